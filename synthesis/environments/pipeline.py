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

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from astra_jax.base.errors import InputError
from synthesis.core.compat import encode_for_fingerprint, former_setting
from synthesis.core.datasets import read_dataset
from synthesis.core.records import Language, Provenance, ToolEnvironment
from synthesis.core.stages import Journal
from synthesis.core.stored import Concat, MapView, Records
from synthesis.environments.augment import augment, validated
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.context import EnvironmentContext, open_context
from synthesis.environments.decompose import QuestionSeed, best, decompose, distinct, question_seeds
from synthesis.environments.distract import build_indices, distract
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
from synthesis.pipeline.pipeline_run import PipelineRun, Summary, digests_of_files, resolved
from synthesis.pipeline.preview import Preview

In = TypeVar("In", bound=msgspec.Struct)
Out = TypeVar("Out", bound=msgspec.Struct)


_LEFT_OUT_IF_EMPTY = ("license", "stateful_share", "informative_joins")
"""Settings that came later: where they are empty, a run's name is what it was before."""


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
        return await _synthesize(config, executor, context, journal, Path(out_dir), seed, replace, preview)


async def _synthesize(
    config: EnvironmentsConfig,
    executor: Executor,
    context: EnvironmentContext,
    journal: Journal,
    out_dir: Path,
    seed: int,
    replace: bool,
    preview: Preview | None,
) -> Summary:
    of_others = read_dataset(config.tools_of, ToolEnvironment) if config.tools_of else []
    given = {one.id: one for one in of_others if one.world is msgspec.UNSET}
    if config.tools_of and not given:
        raise SourceError(f"tools_of: {config.tools_of} holds no environment without a world; give a dataset that does")
    if config.stateful_share and executor.by_rules and not config.languages.get("en"):
        raise InputError("stateful_share: the offline teacher's worlds are English; give `en` a weight in languages")
    worlds_in: Language | None = "en" if executor.by_rules else None
    seeds = question_seeds(config, seed, list(given.values()), worlds_in)
    # Concurrency changes no output, so it does not name the run; what was read does, wherever it stood.
    named = {"concurrency": 0, "questions": "", "knowledge": "", "taxonomy": "", "tools_of": ""}
    settings = {
        former_setting(key): value
        for key, value in resolved(config).items()
        if (key not in _LEFT_OUT_IF_EMPTY or value) and key != "stop_after"
    }
    what = [{**settings, **named}, seed, executor.embedder.name, seeds, sorted(given.items())]
    identity = encode_for_fingerprint(what)
    run = hashlib.sha256(identity).hexdigest()[:8]

    pipeline = PipelineRun(
        executor, context, journal, out_dir, config=config, concurrency=config.concurrency, seed=seed,
        prefix=f"environments/{run}/",
        files=digests_of_files(filter(None, (config.questions, config.knowledge, config.taxonomy))),
        preview=preview,
    )  # fmt: skip
    pipeline.claim("held_out", may_grow=("count",), changeable_on_resume=("concurrency", "stop_after"), replace=replace)

    async def stage(
        name: str,
        function: Callable[[In, EnvironmentContext], Awaitable[list[Out]]],
        inputs: Sequence[In],
        key: Callable[[In], str],
        out: type[Out],
    ) -> Records[Out]:
        return await pipeline.stage(name, function, inputs, key=key, out=out, label=f"environments: {name}")

    def id_of(record: Draft | ToolsetDraft) -> str:
        return (record if isinstance(record, Draft) else record.draft).decomposition.id

    def seed_id(one: QuestionSeed) -> str:
        return one.id

    async def judged(drafts: Records[Draft]) -> Records[Draft]:
        kept, repeated = distinct(drafts)
        pipeline.reject("distinct", repeated)
        kept, worse = best(await stage("validate", validate_draft, kept, id_of, Draft), config.quality_percentile)
        pipeline.reject("quality", worse)
        return kept

    if given:
        asked = partial(augment, environments=given)
        built = await stage("augment", asked, seeds, seed_id, ToolsetDraft)
        drafts = await judged(MapView(_draft_of, built))
        positions = {id_of(draft): position for position, draft in enumerate(drafts)}
        built = built.filter(lambda one: id_of(one) in positions)
        built = MapView(validated, built, drafts.select(positions[id_of(one)] for one in built))
    else:
        asked_for = [one for one in seeds if one.mode != "world"]
        drafted = await stage("decompose", decompose, asked_for, seed_id, Draft)
        built = await stage("implement", implement, await judged(drafted), id_of, ToolsetDraft)
        built = await stage("merge", merge, built, id_of, ToolsetDraft)
        if len(asked_for) < len(seeds):
            worlds = [one for one in seeds if one.mode == "world"]
            made = await stage("worlds", make_world, worlds, seed_id, ToolsetDraft)
            kept, repeated = distinct(MapView(_draft_of, made))
            pipeline.reject("distinct", repeated)
            ids = {id_of(one) for one in kept}
            every = Concat([built, made.filter(lambda one: id_of(one) in ids)])
            order = [id_of(one) for one in every]
            built = every.select(sorted(range(len(every)), key=order.__getitem__))
    indices = await build_indices(built, config, executor.embedder, seed)
    built = await stage("distract", partial(distract, indices=indices), built, id_of, ToolsetDraft)
    environments = await stage("verify", finish, built, id_of, ToolEnvironment)

    made_of = (one.provenance for one in environments)
    pipeline.licenses |= {one.license for one in made_of if isinstance(one, Provenance)}
    splits: tuple[Split, ...] = ("train", "held_out")
    for split in splits:
        of_split = environments.filter(partial(_is_of, split))
        name = executor.embedder.name
        pipeline.write(split, ToolEnvironment, of_split, statistics_of(of_split), split=split, embedder=name)
    return pipeline.summary


def _draft_of(one: ToolsetDraft) -> Draft:
    return one.draft


def _is_of(split: Split, one: ToolEnvironment) -> bool:
    return one.split == split
