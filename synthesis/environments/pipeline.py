"""The RL track from configuration to datasets: decompose → validate → implement → merge → distract → verify.

    async with SandboxPool(SandboxConfig()) as pool:
        with Journal(workdir / "journal.sqlite") as journal:
            config = EnvironmentsConfig(count=600)
            executor = LocalExecutor(OfflineTeacher(), pool)
            await synthesize(config, executor=executor, journal=journal, out_dir=workdir, seed=0)

writes the datasets `train` and `held_out` of `ToolEnvironment` records.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from synthesis.core.datasets import read_dataset, write_dataset
from synthesis.core.records import ToolEnvironment
from synthesis.core.stages import Journal
from synthesis.environments.augment import augment, validated
from synthesis.environments.config import Built, Draft, EnvironmentContext, EnvironmentsConfig, open_context
from synthesis.environments.decompose import QuestionSeed, best, decompose, distinct, question_seeds
from synthesis.environments.distract import build_indices, distract
from synthesis.environments.implement import implement
from synthesis.environments.merge import merge
from synthesis.environments.sources import SourceError
from synthesis.environments.statistics import statistics_of
from synthesis.environments.validate import validate
from synthesis.environments.verify import finish
from synthesis.pipeline.executors import Executor, Workers, run_on
from synthesis.pipeline.partition import Split

In = TypeVar("In", bound=msgspec.Struct)
Out = TypeVar("Out", bound=msgspec.Struct)

__all__ = ["EnvironmentsConfig", "EnvironmentsSummary", "synthesize"]


@dataclass(frozen=True)
class EnvironmentsSummary:
    """What one run made.

    Attributes:
        counts: records by split.
        digests: content digests by split.
        rejected: stage → reason → how many; empty reasons are left out.
        details: one example of each rejection, by stage and reason.
        statistics: by split, as on the cards.
    """

    counts: dict[Split, int]
    digests: dict[Split, str]
    rejected: dict[str, dict[str, int]]
    details: dict[str, dict[str, str]]
    statistics: dict[Split, dict[str, Any]]


async def synthesize(
    config: EnvironmentsConfig,
    *,
    executor: Executor,
    journal: Journal,
    out_dir: Path | str,
    seed: int,
) -> EnvironmentsSummary:
    """Make environments and write them as `out_dir/train` and `out_dir/held_out`.

    The same configuration, seed and (repeatable) teacher give the same bytes. A killed run goes on from the journal.

    Args:
        executor: where its stages are worked on, with which teacher, sandbox and embedder; where changes no byte.
        journal: of this run; another configuration or seed in the same journal starts anew, under other stage names.

    Raises:
        SourceError: a file that the configuration names cannot be used, or `tools_of` holds no environment.
        DatasetError: `tools_of` is no dataset of environments.
    """
    make_context = partial(open_context, config=config, seed=seed)
    async with executor.workers(make_context) as workers:
        return await _synthesize(config, executor, workers, journal, Path(out_dir), seed)


async def _synthesize(
    config: EnvironmentsConfig,
    executor: Executor,
    workers: Workers[EnvironmentContext],
    journal: Journal,
    out_dir: Path,
    seed: int,
) -> EnvironmentsSummary:
    rejected: dict[str, Counter[str]] = {}
    details: dict[str, dict[str, str]] = {}
    resolved = msgspec.to_builtins(dataclasses.asdict(config), str_keys=True)
    given = {one.id: one for one in read_dataset(config.tools_of, ToolEnvironment)} if config.tools_of else {}
    if config.tools_of and not given:
        raise SourceError(f"tools_of: {config.tools_of} holds no environment; give a dataset that does")
    seeds = question_seeds(config, seed, list(given.values()))
    # Concurrency changes no output, so it does not name the run; what was read does, wherever it stood.
    named = {"concurrency": 0, "questions": "", "knowledge": "", "taxonomy": "", "tools_of": ""}
    identity = msgspec.json.encode(
        [{**resolved, **named}, seed, executor.embedder.name, seeds, sorted(given.items())], order="deterministic"
    )
    run = hashlib.sha256(identity).hexdigest()[:8]

    async def stage(
        name: str,
        function: Callable[[In, EnvironmentContext], Awaitable[list[Out]]],
        inputs: Sequence[In],
        key: Callable[[In], str],
        out: type[Out],
    ) -> list[Out]:
        result = await run_on(
            workers,
            f"environments/{run}/{name}",
            function,
            inputs,
            key=key,
            out=out,
            journal=journal,
            concurrency=config.concurrency,
            description=f"environments: {name}",
        )
        rejected[name], details[name] = result.rejected, result.details
        return result.outputs

    def id_of(record: Draft | Built) -> str:
        return (record if isinstance(record, Draft) else record.draft).decomposition.id

    def seed_id(one: QuestionSeed) -> str:
        return one.id

    async def judged(drafts: Sequence[Draft]) -> list[Draft]:
        drafts, rejected["distinct"] = distinct(drafts)
        drafts = await stage("validate", validate, drafts, id_of, Draft)
        drafts, rejected["quality"] = best(drafts, config.quality_percentile)
        return drafts

    if given:
        asked = partial(augment, environments=given)
        built = await stage("augment", asked, seeds, seed_id, Built)
        drafts = {id_of(draft): draft for draft in await judged([one.draft for one in built])}
        built = [validated(one, drafts[id_of(one)]) for one in built if id_of(one) in drafts]
    else:
        drafted = await stage("decompose", decompose, seeds, seed_id, Draft)
        built = await stage("implement", implement, await judged(drafted), id_of, Built)
        built = await stage("merge", merge, built, id_of, Built)
    indices = await build_indices(built, config, executor.embedder, seed)
    built = await stage("distract", partial(distract, indices=indices), built, id_of, Built)
    environments = await stage("verify", finish, built, id_of, ToolEnvironment)

    counted = {name: dict(sorted(counts.items())) for name, counts in rejected.items() if counts}
    splits: tuple[Split, ...] = ("train", "held_out")
    by_split = {split: [one for one in environments if one.split == split] for split in splits}
    statistics = {split: statistics_of(by_split[split]) for split in splits}
    digests: dict[Split, str] = {}
    for split in splits:
        card = {
            "split": split,
            "seed": seed,
            "config": resolved,
            "teacher": workers.teacher_name,
            "embedder": executor.embedder.name,
            "statistics": statistics[split],
            "rejected": counted,
        }
        digests[split] = write_dataset(out_dir / split, ToolEnvironment, by_split[split], card=card)
    counts = {split: len(by_split[split]) for split in splits}
    return EnvironmentsSummary(counts, digests, counted, details, statistics)
