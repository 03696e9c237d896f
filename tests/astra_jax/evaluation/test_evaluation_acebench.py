"""ACEBench: what it needs is said before anything runs; in a clone, scripted models get the harness's own figures.

ASTRA_ACEBENCH=DIR python -m pytest tests/astra_jax/evaluation/test_evaluation_acebench.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from evaluation_world import Named, Request, Sampler, Say, Scripted, endpoint, is_probe

from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.suite import Decoding, EvalItem, EvaluationError, ModelEndpoint, SuiteContext
from astra_jax.evaluation.suites import make
from synthesis.core.stages import AbortRun

CLONE = os.environ.get("ASTRA_ACEBENCH", "")
GREEDY = Decoding(temperature=0.0, trials=1)
NOBODY = ModelEndpoint("http://127.0.0.1:9/v1", "nobody")


def context(folder: Path, served: ModelEndpoint = NOBODY, **changes: Any) -> SuiteContext:
    kept = os.environ.get("ASTRA_HARNESSES")
    fields: dict[str, Any] = {
        "policy": served,
        "endpoint": endpoint(served),
        "models": {"user": ModelEndpoint(served.url, "user")},
        "harnesses": Path(kept) if kept else folder.parent / "harnesses",  # one for all tests
        "sources": {"acebench": Path(CLONE)} if CLONE else {},
        "logs": folder / "logs",
    }
    return SuiteContext(**{**fields, **changes})


def test_who_plays_the_user_is_asked_for_first(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="acebench needs a model for the user: give --user_url"):
        make("acebench", context(tmp_path, models={}))


async def test_a_clone_is_asked_for_with_the_commands_that_make_one(tmp_path: Path) -> None:
    suite = make("acebench", context(tmp_path, sources={}))
    with pytest.raises(EvaluationError, match=r"git clone https://github.com/\S+/ACEBench DIR && git -C DIR checkout"):
        await suite.prepare()
    await suite.close()


async def test_another_folder_is_refused(tmp_path: Path) -> None:
    suite = make("acebench", context(tmp_path, sources={"acebench": tmp_path}))
    with pytest.raises(EvaluationError, match="is not a clone of ACEBench; get it by: git clone"):
        await suite.prepare()


async def test_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "eval_main.py").write_text("print('another version')\n")
    suite = make("acebench", context(tmp_path, sources={"acebench": tmp_path}))
    with pytest.raises(EvaluationError, match=r"not the pinned \w+ of commit 56dd66c; git -C \S+ status shows"):
        await suite.prepare()


# --- in a clone

in_a_clone = [
    pytest.mark.slow,
    pytest.mark.skipif(not CLONE, reason="ACEBench is in no registry; ASTRA_ACEBENCH names a clone of it"),
]


def cases(language: str, category: str) -> dict[str, list[str]]:
    """The milestones of all items, by id; the first way where there are several."""
    folder = Path(CLONE, "data_all", f"data_{language}", "possible_answer")
    lines = (folder / f"data_agent_{category}.json").read_text(encoding="utf-8").splitlines()
    answers = {answer["id"]: answer["mile_stone"] for answer in map(json.loads, lines)}
    return {id: stones if isinstance(stones[0], str) else stones[0] for id, stones in answers.items()}


def milestones(stones: dict[str, list[str]]) -> Sampler:
    """Plays them, each after some reasoning, and ends the conversation. As the user it only asks to go on."""

    def policy(request: Request) -> Say:
        if request["model"] == "user":
            return Say("Please go on.")
        heard = request["messages"][-1]["content"]
        turn = heard.count("\nexecution result:") + heard.count("\nexecution:")
        left = stones[request["user"]][turn:]
        return Say(f"<think>[no(a='b')]</think>\n\n{left[0] if left else 'finish conversation'}")

    return policy


@contextlib.asynccontextmanager
async def prepared(folder: Path, policy: Sampler, name: str = "acebench", **changes: Any) -> AsyncIterator[Named]:
    async with Scripted(policy, models=("scripted", "user")) as served:
        suite = Named(make(name, context(folder, served, **changes)))
        try:
            await suite.prepare()
            yield suite
        finally:
            await suite.close()


async def play(suite: Named, category: str, ids: Sequence[str] = ()) -> list[ItemResult]:
    items = [EvalItem(category, id, 0, seed=1) for id in ids or suite.ids(category)]
    return await asyncio.gather(*(suite.run(item, GREEDY) for item in items))


class TestInAClone:
    pytestmark = in_a_clone

    async def test_a_model_that_never_calls_scores_nothing(self, tmp_path: Path) -> None:
        async with prepared(tmp_path, lambda _: Say("I would rather not.")) as suite:
            steps = await play(suite, "multi_step")
            turns = await play(suite, "multi_turn", suite.ids("multi_turn")[:5])
        assert len(steps) == 20
        for result in steps + turns:
            assert (result.score, result.metrics, result.finish, result.calls) == (0, {"process": 0}, "turn_limit", 0)

    @pytest.mark.parametrize(
        ("name", "category", "end_to_end", "process"),
        [
            ("acebench", "multi_step", 0.2, 1.0),
            ("acebench_zh", "multi_step", 0.4, 1.0),
            ("acebench", "multi_turn", 0.633, 0.801),
            ("acebench_zh", "multi_turn", 0.9, 0.911),
        ],
    )
    async def test_playing_the_milestones_gives_the_figures_of_the_harness(
        self, name: str, category: str, end_to_end: float, process: float, tmp_path: Path
    ) -> None:
        """Those of its own programs, `generate.py` and `eval_main.py`, with the same endpoint."""
        stones = cases("zh" if name.endswith("zh") else "en", category)
        async with prepared(tmp_path, milestones(stones), name) as suite:
            results = await play(suite, category)
        assert [result.sub_tasks for result in results] == [len(stones[result.item]) for result in results]
        assert mean(result.score for result in results) == pytest.approx(end_to_end, abs=5e-4)
        assert mean(result.metrics["process"] for result in results) == pytest.approx(process, abs=5e-4)

    async def test_code_for_a_call_leaves_nothing_behind(self, tmp_path: Path) -> None:
        left = tmp_path / "left"
        touch = f"open({str(left)!r}, 'w').write('x')"
        said = [
            f"[{touch}]",
            f"[turn_on_wifi(x={touch})]",
            f"[turn_on_wifi(x=open(file={str(left)!r}, mode='w'))]",
            f"[turn_on_wifi(x={touch} + 1)]",
            f"[turn_on_wifi(x=[{touch} + 1])]",
            f"[turn_on_wifi(x=lambda: {touch})]",
            f"[turn_on_wifi(**{{'x': {touch}}})]",
            "[turn_on_wifi(x=9**9**9)]",
            "[turn_on_wifi(x='x' * 10**12)]",
            "[turn_on_wifi(x=b'')]",
            "[" * 5000,
            "[f(x=" * 200 + "1" + ")]" * 200,
        ]

        def policy(request: Request) -> Say:
            return Say(said[request["messages"][-1]["content"].count("\nexecution") % len(said)])

        async with prepared(tmp_path, policy) as suite:
            (steps,) = await play(suite, "multi_step", ["agent_multi_step_0"])
            (turns,) = await play(suite, "multi_turn", ["agent_multi_turn_0"])
        assert steps.score == turns.score == 0 and steps.steps == 20
        assert not left.exists()

    async def test_a_call_with_arithmetic_is_made(self, tmp_path: Path) -> None:
        """As the harness has it: only code is kept from it."""
        said = ["[turn_on_wifi()]", "[delete_message(message_id=1 + 2)]", "finish conversation"]

        def policy(request: Request) -> Say:
            return Say("Please." if request["model"] == "user" else said.pop(0))

        async with prepared(tmp_path, policy) as suite:
            (result,) = await play(suite, "multi_turn", ["agent_multi_turn_0"])
        assert "Message ID 3 has been successfully deleted" in json.dumps(result.messages)

    async def test_a_conversation_that_does_not_fit_scores_nothing(self, tmp_path: Path) -> None:
        refusal = Say("This model's maximum context length is 10 tokens.", status=400)
        async with prepared(tmp_path, lambda request: Say("Yes.") if is_probe(request) else refusal) as suite:
            (result,) = await play(suite, "multi_step", ["agent_multi_step_3"])
        assert (result.score, result.finish) == (0, "token_limit") and "no longer fits" in result.problem

    async def test_a_reply_that_is_cut_off_goes_on_and_is_counted(self, tmp_path: Path) -> None:
        async with prepared(tmp_path, lambda _: Say("<think>[turn_on_wifi()]", finish="length")) as suite:
            (result,) = await play(suite, "multi_step", ["agent_multi_step_3"])
        assert result.calls == 0 and "20 replies were cut off" in result.problem

    @pytest.mark.parametrize("role", ["user", "scripted"])
    async def test_an_endpoint_that_fails_concludes_nothing(self, role: str, tmp_path: Path) -> None:
        def policy(request: Request) -> Say:
            return Say("down", status=401) if request["model"] == role else Say("Hello.")

        async with prepared(tmp_path, policy) as suite:
            with pytest.raises(AbortRun, match="status 401"):
                await play(suite, "multi_turn", ["agent_multi_turn_3"])

    async def test_the_clone_stays_as_it_is(self, tmp_path: Path) -> None:
        before = sorted(Path(CLONE).rglob("*"))
        async with prepared(tmp_path, milestones(cases("en", "multi_step"))) as suite:
            await play(suite, "multi_step", ["agent_multi_step_3"])
        assert sorted(Path(CLONE).rglob("*")) == before
