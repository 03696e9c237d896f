"""The RL track from configuration to datasets: decompose → validate → implement → merge → distract → split.

    async with SandboxPool(SandboxConfig()) as pool:
        with Journal(workdir / "journal.sqlite") as journal:
            config = EnvironmentsConfig(count=600)
            await synthesize(config, teacher=OfflineTeacher(), pool=pool, journal=journal, out_dir=workdir, seed=0)

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
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from synthesis.datasets import write_dataset
from synthesis.environments.config import Built, Context, Draft, EnvironmentsConfig
from synthesis.environments.decompose import QuestionSeed, decompose, distinct, question_seeds
from synthesis.environments.distract import Candidate, Twin, build_indices, distract, find_twins
from synthesis.environments.embedding import Embedder, HashedEmbedder
from synthesis.environments.implement import implement
from synthesis.environments.merge import merge
from synthesis.environments.partition import Side
from synthesis.environments.split import split
from synthesis.environments.statistics import statistics_of
from synthesis.environments.validate import validate
from synthesis.records import ToolEnvironment
from synthesis.runner import Journal, run_stage
from synthesis.teacher import Teacher

if TYPE_CHECKING:
    from sandbox import Sandbox

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
        details: one example of each rejection, `stage/reason` → detail.
        statistics: by split, as on the cards.
    """

    counts: dict[Side, int]
    digests: dict[Side, str]
    rejected: dict[str, dict[str, int]]
    details: dict[str, str]
    statistics: dict[Side, dict[str, Any]]


async def synthesize(
    config: EnvironmentsConfig,
    *,
    teacher: Teacher,
    pool: Sandbox,
    journal: Journal,
    out_dir: Path | str,
    seed: int,
    embedder: Embedder | None = None,
) -> EnvironmentsSummary:
    """Make environments and write them as `out_dir/train` and `out_dir/held_out`.

    The same configuration, seed and (repeatable) teacher give the same bytes. A killed run goes on from the journal.

    Args:
        pool: an entered sandbox pool.
        journal: of this run; another configuration or seed in the same journal starts anew, under other stage names.
        embedder: for choosing irrelevant tools; `HashedEmbedder()` by default.
    """
    context = Context(config, teacher, pool, seed, embedder or HashedEmbedder())
    rejected: dict[str, Counter[str]] = {}
    details: dict[str, str] = {}
    resolved = msgspec.to_builtins(dataclasses.asdict(config), str_keys=True)
    # Concurrency changes no output, so it does not name the run.
    identity = msgspec.json.encode({**resolved, "concurrency": 0, "seed": seed}, order="deterministic")
    run = hashlib.sha256(identity).hexdigest()[:8]

    async def stage(
        name: str,
        function: Callable[[In], Awaitable[list[Out]]],
        inputs: Sequence[In],
        key: Callable[[In], str],
        out: type[Out],
    ) -> list[Out]:
        result = await run_stage(
            f"environments/{run}/{name}",
            function,
            inputs,
            key=key,
            out=out,
            journal=journal,
            concurrency=config.concurrency,
            description=f"environments: {name}",
        )
        rejected[name] = result.rejected
        details.update({f"{name}/{reason}": detail for reason, detail in result.details.items()})
        return result.outputs

    def id_of(record: Draft | Built) -> str:
        return (record if isinstance(record, Draft) else record.draft).decomposition.id

    def name_of(candidate: Candidate) -> str:
        return candidate.tool.spec.name

    def seed_id(one: QuestionSeed) -> str:
        return one.id

    seeds = question_seeds(config, seed)
    drafts = await stage("decompose", partial(decompose, context=context), seeds, seed_id, Draft)
    drafts, rejected["distinct"] = distinct(drafts)
    drafts = await stage("validate", partial(validate, context=context), drafts, id_of, Draft)
    built = await stage("implement", partial(implement, context=context), drafts, id_of, Built)
    built = await stage("merge", partial(merge, context=context), built, id_of, Built)
    indices = await build_indices(built, context)
    twins: set[Twin] = set()
    for language, index in indices.items():
        own = [one for one in built if one.draft.decomposition.language == language]
        twins.update(
            await stage(
                f"twins_{language}", partial(find_twins, built=own, context=context), index.candidates, name_of, Twin
            )
        )
    built = await stage(
        "distract", partial(distract, context=context, indices=indices, twins=twins), built, id_of, Built
    )
    environments = await stage("split", partial(split, context=context), built, id_of, ToolEnvironment)

    counted = {name: dict(sorted(counts.items())) for name, counts in rejected.items() if counts}
    sides: tuple[Side, ...] = ("train", "held_out")
    by_side = {side: [one for one in environments if one.split == side] for side in sides}
    statistics = {side: statistics_of(by_side[side]) for side in sides}
    digests: dict[Side, str] = {}
    for side in sides:
        card = {
            "split": side,
            "seed": seed,
            "config": resolved,
            "teacher": type(teacher).__name__,
            "embedder": type(context.embedder).__name__,
            "statistics": statistics[side],
            "rejected": counted,
        }
        digests[side] = write_dataset(Path(out_dir) / side, ToolEnvironment, by_side[side], card=card)
    counts = {side: len(by_side[side]) for side in sides}
    return EnvironmentsSummary(counts, digests, counted, details, statistics)
