"""Stages of the quickstart, in order. Each reads files of earlier stages in the workdir and returns JSON for the
ledger.

    trajectories ─ environments ─ tokenizer ─ evaluate_untrained ─ sft_dialogue ─ sft_tools ─ evaluate_sft
        ─ grpo ─ evaluate_grpo

A run from pretrained weights (`pretrained.py`) first reads weights and tokenizer (weights), and before SFT samples the
model's own conversations (rehearsal).

A killed stage resumes from its own journal or checkpoint; a finished one is never run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
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
from astra_jax.base.progress import log_above_progress
from astra_jax.evaluation.episodes import answers_rightly, evaluate
from astra_jax.grpo import train as grpo
from astra_jax.models.copying import copying_params
from astra_jax.models.model import Params
from astra_jax.rollout.engine.engine import Engine
from astra_jax.rollout.episode import Episode
from astra_jax.run import model_card, weights
from astra_jax.run.frozen import WeightsSource
from astra_jax.run.model_card import TrainedOn, trained_on
from astra_jax.sft import train as sft
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.rehearsal import longest, rehearse
from astra_jax.tokenizer import ChatTokenizer
from configs.quickstart import QuickstartConfig
from launch.quickstart import pretrained
from launch.quickstart.ledger import Ledger
from sandbox import Sandbox
from synthesis.core.chatml import QWEN3
from synthesis.core.datasets import read_card, read_dataset, write_dataset
from synthesis.core.records import Message, ToolEnvironment, Trajectory
from synthesis.core.stages import AbortRun, Journal
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.partition import Split
from synthesis.pipeline.pipeline_run import Summary

Result = dict[str, Any]
SAMPLES = 3
"""Number of environments whose held-out episodes are stored in full for the report."""


class Quickstart:
    """One run of the quickstart in one workdir."""

    def __init__(self, config: QuickstartConfig, workdir: Path, ledger: Ledger) -> None:
        from synthesis.offline.teacher import OfflineTeacher

        self.config, self.workdir, self.ledger = config, workdir, ledger
        self.teacher = OfflineTeacher()
        start: dict[str, Callable[[], Awaitable[Result]]] = {"tokenizer": self.train_tokenizer}
        if config.pretrained:
            start = {"weights": self.read_weights, "tokenizer": self.take_tokenizer}
        first: dict[str, Callable[[], Awaitable[Result]]] = {}
        before_tools = self.untrained
        if config.dialogue is not None:
            first = {"sft_dialogue": partial(self.sft, "dialogue", self.untrained)}
            before_tools = partial(self.trained, "sft/dialogue")
        if config.rehearsal is not None:
            first = {"rehearsal": self.rehearse, **first}
        self.stages: dict[str, Callable[[], Awaitable[Result]]] = {
            "trajectories": self.trajectories,
            "environments": self.environments,
            **start,
            "evaluate_untrained": partial(self.evaluate, self.untrained, "untrained"),
            **first,
            "sft_tools": partial(self.sft, "tools", before_tools),
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
                    log_above_progress(f"{title}: finished earlier, in {done['seconds']:.0f} s")
                    continue
                log_above_progress(title)
                result = await self._timed(name, stage)
                isolation = {"tier": opened.tier, "layers": opened.layers}
                self.ledger.finish(name, result | {"sandbox": isolation})

    async def _timed(self, name: str, stage: Callable[[], Awaitable[Result]]) -> Result:
        """Return a stage's result with its time and memory, over all of its starts that were not killed."""
        before, started = self.ledger.spent(name), time.perf_counter()

        def spent() -> Result:
            seconds = before["seconds"] + time.perf_counter() - started
            return {"seconds": seconds, "peak_rss_bytes": max(before["peak_rss_bytes"], peak_rss_bytes())}

        try:
            result = await stage()
        except BaseException:
            with contextlib.suppress(OSError):  # what ended it is what is told
                self.ledger.leave(name, spent())
            raise
        gc.collect()  # what refers to itself, a training's last state among it, is not to lie beside the next
        return result | spent()

    # --------------------------------------------------------------------------------------------------- the datasets

    async def trajectories(self) -> Result:
        with Journal(self.workdir / "journals" / "trajectories.sqlite") as journal:
            summary = await synthesis.trajectories.pipeline.synthesize(
                self.config.trajectories,
                executor=Executor(self.teacher, self.sandbox),
                journal=journal,
                out_dir=self.workdir / "trajectories",
                workdir=self.workdir,
                seed=self.config.seed,
            )
        for reason, count in sorted(summary.rejected["normalize"].items()):
            log_above_progress(f"left out {count} tools ({reason}), such as {summary.details['normalize'][reason]}")
        return _result(summary, summary.statistics["trajectories"])

    async def environments(self) -> Result:
        with Journal(self.workdir / "journals" / "environments.sqlite") as journal:
            summary = await synthesis.environments.pipeline.synthesize(
                self.config.environments,
                executor=Executor(self.teacher, self.sandbox),
                journal=journal,
                out_dir=self.workdir / "environments",
                seed=self.config.seed,
            )
        return _result(summary, summary.statistics)

    async def train_tokenizer(self) -> Result:
        texts = self._texts(read_dataset(self.trajectories_dir, Trajectory), self.environments_of("train"))
        return self._described(ChatTokenizer.train(texts, self.config.vocab_size, self.workdir / "tokenizer"))

    async def read_weights(self) -> Result:
        return pretrained.read(self.config, self.weights_dir)

    async def take_tokenizer(self) -> Result:
        return self._described(pretrained.take_tokenizer(self.config, self.weights_dir, self.workdir / "tokenizer"))

    def _described(self, tokenizer: ChatTokenizer) -> Result:
        digest = hashlib.sha256((self.workdir / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest()
        return {"vocab_size": tokenizer.vocab_size, "digests": {"tokenizer": digest}}

    def _texts(self, trajectories: list[Trajectory], environments: list[ToolEnvironment]) -> Iterator[str]:
        """Yield the texts for the tokenizer: of the environments only the training ones, so that held-out text stays
        unseen."""
        thinking = self.config.tools.data.thinking
        for one in trajectories:
            messages = one.messages if thinking else [msgspec.structs.replace(m, reasoning="") for m in one.messages]
            yield "".join(segment.text for segment in QWEN3.render(messages, one.tools))
        for environment in environments:
            offered = [*environment.tools, *(tool for band in environment.distractors.values() for tool in band)]
            question = Message("user", environment.question)
            yield "".join(segment.text for segment in QWEN3.render([question], [tool.spec for tool in offered]))

    async def rehearse(self) -> Result:
        config = self.config.rehearsal
        assert config is not None
        engine = dataclasses.replace(self.config.engine, max_length=longest(self.tokenizer, config))
        with Journal(self.workdir / "journals" / "rehearsal.sqlite") as journal:
            async with Engine(self.untrained(), self.config.model, engine) as policy:
                drawn = await rehearse(policy, self.tokenizer, config, journal=journal, run="rehearsal")
        card = {"made_by": "quickstart", "rejected": dict(drawn.rejected)}
        write_dataset(self.rehearsal_dir, Trajectory, drawn.outputs, card=card)
        return {
            "conversations": len(drawn.outputs),
            "unfinished": sum(one.unfinished is True for one in drawn.outputs),
            "rejected": {"rehearse": dict(drawn.rejected)},
            "digests": {"rehearsal": read_card(self.rehearsal_dir)["digest"]},
        }

    # ------------------------------------------------------------------------------------------------------- training

    async def sft(self, part: str, start: Callable[[], Params]) -> Result:
        config: SFTConfig = getattr(self.config, part)
        origin: WeightsSource | None = WeightsSource(str(self.checkpoints_of("sft/dialogue")))
        if part == "dialogue" or self.config.dialogue is None:  # without real weights there are no adapters to them
            origin = pretrained.origin(self.weights_dir) if self.config.pretrained else None
            config = pretrained.with_added_tokens(config, self.weights_dir) if self.config.pretrained else config
        workdir = self.workdir / "sft" / part
        arguments = (config, self.config.model, start, self.trajectories_dir, self.tokenizer, workdir)
        rehearsal = None if self.config.rehearsal is None else self.rehearsal_dir
        # The table's warnings name flags of astra sft; the quickstart's report has its numbers.
        result = sft.train(*arguments, rehearsal=rehearsal, origin=origin, on_summary=lambda _: None)
        _unless_preempted(result.stopped)
        before = self.ledger.result("sft_dialogue") if part == "tools" else None
        base = "the dialogue stage" if before is not None else self._origin
        used = {"data": self.trajectories_dir, "rehearsal": rehearsal}
        self._complete(workdir, "SFT", config, [trained_on(role, one) for role, one in used.items() if one], base)
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
                origin=WeightsSource(str(self.checkpoints_of("sft/tools"))),
                on_summary=lambda _: None,
            )
        _unless_preempted(result.stopped)
        data = [trained_on("environments", self.workdir / "environments" / "train")]
        self._complete(self.workdir / "grpo", "GRPO", self.config.grpo, data, "the SFT stage")
        return {"updates": result.steps, "stopped": result.stopped}

    @property
    def _origin(self) -> str:
        return "the weights of a release" if self.config.pretrained else "weights made to copy (quickstart)"

    def _complete(self, workdir: Path, method: str, config: Any, data: list[TrainedOn], base: str) -> None:
        """Complete a training stage's folder to a model that can be loaded."""
        model_card.complete(workdir / model_card.CHECKPOINTS, self.tokenizer, self.workdir / "tokenizer")
        weights = self.weights_dir if self.config.pretrained else None
        model_card.write_card(workdir, method, config, data, base=base, weights=weights)

    async def evaluate(self, start: Callable[[], Params], description: str) -> Result:
        environments = self.environments_of("held_out")
        sampled = {environment.id for environment in environments[:SAMPLES]}
        episodes: dict[str, Any] = {}

        def keep(environment: ToolEnvironment, number: int, episode: Episode) -> None:
            if environment.id in sampled and number == 0:
                right = answers_rightly(episode, environment)
                shown = {"messages": episode.messages, "finish": episode.finish, "score": episode.score, "right": right}
                episodes[environment.id] = msgspec.to_builtins(shown)

        async with Engine(start(), self.config.model, self.config.engine) as engine:
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

    @property
    def rehearsal_dir(self) -> Path:
        return self.workdir / "rehearsal"

    @property
    def weights_dir(self) -> Path:
        return self.workdir / "weights"

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer.load(self.workdir / "tokenizer")

    def environments_of(self, split: Split) -> list[ToolEnvironment]:
        """Return the synthesised environments of a split."""
        return read_dataset(self.workdir / "environments" / split, ToolEnvironment)

    def untrained(self) -> Params:
        if self.config.pretrained:
            return pretrained.load(self.config.model, self.weights_dir)
        return copying_params(self.config.model.init(jax.random.key(self.config.seed)), self.config.model)

    def checkpoints_of(self, part: str) -> Path:
        return self.workdir / part / "checkpoints"

    def trained(self, part: str) -> Params:
        """Return the last weights of a training stage."""
        return weights.load_orbax(self.checkpoints_of(part), self.config.model)


def _unless_preempted(stopped: str) -> None:
    """Raise if SIGTERM ended a training stage: it has saved a checkpoint, and is not finished."""
    if stopped == "preempted":
        raise AbortRun("asked to stop", "the stage is saved; run the same command again to resume")


def _result(summary: Summary, statistics: Result) -> Result:
    """Return the ledger's entry for a synthesis run."""
    names = ("counts", "digests", "rejected", "details")
    return {**{name: getattr(summary, name) for name in names}, "statistics": statistics}


def peak_rss_bytes() -> int:
    """Return the largest resident size so far: this process's, plus that of its largest child (a sandbox or MCP
    server)."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(one).ru_maxrss for one in who) * 1024
