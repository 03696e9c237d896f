"""The configuration of environment synthesis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

from astra_jax.base.settings import Amount, Bound, Count, CountOrZero, OneOf, SettingError, Settings, Share
from synthesis.core.records import Language, Structure
from synthesis.pipeline.demo import relation_ids
from synthesis.pipeline.own_stages import OwnStages
from synthesis.pipeline.partition import Partition, SplitBy
from synthesis.pipeline.stage_keys import Free, Grows

Band = Literal["high", "medium", "low"]
BANDS: tuple[Band, ...] = get_args(Band)
_Parts = Annotated[int, Bound(least=2, most=64)]


@dataclass(frozen=True)
class EnvironmentsConfig(Settings):
    """Settings of environment synthesis: number and kinds.

    Attributes:
        count: questions asked for; rejected ones are not replaced.
        questions: file of questions to answer and decompose (question-conditional); see `sources`.
        knowledge: file of domains and texts to ask about (unconditional); see `sources`.
        taxonomy: file of a taxonomy whose leaves to ask about; see `sources`.
        license: of that file, for cards and records; what is joined from the packaged tables has theirs.
        tools_of: dataset of environments for whose tools to find new questions (augmentation).
        mask_examples: how often a leaf of the taxonomy is shown without an example.
        held_out_fraction: share of `count` that is drawn for the held-out split.
        held_out_entities: share of all entities that only held-out questions may name. Larger than `held_out_fraction`,
            because every entity of a held-out chain has to be one of them.
        held_out_questions: share of all intents (or signatures) that only held-out questions may have.
        split_by: `intent`: no tool of a held-out question is needed by, or offered with, a training question.
            `signature`: only the way in which look-ups are put together is held out. `source`: the share
            `held_out_fraction` of the rows of `questions`, `knowledge` or `taxonomy`, with all that is made of them;
            nothing where there are none. None: `intent` where the teacher asks by rules, on one side from the start;
            `source` where a model asks, which cannot know the sides of the others.
        partition_salt: names the partition into the two splits. It does not depend on the seed, so that what one run
            holds out no other run trains on.
        languages: weights by ISO 639-1 code; the default is the paper's share (71.2 % English). Others than `en` and
            `zh` want a teacher behind an endpoint.
        structures: weights; the default is the paper's shares.
        stateful_share: share of `count` that asks for another state of a small database, a world of its own, and not
            for an answer. What the teacher knows of them decides their structure; the offline teacher's are English.
        min_hops: shortest longest path of the multi-hop structures.
        max_hops: longest path.
        min_branches: fewest parallel branches of the parallel structures.
        max_branches: most parallel branches.
        domains: subject domains to draw from; empty: the teacher's choice.
        relations: restricts the offline teacher to these relations (a curriculum); empty: all.
        informative_joins: of the offline teacher: join no relations whose values are nearly all the same (nine tenths),
            and ask nothing of which a hop can be skipped.
        hardened_share: share of tools whose document is made harder by at least one optional parameter. The paper
            hardens all; optional parameters cost prompt tokens, which tiny models have few of.
        table_rows: how many subjects the offline teacher's tool knows.
        quality_threshold: least mean of the four quality indicators.
        quality_percentile: of the run's decompositions by that mean, this share (0 to 1) is below the cut and dropped;
            those that are as good as the one at the cut stay. The original's is 0.9. 0 leaves the threshold alone.
        attempts: how often the teacher is asked, with the problem as feedback, before a record is rejected.
        stop_after: records of a stage after which the run stops if less than one in a hundred is accepted.
        merge_similarity: least cosine similarity of the documents of tools that become one.
        distractors: most irrelevant tools of each similarity band.
        high_cut: normalised similarity above which an irrelevant tool is `high` (paper: 0.85).
        low_cut: normalised similarity below which it is `low` (paper: 0.4).
        fact_distractors: whether all fact relations are candidates too, beside the tools of all environments.
        concurrency: records in work at a time.
        own_stages: by a stage's name, functions of your own that take its records before the next stage
            (docs/extending.md).
    """

    count: Grows[CountOrZero] = 600
    questions: str = ""
    knowledge: str = ""
    taxonomy: str = ""
    license: str = ""
    tools_of: str = ""
    mask_examples: Share = 0.5
    held_out_fraction: Share = 0.2
    held_out_entities: Share = 0.35
    held_out_questions: Share = 0.3
    split_by: SplitBy | None = None
    partition_salt: str = "astra"
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
    fact_distractors: bool = True
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
        named = [name for name in ("questions", "knowledge", "taxonomy", "tools_of") if getattr(self, name)]
        if len(named) > 1:
            raise SettingError(f"{', '.join(named)}: one run has one source of questions; give one of them")

        if self.tools_of and self.stateful_share:
            raise SettingError(
                f"stateful_share is {self.stateful_share}; with tools_of no world is made, so it must be 0"
            )

    def asked_of(self, *, by_rules: bool) -> EnvironmentsConfig:
        """Return the configuration with `split_by` as it is for a teacher that follows rules, or for a model."""
        return replace(self, split_by=self.split_by or ("intent" if by_rules else "source"))

    @property
    def partition(self) -> Partition:
        return Partition(
            self.partition_salt, self.held_out_entities, self.held_out_questions, self.split_by or "intent"
        )
