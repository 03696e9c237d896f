"""Held-out evaluation of a run: what it measures, that training does not depend on it, and what a restart repeats."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import jax
import pytest
from grpo_world import MODEL, caller
from metrics_page import undocumented
from own_objects_world import Calculatrice
from rollout_world import ScriptedSampler, make_environment, tiny_model
from sft_world import starting

from astra_jax.base.errors import InputError
from astra_jax.evaluation.episodes import kinds_of
from astra_jax.grpo import held_out
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.dump import DumpedBatches
from astra_jax.grpo.held_out import check_apart
from astra_jax.grpo.job import GRPOResult
from astra_jax.grpo.train import train
from astra_jax.rollout.engine.engine import Engine, EngineConfig
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.run.metrics import read_metrics
from launch.viewer.watched import Watcher
from synthesis.core.own_objects import OwnEnvironment
from synthesis.core.stages import rng_for

EPISODE = EpisodeConfig(max_turns=3, max_prompt_tokens=1_500, max_response_tokens=300, reward="score:1,format:0.5")
CONFIG = GRPOConfig(
    steps=2, batch_size=1, group_size=4, learning_rate=1e-2, concurrent_groups=2, row_buckets=(512, 1_800),
    micro_batch_size=2, weight_decay=0.0, checkpoint_every=1, eval_samples=2, episode=EPISODE,
)  # fmt: skip


TRAINED = [OwnEnvironment(Calculatrice(1, 2)), OwnEnvironment(Calculatrice(2, 2))]
HELD_OUT = [OwnEnvironment(Calculatrice(a, 20, kind)) for a, kind in ((10, "facile"), (11, "facile"), (12, ""))]


class Calculator(ScriptedSampler):
    """Is right about 10 + 20; about others where the episode's seed is even; about 12 + 20 never."""

    dies_after = 10**9

    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer, self.said)
        self.played: list[str] = []

    def said(self, session: str, turn: int, seed: int) -> str:
        _, _, rest = session.partition("evaluate.")
        place = rest.rpartition(".")[0] or "1+2"
        if place in ("10+20", "12+20"):
            return "30" if place == "10+20" else "Je ne sais pas."
        return str(sum(map(int, place.split("+")))) if seed % 2 == 0 else "Je ne sais pas."

    async def generate(self, token_ids, sampling, *, session=""):
        if session.startswith("evaluate."):
            if len(self.played) == self.dies_after:
                raise ConnectionError("the machine is gone")
            self.played.append(f"{session} {sampling.temperature:g}")
        return await super().generate(token_ids, sampling, session=session)


def training(chat_tokenizer, folder: Path) -> Callable[..., Coroutine[Any, Any, GRPOResult]]:
    """Trainings with a policy, each in a folder of its own."""
    model = tiny_model(chat_tokenizer.vocab_size, 2_048)
    start = starting(model.init(jax.random.key(0)))

    async def train_in(name: str, policy: Any, config: GRPOConfig = CONFIG, **options):
        options.setdefault("held_out", HELD_OUT)
        arguments = config, model, start, TRAINED, chat_tokenizer, None, folder / name
        return await train(*arguments, policy=policy, progress=False, **options)

    return train_in


@pytest.fixture
def run(chat_tokenizer, tmp_path):
    return training(chat_tokenizer, tmp_path)


@dataclasses.dataclass(frozen=True)
class Whole:
    """A finished run that nothing interrupted."""

    workdir: Path
    policy: Calculator
    result: GRPOResult


@pytest.fixture(scope="module")
def whole(chat_tokenizer, tmp_path_factory) -> Whole:
    folder, policy = tmp_path_factory.mktemp("whole"), Calculator(chat_tokenizer)
    return Whole(folder / "run", policy, asyncio.run(training(chat_tokenizer, folder)("run", policy)))


def evaluated(workdir: Path) -> dict[int, dict[str, float]]:
    """The metrics of the evaluations, by step."""
    rows = read_metrics(workdir / "metrics")
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    return {
        row["step"]: {name: value for name, value in row.items() if name.startswith("eval/") and "seconds" not in name}
        for row in rows
        if any(name.startswith("eval/") for name in row)
    }


def is_even(id: str, number: int) -> bool:
    """Whether the seed of an evaluation's episode is even."""
    rng = rng_for(CONFIG.seed, "evaluate", id, number)
    rng.getrandbits(32)  # of the task
    return rng.getrandbits(32) % 2 == 0


def trained(workdir: Path) -> list[dict[str, float]]:
    """The rows of the updates, without times and evaluations."""
    left = ("eval/", "seconds/", "rollout/tokens_per_second", "goodput/", "perf/")
    rows = [row for row in read_metrics(workdir / "metrics") if row["step"]]
    return [{name: value for name, value in row.items() if not name.startswith(left)} for row in rows]


def test_before_and_after_greedy_and_sampled_by_kind(whole) -> None:
    result, workdir = whole.result, whole.workdir
    found = evaluated(workdir)
    assert list(found) == [0, 2] and found[0] == found[2], "the same seeds each time"
    greedy, second = (is_even("11+20", number) for number in range(2))
    values = found[0]
    assert values["eval/greedy/reward_score"] == pytest.approx((1 + greedy) / 3)
    assert values["eval/greedy/reward_format"] == 0, "no episode has a call"
    assert values["eval/greedy/reward"] == pytest.approx((1 + greedy) / 3)
    assert values["eval/greedy/solved"] == pytest.approx((1 + greedy) / 3)
    assert values["eval/greedy/facile/solved"] == pytest.approx((1 + greedy) / 2)
    assert values["eval/greedy/Calculatrice/solved"] == 0
    assert values["eval/sampled/solved"] == pytest.approx((2 + greedy + second) / 6)
    assert values["eval/sampled/pass_at_2"] == pytest.approx((1 + (greedy or second)) / 3)
    assert values["eval/environments"] == 3 and values["eval/greedy/masked_episodes"] == 0
    assert sorted(whole.policy.played) == sorted(
        f"evaluate.{a}+20.{number} {temperature}"
        for a in (10, 11, 12) for number, temperature in ((0, 0), (0, 1), (1, 1)) for _ in range(2)
    )  # fmt: skip
    report = json.loads((workdir / "held_out" / "update_00000002.json").read_text())
    assert report["environments"][0] == {"id": "10+20", "kind": "facile", "greedy": [1.0], "sampled": [1.0, 1.0]}
    assert not undocumented(result.history)
    assert result.history[-1]["eval/greedy/solved"] == values["eval/greedy/solved"]
    assert "Held-out reward" in Watcher(workdir).look().trainings[0].curves()
    last = held_out.summary_line(report, json.loads((workdir / "held_out" / "update_00000000.json").read_text()))
    reward = f"{values['eval/greedy/reward']:.2f}"
    assert last == result.held_out and last.startswith(f"held-out reward {reward} → {reward} (greedy), ")
    assert last.endswith("; 3 environments, update 0 → 2")


def test_kinds_are_names_of_metrics_and_not_too_many() -> None:
    class Door(Calculatrice):
        pass

    kinds = ["a b", "a b", "c/d", "", *(f"k{i}" for i in range(60))]
    found = kinds_of([OwnEnvironment(Door(i, 0, kind)) for i, kind in enumerate(kinds)])
    assert found[:4] == ["a_b", "a_b", "c_d", "Door"] and found[-1] == "other" and len(set(found)) == 50
    assert kinds_of([make_environment()]) == ["multi_hop"]


async def test_every_so_many_updates(run, chat_tokenizer, tmp_path) -> None:
    config = dataclasses.replace(CONFIG, steps=3, eval_every=2)
    await run("run", Calculator(chat_tokenizer), config)
    assert list(evaluated(tmp_path / "run")) == [0, 2, 3]
    more = dataclasses.replace(CONFIG, steps=4, eval_every=4, eval_samples=3)
    await run("run", Calculator(chat_tokenizer), more)
    found = evaluated(tmp_path / "run")
    assert list(found) == [0, 2, 3, 4], "one that asks for something else begins where it is"
    assert "eval/sampled/pass_at_3" in found[3] and "eval/sampled/pass_at_3" not in found[2]


async def test_training_is_the_same_to_the_bit_without_it(run, whole, chat_tokenizer, tmp_path) -> None:
    results = [whole.result, await run("run", Calculator(chat_tokenizer), held_out=())]
    with_it, without = (jax.tree.leaves(one.params) for one in results)
    assert all((one == other).all() for one, other in zip(with_it, without, strict=True))
    assert trained(whole.workdir) == trained(tmp_path / "run") and len(trained(whole.workdir)) == 2
    assert not evaluated(tmp_path / "run") and not (tmp_path / "run" / "held_out").exists()


class NotedEngine(Engine):
    """Notes who asks for tokens, and when there are new weights."""

    noted: list[str]

    async def load_weights(self, params, version: int) -> None:
        self._note("update")
        await super().load_weights(params, version)

    async def generate(self, token_ids, sampling, *, session=""):
        self._note("evaluation" if session.startswith("evaluate.") else "training")
        return await super().generate(token_ids, sampling, session=session)

    def _note(self, what: str) -> None:
        self.noted = getattr(self, "noted", [])
        if self.noted[-1:] != [what] or what == "update":
            self.noted.append(what)


@pytest.mark.nightly
async def test_training_with_the_engine_samples_the_same_without_it(chat_tokenizer, tmp_path) -> None:
    """What it computes depends, in its last digits, on which requests meet in a step; what it samples does not."""
    model = dataclasses.replace(MODEL, vocab_size=chat_tokenizer.vocab_size, d_model=chat_tokenizer.vocab_size)
    episode = dataclasses.replace(EPISODE, reward="caller:said", max_response_tokens=60, max_turns=2)
    config = dataclasses.replace(CONFIG, eval_every=1, batch_size=2, episode=episode, dump_batches=True)
    params = caller(model, chat_tokenizer)
    groups = []
    for name, those in (("a", HELD_OUT), ("b", ())):
        async with NotedEngine(params, model, EngineConfig(slots=8, max_length=1_800)) as engine:
            await train(
                config, model, starting(params), TRAINED, chat_tokenizer, None, tmp_path / name,
                policy=engine, held_out=those, progress=False,
            )  # fmt: skip
        groups.append(
            [one for update in range(2) for one in DumpedBatches(tmp_path / name / "batches").groups(update)[0]]
        )
        if those:
            assert isinstance(engine, NotedEngine) and engine.noted == [
                "update",
                "evaluation",
                "update",
                "training",
            ] * 2 + [
                "update",
                "evaluation",
                "update",
            ]
    tokens, others = ([[e.token_ids for e in group.episodes] for group in of_one] for of_one in groups)
    assert tokens == others and len(tokens) == 4
    assert set(evaluated(tmp_path / "a")) == {0, 1, 2}


@pytest.fixture(autouse=True)
def caller_module(tmp_path, monkeypatch):
    """A reward that tells the episodes of `caller` apart."""
    (tmp_path / "caller.py").write_text("def said(episode):\n    return float('No' in episode.answer)\n")
    monkeypatch.syspath_prepend(tmp_path)


async def test_an_interrupted_evaluation_is_finished_and_a_finished_one_not_repeated(
    run, whole, chat_tokenizer, tmp_path
) -> None:
    first, second, third = (Calculator(chat_tokenizer) for _ in range(3))
    first.dies_after, second.dies_after = 5, 11  # whatever of the first five was finished, in the last evaluation
    with pytest.raises(ConnectionError):
        await run("run", first)
    assert not evaluated(tmp_path / "run")
    with pytest.raises(ConnectionError):
        await run("run", second)
    assert list(evaluated(tmp_path / "run")) == [0]
    watched = Watcher(tmp_path / "run").look().trainings[0].evaluation
    assert watched is not None and watched.update == 2 and 0 < watched.episodes < 9
    result = await run("run", third)
    assert result.stopped == "finished"
    assert len(third.played) == 9 - watched.episodes, "finished episodes are not played again"
    assert evaluated(tmp_path / "run") == evaluated(whole.workdir)
    assert trained(tmp_path / "run") == trained(whole.workdir)
    for one, other in zip(jax.tree.leaves(result.params), jax.tree.leaves(whole.result.params), strict=True):
        assert (one == other).all()
    again = Calculator(chat_tokenizer)
    await run("run", again)
    assert not again.played and evaluated(tmp_path / "run") == evaluated(whole.workdir)
    assert sorted(one.name for one in (tmp_path / "run" / "held_out").iterdir()) == [
        "update_00000000.json", "update_00000002.json"
    ]  # fmt: skip


async def test_what_cannot_be_judged_is_masked_and_counted(run, whole, chat_tokenizer, tmp_path) -> None:
    broken = Calculatrice(9, 9)
    broken.question = "Il refuse."
    await run("run", Calculator(chat_tokenizer), held_out=[*HELD_OUT, OwnEnvironment(broken)])
    values = evaluated(tmp_path / "run")[2]
    assert values["eval/greedy/masked_episodes"] == values["eval/greedy/unscored_episodes"] == 1
    assert values["eval/sampled/masked_episodes"] == 2
    assert values["eval/greedy/reward"] == whole.result.history[-1]["eval/greedy/reward"], "they are in no mean"
    report = json.loads((tmp_path / "run" / "held_out" / "update_00000002.json").read_text())
    assert report["masked"] == {"reward score raised ArithmeticError: nobody knows": 3}
    assert report["environments"][-1]["greedy"] == [None]
    only = await run("only", Calculator(chat_tokenizer), held_out=[OwnEnvironment(broken)])
    assert "eval/greedy/reward" not in only.history[-1] and only.history[-1]["eval/greedy/masked_episodes"] == 1


@pytest.mark.nightly
async def test_with_rollouts_across_updates(run, chat_tokenizer, tmp_path) -> None:
    config = dataclasses.replace(CONFIG, async_rollouts=True, eval_every=1)
    await run("run", Calculator(chat_tokenizer), config)
    found = evaluated(tmp_path / "run")
    assert list(found) == [0, 1, 2] and found[0] == found[1] == found[2]


async def test_what_is_trained_on_is_not_held_out(run, pool, chat_tokenizer, tmp_path) -> None:
    with pytest.raises(InputError, match=r"1 of the 4 held-out environments are trained on too .*'1\+2'"):
        await run("run", Calculator(chat_tokenizer), held_out=[*HELD_OUT, TRAINED[0]])
    with pytest.raises(InputError, match=r"2 held-out environments have the id '10\+20'"):
        await run("run", Calculator(chat_tokenizer), held_out=[*HELD_OUT, HELD_OUT[0]])
    said: list[str] = []
    named = make_environment("other")
    check_apart([named], [make_environment("france")], said.append)
    assert len(said) == 1 and "1 of the 1 held-out environments have the prompt of one that is trained on" in said[0]
    check_apart(HELD_OUT, TRAINED, said.append)
    same_id = Calculatrice(7, 7)
    same_id.id = "1+2"  # as the first tasks of two files have
    check_apart([OwnEnvironment(same_id)], TRAINED, said.append)
    assert len(said) == 1
    config = dataclasses.replace(CONFIG, episode=dataclasses.replace(EPISODE, reward="f1"))
    model = tiny_model(chat_tokenizer.vocab_size, 2_048)
    with pytest.raises(InputError, match="reward f1 counts sub-tasks, and environment 10.20 has none"):
        await train(
            config, model, starting(model.init(jax.random.key(0))), [make_environment()], chat_tokenizer, pool,
            tmp_path / "records", policy=Calculator(chat_tokenizer), held_out=HELD_OUT, progress=False,
        )  # fmt: skip
