"""The configuration of environment synthesis, and what its stages share while they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import msgspec

from synthesis.core.records import CodeTool, Decomposition, Language, Mode, ReferenceCall, Structure
from synthesis.core.stages import Rejected, rng_for
from synthesis.pipeline.embedding import Embedder, SentenceEmbedder
from synthesis.pipeline.executors import Resources
from synthesis.pipeline.partition import Partition, Split, SplitBy
from synthesis.pipeline.teacher import Teacher, TeacherError

if TYPE_CHECKING:
    from sandbox import Sandbox

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

TOOLS_AT_ONCE = 16
Band = Literal["high", "medium", "low"]
BANDS: tuple[Band, ...] = get_args(Band)


@dataclass(frozen=True)
class EnvironmentsConfig:
    """How many environments, and of which kind.

    Attributes:
        count: questions asked for; rejected ones are not replaced.
        questions: file of questions to answer and decompose (question-conditional); see `sources`.
        knowledge: file of domains and texts to ask about (unconditional); see `sources`.
        taxonomy: file of a taxonomy whose leaves to ask about; see `sources`.
        tools_of: dataset of environments for whose tools to find new questions (augmentation).
        mask_examples: how often a leaf of the taxonomy is shown without an example.
        held_out_fraction: share of `count` that is drawn for the held-out split.
        held_out_entities: share of all entities that only held-out questions may name. Larger than `held_out_fraction`,
            because every entity of a held-out chain has to be one of them.
        held_out_questions: share of all intents (or signatures) that only held-out questions may have.
        split_by: `intent`: no tool of a held-out question is needed by, or offered with, a training question.
            `signature`: only the way in which look-ups are put together is held out.
        partition_salt: names the partition into the two splits. It does not depend on the seed, so that what one run
            holds out no other run trains on.
        languages: weights; the default is the paper's share (71.2 % English).
        structures: weights; the default is the paper's shares.
        min_hops: shortest longest path of the multi-hop structures.
        max_hops: longest path.
        min_branches: fewest parallel branches of the parallel structures.
        max_branches: most parallel branches.
        domains: subject domains to draw from; empty: the teacher's choice.
        relations: restricts the offline teacher to these relations (a curriculum); empty: all.
        hardened_share: share of tools whose document is made harder by at least one optional parameter. The paper
            hardens all; optional parameters cost prompt tokens, which tiny models have few of.
        table_rows: how many subjects the offline teacher's tool knows.
        quality_threshold: least mean of the four quality indicators.
        quality_percentile: of the run's decompositions by that mean, this share (0 to 1) is below the cut and dropped;
            those that are as good as the one at the cut stay. The original's is 0.9. 0 leaves the threshold alone.
        attempts: how often the teacher is asked, with the problem as feedback, before a record is rejected.
        merge_similarity: least cosine similarity of the documents of tools that become one.
        distractors: most irrelevant tools of each similarity band.
        high_cut: normalised similarity above which an irrelevant tool is `high` (paper: 0.85).
        low_cut: normalised similarity below which it is `low` (paper: 0.4).
        fact_distractors: whether all fact relations are candidates too, beside the tools of all environments.
        concurrency: records in work at a time.
    """

    count: int = 600
    questions: str = ""
    knowledge: str = ""
    taxonomy: str = ""
    tools_of: str = ""
    mask_examples: float = 0.5
    held_out_fraction: float = 0.2
    held_out_entities: float = 0.35
    held_out_questions: float = 0.3
    split_by: SplitBy = "intent"
    partition_salt: str = "astra"
    languages: Mapping[Language, float] = field(default_factory=lambda: {"en": 0.712, "zh": 0.288})
    structures: Mapping[Structure, float] = field(
        default_factory=lambda: {
            "single_hop": 0.068,
            "parallel_single_hop": 0.106,
            "multi_hop": 0.348,
            "parallel_multi_hop": 0.478,
        }
    )
    min_hops: int = 2
    max_hops: int = 3
    min_branches: int = 2
    max_branches: int = 3
    domains: tuple[str, ...] = ()
    relations: tuple[str, ...] = ()
    hardened_share: float = 0.3
    table_rows: int = 24
    quality_threshold: float = 0.85
    quality_percentile: float = 0.0
    attempts: int = 3
    merge_similarity: float = 0.6
    distractors: Mapping[Band, int] = field(default_factory=lambda: dict.fromkeys(BANDS, 2))
    high_cut: float = 0.85
    low_cut: float = 0.4
    fact_distractors: bool = True
    concurrency: int = 32

    def __post_init__(self) -> None:
        fractions = (
            "held_out_fraction",
            "held_out_entities",
            "held_out_questions",
            "hardened_share",
            "mask_examples",
            "merge_similarity",
            "quality_percentile",
            "quality_threshold",
        )
        for name in fractions:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: {getattr(self, name)} is not a fraction; use a value from 0 to 1")
        for name in ("languages", "structures"):
            weights = getattr(self, name)
            if not weights or min(weights.values()) < 0 or sum(weights.values()) <= 0:
                raise ValueError(f"{name}: {dict(weights)} must hold at least one positive weight and none below 0")
        if not 2 <= self.min_hops <= self.max_hops:
            raise ValueError(f"min_hops, max_hops: {self.min_hops}, {self.max_hops} must satisfy 2 <= least <= most")
        if not 2 <= self.min_branches <= self.max_branches:
            raise ValueError(
                f"min_branches, max_branches: {self.min_branches}, {self.max_branches} must satisfy 2 <= least <= most"
            )
        if not 0.0 <= self.low_cut <= self.high_cut <= 1.0:
            raise ValueError(f"low_cut, high_cut: {self.low_cut}, {self.high_cut} must satisfy 0 <= low <= high <= 1")
        if min(self.distractors.values(), default=0) < 0:
            raise ValueError(f"distractors: {dict(self.distractors)} holds a number below 0")
        minimums = {"count": 0, "table_rows": 2, "attempts": 1, "concurrency": 1}
        for name, least in minimums.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is too small; use at least {least}")
        named = [name for name in ("questions", "knowledge", "taxonomy", "tools_of") if getattr(self, name)]
        if len(named) > 1:
            raise ValueError(f"{', '.join(named)}: one run has one source of questions; give one of them")

    @property
    def partition(self) -> Partition:
        return Partition(self.partition_salt, self.held_out_entities, self.held_out_questions, self.split_by)


# ---------------------------------------------------------------------------------------------------------------------
# Records between the stages


class Draft(msgspec.Struct, frozen=True, rename={"split": "side"}):  # as journals have it
    """A decomposition on its way; `domains` are its sub-questions', in their order."""

    decomposition: Decomposition
    domains: list[str]
    split: Split = "train"
    mode: Mode = "unconditional"


class NeededTool(msgspec.Struct, frozen=True):
    """A proven tool of an environment.

    `calls` are its reference calls; `others` holds, for each of them, arguments that must give another answer.
    """

    intent: str
    domain: str
    tool: CodeTool
    calls: list[ReferenceCall]
    others: list[dict[str, Any]]


class Built(msgspec.Struct, frozen=True):
    """A decomposition with its tools, later with its distractors by band.

    `closeness` is the largest cosine similarity of a distractor's document to a needed tool's.
    """

    draft: Draft
    tools: list[NeededTool]
    distractors: dict[str, list[CodeTool]] = {}
    closeness: float = 0.0


# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnvironmentContext:
    """What every stage of one run is given."""

    config: EnvironmentsConfig
    teacher: Teacher
    sandbox: Sandbox
    seed: int
    embedder: Embedder = field(default_factory=SentenceEmbedder)
    proofs: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TOOLS_AT_ONCE))
    """Held while one tool is called. The pool keeps an open slot for each tool in use; with more in use than it has
    slots, every call would open one anew, which costs several times the call."""

    async def ask(
        self,
        answer: type[T],
        variables: Mapping[str, Any],
        *,
        language: Language,
        key: str,
        check: Callable[[T], Awaitable[R]],
        attempts: int | None = None,
    ) -> R:
        """Ask the teacher until `check` accepts: its `Rejected` goes back to the teacher as the variable `feedback`.

        Args:
            key: what the request is about; with the answer's type and the attempt it decides the request's seed.
            check: turns the answer into what the stage wants, or raises `Rejected`.
            attempts: instead of the configured number.

        Raises:
            Rejected: `teacher_failed`, or what the check said of the last attempt.
        """
        feedback = str(variables.get("feedback", ""))
        for attempt in range(attempts or self.config.attempts):
            seed = rng_for(self.seed, answer.__name__, key, attempt).getrandbits(31)
            try:
                given = await self.teacher.ask(
                    answer, {**variables, "feedback": feedback}, language=language, seed=seed
                )
                return await check(given)
            except TeacherError as error:
                raise Rejected("teacher_failed", str(error)) from error
            except Rejected as rejection:
                last = rejection
                feedback = rejection.detail or rejection.reason
        raise last


@asynccontextmanager
async def open_context(
    resources: Resources, *, config: EnvironmentsConfig, seed: int
) -> AsyncIterator[EnvironmentContext]:
    """The context of one process."""
    yield EnvironmentContext(config, resources.teacher, resources.sandbox, seed, resources.embedder)


async def accept(given: T) -> T:
    """The check that takes every answer."""
    return given
