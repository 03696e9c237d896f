"""Evaluation on environments that a run does not train on: before the first update, at intervals, and after the last.

Each evaluation runs every environment once greedily, and `eval_samples` times at the run's temperature, with the run's
rewards. All evaluations of a run use the same seeds. They do not affect training: they have separate random numbers,
and the embedded engine's caches are emptied afterwards.

`workdir/held_out` has a report of each evaluation, and finished episodes of an interrupted one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from etils import epath

from astra_jax.base.errors import InputError
from astra_jax.base.files import write_text
from astra_jax.base.progress import log_above_progress
from astra_jax.evaluation.episodes import INFRASTRUCTURE, EvalConfig, run_episodes, summarise_by_kind
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.environments import digest_of_environments
from astra_jax.grpo.journal import BatchJournal, Journals
from astra_jax.rollout.episode import Episode
from astra_jax.rollout.sampler import Sampler
from astra_jax.run.digests import digest_of_json
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.core.environment import AnyEnvironment, kind_of, prompt_of

FOLDER = "held_out"
"""Folder name below a run's workdir."""
PREFIX = "eval"
"""Prefix of the metrics' names."""
_SHOWN = ("reward", "solved")
_Played = dict[tuple[str, int], Episode]
"""Finished episodes by environment id and episode number."""


class HeldOutEvaluation:
    """Evaluations of a run on its held-out environments, on the first host only.

    Args:
        folder: `FOLDER` of the run.
        run: the run's id.
        progress: whether to show bars and print results.

    Attributes:
        summary: one line comparing the newest evaluation with the run's first; "" before the first.
    """

    def __init__(
        self,
        policy: Sampler,
        sandbox: Sandbox | None,
        environments: Sequence[AnyEnvironment],
        tokenizer: ChatTokenizer,
        config: GRPOConfig,
        folder: epath.Path,
        *,
        run: str,
        progress: bool,
    ) -> None:
        self._policy, self._sandbox, self._environments, self._tokenizer = policy, sandbox, environments, tokenizer
        self._config, self._folder, self._progress = config, folder, progress
        at_once, seed = config.episodes_at_once, config.seed
        self._modes = {
            "greedy": EvalConfig(0.0, 1, concurrency=at_once, episode=config.episode, seed=seed),
            "sampled": EvalConfig(
                config.episode.temperature,
                config.eval_samples,
                concurrency=at_once,
                episode=config.episode,
                seed=seed,
            ),
        }
        self._is_known = False
        self.summary = ""
        settings = [{**asdict(one), "concurrency": None} for one in self._modes.values()]  # independent of concurrency
        shown = digest_of_environments(environments)
        self._identity = digest_of_json({"environments": shown, "settings": settings, "tokenizer": tokenizer.digest})
        self._journals = Journals(folder, run, self._identity)

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after this number of updates: at the first and last step, and every `eval_every`.
        Also if a resumed run has no evaluation of these environments yet."""
        every = self._config.eval_every
        if step in (0, self._config.steps) or (every and step % every == 0):
            return True
        self._is_known = self._is_known or any(report["step"] <= step for report in self._reports())
        return not self._is_known

    async def evaluate(self, step: int, weights: str) -> dict[str, float]:
        """Evaluate the policy's current weights, or read the report of an earlier process.

        Args:
            step: number of updates that made the weights.
            weights: their digest.

        Returns:
            Metrics by name.
        """
        reports = {one["step"]: one for one in self._reports()}
        report = reports.get(step)
        known = report is not None and report["weights"] == weights
        if report is None or not known:
            report = await self._report(step, weights)
        earlier = [one for one in reports.values() if one["step"] < step]
        self.summary = summary_line(report, earlier[0] if earlier else None)
        if self._progress and not known:
            log_above_progress(self.summary)
            for reason, count in report["masked"].items():
                log_above_progress(f"held-out evaluation: {count} episodes are masked and in no mean: {reason}")
        return dict(report["metrics"])

    async def _report(self, step: int, weights: str) -> dict[str, Any]:
        """Run all episodes, and write and return the report."""
        episodes, seconds = await self._play(step, weights)
        metrics = {f"{PREFIX}/environments": float(len(self._environments)), f"{PREFIX}/seconds": seconds}
        for mode, config in self._modes.items():
            found = summarise_by_kind(self._environments, episodes[mode], config)
            metrics |= {f"{PREFIX}/{mode}/{name}": value for name, value in found.items()}
        report = {
            "step": step,
            "weights": weights,
            "held_out": self._identity,
            "settings": {mode: asdict(config) for mode, config in self._modes.items()},
            "metrics": metrics,
            "masked": dict(
                Counter(_reason(one) for mode in episodes.values() for one in mode.values() if one.is_masked)
            ),
            "environments": [
                {"id": one.id, "kind": kind_of(one)}
                | {
                    mode: [_reward(episodes[mode][one.id, n]) for n in range(config.episodes_per_environment)]
                    for mode, config in self._modes.items()
                }
                for one in self._environments
            ],
        }
        write_text(self._path(step), json.dumps(report, indent=1) + "\n")
        self._journals.forget()
        return report

    async def _play(self, step: int, weights: str) -> tuple[dict[str, _Played], float]:
        """Run all episodes that the journal lacks. Return episodes by mode, and the seconds spent."""
        journal = await asyncio.to_thread(self._journals.open, step, weights)
        started, first = time.monotonic(), 0
        episodes: dict[str, _Played] = {}
        try:
            for mode, config in self._modes.items():
                episodes[mode] = await self._play_mode(journal, config, first, f"held out, {mode}")
                first += config.episodes_per_environment
        finally:
            await journal.close()
        return episodes, journal.seconds + time.monotonic() - started

    async def _play_mode(self, journal: BatchJournal, config: EvalConfig, first: int, description: str) -> _Played:
        """Run the episodes of one mode, numbered from `first` in the journal."""
        places = {one.id: place for place, one in enumerate(self._environments)}
        done: _Played = {}

        async def keep(environment: AnyEnvironment, number: int, episode: Episode) -> None:
            done[environment.id, number] = episode
            if not episode.is_masked:  # masked ones are repeated after a restart
                await journal.keep_episode(places[environment.id], first + number, episode)

        def finished(environment: AnyEnvironment, number: int) -> Episode | None:
            found = journal.take_episode(places[environment.id], first + number)
            if found is not None:
                done[environment.id, number] = found
            return found

        await run_episodes(
            self._policy,
            self._environments,
            self._tokenizer,
            self._sandbox,
            config=config,
            on_episode=keep,
            finished=finished,
            progress=self._progress,
            description=description,
        )
        return done

    def _path(self, step: int) -> epath.Path:
        return self._folder / f"update_{step:08}.json"

    def _reports(self) -> list[dict[str, Any]]:
        """Return reports of the same environments and settings, by step."""
        if not self._folder.exists():
            return []
        found = (self._read(path) for path in self._folder.iterdir() if path.name.endswith(".json"))
        return sorted((one for one in found if one is not None), key=lambda one: one["step"])

    def _read(self, path: epath.Path) -> dict[str, Any] | None:
        """Return a report, or None if it is unreadable or has other environments or settings."""
        try:
            found = json.loads(path.read_text())
            return found if found["held_out"] == self._identity else None
        except (OSError, ValueError, TypeError, KeyError):
            return None


def _reason(episode: Episode) -> str:
    return episode.unscored or INFRASTRUCTURE


def _reward(episode: Episode) -> float | None:
    return None if episode.is_masked else episode.reward


def summary_line(report: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Return one line comparing an evaluation with the run's first."""

    def figures(mode: str, name: str) -> str:
        key = f"{PREFIX}/{mode}/{name}"
        values = [one["metrics"].get(key) for one in (before, report) if one is not None]
        return " → ".join("–" if value is None else f"{value:.2f}" for value in values)

    samples = report["settings"]["sampled"]["episodes_per_environment"]
    parts = [f"{name} {figures('greedy', name)} (greedy), {figures('sampled', name)} (sampled)" for name in _SHOWN]
    if samples > 1:
        parts.append(f"pass@{samples} {figures('sampled', f'pass_at_{samples}')}")
    steps = [str(one["step"]) for one in (before, report) if one is not None]
    return f"held-out {'; '.join(parts)}; {len(report['environments'])} environments, update {' → '.join(steps)}"


def check_apart(
    held_out: Sequence[AnyEnvironment],
    environments: Sequence[AnyEnvironment],
    warn: Callable[[str], None] = log_above_progress,
) -> None:
    """Check that no held-out environment has the id and the prompt of one that is trained on.

    Args:
        warn: called with a line about environments with another id and the same prompt, which may still differ.

    Raises:
        InputError: an environment is trained on too, or two have the same id.
    """
    trained = {(one.id, _prompt(one)) for one in environments}
    if both := [one.id for one in held_out if (one.id, _prompt(one)) in trained]:
        raise InputError(
            f"{len(both)} of the {len(held_out)} held-out environments are trained on too (same id and prompt), such "
            f"as {both[0]!r:.80}; leave them out of --held_out, or give each environment an id of its own"
        )
    repeated = Counter(one.id for one in held_out).most_common(1)
    if repeated and repeated[0][1] > 1:
        raise InputError(
            f"{repeated[0][1]} held-out environments have the id {repeated[0][0]!r:.80}; name each once, and give each "
            "an id of its own"
        )
    prompts = {prompt for _, prompt in trained}
    if alike := [one.id for one in held_out if _prompt(one) in prompts]:
        warn(
            f"{len(alike)} of the {len(held_out)} held-out environments have the prompt of one that is trained on, "
            f"such as {alike[0]!r:.80}; leave them out, unless they differ behind the prompt (a seed, a state)"
        )


def _prompt(environment: AnyEnvironment) -> tuple[tuple[str, str], ...]:
    return tuple((message.role, message.content) for message in prompt_of(environment))
