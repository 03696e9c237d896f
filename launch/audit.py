"""Check stored data independently: re-derive from the records alone what their makers claim.

    python -m launch.audit WORKDIR                                  # all datasets below a folder
    python -m launch.audit chats.jsonl --held_out=environments/held_out
    python -m launch.audit DATASET --fail_on=repeated_call=0.02,near_duplicate=1

DATASET is a folder of trajectories or environments, a workdir with both, or a file of conversations in a form that
launch.sft reads. Tool code that is stored with environments or servers runs again in the sandbox. Prints the three
worst findings, and writes a page and a JSON file with all of them. docs/trajectories.md lists the rules.

The exit code is 0, or 4 if more records have a fault than the rule's limit allows.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from astra_jax.base.errors import InputError
from astra_jax.base.terminal import say
from launch.flags import cli, sandboxes, shared

if TYPE_CHECKING:  # --help does not wait for them
    from synthesis.audit.report import AuditedData, AuditReport
    from synthesis.core.records import ToolServer

_KINDS = "a folder of trajectories or environments, a workdir, or a .jsonl or .parquet file of conversations"
_DATA = flags.DEFINE_string("data", None, f"Dataset: {_KINDS}.")
_HELD_OUT = shared.held_out(f"{_KINDS}. Its calls, questions and entities must not occur in --data.")
_FAIL_ON = flags.DEFINE_list(
    "fail_on",
    [],
    "Largest allowed share of records with a fault, from 0 to 1: RULE=SHARE, separated by commas; by default the "
    "limits in docs/trajectories.md.",
)
_PAGE = flags.DEFINE_string("page", "audit.html", "HTML page to write, self-contained.")
_FIGURES = flags.DEFINE_string("figures", "audit.json", "JSON file to write all numbers to.")
_DEEPEST = 4
"""Levels of folders below a workdir in which datasets are looked for."""
_FAILED = 4


def main() -> int:
    if not _DATA.value:
        raise cli.UsageError("no dataset is given; write python -m launch.audit DATASET, or --data=DATASET")
    limits = _limits()
    report = asyncio.run(_audit(limits))

    from astra_jax.base.files import write_text
    from launch.viewer.audit_page import write_audit

    write_audit(Path(_PAGE.value), report)
    write_text(Path(_FIGURES.value), json.dumps(report.as_json(), ensure_ascii=False, indent=1))
    for line in _summary(report):
        say(line)
    return _FAILED if report.failing else 0


def _limits() -> dict[str, float]:
    """Return the limits that --fail_on sets. Raises `UsageError`."""
    from synthesis.audit.findings import RULES

    limits: dict[str, float] = {}
    for given in _FAIL_ON.value:
        name, equals, share = given.partition("=")
        if name not in RULES:
            raise cli.UsageError(f"--fail_on={given}: there is no rule {name!r}; use {', '.join(RULES)}")
        try:
            limits[name] = float(share)
        except ValueError:
            limits[name] = -1
        if not equals or not 0 <= limits[name] <= 1:
            raise cli.UsageError(f"--fail_on={given}: give a share from 0 to 1, for example {name}=0.02")
    return limits


async def _audit(limits: dict[str, float]) -> AuditReport:
    from synthesis.audit.replay import Runner
    from synthesis.audit.report import ReplayUnavailable, audit
    from synthesis.core.records import ToolEnvironment

    sources, servers = _found(_DATA, held_out=None)
    if _HELD_OUT.value:
        others, more = _found(_HELD_OUT, held_out=True)
        sources, servers = sources + others, servers | more
    async with AsyncExitStack() as stack:
        runner = None
        if servers or any(one.kind is ToolEnvironment for one in sources):
            runner = Runner(await stack.enter_async_context(sandboxes.sandbox_from_flags()))
        try:
            return await audit(sources, servers, runner, limits)
        except ReplayUnavailable as error:
            raise cli.UsageError(
                f"the sandbox could not run a stored call ({error}); run the same command again"
            ) from None


def _found(
    flag: flags.FlagHolder[str | None], *, held_out: bool | None
) -> tuple[list[AuditedData], dict[str, ToolServer]]:
    """Return the datasets that a flag names, and the servers beside them by id. Raises `UsageError`, `DatasetError`."""
    from synthesis.audit.report import AuditedData
    from synthesis.core.datasets import CARD_FILE, read_card, read_dataset
    from synthesis.core.records import ToolEnvironment, ToolServer, Trajectory

    text = flag.value or ""
    path = Path(text)
    if path.is_file():
        return [_converted(path, text, flag.name, held_out=held_out)], {}
    if not path.is_dir():
        raise cli.UsageError(f"--{flag.name}={text}: there is no such folder or file; give {_KINDS}")
    below = [path, *(card.parent for depth in range(1, _DEEPEST + 1) for card in path.glob("*/" * depth + CARD_FILE))]
    folders = [one for one in dict.fromkeys(below) if (one / CARD_FILE).is_file()]
    kinds: dict[str, type[Trajectory] | type[ToolEnvironment]] = {
        "Trajectory": Trajectory,
        "ToolEnvironment": ToolEnvironment,
    }
    sources: list[AuditedData] = []
    servers: dict[str, ToolServer] = {}
    for folder in sorted(folders):
        kind = read_card(folder)["kind"]
        if kind in kinds:
            name = str(folder.relative_to(path)) if folder != path else folder.name
            sources.append(
                AuditedData(name if held_out is None else f"{flag.name}: {name}", folder, kinds[kind], held_out)
            )
    beside = {*folders, *(one.parent / "servers" for one in folders)}
    for folder in sorted(one for one in beside if (one / CARD_FILE).is_file()):
        if read_card(folder)["kind"] == "ToolServer":
            servers |= {server.id: server for server in read_dataset(folder, ToolServer)}
    if not sources:
        raise cli.UsageError(
            f"--{flag.name}={text}: no dataset of trajectories or environments is there; give {_KINDS}"
        )
    return sources, servers


def _converted(path: Path, text: str, flag: str, *, held_out: bool | None) -> AuditedData:
    """Return the dataset of a file of conversations. Raises `UsageError`."""
    from astra_jax.base.files import user_cache
    from synthesis.astra_format.conversations import CACHE_FOLDER, DEFECTS, kept_dataset
    from synthesis.audit.report import AuditedData
    from synthesis.core.datasets import read_card
    from synthesis.core.records import Trajectory

    try:
        folder = kept_dataset([path], user_cache(CACHE_FOLDER), accept=DEFECTS, skip_bad=True, source=text)
    except InputError as error:
        raise cli.UsageError(f"--{flag}: {error}") from None
    name = path.name if held_out is None else f"{flag}: {path.name}"
    return AuditedData(name, folder, Trajectory, held_out, dict(read_card(folder)["skipped"]))


def _summary(report: AuditReport) -> list[str]:
    """Return the lines for the terminal: datasets, the three worst rules with an example, and the verdict."""
    lines = [f"{one['name']}: {one['records']} {one['kind']} records, {one['split']}" for one in report.datasets]
    for rule in [one for one in report.rules if one.found][:3]:
        over = f", allowed {rule.limit:.1%}" if rule.fails else ""
        lines.append(f"{rule.name}: {rule.found} of {rule.checked} records ({rule.share:.1%}{over}). {rule.about}")
        example = report.examples(rule.name, 1)[0]
        lines.append(f"  {example.dataset} {example.record}: {example.detail}")
    unchecked = [one for one in report.rules if one.left_out]
    for rule in unchecked:
        reasons = ", ".join(f"{count} {reason}" for reason, count in rule.left_out.items())
        lines.append(f"not checked by {rule.name}: {reasons}")
    failing = report.failing
    verdict = f"{len(failing)} rules fail: {', '.join(one.name for one in failing)}" if failing else "all rules pass"
    return [*lines, f"{verdict}; see {_PAGE.value} and {_FIGURES.value}"]


if __name__ == "__main__":
    cli.run(main, argument=_DATA)
