"""The configuration of environment synthesis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

from astra_jax.base.settings import Amount, Bound, Count, CountOrZero, OneOf, SettingError, Settings, Share
from synthesis.core.records import Language, Structure
from synthesis.pipeline.demo import relation_ids
from synthesis.pipeline.own_stages import OwnStages
from synthesis.pipeline.partition import WORKSPACE, Partition, SplitBy
from synthesis.pipeline.stage_keys import Free, Grows

Band = Literal["high", "medium", "low"]
BANDS: tuple[Band, ...] = get_args(Band)
_Parts = Annotated[int, Bound(least=2, most=64)]


@dataclass(frozen=True)
class EnvironmentsConfig(Settings):
    """Settings of environment synthesis: number and kinds of environments, and filters.

    Attributes:
        count: number of questions to generate. Rejected ones are not replaced, so fewer environments are stored.
        questions: file of questions that are decomposed (question-conditional); see `sources`. Empty: no such file.
        documents: your documents to ask about: Markdown, HTML, text and PDF, as files, folders or patterns such as
            `docs/**/*.md`. They are read in passages at headings and paragraphs, or pages; each question stores the
            place of its passage. Empty: none.
        knowledge: file of domains and texts to ask about (unconditional); see `sources`. Empty: no such file.
        taxonomy: file of a taxonomy whose leaves are asked about; see `sources`. Empty: no such file.
        license: license of `questions`, `documents`, `knowledge` or `taxonomy`, for cards and records. Data from the
            packaged tables keeps its own license.
        tools_of: dataset of environments; new questions are generated for their tools (augmentation). Empty: none.
        mask_examples: share of questions about a leaf of the taxonomy for which the teacher sees no example of the
            leaf. Higher values give more varied questions.
        held_out_fraction: share of `count` that is generated for the held-out split.
        held_out_entities: share of all entities that only held-out questions may name. It is larger than
            `held_out_fraction`, because every entity of a held-out chain must be held out.
        held_out_questions: share of all intents (or signatures) that only held-out questions may have.
        split_by: what the held-out split is held out by. `intent`: no tool that a held-out question needs is needed by,
            or offered with, a training question. `signature`: only combinations of look-ups are held out. `source`: the
            share `held_out_fraction` of the rows of `questions`, `knowledge` or `taxonomy`, or of the passages of
            `documents`, with all their environments; nothing without such a source. None: `intent` with the offline
            teacher, which knows the split when it asks; `source` with a model, which does not.
        partition_salt: name of the partition into the two splits. It does not depend on the seed: with one name, no run
            trains on what another run holds out.
        languages: weights by ISO 639-1 code. The default is the paper's share (71.2 % English). Languages other than
            `en` and `zh` need a teacher behind an endpoint.
        structures: weights of the structures of questions. The default is the paper's shares.
        stateful_share: share of `count` whose task is to change the state of a small database, instead of finding an
            answer. Their structure follows from the teacher's plan; those of the offline teacher are in English.
        min_hops: smallest number of hops in the longest path of the multi-hop structures.
        max_hops: largest number of hops in a path.
        min_branches: fewest parallel branches of the parallel structures.
        max_branches: most parallel branches of the parallel structures.
        domains: subject domains to sample from. Empty: the teacher chooses.
        relations: relations that the offline teacher may use, as a curriculum. Empty: all.
        informative_joins: for the offline teacher: join no relations of which nine tenths of the values are the same,
            and ask no question in which a hop can be skipped.
        hardened_share: share of tools whose document gets at least one optional parameter, which makes them harder. The
            paper does it to all tools. Use less for tiny models: optional parameters cost prompt tokens.
        table_rows: number of subjects that a tool of the offline teacher knows.
        quality_threshold: least mean of the four quality indicators, 0 to 1, for a decomposition to be accepted.
        quality_percentile: share of the run's decompositions, 0 to 1, with the lowest quality means to drop; ties with
            the last kept one stay. The original uses 0.9. 0: only `quality_threshold` applies.
        attempts: how often the teacher is asked for a record, with the previous fault in the prompt, before the record
            is rejected.
        stop_after: number of records of a stage after which the run stops if less than one in a hundred is accepted. 0:
            never stop.
        merge_similarity: least cosine similarity of tool documents for tools to be merged into one.
        distractors: maximum irrelevant tools from each similarity band.
        high_cut: normalized similarity above which an irrelevant tool belongs to the band `high` (paper: 0.85).
        low_cut: normalized similarity below which an irrelevant tool belongs to the band `low` (paper: 0.4).
        fact_distractors: use all packaged fact relations as irrelevant tools, in addition to the tools of all
            environments. None: only with the offline teacher.
        concurrency: records processed at the same time.
        own_stages: your own functions, by the name of the stage after which they take its records
            (docs/extending.md).
    """

    count: Grows[CountOrZero] = 600
    questions: str = ""
    documents: tuple[str, ...] = ()
    knowledge: str = ""
    taxonomy: str = ""
    license: str = ""
    tools_of: str = ""
    mask_examples: Share = 0.5
    held_out_fraction: Share = 0.2
    held_out_entities: Share = WORKSPACE.entities
    held_out_questions: Share = WORKSPACE.questions
    split_by: SplitBy | None = None
    partition_salt: str = WORKSPACE.salt
    languages: Mapping[Language, Amount] = field(default_factory=lambda: {"en": 0.712, "zh": 0.288})
    structures: Mapping[Structure, Amount] = field(
        default_factory=lambda: {
            "single_hop": 0.068,
            "parallel_single_hop": 0.106,
            "multi_hop": 0.348,
            "parallel_multi_hop": 0.478,
        }
    )
    stateful_share: Share = 0.0
    min_hops: _Parts = 2
    max_hops: _Parts = 3
    min_branches: _Parts = 2
    max_branches: _Parts = 3
    domains: tuple[str, ...] = ()
    relations: tuple[Annotated[str, OneOf(relation_ids)], ...] = ()
    informative_joins: bool = False
    hardened_share: Share = 0.3
    table_rows: Annotated[int, Bound(least=2, most=100_000)] = 24
    quality_threshold: Share = 0.85
    quality_percentile: Share = 0.0
    attempts: Count = 3
    stop_after: Free[Count] = 50
    merge_similarity: Share = 0.6
    distractors: Mapping[Band, CountOrZero] = field(default_factory=lambda: dict.fromkeys(BANDS, 2))
    high_cut: Share = 0.85
    low_cut: Share = 0.4
    fact_distractors: bool | None = None
    concurrency: Free[Count] = 32
    own_stages: OwnStages = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("languages", "structures"):
            if not any(getattr(self, name).values()):
                raise SettingError(f"{name}: {dict(getattr(self, name))} has no weight above 0; give one at least")
        for least, most in (("min_hops", "max_hops"), ("min_branches", "max_branches"), ("low_cut", "high_cut")):
            if getattr(self, least) > getattr(self, most):
                raise SettingError(
                    f"{least} is {getattr(self, least)}, {most} is {getattr(self, most)}; the first must not be above "
                    "the second"
                )
        named = [
            name for name in ("questions", "documents", "knowledge", "taxonomy", "tools_of") if getattr(self, name)
        ]
        if len(named) > 1:
            raise SettingError(f"{', '.join(named)}: one run has one source of questions; give one of them")

        if self.tools_of and self.stateful_share:
            raise SettingError(
                f"stateful_share is {self.stateful_share}; with tools_of no world is made, so it must be 0"
            )

    def asked_of(self, *, by_rules: bool) -> EnvironmentsConfig:
        """Return the configuration with the defaults that depend on the teacher: one that follows rules, or a model."""
        facts = by_rules if self.fact_distractors is None else self.fact_distractors
        return replace(self, split_by=self.split_by or ("intent" if by_rules else "source"), fact_distractors=facts)

    @property
    def partition(self) -> Partition:
        return Partition(
            self.partition_salt, self.held_out_entities, self.held_out_questions, self.split_by or WORKSPACE.by
        )
