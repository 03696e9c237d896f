"""The main job's stages, in order. Each reads what earlier ones wrote in the workdir and returns JSON for the ledger.

    trajectories ─ environments ─ tokenizer ─ evaluate_untrained ─ sft_dialogue ─ sft_tools ─ evaluate_sft
        ─ grpo ─ evaluate_grpo

A stage that was killed goes on from its own journal or checkpoint; a finished one is never run again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import resource
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import msgspec

import synthesis.environments.pipeline
import synthesis.trajectories.pipeline
from astra_jax.evaluation.episodes import evaluate
from astra_jax.grpo import train as grpo
from astra_jax.models.copying import copying_params
from astra_jax.models.model import Params
from astra_jax.rollout.engine.engine import Engine
from astra_jax.rollout.episode import Episode
from astra_jax.run.checkpoints import Checkpointer
from astra_jax.sft import train as sft
from astra_jax.sft.config import SFTConfig
from astra_jax.tokenizer import ChatTokenizer
from configs.quickstart import QuickstartConfig
from launch.quickstart.ledger import Ledger
from sandbox import Sandbox
from synthesis.core.chat_format import render
from synthesis.core.datasets import read_dataset
from synthesis.core.progress import say_beside_bars
from synthesis.core.records import Message, ToolEnvironment, Trajectory
from synthesis.core.stages import Journal, Stopped
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline.executors import LocalExecutor
from synthesis.pipeline.partition import Split
from synthesis.pipeline.track import Summary

Result = dict[str, Any]
SAMPLES = 3
"""Environments whose held-out episodes are kept, whole, for the report."""


class Quickstart:
    """One run of the main job in one workdir."""

    def __init__(self, config: QuickstartConfig, workdir: Path, ledger: Ledger) -> None:
        self.config, self.workdir, self.ledger = config, workdir, ledger
        self.teacher = OfflineTeacher()
        self.stages: dict[str, Callable[[], Awaitable[Result]]] = {
            "trajectories": self.trajectories,
            "environments": self.environments,
            "tokenizer": self.train_tokenizer,
            "evaluate_untrained": partial(self.evaluate, self.untrained, "untrained"),
            "sft_dialogue": partial(self.sft, "dialogue", self.untrained),
            "sft_tools": partial(self.sft, "tools", lambda: self.trained("sft/dialogue")),
            "evaluate_sft": partial(self.evaluate, lambda: self.trained("sft/tools"), "SFT"),
            "grpo": self.grpo,
            "evaluate_grpo": partial(self.evaluate, lambda: self.trained("grpo"), "GRPO"),
        }

    async def run(self, sandbox: AbstractAsyncContextManager[Sandbox]) -> None:
        """Run the stages that are not finished; tool code runs in `sandbox`, not yet open."""
        async with sandbox as opened:
            self.sandbox = opened
            for number, (name, stage) in enumerate(self.stages.items(), start=1):
                title = f"[{number}/{len(self.stages)}] {name}"
                if (done := self.ledger.result(name)) is not None:
                    say_beside_bars(f"{title}: finished earlier, in {done['seconds']:.0f} s")
                    continue
                say_beside_bars(title)
                started = time.perf_counter()
                result = await stage()
                seconds = time.perf_counter() - started
                isolation = {"tier": opened.tier, "layers": opened.layers}
                measured = {"seconds": seconds, "peak_rss_bytes": peak_rss_bytes(), "sandbox": isolation}
                self.ledger.finish(name, result | measured)

    # --------------------------------------------------------------------------------------------------- the datasets

    async def trajectories(self) -> Result:
        with Journal(self.workdir / "journals" / "trajectories.sqlite") as journal:
            summary = await synthesis.trajectories.pipeline.synthesize(
                self.config.trajectories,
                executor=LocalExecutor(self.teacher, self.sandbox),
                journal=journal,
                out_dir=self.workdir / "trajectories",
                workdir=self.workdir,
                seed=self.config.seed,
            )
        for reason, count in sorted(summary.rejected["normalize"].items()):
            say_beside_bars(f"left out {count} tools ({reason}), such as {summary.details['normalize'][reason]}")
        return _result(summary, summary.statistics["trajectories"])

    async def environments(self) -> Result:
        with Journal(self.workdir / "journals" / "environments.sqlite") as journal:
            summary = await synthesis.environments.pipeline.synthesize(
                self.config.environments,
                executor=LocalExecutor(self.teacher, self.sandbox),
                journal=journal,
                out_dir=self.workdir / "environments",
                seed=self.config.seed,
            )
        return _result(summary, summary.statistics)

    async def train_tokenizer(self) -> Result:
        texts = self._texts(read_dataset(self.trajectories_dir, Trajectory), self.environments_of("train"))
        tokenizer = ChatTokenizer.train(texts, self.config.vocab_size, self.workdir / "tokenizer")
        digest = hashlib.sha256((self.workdir / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest()
        return {"vocab_size": tokenizer.vocab_size, "digests": {"tokenizer": digest}}

    def _texts(self, trajectories: list[Trajectory], environments: list[ToolEnvironment]) -> Iterator[str]:
        """What the model will read. Of the environments only the training ones: held-out text stays unseen."""
        thinking = self.config.tools.data.thinking
        for one in trajectories:
            messages = one.messages if thinking else [msgspec.structs.replace(m, reasoning="") for m in one.messages]
            yield "".join(segment.text for segment in render(messages, one.tools))
        for environment in environments:
            offered = [*environment.tools, *(tool for band in environment.distractors.values() for tool in band)]
            question = Message("user", environment.question)
            yield "".join(segment.text for segment in render([question], [tool.spec for tool in offered]))

    # ------------------------------------------------------------------------------------------------------- training

    async def sft(self, part: str, start: Callable[[], Params]) -> Result:
        config: SFTConfig = getattr(self.config, part)
        workdir = self.workdir / "sft" / part
        result = sft.train(config, self.config.model, start, self.trajectories_dir, self.tokenizer, workdir)
        _unless_preempted(result.stopped)
        stats = result.stats
        return {
            "steps": result.steps,
            "loss": result.final_loss,
            "conversations": len(stats.lengths),
            "tokens": stats.tokens,
            "trained_tokens": stats.trainable,
            "dropped": stats.dropped,
            "cut": stats.cut,
        }

    async def grpo(self) -> Result:
        start = partial(self.trained, "sft/tools")
        async with Engine(start(), self.config.model, self.config.engine) as engine:
            result = await grpo.train(
                self.config.grpo,
                self.config.model,
                start,
                self.environments_of("train"),
                self.tokenizer,
                self.sandbox,
                self.workdir / "grpo",
                policy=engine,
            )
        _unless_preempted(result.stopped)
        return {"updates": result.steps, "stopped": result.stopped}

    async def evaluate(self, weights: Callable[[], Params], description: str) -> Result:
        environments = self.environments_of("held_out")
        sampled = {environment.id for environment in environments[:SAMPLES]}
        episodes: dict[str, Any] = {}

        def keep(environment: ToolEnvironment, number: int, episode: Episode) -> None:
            if environment.id in sampled and number == 0:
                shown = {"messages": episode.messages, "finish": episode.finish, "score": episode.score}
                episodes[environment.id] = msgspec.to_builtins(shown)

        async with Engine(weights(), self.config.model, self.config.engine) as engine:
            result = await evaluate(
                engine,
                environments,
                self.tokenizer,
                self.sandbox,
                config=self.config.evaluation,
                description=f"evaluate {description}",
                on_episode=keep,
            )
        return dataclasses.asdict(result) | {"samples": episodes}

    # --------------------------------------------------------------------------------------------- what stages read

    @property
    def trajectories_dir(self) -> Path:
        return self.workdir / "trajectories" / "trajectories"

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer.load(self.workdir / "tokenizer")

    def environments_of(self, split: Split) -> list[ToolEnvironment]:
        """What was synthesised for training, or held out."""
        return read_dataset(self.workdir / "environments" / split, ToolEnvironment)

    def untrained(self) -> Params:
        return copying_params(self.config.model.init(jax.random.key(self.config.seed)), self.config.model)

    def trained(self, part: str) -> Params:
        """The last weights of a training stage."""
        checkpointer = Checkpointer(self.workdir / part / "checkpoints")
        try:
            like = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), self.untrained())
            return checkpointer.restore_params(checkpointer.params_steps()[-1], like)
        finally:
            checkpointer.close()


def _unless_preempted(stopped: str) -> None:
    """SIGTERM in a training stage: it has saved, and is not finished."""
    if stopped == "preempted":
        raise Stopped("asked to stop", "the stage is saved; run the same command again to go on")


def _result(summary: Summary, statistics: Result) -> Result:
    """What the ledger keeps of a synthesis run."""
    names = ("counts", "digests", "rejected", "details")
    return {**{name: getattr(summary, name) for name in names}, "statistics": statistics}


def peak_rss_bytes() -> int:
    """The largest resident size so far: this process's, plus that of its largest child (a sandbox or MCP server)."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(one).ru_maxrss for one in who) * 1024
