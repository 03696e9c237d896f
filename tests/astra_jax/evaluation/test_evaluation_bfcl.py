"""BFCL multi-turn with the official data, simulators and checker, in their own environment, against scripted models."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
import pytest_asyncio
from benchmark_world import program
from bfcl_world import CATEGORIES, Reference, gold, reference, steps_of, turn_of
from evaluation_world import Named, Request, Sampler, Say, Scripted, endpoint, is_probe

from astra_jax.evaluation.comparison import compare
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.run import InfrastructureFailed, RunConfig, run_suites
from astra_jax.evaluation.saved import load_evaluation
from astra_jax.evaluation.suite import Decoding, EvalItem, EvaluationError, SuiteContext
from astra_jax.evaluation.suites import bfcl, make
from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from astra_jax.tokenizer import ChatTokenizer
from configs.training import SFTRun
from synthesis.core.stages import Journal, Transient

conduct_ablation = program("benchmarks.conduct_ablation")

ALL = bool(os.environ.get("ASTRA_BFCL_ALL"))
"""All 800 entries instead of some of each category; about two minutes."""

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def harnesses(tmp_path_factory) -> Path:
    """Where environments are made; a folder that outlives the session saves making them."""
    kept = os.environ.get("ASTRA_HARNESSES")
    return Path(kept) if kept else tmp_path_factory.mktemp("harnesses")


@contextlib.asynccontextmanager
async def serving(harnesses: Path, folder: Path) -> AsyncIterator[World]:
    """A suite, prepared."""
    scripted = Scripted(lambda _: Say("Nobody has told me what to say."))
    async with scripted as served:
        asked = endpoint(served)
        context = SuiteContext(
            policy=served, endpoint=asked, models={}, harnesses=harnesses, sources={}, logs=folder / "logs"
        )
        suite = Named(make("bfcl_v3_mt", context))
        try:
            await suite.prepare()
            yield World(suite, scripted, reference(package(harnesses)))
        finally:
            await suite.close()
            await asked.close()


@dataclass
class World:
    """A prepared suite, who is asked, and the reference."""

    suite: Named
    scripted: Scripted
    known: Reference

    async def run(self, policy: Sampler, *entries: str) -> list[ItemResult]:
        """Run entries once each."""
        self.scripted.policy = policy
        items = [EvalItem(entry.removeprefix("multi_turn_").rsplit("_", 1)[0], entry, 0, 7) for entry in entries]
        return [await self.suite.run(item, Decoding(temperature=0)) for item in items]

    async def run_many(self, policy: Sampler, folder: Path) -> list[ItemResult]:
        """Run some entries of each category, or all, as the program does."""
        self.scripted.policy = policy
        with contextlib.closing(Journal(folder / "journal.sqlite")) as journal:
            config = RunConfig(limit=None if ALL else 3, trials=1, concurrency=8)
            return await run_suites([self.suite], journal=journal, config=config)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(harnesses, tmp_path_factory) -> AsyncIterator[World]:
    async with serving(harnesses, tmp_path_factory.mktemp("bfcl")) as world:
        yield world


def package(harnesses: Path) -> Path:
    (found,) = bfcl.ENVIRONMENT.folder(harnesses).glob("lib/python3.*/site-packages/bfcl_eval")
    return found


async def test_who_plays_the_reference_scores_everything(world, harnesses, tmp_path) -> None:
    results = await world.run_many(gold(world.known), tmp_path)
    assert len(results) == (800 if ALL else 12)
    assert {result.category for result in results} == set(CATEGORIES)
    assert [result.item for result in results if result.score < 1] == []
    for result in results:
        turns = world.known[result.item]
        assert (result.finish, result.problem) == ("answered", "")
        assert result.sub_tasks == len(turns)
        assert result.calls == sum(map(len, turns))
        assert result.steps == sum(1 + bool(turn) for turn in turns)
        assert (result.prompt_tokens, result.completion_tokens) == (10 * result.steps, 5 * result.steps)
        right = {"abstained", "called_when_able", "quiet_when_unable"}
        assert not any(result.metrics.get(name) for name in result.metrics.keys() - right)
        assert ("abstained" in result.metrics) == ("quiet_when_unable" in result.metrics) == (not all(turns))
        assert {result.metrics[name] for name in right & result.metrics.keys()} == {1.0}


async def test_who_never_calls_a_tool_scores_nothing(world, tmp_path) -> None:
    results = await world.run_many(lambda _: Say("I cannot."), tmp_path)
    assert len(results) == (800 if ALL else 12)
    for result in results:
        assert (result.score, result.calls, result.finish) == (0.0, 0, "answered")
        assert result.metrics["empty_turn_model_response"] == 1
        assert result.metrics.get("abstained", 1.0) == 1
        assert (result.metrics["called_when_able"], result.metrics.get("quiet_when_unable", 1.0)) == (0, 1)


async def test_every_hostile_call_is_refused_and_leaves_nothing(world, tmp_path) -> None:
    mark = tmp_path / "mark"
    calls = [
        (f"open({str(mark)!r},'w').write", {"s": "x"}),
        (f"__import__('os').system('touch {mark}') or print", {}),
        ("print", {}),
        ("exec", {"source": "1"}),
        ("json.dumps", {"obj": 1}),
        ("().__class__.__mro__[1].__subclasses__", {}),
        ("ls.__func__.__globals__['__builtins__']['open']", {"file": str(mark), "mode": "w"}),
        ("ls", {f"a=open({str(mark)!r},'w'), b": 1}),
        ("ls", {"a=1) or open('/tmp/x','w'": 1}),
        ("ls", {"lambda": 1}),
        ("", {}),
        ("ls(); print", {}),
        ("cd\n", {"folder": ".."}),
        ("kill", {"pid": 1}),
    ]  # fmt: skip

    def policy(request: Request) -> Say:
        return Say("Done.") if steps_of(request) else Say(calls=[*calls, ("ls", {"a": False}), ("ls", {})])

    before = set(Path("/tmp").iterdir())
    results = await world.run(policy, "multi_turn_base_0", "multi_turn_base_1", "multi_turn_base_0")
    for result in results:
        assert result.score == 0
        assert result.metrics["refused_calls"] == len(calls) * result.sub_tasks
        outputs = [message["content"] for message in result.messages if message["role"] == "tool"]
        assert len(outputs) == (len(calls) + 2) * result.sub_tasks
        for output in outputs[: len(calls)]:
            assert output.startswith("Error during execution: "), output
        assert "current_directory_content" in outputs[len(calls)]
    assert results[0].messages == results[2].messages
    assert not mark.exists()
    assert not {path.name for path in set(Path("/tmp").iterdir()) - before} & {"x", "mark", "sandbox-selftest"}


async def test_outputs_are_those_of_the_harness(world, harnesses, tmp_path) -> None:
    """The tool messages of a conversation against the harness's own function, called outside of any lock."""
    entries = [
        "multi_turn_base_3",
        "multi_turn_miss_func_51",
        "multi_turn_miss_param_110",
        "multi_turn_long_context_160",
    ]
    results = await world.run(gold(world.known), *entries)
    code = textwrap.dedent(
        """
        import json, sys
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call
        from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry
        outputs = []
        for id in sys.argv[1:]:
            category = id.rsplit("_", 1)[0]
            entry, = (e for e in load_dataset_entry(category) if e["id"] == id)
            truth, = (e["ground_truth"] for e in load_ground_truth_entry(category) if e["id"] == id)
            outputs.append([
                output for turn in truth for output in execute_multi_turn_func_call(
                    turn, entry["initial_config"], entry["involved_classes"], "m", id, "long_context" in id
                )[0]
            ])
        print(json.dumps(outputs))
        """
    )
    theirs = subprocess.run(
        [bfcl.ENVIRONMENT.folder(harnesses) / "bin/python", "-c", code, *entries],
        env={"BFCL_PROJECT_ROOT": str(tmp_path), "TZ": "UTC", "PATH": os.environ["PATH"]},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    ours = [[m["content"] for m in result.messages if m["role"] == "tool"] for result in results]
    assert ours == json.loads(theirs.stdout)


async def test_missing_functions_come_late_with_the_harness_line(world, harnesses, tmp_path) -> None:
    seen: dict[int, tuple[set[str], str]] = {}

    def policy(request: Request) -> Say:
        seen[turn_of(request)] = (
            {tool["function"]["name"] for tool in request["tools"]},
            request["messages"][-1]["content"],
        )
        return Say("Done.")

    await world.run(policy, "multi_turn_miss_func_0")
    assert all("sort" not in seen[turn][0] for turn in range(3))
    assert all("sort" in seen[turn][0] for turn in range(3, 5))
    line = subprocess.run(
        [bfcl.ENVIRONMENT.folder(harnesses) / "bin/python", "-c",
         "from bfcl_eval.constants.default_prompts import *; print(DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC)"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    assert line and seen[3][1] == line


async def test_who_never_stops_is_stopped(world, harnesses, tmp_path) -> None:
    """In a turn with others after it the entry fails; in the last turn it is scored, as the harness does."""
    (single,) = [id for id in world.known if id.startswith("multi_turn_base") and len(world.known[id]) == 1][:1]

    def policy(request: Request) -> Say:
        first = gold(world.known)(request)
        return first if first.calls else Say(calls=[("no_such_tool", {})])

    several, last = await world.run(policy, "multi_turn_base_0", single)
    assert (several.score, several.steps, several.finish) == (0.0, 21, "step_limit")
    assert several.metrics["force_terminated"] == 1
    assert (last.score, last.steps, last.finish) == (1.0, 21, "step_limit")


async def test_a_function_that_is_still_missing_can_be_called(world) -> None:
    """As in the harness: whoever knows the simulators' functions by heart gets the same verdict there."""
    entry = "multi_turn_miss_func_0"  # `sort` comes in turn 3, for what is asked in turn 2

    def policy(request: Request) -> Say:
        if steps_of(request):
            return Say("Done.")
        if turn_of(request) == 2:
            return Say(calls=[("sort", {"file_name": "final_report.pdf"})])
        return gold(world.known)(request)

    (result,) = await world.run(policy, entry)
    assert (result.score, result.metrics["refused_calls"], result.metrics["abstained"]) == (1.0, 0, 0)
    assert (result.metrics["called_when_able"], result.metrics["quiet_when_unable"]) == (1, 0)


async def test_wrong_calls_fail_the_check_that_they_fail(world, harnesses, tmp_path) -> None:
    entry = "multi_turn_base_0"
    right = gold(world.known)

    def extra(request: Request) -> Say:
        if turn_of(request) == 0 and steps_of(request) == 1:
            return Say(calls=[("mkdir", {"dir_name": "another"})])
        return Say("Done.") if steps_of(request) > 1 else right(request)

    def less(request: Request) -> Say:  # `diff` changes no state
        said = right(request)
        return Say(calls=[call for call in said.calls if call[0] != "diff"], text=said.text)

    (state,) = await world.run(extra, entry)
    assert state.score == 0 and state.metrics["instance_state_mismatch"] == 1 and "GorillaFileSystem" in state.problem
    (response,) = await world.run(less, entry)
    assert response.score == 0 and response.metrics["execution_response_mismatch"] == 1


async def test_a_step_that_cannot_be_decoded_ends_its_turn(world, harnesses, tmp_path) -> None:
    entry = "multi_turn_base_0"
    right = gold(world.known)
    for broken in ('{"a": ', "", "[1]", '"{}"'):

        def policy(request: Request, broken: str = broken) -> Say:
            if turn_of(request) == 1 and steps_of(request) == 1:
                return Say(calls=[("ls", {}), ("ls", broken)])
            return right(request)

        (result,) = await world.run(policy, entry)
        assert (result.score, result.metrics["undecodable_steps"], result.steps) == (1.0, 1, 8)
        answered = [m["tool_call_id"] for m in result.messages if m["role"] == "tool"]
        calls = [call for m in result.messages for call in m.get("tool_calls", [])]
        assert answered == [call["id"] for call in calls]
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)


async def test_limits_of_the_endpoint(world, harnesses, tmp_path) -> None:
    right = gold(world.known)

    def long(request: Request) -> Say:
        return (
            Say("This model's maximum context length is 10 tokens.", status=400) if turn_of(request) else right(request)
        )

    def cut(request: Request) -> Say:
        return Say("Let me think", finish="length") if steps_of(request) == 1 else right(request)

    def cut_call(request: Request) -> Say:
        return Say(calls=[("mkdir", '{"dir_')], finish="length") if steps_of(request) == 1 else right(request)

    def refused(request: Request) -> Say:
        return Say("Yes.") if is_probe(request) else Say("no tools here", status=422)

    entry = ["multi_turn_base_0"]
    (overflowed,) = await world.run(long, *entry)
    assert (overflowed.score, overflowed.finish) == (0.0, "context_limit")
    assert overflowed.metrics["inference_error"] == 1
    for policy in (cut, cut_call):
        (result,) = await world.run(policy, *entry)
        assert (result.score, result.finish) == (1.0, "answered")
    with pytest.raises(Transient, match="no tools here"):
        await world.run(refused, *entry)


async def test_what_eats_the_processor_fails_its_entry_only(world, harnesses, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bfcl, "CPU_SECONDS", 1)
    entry = next(id for id, turns in world.known.items() if any("mean(" in text for turn in turns for text in turn))
    before = _workers(harnesses)
    async with serving(harnesses, tmp_path) as other:
        (result,) = await other.run(lambda _: Say(calls=[("power", {"base": 7, "exponent": 7**11})]), entry)
        assert (result.score, result.finish, result.metrics["inference_error"]) == (0.0, "crashed", 1)
        assert "processor time" in result.problem
        (result,) = await other.run(gold(world.known), entry)
        assert result.score == 1
        assert _workers(harnesses) - before
    deadline = time.monotonic() + 60
    while _workers(harnesses) - before:  # all of them end with their program
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_infrastructure_fails_the_run_and_a_restart_finishes_it(world, tmp_path, monkeypatch) -> None:
    right = gold(world.known)

    def policy(request: Request) -> Say:
        if is_probe(request):
            return Say("Yes.")
        return Say("overloaded", status=500) if request["user"] == "multi_turn_base_2" else right(request)

    monkeypatch.setattr(world.suite, "only", {"base": [f"multi_turn_base_{i}" for i in (1, 2, 3)]})
    world.scripted.policy = policy
    config = RunConfig(trials=2, retries=1)
    with contextlib.closing(Journal(tmp_path / "journal.sqlite")) as journal:
        with pytest.raises(InfrastructureFailed, match="bfcl_v3_mt: 2 items"):
            await run_suites([world.suite], journal=journal, config=config)
        world.scripted.policy = right
        world.scripted.requests.clear()
        results = await run_suites([world.suite], journal=journal, config=config)
    assert {request["user"] for request in world.scripted.requests} == {"multi_turn_base_2"}
    assert [(result.item[-1], result.trial, result.score) for result in results] == [
        (id, trial, 1.0) for id in "123" for trial in range(2)
    ]
    with pytest.raises(Transient, match="KeyError"):
        await world.run(right, "multi_turn_base_900")


async def test_another_version_or_other_data_is_refused(world, harnesses, tmp_path, monkeypatch) -> None:
    copy = tmp_path / "harnesses"
    original, folder = bfcl.ENVIRONMENT.folder(harnesses), bfcl.ENVIRONMENT.folder(copy)
    shutil.copytree(original, folder, symlinks=True)
    data = package(copy) / "data" / "BFCL_v4_multi_turn_base.json"
    text = data.read_text()
    data.write_text(text.replace("final_report", "last_report"))
    with pytest.raises(EvaluationError, match=r"BFCL_v4_multi_turn_base.json has sha256 .* it is made anew"):
        async with serving(copy, tmp_path):
            pass
    data.write_text(text)
    monkeypatch.setattr(bfcl, "VERSION", "2026.3.24")
    with pytest.raises(EvaluationError, match="bfcl-eval is 2026.3.23, not the pinned 2026.3.24"):
        async with serving(copy, tmp_path):
            pass


async def test_nothing_starts_where_a_process_cannot_be_locked(world, harnesses, tmp_path) -> None:
    """The worker below a filter that hides Landlock, as an old kernel would."""
    code = textwrap.dedent(
        """
        import os, sys
        from sandbox import libc
        from sandbox.seccomp import SyscallFilter
        from sandbox.syscalls import NUMBERS
        libc.prctl(38, 1)
        number = NUMBERS["landlock_create_ruleset"]
        program = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50026), (0x06, 0, 0, 0x7FFF0000)]
        hidden = SyscallFilter(program)
        function, arguments = hidden.attachment()
        assert function(*arguments) == 0
        os.execv(sys.argv[1], sys.argv[1:])
        """
    )
    root = Path(bfcl.__file__).parents[3]
    worker = root / "astra_jax" / "evaluation" / "workers" / "bfcl.py"
    ended = subprocess.run(
        [sys.executable, "-c", code, bfcl.ENVIRONMENT.folder(harnesses) / "bin/python", "-s", worker,
         tmp_path / "socket", bfcl.VERSION, "10", "multi_turn_base"],
        cwd=root, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 1 and "ready" not in ended.stdout
    assert "cannot lock a process" in ended.stderr and "Landlock" in ended.stderr


def _workers(harnesses: Path) -> set[str]:
    """Process ids of the suite's program and its children."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if str(harnesses).encode() in command and b"workers/bfcl.py" in command:
                found.add(folder.name)
    return found


async def test_the_ablation_of_behaviours_in_tiny(harnesses, tmp_path) -> None:
    """Both arms of one command, from random weights: what is trained on differs in what is left out alone."""
    folder = tmp_path / "weights"
    documents = [file.read_text() for file in (package(harnesses) / "data" / "multi_turn_func_doc").glob("*.json")]
    tokenizer = ChatTokenizer.train(documents, 2_500, folder)
    model = Qwen3Config(
        vocab_size=tokenizer.vocab_size, d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=32,
        tie_embeddings=True, max_positions=8_192,
    )  # fmt: skip
    save_hf(model.init(jax.random.key(0)), model, folder)
    data = DataConfig(seq_len=1_024, packing_bins=4)
    sft = SFTConfig(data=data, batch_size=1, steps=1, learning_rate=1e-3, sample_every=0)
    plan = conduct_ablation.Plan(
        run=SFTRun(model, sft), weights=folder, harnesses=harnesses, trajectories=20, limit=2, max_tokens=4,
        max_length=8_192, slots=2, seed=0,
    )  # fmt: skip
    row = await conduct_ablation.ablation(plan, tmp_path)
    left_out = set(conduct_ablation.LEFT_OUT)
    assert (
        left_out & row["arms"]["with"]["behaviours"].keys()
        and not left_out & row["arms"]["without"]["behaviours"].keys()
    )
    for arm in row["arms"].values():
        assert arm["trajectories"] == 20 and arm["steps"] == 1 and arm["trained_tokens_a_step"] > 0
        assert set(arm["bfcl"]) == set(conduct_ablation.CATEGORIES)
        missing = arm["bfcl"]["miss_func"]
        # Random weights make no call: right in one turn of each entry, and wrong in all others.
        assert [missing[name]["mean"] for name in conduct_ablation.MEASURES] == [0, 0, 1]
        assert arm["bfcl"]["base"]["quiet_when_unable"] is None
    assert row["difference"]["miss_param"]["accuracy"]["mean"] == 0
    assert "| miss_func | quiet_when_unable | 1.00 (" in conduct_ablation.table(row)
    compared = compare({arm: load_evaluation(tmp_path / arm) for arm in conduct_ablation.ARMS})
    assert [suite.name for suite in compared.suites] == ["bfcl_v3_mt"]
