"""Do asynchronous rollouts pay? GRPO on a real vLLM server on this machine's CPUs, with tools that take up to two
seconds.

    python -m benchmarks.async_rollouts --workdir=DIR --seeds=0,1,2 --save

For each seed the quickstart is run as far as SFT. From its weights each arm trains for the same wall-clock time, which
starts when the server has the first weights. The last weights are evaluated on the held-out environments, by the
embedded engine and with quick tools.

In the arms rollouts are 0 (strictly online), 1, 2 and 4 steps ahead, and a sync falls into running requests. Further
arms drain the server first: new requests wait until all others have ended. All else is the product, with the
quickstart's own settings.

Writes a row for each arm and seed: updates, waiting time of the trainer, tokens' ages, F1 and answers before and after.
Finished work is not repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from absl import flags

from astra_jax.base.settings import Seconds, Seed
from astra_jax.grpo import train as grpo
from astra_jax.models import hf_checkpoint
from astra_jax.models.model import Params
from astra_jax.rollout.sampler import Completion, Sampling
from astra_jax.rollout.vllm.config import VLLMConfig
from astra_jax.rollout.vllm.sampler import VLLMSampler
from astra_jax.run import compilation_cache
from benchmarks import processes, rows
from configs.quickstart import QuickstartConfig, seeded
from launch.flags import cli
from launch.flags.numbers import number_flag, numbers_of
from launch.quickstart import summary
from launch.quickstart.ledger import Ledger
from launch.quickstart.stages import Quickstart
from sandbox import CallResult, SandboxPool

sys.path.append(str(rows.ROOT / "tests" / "worlds"))

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of all runs; finished ones are not run again.", required=True)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, of the quickstart as of GRPO.")
_SECONDS = number_flag("seconds", 225.0, Seconds, "By the clock, for each arm.")
_TOOL_SECONDS = number_flag("tool_seconds", 2.0, Seconds, "Of the slowest call; they are spread evenly from 0.")
_ARMS = flags.DEFINE_list("arms", ["0", "1", "2", "4", "1-drained", "2-drained", "4-drained"], "Which, in this order.")
_SAVE = flags.DEFINE_bool("save", False, "Append the rows to the results.")

UPDATES = 100_000
"""More than any arm comes to: the clock ends it."""


@dataclass(frozen=True)
class Arm:
    """`max_off_policy_steps` (0: strictly online), and whether a sync waits until nothing is under way."""

    async_steps: int
    drained: bool

    @classmethod
    def of(cls, name: str) -> Arm:
        """Raises `UsageError`."""
        steps, _, rest = name.partition("-")
        if not steps.isdecimal() or rest not in ("", "drained"):
            raise cli.UsageError(f"--arms has {name!r}; give a number, or NUMBER-drained, such as 2-drained")
        return cls(int(steps), rest == "drained")

    @property
    def name(self) -> str:
        """As in `--arms`."""
        return f"{self.async_steps}-drained" if self.drained else str(self.async_steps)


class SlowTools(SandboxPool):
    """Calls take a time of their own, which is the same for the same call, once `seconds` is set."""

    seconds: float = 0.0

    async def call(self, code: str, function: str, arguments: Mapping[str, Any], **options: Any) -> CallResult:
        """See `SandboxPool.call`."""
        named = json.dumps([function, dict(arguments), options.get("seed", 0)], sort_keys=True).encode()
        await asyncio.sleep(random.Random(hashlib.sha256(named).digest()).uniform(0, self.seconds))
        return await super().call(code, function, arguments, **options)


class ClockedPolicy(VLLMSampler):
    """Calls `begins` when the servers have the first weights."""

    begins: Callable[[], None]

    async def load_weights(self, params: Params, version: int) -> None:
        """See `TrainableSampler.load_weights`."""
        await super().load_weights(params, version)
        if version == 0:
            self.begins()


class DrainedPolicy(ClockedPolicy):
    """No update falls into a request: it waits for all that are under way, and new ones wait for it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._under_way = 0
        self._changed = asyncio.Condition()
        self._draining = False

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        """See `Sampler.generate`."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._draining)
            self._under_way += 1
        try:
            return await super().generate(token_ids, sampling, session=session)
        finally:
            async with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    async def load_weights(self, params: Params, version: int) -> None:
        """See `TrainableSampler.load_weights`."""
        async with self._changed:
            self._draining = True
            await self._changed.wait_for(lambda: not self._under_way)
        try:
            await super().load_weights(params, version)
        finally:
            async with self._changed:
                self._draining = False
                self._changed.notify_all()


@contextmanager
def started(parent: Path, seed: int) -> Iterator[Quickstart]:
    """A seed's quickstart that has been through SFT, made where there is none; one update of GRPO ends it."""
    folder = parent / f"start-{seed}"
    processes.run("launch.quickstart", f"--workdir={folder}", f"--seed={seed}", "--config.grpo.steps=1")
    config = seeded(QuickstartConfig(), seed)
    made = replace(config, grpo=replace(config.grpo, steps=1))
    with closing(Ledger(folder, summary.identity(made, "quick"))) as ledger:
        yield Quickstart(made, folder, ledger)


def main() -> None:
    workdir = cli.local_folder(_WORKDIR)
    arms = [Arm.of(name) for name in _ARMS.value]
    seeds = numbers_of(_SEEDS, Seed)
    programs = workdir / compilation_cache.FOLDER
    compilation_cache.keep_programs(programs)
    for number, seed in enumerate(seeds):
        with started(workdir, int(seed)) as start:
            if not number:
                _warmed(start, arms, workdir / "warm-up")
            for arm in arms:
                folder = workdir / f"seed-{seed}" / arm.name
                done = folder / "row.json"
                if not done.exists():
                    row = asyncio.run(_measured(start, arm, folder, _SECONDS.value, _TOOL_SECONDS.value))
                    done.write_text(json.dumps(row), encoding="utf-8")
                    rows.report("async_rollouts", row, save=_SAVE.value)


def _warmed(start: Quickstart, arms: Sequence[Arm], folder: Path) -> None:
    """Compiles what arms run: the first one would pay for the others by the clock."""
    for steps in sorted({arm.async_steps for arm in arms}):
        where = folder / str(steps)
        if not (where / "done").exists():
            shutil.rmtree(where, ignore_errors=True)
            asyncio.run(_trained(start, Arm(steps, drained=False), where, 3_600.0, 0.0, updates=2))
            (where / "done").touch()


async def _measured(start: Quickstart, arm: Arm, folder: Path, seconds: float, tool_seconds: float) -> dict[str, Any]:
    """A row: an arm of a seed."""
    shutil.rmtree(folder, ignore_errors=True)  # the clock of one that was interrupted says nothing
    result = await _trained(start, arm, folder, seconds, tool_seconds)
    async with SandboxPool() as start.sandbox:
        after = await start.evaluate(lambda: result.params, arm.name)
    before = start.ledger.result("evaluate_sft")
    assert before is not None, "it has been through SFT"
    return {
        "seed": start.config.seed,
        "async_steps": arm.async_steps,
        "drained": arm.drained,
        "seconds": seconds,
        "tool_seconds": tool_seconds,
        **means(result.history),
        "f1_before": round(before["f1"], 4),
        "f1": round(after["f1"], 4),
        "answer_accuracy_before": round(before["answer_accuracy"], 4),
        "answer_accuracy": round(after["answer_accuracy"], 4),
    }


def means(history: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return means of an arm's metrics. The first update is left out, since its pipeline is empty.

    Returns:
        `updates`; `updates_an_hour`; mean seconds of a step, and of the parts that its trainer waits for. `mean_age` is
        the age in updates of the weights of trained groups, `valid_share` that of groups.
    """
    history = [row for row in history if "seconds/step" in row]  # the last one may be of no update: of the end
    steady = history[1:] or history

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in steady)

    step = mean("seconds/step")
    return {
        "updates": len(history),
        "updates_an_hour": round(3_600 / step, 1),
        "step_seconds": {
            "step": round(step, 2),
            **{name: round(mean(f"seconds/{name}"), 2) for name in ("wait", "update", "publish", "sync")},
        },
        "mean_age": round(mean("filling/mean_age"), 3),
        "valid_share": round(mean("filling/valid_share"), 3),
        "reward": round(statistics.fmean(row["rollout/reward"] for row in steady if "rollout/reward" in row), 4),
    }


@asynccontextmanager
async def _served(start: Quickstart, arm: Arm, folder: Path) -> AsyncIterator[ClockedPolicy]:
    """A new server for an arm, whose prefix cache is empty, and the policy on it."""
    from vllm_world import KEY, SYNC_KEY, Server, World, serving

    model, tokenizer = start.config.model, start.tokenizer
    episode = start.config.grpo.episode
    served = replace(model, param_dtype="float32")
    hf_checkpoint.write_serving_folder(served, start.workdir / "tokenizer", tokenizer.changed_files, folder / "serve")
    world = World(folder, model, tokenizer)
    longest = episode.max_prompt_tokens + episode.max_response_tokens
    with serving(Server(world, arguments=[f"--max-model-len={longest}"])) as (server,):
        options = VLLMConfig(
            (server.url,), api_key=KEY, sync_key=SYNC_KEY, max_off_policy_steps=arm.async_steps, check_seconds=0.5
        )
        kind = DrainedPolicy if arm.drained else ClockedPolicy
        policy = kind(options, world.publisher(), vocabulary=tokenizer.vocabulary_digest, max_length=longest)
        async with policy:
            yield policy


async def _trained(
    start: Quickstart, arm: Arm, folder: Path, seconds: float, tool_seconds: float, updates: int = UPDATES
) -> grpo.GRPOResult:
    folder.mkdir(parents=True)
    # Saved once, in the end: checkpoints of so small a model would be most of what is written.
    config = replace(
        start.config.grpo,
        steps=updates,
        async_rollouts=arm.async_steps > 0,
        max_off_policy_steps=arm.async_steps or 1,
        checkpoint_every=UPDATES,
        episodes_every=0,
    )
    tools = SlowTools()
    async with tools, _served(start, arm, folder) as policy:

        def begins() -> None:
            """The tools are slow, and the clock runs: SIGTERM ends the run, saved."""
            tools.seconds = tool_seconds
            asyncio.get_running_loop().call_later(seconds, os.kill, os.getpid(), signal.SIGTERM)

        policy.begins = begins
        return await grpo.train(
            config,
            start.config.model,
            partial(start.trained, "sft/tools"),
            start.environments_of("train"),
            start.tokenizer,
            tools,
            folder / "run",
            policy=policy,
            progress=False,
        )


if __name__ == "__main__":
    cli.with_cpu_environment("benchmarks.async_rollouts")
    cli.run(main, again="what is finished is not done again")
