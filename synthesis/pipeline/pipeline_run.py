"""One run of a track: its stages, their rejections, and the datasets with their cards."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.versions import code_version
from synthesis.core.datasets import CARD_FILE, read_card, write_dataset
from synthesis.core.mirror import fetched
from synthesis.core.rate_limits import STAGE, Spent, summed
from synthesis.core.records import Provenance
from synthesis.core.stages import Journal, run_stage
from synthesis.core.stored import Records
from synthesis.pipeline.context import Context
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.own_stages import load_own_stages
from synthesis.pipeline.preview import Preview
from synthesis.pipeline.stage_keys import (
    DeclaredSettings,
    StageSpec,
    digest_of,
    earlier_values,
    free_settings,
    growing_settings,
)
from synthesis.pipeline.teacher import description

C = TypeVar("C")
In = TypeVar("In")
Out = TypeVar("Out", bound=msgspec.Struct)


@dataclass
class Summary:
    """Result of a run.

    Attributes:
        counts: number of records by dataset.
        digests: content digest by dataset.
        rejected: stage → reason → count. A stage without rejections is included, without reasons.
        details: stage → reason → one example; `tools_changed` → the kind of change → one example.
        statistics: statistics by dataset, as on its card.
        costs: stage → requests and tokens sent to the teacher's endpoint; empty without one.
        datasets: name → folder; runs with equal results are equal, whatever their folders.
    """

    counts: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, dict[str, int]] = field(default_factory=dict)
    details: dict[str, dict[str, str]] = field(default_factory=dict)
    statistics: dict[str, dict[str, Any]] = field(default_factory=dict)
    costs: dict[str, Spent] = field(default_factory=dict, compare=False)
    datasets: dict[str, Path] = field(default_factory=dict, compare=False)


class PipelineRun(Generic[C]):
    """Runs stages and writes datasets.

    Args:
        context: of every stage.
        config: of the pipeline, a dataclass; resolved on the cards.
        concurrency: records in work at a time.
        stages: all stages of the pipeline, which stages of the user's own may follow.
        files: digests of the files that the configuration names, by their path.
        preview: takes a few records of each stage, and notes what it sees.
        old_prefix: prefix of the stages' names in the journal, for a run that version 0.1 started: its stages were
            named after all settings, and their inputs by the plain key.

    Raises:
        InputError: a stage of the user's own cannot be loaded.
    """

    def __init__(
        self, executor: Executor, context: C, journal: Journal, out_dir: Path, *, config: Any, concurrency: int,
        seed: int, stages: Iterable[StageSpec[Any, Any]] = (), files: Mapping[str, str] = {},
        preview: Preview | None = None, old_prefix: str = "",
    ) -> None:  # fmt: skip
        self.summary = Summary()
        self.licenses: set[str] = set()
        """Licences of the sources, added by their readers. An empty text: a source names none."""
        self._executor, self._context, self._teacher = executor, context, description(executor.teacher)
        self._journal, self._out_dir, self._old_prefix = journal, out_dir, old_prefix
        self._preview = preview
        self._concurrency, self._seed, self._files = concurrency, seed, dict(files)
        self._settings, self._kind = config, type(config)
        self._config, self._defaults = resolved(config), resolved(type(config)())
        self._own = load_own_stages(getattr(config, "own_stages", {}), stages, self._config.keys())
        for own in (one for every in self._own.values() for one in every):
            self._files[own.stage.name] = own.stage.code

    def claim(self, name: str, *, replace: bool, read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict) -> None:
        """See that a dataset which is finished is not replaced by another: call this before anything is written.

        Args:
            name: of the run's last dataset. If it exists, the run is finished.
            replace: the user asks to replace it.
            read: returns the settings of a card under their names of today.

        Raises:
            InputError: the dataset exists with another seed, setting, teacher or content of a file.
        """
        folder = self._out_dir / name
        if replace or not (folder / CARD_FILE).exists():
            return
        card = read_card(folder)
        free, grows = free_settings(self._kind), growing_settings(self._kind)
        # As JSON holds them. A card without a setting is of a version that did not have it.
        earlier = {**self._defaults, **earlier_values(self._kind)}
        both = msgspec.json.encode([{**earlier, **read(card.get("config", {}))}, self._config])
        then, now = msgspec.json.decode(both)
        found = [
            (f"config.{key}", then.get(key), now[key])
            for key in now
            if key not in free and then.get(key) != now[key] and not (key in grows and now[key] > then.get(key, 0))
        ]
        if card.get("seed") != self._seed:
            found.append(("seed", card.get("seed"), self._seed))
        made_by = of_records(card.get("provenance", {}).get("teacher", {"name": card.get("teacher")}))
        teacher = of_records(self._teacher)
        found += [
            (f"teacher's {key}", one, teacher.get(key)) for key, one in made_by.items() if one != teacher.get(key)
        ]
        files = card.get("files", self._files)
        found += [
            (f"content of {path}", files.get(path, "nothing"), self._files.get(path, "nothing"))
            for path in sorted({*files, *self._files})
            if files.get(path) != self._files.get(path)
        ]
        if found:
            what, old, new = found[0]
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise InputError(
                f"{folder} is finished, and was made with another {what}{more}: {old!r:.120}, now {new!r:.120}. Give "
                "another --workdir; or --replace, which replaces the datasets and requests only unrecorded answers"
            )

    async def stage(
        self,
        stage: StageSpec[In, Out],
        function: Callable[[In, C], Awaitable[Sequence[Out]]],
        inputs: Sequence[In],
        *,
        bound: Callable[[In], str] | None = None,
        concurrency: int = 0,
    ) -> Records[Out]:
        """Run a stage and the user's own stages after it, and note what they reject.

        Args:
            bound: returns a digest of what is bound to the function and belongs to an input.
            concurrency: in place of the pipeline's.

        Returns:
            The records, which are read from the journal on demand.
        """
        outputs = await self._run(stage, function, inputs, bound, concurrency)
        for own in self._own.get(stage.name, ()):
            outputs = await self._run(cast("StageSpec[Out, Out]", own.stage), own, outputs, None, concurrency)
        return outputs

    async def _run(
        self,
        stage: StageSpec[In, Out],
        function: Callable[[In, C], Awaitable[Sequence[Out]]],
        inputs: Sequence[In],
        bound: Callable[[In], str] | None,
        concurrency: int,
    ) -> Records[Out]:
        teacher, earlier = of_records(self._teacher), earlier_values(self._kind)
        journaled = f"{stage.name}/{stage.fingerprint(self._config, self._seed, teacher, earlier=earlier)}"

        def with_digest(item: In) -> str:
            return f"{stage.key(item)} {digest_of([item, bound(item) if bound else ''])}"

        key: Callable[[In], str] = with_digest
        if self._old_prefix:
            model = f"/{digest_of(teacher)}" if "model" in teacher else ""
            journaled, key = f"{self._old_prefix}{stage.name}{model}", stage.key
        context: Any = self._context
        if isinstance(context, Context):
            context = dataclasses.replace(context, config=self.declared(stage))
        if self._preview is not None:
            function, inputs = self._preview.stage(stage.name, function, inputs)

        async def work(item: In) -> Sequence[Out]:
            return await function(item, context)

        before = STAGE.set(stage.name)
        try:
            result = await run_stage(
                journaled, work, inputs, key=key, out=stage.out, journal=self._journal,
                concurrency=concurrency or self._executor.records_at_once(self._concurrency),
                description=stage.label or stage.name, stored=True,
                stop_after=self._config.get("stop_after", 0) if stage.stops_run else 0,
            )  # fmt: skip
        finally:
            STAGE.reset(before)
        self.summary.costs = dict(self._executor.costs)
        self.reject(stage.name, result.rejected, result.details)
        assert isinstance(result.outputs, Records), "as asked for"
        return result.outputs

    def declared(self, stage: StageSpec[Any, Any]) -> Any:
        """Return the configuration as a stage may read it."""
        return DeclaredSettings(self._settings, stage, free_settings(self._kind))

    def note_sources(self, lines: Iterable[str]) -> None:
        """Add lines on the sources to a preview; a run keeps them in its datasets."""
        if self._preview is not None:
            self._preview.source_notes += lines

    def reject(self, stage: str, reasons: Counter[str], details: Mapping[str, str] | None = None) -> None:
        """Add the records that a step dropped: reason → count, and one example of each."""
        every = Counter(self.summary.rejected.get(stage, {})) + reasons
        self.summary.rejected[stage] = dict(sorted(every.items()))
        self.summary.details[stage] = {**(details or {}), **self.summary.details.get(stage, {})}

    def write(
        self, name: str, kind: type[Out], records: Sequence[Out], statistics: Mapping[str, Any], **more: Any
    ) -> None:
        """Write a dataset.

        Args:
            more: fields of its card in addition to configuration, seed, teacher, statistics and rejections.
        """
        card = {
            "config": self._config,
            "seed": self._seed,
            "teacher": self._teacher["name"],
            "provenance": {
                "teacher": dict(self._teacher),
                "code": code_version(),
                "licenses": sorted(self.licenses),
            },
            "files": self._files,
            "statistics": statistics,
            "rejected": self.summary.rejected,
            **({"cost": cost_of(self.summary.costs, len(records))} if self.summary.costs else {}),
            **models_on_card(records),
            **more,
        }
        summary = self.summary
        summary.datasets[name] = self._out_dir / name
        summary.digests[name] = write_dataset(summary.datasets[name], kind, records, card=card)
        summary.counts[name], summary.statistics[name] = len(records), dict(statistics)


def of_records(teacher: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a teacher's description that decide its answers: all but its models' addresses."""
    found = {key: value for key, value in teacher.items() if key != "endpoint"}
    if "roles" in found:
        found["roles"] = {role: [of_records(one) for one in models] for role, models in found["roles"].items()}
    return found


def models_on_card(records: Sequence[msgspec.Struct]) -> dict[str, Any]:
    """Count records by role and model, and those whose model judged its own text."""
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    own: Counter[str] = Counter()
    for record in records:
        made_of = getattr(record, "provenance", None)
        if isinstance(made_of, Provenance):
            for role, model in made_of.models.items():
                counted[role][model] += 1
            if made_of.judged_its_own:
                own[made_of.models["judge"]] += 1
    if not counted:
        return {}
    return {
        "models": {role: dict(sorted(counted[role].items())) for role in sorted(counted)},
        "judged_own_text": dict(sorted(own.items())),
    }


def digests_of_files(names: Iterable[str]) -> dict[str, str]:
    """Return a digest of each file's content; for a folder of all its files. Missing files have none."""
    found: dict[str, str] = {}
    for name in names:
        path, digest = fetched(name), hashlib.sha256()
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                digest.update(f"{file.relative_to(path)}\0".encode() + file.read_bytes())
        found[name] = digest.hexdigest()[:16]
    return found


def cost_of(stages: Mapping[str, Spent], records: int) -> dict[str, Any]:
    """Return the endpoint's use for a dataset's card: of the whole run so far, in total and by stage.

    Args:
        stages: costs by stage.
        records: number of records in the dataset.
    """

    def numbers_of(spent: Spent) -> dict[str, Any]:
        each = {"tokens_per_record": round(spent.tokens / records, 1)} if records else {}
        return {**dataclasses.asdict(spent), **each}

    every = summed(stages.values())
    return {**numbers_of(every), "stages": {name: numbers_of(stages[name]) for name in sorted(stages)}}


def resolved(config: Any) -> dict[str, Any]:
    """Return a configuration as JSON values."""
    return msgspec.to_builtins(dataclasses.asdict(config), str_keys=True)
