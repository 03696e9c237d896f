"""Pages of the records that lead to the main ones, and of rejected records.

GET  /NAME               servers, chains or tasks of a run.
GET  /NAME/record/ID     one of them.
GET  /rejected           records that a stage rejected; ?text, ?stage and ?reason filter them.
GET  /rejected/ID        one of them: the reason; the conversation and the scores, or the whole record.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from astra_jax.base.http_service import HttpRefusal
from launch.viewer.conversation import question_of, turns_of
from launch.viewer.lists import ListChoice, Pages, RecordList, Row, StoredRecords
from launch.viewer.schemas import parameters_of
from launch.viewer.service import page, short
from launch.viewer.trajectories import failures_of, scores_of
from synthesis.core.datasets import CARD_FILE
from synthesis.core.journal import RejectedRow, read_rejected
from synthesis.core.records import CallError, InjectedFailure, Task, ToolChain, ToolServer, Trajectory, decode
from synthesis.trajectories.runs import AgentRun

Record = TypeVar("Record", Task, ToolChain, ToolServer)
_MAIN = ("trajectories", "train", "held_out")
"""Datasets of a synthesis, of which the first that there is has the first page."""
_LONG = 160
"""Characters of a reason's detail in the list; the record's page has all."""


_NOTHING: Mapping[str, Any] = {
    "heading": "", "language": "", "values": {}, "turns": (), "scores": (), "tools": (), "json": "", "missing": False,
    "parameters_of": parameters_of,
}  # fmt: skip
"""Values of the template for what a record does not have."""


class StoredPages(Generic[Record]):
    """Shows the servers, chains or tasks of a run. Raises as `StoredRecords`."""

    def __init__(self, path: str | os.PathLike[str], kind: type[Record], home: str = "/") -> None:
        self.noun, columns, row = _KINDS[kind]
        self._home = home
        self._records: StoredRecords[Record] = StoredRecords(path, kind, self.noun, row)
        self._list = RecordList(
            self.noun.capitalize(), self.noun, columns, self._records.rows, f"{home.rstrip('/')}/record/{{}}",
            text="text in the record", home=home,
            choices=[ListChoice("server", "all servers")] if "server" in columns else [],
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._records.rows)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that the module lists."""
        base = self._home.rstrip("/")
        return [web.get(self._home, self._list.show), web.get(f"{base}/record/{{id:.+}}", self._show)]

    async def _show(self, request: web.Request) -> web.Response:
        one = self._records.read(request.match_info["id"])
        shown = {**_NOTHING, **_shown(one)}
        return page("stored.html.jinja", title=one.id, **shown, **self._list.around(request, one.id))


class RejectedPages:
    """Shows what the stages of a run rejected, as its journals have it when a page is opened.

    Args:
        workdir: of the run.
        home: address of the list.
    """

    noun = "rejected records"

    def __init__(self, workdir: Path, home: str = "/rejected") -> None:
        self._workdir, self._home = workdir, home

    @property
    def journals(self) -> list[Path]:
        """Return the journals of a synthesis in the workdir."""
        return journals_of(self._workdir)

    def __len__(self) -> int:
        return len(self._rows())

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that the module lists."""
        return [web.get(self._home, self._list_all), web.get("/rejected/{id}", self._show)]

    def _rows(self, wanted: str = "") -> list[RejectedRow]:
        try:
            return [row for path in self.journals for row in read_rejected(path, wanted)]
        except sqlite3.Error as error:
            raise HttpRefusal(503, f"the journal of {self._workdir} cannot be read now ({error}); try again") from None

    def _records(self, rows: Sequence[RejectedRow]) -> RecordList:
        choices = (ListChoice("stage", "all stages"), ListChoice("reason", "all reasons"))
        return RecordList(
            "Rejected records", self.noun, {"record": "question", "stage": "small", "reason": "small", "why": "text"},
            [_row_of(one) for one in rows], "/rejected/{}", text="text in the record's id and the reason",
            choices=choices, home=self._home,
        )  # fmt: skip

    async def _list_all(self, request: web.Request) -> web.Response:
        rows = self._rows()
        counted = Counter((_stage(one.stage), one.reason.replace("_", " ")) for one in rows)
        counts = [(stage, reason, count) for (stage, reason), count in counted.most_common()]
        return await self._records(rows).show(request, counts=counts)

    async def _show(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        found = self._rows(id)
        if not found:
            raise HttpRefusal(404, f"no rejected record has the id {short(id)}; choose one of the list at {self._home}")
        one = found[0]
        facts = {"stage": _stage(one.stage), "reason": one.reason.replace("_", " "), "why": one.detail}
        shown = {**_NOTHING, **_shown_rejected(one)}
        shown["values"] = facts | shown["values"]
        around = self._records(self._rows()).around(request, id)
        return page("stored.html.jinja", title=_name_of(one), **shown, **around)


def find_pages(path: str) -> tuple[str, dict[str, Pages]]:
    """Return the dataset to show, "" if a run has none yet, and the other pages of its run by their addresses."""
    folder = Path(path)
    if "://" in path or not folder.is_dir():
        return path, {}
    data = path
    if not (folder / CARD_FILE).exists():
        if not journals_of(folder):
            return path, {}
        data = next((str(folder / name) for name in _MAIN if (folder / name / CARD_FILE).exists()), "")
    run = folder if data != path else folder.absolute().parent
    if not journals_of(run):
        return data, {}
    more: dict[str, Pages] = {}
    kinds: tuple[tuple[str, Any], ...] = (("tasks", Task), ("chains", ToolChain), ("servers", ToolServer))
    for name, kind in kinds:
        if (run / name / CARD_FILE).exists() and (run / name).absolute() != Path(data).absolute():
            more[f"/{name}"] = StoredPages(run / name, kind, f"/{name}")
    return data, more | {"/rejected": RejectedPages(run)}


def journals_of(workdir: Path) -> list[Path]:
    """Return the journals of a synthesis in a workdir; none where it has none."""
    return sorted([*workdir.glob("journal.sqlite"), *workdir.glob("journals/*.sqlite")])


def _row_of(one: RejectedRow) -> Row:
    why = one.detail if len(one.detail) <= _LONG else f"{one.detail[:_LONG]}…"
    values = {
        "record": _name_of(one), "stage": _stage(one.stage), "reason": one.reason.replace("_", " "), "why": why
    }  # fmt: skip
    return Row(one.id, values, f"{one.key}\n{one.reason}\n{one.detail}".casefold())


def _name_of(one: RejectedRow) -> str:
    """Return the record's id, which stands before its digest in the key."""
    return one.key.rpartition(" ")[0] or one.key


def _stage(name: str) -> str:
    return name.partition("/")[0]


def _shown_rejected(one: RejectedRow) -> dict[str, Any]:
    """Return what the template shows of a rejected record, of whatever kind."""
    kinds: Mapping[str, type[msgspec.Struct]] = {
        kind.__name__: kind for kind in (Trajectory, AgentRun, Task, ToolChain, ToolServer)
    }
    if not one.record:
        return {"missing": True}
    try:
        record: Any = decode(one.record, kinds[one.kind])
    except (KeyError, msgspec.MsgspecError):
        return {"json": msgspec.json.format(one.record, indent=2).decode()}
    return _shown(record)


def _shown(one: Trajectory | AgentRun | Task | ToolChain | ToolServer) -> dict[str, Any]:
    """Return what the template shows of a record."""
    if isinstance(one, Trajectory):
        return {
            "heading": question_of(one.messages), "language": one.language, "tools": one.tools,
            "values": {"server": one.server_id, "reward": "not scored" if one.reward is None else f"{one.reward:.3f}"},
            "turns": turns_of(one.messages, failures_of(one)), "scores": scores_of(one) if one.scores else (),
        }  # fmt: skip
    if isinstance(one, AgentRun):
        task = one.task
        failures = [InjectedFailure(call.call_id, call.injected) for call in one.calls if call.injected]
        errors = [CallError(call.call_id, call.error) for call in one.calls if call.error]
        run = Trajectory(
            task.id, task.id, task.server_id, "", task.language, [], one.messages, len(failures), {}, None, failures,
            errors,
        )  # fmt: skip
        return _shown(run)
    if isinstance(one, ToolServer):
        values = {"title": one.title, "domain": one.domain, "language": one.language, "license": one.license or "none"}
        return {
            "heading": one.title or one.id, "tools": one.tools, "values": values, "json": _json(one.execution),
        }  # fmt: skip
    heading = one.question if isinstance(one, Task) else " → ".join(one.tools)
    values = {"server": one.server_id}
    if isinstance(one, Task):
        values |= {"mode": one.mode, "variation": one.augmentation, "tools": ", ".join(one.tools) or "none"}
        values |= {name.replace("_", " "): score for name, score in msgspec.structs.asdict(one.scores).items()}
    else:
        values |= {name: verdict.reason for name, verdict in one.verdicts.items()}
    return {"heading": heading, "values": values, "json": _json(one)}


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _server_row(one: ToolServer) -> Row:
    names = [tool.name for tool in one.tools]
    kind = type(one.execution).__name__.removesuffix("Execution")
    values = {"title": one.title or one.id, "id": one.id, "language": one.language, "calls": kind, "tools": len(names)}
    return Row(one.id, values, "\n".join([one.id, one.title, one.description, *names]).casefold(), one.language)


def _chain_row(one: ToolChain) -> Row:
    chain = " → ".join(one.tools)
    values = {"tools": chain, "server": one.server_id, "weight": round(one.weight, 4)}
    return Row(one.id, values, f"{one.id}\n{chain}".casefold())


def _task_row(one: Task) -> Row:
    values = {
        "question": one.question or "(no question)", "server": one.server_id, "mode": one.mode.replace("_", " "),
        "variation": one.augmentation, "tools": len(one.tools),
    }  # fmt: skip
    return Row(one.id, values, "\n".join([one.id, one.question, *one.tools]).casefold(), one.language)


_KINDS: Mapping[Any, tuple[str, Mapping[str, str], Callable[[Any], Row]]] = {
    ToolServer: (
        "servers",
        {"title": "question", "id": "code", "language": "small", "calls": "small", "tools": "number"},
        _server_row,
    ),
    ToolChain: ("chains", {"tools": "question", "server": "code", "weight": "number"}, _chain_row),
    Task: (
        "tasks",
        {"question": "question", "server": "code", "mode": "small", "variation": "small", "tools": "number"},
        _task_row,
    ),
}
"""By class: the noun, the columns of the list (see `RecordList`) and the row of a record."""
