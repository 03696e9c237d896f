"""The RL track from configuration to datasets: decompose → validate → implement → merge → distract → verify.

Worlds with state (`stateful_share`) are made by a stage of their own, and join the others before `distract`.

    async with SandboxPool(SandboxConfig()) as pool:
        with Journal(workdir / "journal.sqlite") as journal:
            config = EnvironmentsConfig(count=600)
            executor = Executor(OfflineTeacher(), pool)
            await synthesize(config, executor=executor, journal=journal, out_dir=workdir, seed=0)

writes the datasets `train` and `held_out` of `ToolEnvironment` records.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.progress import log_above_progress
from synthesis.core.datasets import read_dataset
from synthesis.core.records import DocumentPassage, Language, Provenance, ToolEnvironment
from synthesis.core.stages import Journal
from synthesis.core.stored import Concat, MapView, Records
from synthesis.environments import compat
from synthesis.environments.augment import augment, validated
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.context import EnvironmentContext, open_context
from synthesis.environments.decompose import QuestionSeed, best, decompose, distinct, question_seeds
from synthesis.environments.distract import build_indices, distract
from synthesis.environments.documents import read_documents
from synthesis.environments.drafts import Draft, ToolsetDraft
from synthesis.environments.implement import implement
from synthesis.environments.merge import merge
from synthesis.environments.sources import SourceError
from synthesis.environments.statistics import statistics_of
from synthesis.environments.validate import validate_draft
from synthesis.environments.verify import finish
from synthesis.environments.worlds import make_world
from synthesis.pipeline.executors import Executor, check_spoken
from synthesis.pipeline.partition import Split
from synthesis.pipeline.pipeline_run import PipelineRun, Summary, digests_of_files
from synthesis.pipeline.preview import Preview
from synthesis.pipeline.stage_keys import StageSpec, digest_of


def _seed_id(seed: QuestionSeed) -> str:
    return seed.id


def _draft_id(draft: Draft) -> str:
    return draft.decomposition.id


def _built_id(built: ToolsetDraft) -> str:
    return built.draft.decomposition.id


def _environment_id(environment: ToolEnvironment) -> str:
    return environment.id


_PARTITION = ("partition_salt", "held_out_entities", "held_out_questions", "split_by")
_QUESTIONS = (
    "min_hops", "max_hops", "min_branches", "max_branches", "relations", "informative_joins", "attempts", *_PARTITION,
)  # fmt: skip
"""Settings of every request for a question."""

DECOMPOSE = StageSpec("decompose", Draft, _seed_id, _QUESTIONS, _draft_id, "environments: decompose")
VALIDATE = StageSpec(
    "validate", Draft, _draft_id, ("quality_threshold", "attempts"), _draft_id, "environments: validate"
)
IMPLEMENT = StageSpec(
    "implement",
    ToolsetDraft,
    _draft_id,
    ("table_rows", "hardened_share", "attempts"),
    _built_id,
    "environments: implement",
)
MERGE = StageSpec(
    "merge", ToolsetDraft, _built_id, ("table_rows", "merge_similarity", "attempts"), _built_id, "environments: merge"
)
AUGMENT = StageSpec("augment", ToolsetDraft, _seed_id, _QUESTIONS, _built_id, "environments: augment")
WORLDS = StageSpec("worlds", ToolsetDraft, _seed_id, _QUESTIONS, _built_id, "environments: worlds")
DISTRACT = StageSpec(
    "distract", ToolsetDraft, _built_id,
    ("distractors", "high_cut", "low_cut", "fact_distractors", "table_rows", *_PARTITION), _built_id,
    "environments: distract",
)  # fmt: skip
VERIFY = StageSpec("verify", ToolEnvironment, _built_id, ("license",), _environment_id, "environments: verify")
STAGES = (DECOMPOSE, VALIDATE, AUGMENT, IMPLEMENT, MERGE, WORLDS, DISTRACT, VERIFY)


async def synthesize(
    config: EnvironmentsConfig,
    *,
    executor: Executor,
    journal: Journal,
    out_dir: Path | str,
    seed: int,
    replace: bool = False,
    preview: Preview | None = None,
) -> Summary:
    """Generate environments and write them as `out_dir/train` and `out_dir/held_out`.

    The same configuration, seed and (repeatable) teacher give the same bytes. A killed run resumes from the journal.

    Args:
        executor: teacher, sandbox and embedder of the stages; the result does not depend on where the sandbox runs.
        replace: replace existing datasets of another seed, setting or teacher in `out_dir`.
        preview: see `PipelineRun`.
        journal: journal of this run. Another configuration or seed in the same journal starts from scratch, under other
            stage names.

    Raises:
        InputError: the teacher does not support a language, or `out_dir` has datasets of another seed, setting or
            teacher and `replace` is False.
        SourceError: a file that the configuration names cannot be used, or `tools_of` has no environment.
        DatasetError: `tools_of` is not a dataset of environments.
    """
    config = config.asked_of(by_rules=executor.by_rules)
    check_spoken(config.languages, by_rules=executor.by_rules)
    async with open_context(executor, config=config, seed=seed) as context:
        return await _Run(config, executor, context, journal, Path(out_dir), seed, preview).run(replace)


class _Run:
    """One run; the methods are its stages, in order."""

    def __init__(
        self,
        config: EnvironmentsConfig,
        executor: Executor,
        context: EnvironmentContext,
        journal: Journal,
        out_dir: Path,
        seed: int,
        preview: Preview | None,
    ) -> None:
        if config.stateful_share and executor.by_rules and not config.languages.get("en"):
            raise InputError(
                "stateful_share: the offline teacher's worlds are English; give `en` a weight in languages"
            )
        self.config, self.embedder, self.seed = config, executor.embedder, seed
        self.given = _given(config)
        for name in ("tools_of", "documents", "knowledge", "taxonomy"):
            if getattr(config, name) and executor.by_rules:
                raise InputError(f"{name}: the offline teacher asks over its own tables; give --teacher_url")
        self.documents = read_documents(config.documents)
        worlds_in: Language | None = "en" if executor.by_rules else None
        self.seeds = question_seeds(config, seed, list(self.given.values()), worlds_in, self.documents.passages)
        named = (config.questions, config.knowledge, config.taxonomy, *self.documents.files)
        self.pipeline = PipelineRun(
            executor, context, journal, out_dir, config=config, concurrency=config.concurrency, seed=seed,
            stages=STAGES, files=digests_of_files(filter(None, named)), preview=preview,
            old_prefix=compat.old_prefix(journal, config, seed, self.embedder.name, self.seeds, self.given),
        )  # fmt: skip

    async def run(self, replace: bool) -> Summary:
        pipeline = self.pipeline
        pipeline.claim("held_out", replace=replace)
        if self.documents.rejected:
            pipeline.reject("documents", self.documents.rejected, self.documents.details)
        self.say_sources()
        built = await (self.augmented() if self.given else self.made())
        environments = await pipeline.stage(VERIFY, finish, await self.distracted(built))
        places = {one.id: one.document for one in self.seeds if one.document}
        environments = MapView(partial(_placed, places), environments) if places else environments
        made_of = (one.provenance for one in environments)
        pipeline.licenses |= {one.license for one in made_of if isinstance(one, Provenance)}
        splits: tuple[Split, ...] = ("train", "held_out")
        for split in splits:
            of_split = environments.filter(partial(_is_of, split))
            name = self.embedder.name
            pipeline.write(split, ToolEnvironment, of_split, statistics_of(of_split), split=split, embedder=name)
        return pipeline.summary

    def say_sources(self) -> None:
        """Print what the questions are about, before the teacher is asked."""
        config, documents = self.config, self.documents
        for reason, count in documents.rejected.items():
            log_above_progress(f"documents: {count:,} left out as {reason}, such as {documents.details[reason]}")
        if documents.files:
            of = f"{len(documents.passages):,} passages of {len(documents.files):,} documents"
            asked = len({one.document for one in self.seeds if one.document})
            log_above_progress(f"own sources: {of}; {config.count:,} questions about {asked:,} of the passages")
        else:
            names = ("questions", "knowledge", "taxonomy", "tools_of")
            named = [f"{name} {getattr(config, name)}" for name in names if getattr(config, name)]
            log_above_progress(f"own sources: {', '.join(named) or 'none; the teacher chooses what to ask'}")
        facts = "the packaged fact tools, as irrelevant tools" if config.fact_distractors else "none"
        log_above_progress(f"built-in sources: {facts}")

    async def augmented(self) -> Records[ToolsetDraft]:
        """Return new questions over the tools of given environments."""
        ask = partial(augment, environments=self.given)
        built = await self.pipeline.stage(
            AUGMENT, ask, self.seeds, bound=lambda one: digest_of(self.given[one.environment])
        )
        drafts = await self.judged(MapView(_draft_of, built))
        places = {_draft_id(draft): place for place, draft in enumerate(drafts)}
        built = built.filter(lambda one: _built_id(one) in places)
        return MapView(validated, built, drafts.select(places[_built_id(one)] for one in built))

    async def made(self) -> Records[ToolsetDraft]:
        """Return questions with tools that are written for them, and worlds."""
        pipeline = self.pipeline
        questions = [one for one in self.seeds if one.mode != "world"]
        drafts = await self.judged(await pipeline.stage(DECOMPOSE, decompose, questions))
        built = await pipeline.stage(IMPLEMENT, implement, drafts)
        built = await pipeline.stage(MERGE, merge, built, bound=lambda _: self.embedder.name)
        if len(questions) == len(self.seeds):
            return built
        worlds = await pipeline.stage(WORLDS, make_world, [one for one in self.seeds if one.mode == "world"])
        kept, repeated = distinct(MapView(_draft_of, worlds))
        pipeline.reject("distinct", repeated)
        ids = {_draft_id(one) for one in kept}
        every = Concat([built, worlds.filter(lambda one: _built_id(one) in ids)])
        order = [_built_id(one) for one in every]
        return every.select(sorted(range(len(every)), key=order.__getitem__))

    async def judged(self, drafts: Records[Draft]) -> Records[Draft]:
        """Return the drafts that differ from each other and are good enough."""
        kept, repeated = distinct(drafts)
        self.pipeline.reject("distinct", repeated)
        kept, worse = best(await self.pipeline.stage(VALIDATE, validate_draft, kept), self.config.quality_percentile)
        self.pipeline.reject("quality", worse)
        return kept

    async def distracted(self, built: Records[ToolsetDraft]) -> Records[ToolsetDraft]:
        """Return the environments with irrelevant tools."""
        indices = await build_indices(built, self.pipeline.declared(DISTRACT), self.embedder, self.seed)

        def bound(one: ToolsetDraft) -> str:
            index = indices[one.draft.decomposition.language, one.draft.split]
            return f"{self.embedder.name} {index.digest}"

        return await self.pipeline.stage(DISTRACT, partial(distract, indices=indices), built, bound=bound)


def _given(config: EnvironmentsConfig) -> Mapping[str, ToolEnvironment]:
    """Return the environments of `tools_of`, by id. Raises `SourceError`: it has none without a world."""
    of_others = read_dataset(config.tools_of, ToolEnvironment) if config.tools_of else []
    given = {one.id: one for one in of_others if one.world is msgspec.UNSET}
    if config.tools_of and not given:
        raise SourceError(f"tools_of: {config.tools_of} holds no environment without a world; give a dataset that does")
    return given


def _placed(places: Mapping[str, DocumentPassage], one: ToolEnvironment) -> ToolEnvironment:
    """Return the environment with the place of its text in its provenance."""
    if one.id not in places or not isinstance(one.provenance, Provenance):
        return one
    return msgspec.structs.replace(one, provenance=msgspec.structs.replace(one.provenance, document=places[one.id]))


def _draft_of(one: ToolsetDraft) -> Draft:
    return one.draft


def _is_of(split: Split, one: ToolEnvironment) -> bool:
    return one.split == split
