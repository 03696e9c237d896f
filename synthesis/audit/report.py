"""Audit of datasets: run all rules over stored records, and report what they find."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from astra_jax.base.files import Folder
from synthesis.audit import conversations, environments
from synthesis.audit import text_claims as texts
from synthesis.audit.agent_phrases import FAILURES
from synthesis.audit.findings import RULES, AuditFinding, AuditLedger
from synthesis.audit.replay import ReplayUnavailable, Runner
from synthesis.audit.sets import LEAK_RULES, OWN_RULES, Digest, digest_of, duplicates, leaks
from synthesis.audit.shape import Shape, ShapeRow
from synthesis.core.datasets import each_record
from synthesis.core.records import (
    CodeExecution,
    GroupExecution,
    ToolEnvironment,
    ToolServer,
    Trajectory,
    World,
)

_AT_ONCE: Final = 256
"""Records whose calls run again at the same time."""
_NO_CODE: Final = "no stored code for the server"
_NO_PHRASES: Final = "no phrases for the language"


@dataclass(frozen=True)
class AuditedData:
    """A dataset to audit.

    Attributes:
        name: for people, unique in the audit.
        kind: `Trajectory` or `ToolEnvironment`.
        held_out: evaluation data; None: the records' `split` says so, and trajectories are training data.
        unread: reason → rows of the file that SFT does not read.
    """

    name: str
    path: Folder
    kind: type[Trajectory] | type[ToolEnvironment]
    held_out: bool | None = None
    unread: Mapping[str, int] | None = None


@dataclass(frozen=True)
class RuleResult:
    """Result of one rule.

    Attributes:
        checked: records that it checked.
        found: records with a fault.
        limit: largest allowed share of `found` in `checked`.
        left_out: reason → records that it could not check.
    """

    name: str
    about: str
    checked: int
    found: int
    limit: float
    left_out: dict[str, int]

    @property
    def share(self) -> float:
        """Share of the checked records with a fault, 0 to 1."""
        return self.found / self.checked if self.checked else 0.0

    @property
    def fails(self) -> bool:
        """True if the share exceeds the limit."""
        return self.share > self.limit


@dataclass(frozen=True)
class AuditReport:
    """Result of an audit.

    Attributes:
        datasets: name, kind, records and split of each dataset.
        rules: results, the worst first.
        findings: all faults, one per record and rule.
        shape: dataset → measures.
    """

    datasets: list[dict[str, Any]]
    rules: list[RuleResult]
    findings: list[AuditFinding]
    shape: dict[str, list[ShapeRow]]

    @property
    def failing(self) -> list[RuleResult]:
        """Rules whose limit is exceeded."""
        return [one for one in self.rules if one.fails]

    def examples(self, rule: str, most: int = 20) -> list[AuditFinding]:
        """Return the first findings of a rule."""
        return [one for one in self.findings if one.rule == rule][:most]

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON value."""
        rules = [{**asdict(one), "share": one.share, "fails": one.fails} for one in self.rules]
        shape = {name: [asdict(row) for row in rows] for name, rows in self.shape.items()}
        findings = [asdict(one) for one in self.findings]
        return {"format": 1, "datasets": self.datasets, "rules": rules, "shape": shape, "findings": findings}


async def audit(
    sources: Sequence[AuditedData],
    servers: Mapping[str, ToolServer],
    runner: Runner | None,
    limits: Mapping[str, float],
) -> AuditReport:
    """Audit datasets.

    Args:
        servers: by id, whose code repeats the calls of trajectories.
        runner: runs stored code; None: nothing runs.
        limits: rule → largest share, in place of those of `RULES`.

    Raises:
        DatasetError: a dataset cannot be read.
        ReplayUnavailable: the sandbox could not run a call.
    """
    ledger = AuditLedger()
    digests: list[Digest] = []
    shapes: dict[str, Shape] = {}
    for source in sources:
        shape = shapes[source.name] = Shape()
        for batch in _batches(source):
            for record in batch:
                _check(record, source, ledger)
                shape.add(record)
                digests.append(digest_of(record, source.name, held_out=_is_held_out(record, source)))
            if runner is not None:
                await asyncio.gather(*(_replay(record, source, servers, runner, ledger) for record in batch))
        unread = sum((source.unread or {}).values())
        if source.unread is not None:
            ledger.checked["unreadable_row"] = ledger.checked.get("unreadable_row", 0) + shape.records + unread
            for reason, count in source.unread.items():
                ledger.findings += [AuditFinding("unreadable_row", source.name, "", reason)] * count
    repeated = duplicates(digests)
    ledger.findings += repeated.findings
    for rule in OWN_RULES:
        ledger.checked[rule] = len(digests)
    held = sum(one.held_out for one in digests)
    for rule in LEAK_RULES if 0 < held < len(digests) else ():
        ledger.checked[rule] = held
    ledger.findings += leaks(digests)
    results = [
        RuleResult(name, rule.about, ledger.checked.get(name, 0), sum(one.rule == name for one in ledger.findings),
                   limits.get(name, rule.limit), ledger.left_out.get(name, {}))
        for name, rule in RULES.items()
    ]  # fmt: skip
    results.sort(key=lambda one: (not one.fails, -one.share, -one.found))
    shape_rows = {
        source.name: shapes[source.name].rows(
            repeated.similar.get(source.name, 0), environments=source.kind is ToolEnvironment
        )
        for source in sources
    }
    return AuditReport([_described(one, shapes[one.name], digests) for one in sources], results,
                       sorted(ledger.findings, key=lambda one: list(RULES).index(one.rule)), shape_rows)  # fmt: skip


def _batches(source: AuditedData) -> Iterator[list[Trajectory | ToolEnvironment]]:
    batch: list[Trajectory | ToolEnvironment] = []
    for record in each_record(source.path, source.kind):
        batch.append(record)
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _is_held_out(record: Trajectory | ToolEnvironment, source: AuditedData) -> bool:
    if source.held_out is not None:
        return source.held_out
    return isinstance(record, ToolEnvironment) and record.split == "held_out"


def _described(source: AuditedData, shape: Shape, digests: Sequence[Digest]) -> dict[str, Any]:
    held = sum(one.held_out for one in digests if one.dataset == source.name)
    split = "held out" if held == shape.records else "training" if not held else f"{held} held out"
    return {
        "name": source.name, "kind": source.kind.__name__, "records": shape.records, "split": split,
        "domains": dict(shape.counts.get("domain", {})), "languages": dict(shape.counts.get("language", {})),
    }  # fmt: skip


def _check(record: Trajectory | ToolEnvironment, source: AuditedData, ledger: AuditLedger) -> None:
    if isinstance(record, ToolEnvironment):
        ledger.check(source.name, record.id, environments.RULES, lambda: environments.findings(record))
        without = sum(not step.needs_tool for step in record.sub_questions)
        if without:
            ledger.leave_out("answer_not_in_result", "a step without a tool", without)
        named = {"train": "train", "held_out": "held_out"}.get(str(source.path).rstrip("/").rpartition("/")[2])
        if named is not None:
            wrong = [("wrong_split", f"the record says {record.split}, the folder {named}")]
            ledger.check(source.name, record.id, ["wrong_split"], lambda: iter(wrong if record.split != named else []))
        return
    ledger.check(source.name, record.id, conversations.RULES, lambda: conversations.findings(record))
    if record.language not in FAILURES:
        for rule in ("success_after_failure", "refusal_after_success"):
            ledger.checked[rule] -= 1
            ledger.leave_out(rule, _NO_PHRASES)


async def _replay(
    record: Trajectory | ToolEnvironment,
    source: AuditedData,
    servers: Mapping[str, ToolServer],
    runner: Runner,
    ledger: AuditLedger,
) -> None:
    """Run a record's calls again. Raises `ReplayUnavailable`."""
    if isinstance(record, ToolEnvironment):
        found = await environments.replay(record, runner)
        rules = environments.REPLAYED_WORLD if isinstance(record.world, World) else environments.REPLAYED
        ledger.check(source.name, record.id, rules, lambda: iter(found))
        return
    found, checked = [], False
    for call in conversations.calls_of(record):
        code, function = _code_of(record.server_id, call.name, servers)
        if call.failed or call.result is None:
            continue
        if code is None:
            ledger.leave_out("call_not_reproduced", _NO_CODE)
            continue
        checked = True
        result = await runner.call(code, function, call.arguments)
        stored = texts.parsed(call.result)
        if not result.ok:
            found.append(("call_not_reproduced", f"{call.key[0]}{call.key[1]:.80} fails: {result.error:.160}"))
        elif not environments.same(result.value, stored) and str(result.value) != call.result:
            found.append(
                ("call_not_reproduced",
                 f"{call.key[0]}{call.key[1]:.80} gives {result.value!s:.80}, not {call.result:.80}")
            )  # fmt: skip
    if checked:
        ledger.check(source.name, record.id, ["call_not_reproduced"], lambda: iter(found))


def _code_of(server: str, tool: str, servers: Mapping[str, ToolServer]) -> tuple[str | None, str]:
    """Return the code that answered a call, if it is stored, and its function."""
    found = servers.get(server)
    if found is not None and isinstance(found.execution, GroupExecution):
        origin = found.origin(tool)
        found, tool = servers.get(origin.server_id), origin.tool
    if found is None or not isinstance(found.execution, CodeExecution):
        return None, tool
    return found.execution.code, tool


__all__ = ["AuditReport", "ReplayUnavailable", "RuleResult", "AuditedData", "audit"]
