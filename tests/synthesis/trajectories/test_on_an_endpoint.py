"""The whole track against a model behind a real endpoint: what is stored, what it cost, and what more of it costs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from emulated_model import EmulatedModel, words_of, write_registry

from astra_jax.base.errors import InputError
from astra_jax.base.versions import code_version
from sandbox import SandboxConfig, SandboxPool
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.recording import Recording
from synthesis.core.records import Provenance, Task, ToolChain, Trajectory
from synthesis.core.stages import Journal, NothingAccepted
from synthesis.offline.facts.catalog import LICENSE
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.pipeline_run import Summary
from synthesis.pipeline.prompts import prompts_digest
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.execution import Failures
from synthesis.trajectories.pipeline import synthesize

COUNT = 12
KINDS = {"servers": None, "chains": ToolChain, "tasks": Task, "trajectories": Trajectory}


async def made(folder: Path, model: EmulatedModel, *, seed: int = 0, replace: bool = False, name: str = "m",
               unusable_answers: int = 50, **config: Any) -> tuple[Summary, int]:  # fmt: skip
    """A run in a folder, and how many requests it made."""
    folder.mkdir(exist_ok=True)
    registry = write_registry(folder / "registry.jsonl")
    settings = TrajectoriesConfig(
        **{
            "trajectories": COUNT, "languages": {"en": 1.0}, "sources": (), "mcp_share": 0.0, "walks": 20,
            "tools": (str(registry),), "fact_servers": ("numbers",), "server_weights": {"numbers": 1e-9},
            "proposals": 2, "failures": Failures(rate=0.0), "behaviours": {}, **config,
        }
    )  # fmt: skip
    before = len(model.requests)
    async with model as url, SandboxPool(SandboxConfig()) as pool:
        recording = Recording(folder / "teacher.sqlite")
        teacher = OpenAITeacher(
            OpenAITeacherConfig(
                url,
                name,
                "secret",
                structured_output="json_schema",
                judge_own_text=True,
                unusable_answers=unusable_answers,
            ),
            recording,
            "record",
        )
        try:
            with Journal(folder / "journal.sqlite") as journal:
                summary = await synthesize(
                    settings, executor=Executor(teacher, pool), journal=journal, out_dir=folder / "out",
                    workdir=folder, seed=seed, replace=replace,
                )  # fmt: skip
        finally:
            await teacher.close()
            recording.close()
    return summary, len(model.requests) - before


def stored(folder: Path) -> list[Trajectory]:
    return read_dataset(folder / "out" / "trajectories", Trajectory)


class Otherwise(EmulatedModel):
    """Its endpoint writes names with a prefix, arguments in a code block, and no ids."""

    def agent(self, messages, rng):
        message = super().agent(messages, rng)
        for one in message.get("tool_calls", []):
            function = one["function"]
            function |= {"name": f"functions.{function['name']}", "arguments": f"```json\n{function['arguments']}\n```"}
            one["id"] = ""
        return message


async def test_calls_that_need_a_repair_are_stored_well_formed_and_counted(tmp_path):
    await made(tmp_path, Otherwise())
    kept = stored(tmp_path)
    calls = [call for one in kept for message in one.messages for call in message.tool_calls]
    assert kept and all(call.name.startswith("find_") and set(call.arguments) == {"item"} for call in calls)
    assert [list(one.repaired or {}) for one in kept] == [
        [call.id for message in one.messages for call in message.tool_calls] for one in kept
    ]
    card = read_card(tmp_path / "out" / "trajectories")
    assert card["statistics"]["repaired_calls_by_kind"] == {"code_fence": len(calls), "tool_name": len(calls)}


class Leaking(EmulatedModel):
    """Its endpoint leaves half a call in the text beside the call."""

    def agent(self, messages, rng):
        message = super().agent(messages, rng)
        return {**message, "content": f"{message['content'] or ''}\n\n<｜DSML｜function_calls"}


async def test_turns_with_markup_are_never_stored_and_counted_by_their_own_reason(tmp_path):
    model = Leaking()
    summary, _ = await made(tmp_path, model, unusable_answers=1_000)
    runs = summary.rejected["interact"]
    assert not stored(tmp_path) and set(runs) == {"leaked_markup"}
    assert model.kinds["agent"] == 6 * runs["leaked_markup"]  # as many tries as a bad answer has


async def test_what_is_stored_is_what_was_asked_judged_and_paid_for(tmp_path):
    model = EmulatedModel(memory=0.4)
    summary, requests = await made(tmp_path, model, trajectories=24, license="of the settings")
    kept = stored(tmp_path)
    # An agent that answers from memory is told by what it called, before anybody judges it.
    called = [{call.name for message in one.messages for call in message.tool_calls} for one in kept]
    assert kept and all(set(one.needs) <= names and one.needs for one, names in zip(kept, called, strict=True))
    assert summary.rejected["judge"]["tools_unused"] > 4
    assert all({f"find_{word}" for word in words_of(one.messages[0].content)} == set(one.needs) for one in kept)
    # The agent is asked as an agent, and its thinking stays thinking.
    agents = [body for body in model.requests if "tools" in body]
    assert len(agents) == model.kinds["agent"] and all("response_format" not in body for body in agents)
    assert all(message.reasoning for one in kept for message in one.messages if message.role == "assistant")
    judged = [body["messages"][0]["content"] for body in model.requests if "final_answer_score" in json.dumps(body)]
    assert any("thought: I look up the " in prompt for prompt in judged)  # judges see all that is trained on
    # Chains are verified when they are drawn, and each of them is used.
    chains = read_card(tmp_path / "out" / "chains")["statistics"]
    assert chains["used"] == len(read_dataset(tmp_path / "out" / "chains", ToolChain)) < chains["candidates"] / 2
    # Every token is on the card, under its stage.
    cost = read_card(tmp_path / "out" / "trajectories")["cost"]
    assert set(cost["stages"]) == {"propose", "verify", "tasks", "augment", "score", "interact", "judge"}
    assert cost["requests"] == requests == sum(one["requests"] for one in cost["stages"].values())
    tokens = sum(len(json.dumps(body)) // 4 for body in model.requests)
    assert cost["prompt_tokens"] == tokens == sum(one["prompt_tokens"] for one in cost["stages"].values())
    assert cost["tokens_per_record"] == round((tokens + cost["completion_tokens"]) / len(kept), 1)
    emulated = model.kinds["emulated_result"]
    assert cost["stages"]["interact"]["requests"] == model.kinds["agent"] + emulated
    assert read_card(tmp_path / "out" / "tasks")["cost"]["requests"] < cost["requests"]
    # Who made it, of what: on every card, and on the records themselves.
    cards = [read_card(tmp_path / "out" / name) for name in KINDS]
    teacher = cards[0]["provenance"]["teacher"]
    assert (teacher["name"], teacher["model"], teacher["temperature"]) == ("OpenAITeacher", "m", 1.0)
    assert teacher["endpoint"].startswith("http://127.0.0.1:") and "secret" not in json.dumps(cards)
    assert teacher["prompts"] == prompts_digest() and len(teacher["prompts"]) == 16
    for card in cards:
        assert card["provenance"]["teacher"] == teacher and card["provenance"]["code"] == code_version()
        assert card["provenance"]["licenses"] == sorted(["CC0-1.0", LICENSE, "of the settings"])
    made_by = {name: teacher[name] for name in ("model", "endpoint", "prompts", "temperature", "max_tokens")}
    for one in kept:
        license = "CC0-1.0" if one.server_id == "server-0" else "of the settings"
        emulated = [] if "numbers" in one.server_id else ["emulator"]
        models = dict.fromkeys(["agent", "author", *emulated, "judge"], "m")
        expected = Provenance("OpenAITeacher", **made_by, license=license, code=code_version(), models=models)
        assert one.provenance == expected and expected.judged_its_own
    card = read_card(tmp_path / "out" / "trajectories")
    assert card["models"]["agent"] == card["models"]["judge"] == card["judged_own_text"] == {"m": len(kept)}


async def test_a_larger_run_goes_on_from_the_smaller(tmp_path):
    model = EmulatedModel()
    _, first = await made(tmp_path / "run", model)
    small = stored(tmp_path / "run")
    _, again = await made(tmp_path / "run", model)
    assert again == 0 and stored(tmp_path / "run") == small and len(small) == COUNT
    _, more = await made(tmp_path / "run", model, trajectories=COUNT + 3)
    large = stored(tmp_path / "run")
    assert large[:COUNT] == small and len(large) == COUNT + 3 and 0 < more < first / 2
    bodies = [json.dumps(body, sort_keys=True) for body in model.requests]
    assert len(bodies) == len(set(bodies))  # nothing was asked twice
    _, whole = await made(tmp_path / "whole", model, trajectories=COUNT + 3)
    alike = [
        [msgspec.structs.replace(one, provenance=msgspec.UNSET) for one in stored(tmp_path / folder)]
        for folder in ("run", "whole")
    ]  # the endpoint was at another port
    assert alike[0] == alike[1] and whole == first + more


async def test_what_a_later_stage_reads_does_not_undo_an_earlier_one(tmp_path):
    """A run that never came to its end goes on under another threshold, and asks judges alone."""
    model = EmulatedModel()
    model.refuse["final_answer_score"] = 400
    await made(tmp_path, model)
    assert not stored(tmp_path)
    model.refuse.clear()
    model.kinds.clear()
    await made(tmp_path, model, reward_threshold=0.5, replace=True)
    assert len(stored(tmp_path)) == COUNT and set(model.kinds) == {"final_answer_score"}
    model.kinds.clear()
    await made(tmp_path, model, reward_threshold=0.6, replace=True)
    assert not model.kinds  # judged anew, from what is recorded
    await made(tmp_path, model, reward_threshold=0.6, max_turns=11, replace=True)
    assert not model.kinds and read_card(tmp_path / "out" / "trajectories")["config"]["max_turns"] == 11


async def test_a_finished_workdir_is_not_replaced_by_another_run(tmp_path):
    model = EmulatedModel()
    await made(tmp_path, model, trajectories=COUNT)
    before = {name: (tmp_path / "out" / name / "dataset_card.json").read_bytes() for name in KINDS}
    for change, message in (
        ({"seed": 1}, "was made with another seed: 0, now 1"),
        ({"reward_threshold": 0.9}, "was made with another config.reward_threshold: 0.8, now 0.9"),
        ({"trajectories": COUNT - 1}, "was made with another config.trajectories: 12, now 11"),
        ({"name": "other"}, "was made with another teacher's model: 'm', now 'other'"),
        ({"seed": 1, "name": "other"}, r"was made with another seed \(and 1 more\)"),
    ):
        with pytest.raises(InputError, match=f"{message}.*another --workdir; or --replace"):
            await made(tmp_path, model, **change)
        assert before == {name: (tmp_path / "out" / name / "dataset_card.json").read_bytes() for name in KINDS}
    await made(tmp_path, model, seed=1, replace=True)
    assert read_card(tmp_path / "out" / "trajectories")["seed"] == 1


async def test_a_file_that_changed_is_another_run(tmp_path):
    model = EmulatedModel()
    people = tmp_path / "people.jsonl"
    people.write_text('{"occupation": "lighthouse keeper"}\n')
    await made(tmp_path / "run", model, personas=str(people))
    people.write_text('{"occupation": "beekeeper"}\n')
    with pytest.raises(InputError, match="another content of .*people.jsonl"):
        await made(tmp_path / "run", model, personas=str(people))


class Remembering(EmulatedModel):
    """Knows its messages again by what they hold beside OpenAI's fields, as services do that sign them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, dict[str, Any]] = {}
        self.changed: list[Any] = []

    def message(self, kind: str, body: dict[str, Any], rng: Any) -> dict[str, Any]:
        message = super().message(kind, body, rng)
        for call in message.get("tool_calls", ()):
            id = f"{rng.getrandbits(36):09x}"
            call |= {"id": id, "extra_content": {"signature": f"of {id}"}}
            message["reasoning_details"] = [{"type": "reasoning.encrypted", "data": id}]
            self.sent[id] = {"role": "assistant", **message}
        return message

    def agent(self, messages: list[dict[str, Any]], rng: Any) -> dict[str, Any]:
        for one, result in zip(messages, messages[1:], strict=False):
            if one["role"] == "assistant" and one != self.sent.get(result["tool_call_id"]):
                self.changed.append(one)
        return super().agent(messages, rng)


async def test_the_agents_endpoint_gets_its_own_messages_back_and_records_hold_none_of_it(tmp_path):
    model = Remembering()
    await made(tmp_path, model)
    kept = stored(tmp_path)
    assert len(kept) == COUNT and len(model.sent) > COUNT and not model.changed
    ids = [call.id for one in kept for message in one.messages for call in message.tool_calls]
    assert all(re.fullmatch(r"call_\d+", id) for id in ids) and "signature" not in msgspec.json.encode(kept).decode()


class Unusable(EmulatedModel):
    """Rates every task as worthless until it is `mended`."""

    mended = False

    def _task_rating(self, prompt: str, rng: Any) -> Any:
        low = {} if self.mended else {"question_quality": 1}
        return super()._task_rating(prompt, rng) | low


async def test_a_run_of_which_nothing_is_accepted_stops_and_the_same_command_resumes(tmp_path):
    model = Unusable()
    with pytest.raises(NothingAccepted, match=r"stage score.*: none of 8 accepted. Most common reasons: 8 times \w+, "):
        await made(tmp_path, model, trajectories=40, stop_after=8, concurrency=1)
    asked = len(model.requests)
    model.mended = True
    await made(tmp_path, model, trajectories=40, stop_after=8, concurrency=1)
    repeated = [body for body in model.requests[asked:] if body in model.requests[:asked]]
    assert len(stored(tmp_path)) > 20 and not repeated  # what was paid for is not paid for again
