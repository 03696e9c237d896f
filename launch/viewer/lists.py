"""Lists of records: filtered, sorted and in parts; the neighbours of a record; records that are read when shown."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from aiohttp import web

from astra_jax.base.errors import InputError
from astra_jax.base.http_service import HttpRefusal
from launch.viewer.service import page, short
from synthesis.core.datasets import DatasetError, each_record, read_record

T = TypeVar("T")
Record = TypeVar("Record", bound=msgspec.Struct)


class Pages(Protocol):
    """Pages of one kind of records."""

    noun: str
    """Word for the records, in the plural."""

    def __len__(self) -> int: ...

    def routes(self) -> list[web.RouteDef]:
        """Return the list, `/`, and the pages that it leads to. Handlers raise `HttpRefusal`."""


LINKS: web.AppKey[Sequence[tuple[str, str]]] = web.AppKey("links", Sequence)
"""Links to the service's other lists, as (address, text)."""


@dataclass(frozen=True)
class ListPart(Generic[T]):
    """Part of a sequence; `number` and `last` start at 1, `total` counts all parts."""

    shown: Sequence[T]
    number: int
    last: int
    total: int


def part(whole: Sequence[T], request: web.Request, size: int = 50) -> ListPart[T]:
    """Return the part that `?page` asks for, or the last one. Raises `HttpRefusal`: it is not a whole number."""
    asked = request.query.get("page", "1")
    if not asked.isascii() or not asked.isdigit() or len(asked) > 9:
        raise HttpRefusal(400, f"page is {asked[:40]!r}; give a whole number from 1")
    last = max(1, math.ceil(len(whole) / size))
    number = min(max(1, int(asked)), last)
    return ListPart(whole[(number - 1) * size : number * size], number, last, len(whole))


@dataclass(frozen=True)
class Beside:
    """Neighbours of a record in its list: their addresses, its place from 1; empty where the list does not have it."""

    before: str = ""
    after: str = ""
    place: int = 0
    total: int = 0


def beside(ids: Sequence[T], own: T, address: Callable[[T], str]) -> Beside:
    """Return the neighbours of one of several records."""
    if own not in ids:
        return Beside()
    index = ids.index(own)
    before = address(ids[index - 1]) if index else ""
    after = address(ids[index + 1]) if index + 1 < len(ids) else ""
    return Beside(before, after, index + 1, len(ids))


@dataclass(frozen=True)
class Row:
    """Line of a list.

    Attributes:
        id: of the record, unique in its list.
        values: by column; None is unknown, Markup is not escaped again.
        text: searched by the text filter. A line break keeps a search from matching across two texts.
        language: of the first column.
    """

    id: str
    values: Mapping[str, Any]
    text: str = ""
    language: str = ""


@dataclass(frozen=True)
class ListChoice:
    """Filter by one of several values.

    Attributes:
        name: in the address; of a column, where `value` is not given.
        everything: text of the choice that filters nothing.
        value: of a row.
        values: all that can be asked for; by default all that occur, and another one finds nothing.
        text: of a value, which stands for {}.
    """

    name: str
    everything: str
    value: Callable[[Row], str] | None = None
    values: Sequence[str] = ()
    text: str = "{}"

    def of(self, row: Row) -> str:
        """Return a row's value."""
        return str(row.values[self.name]) if self.value is None else self.value(row)


class RecordList:
    """A list of records with its filters and order.

    Args:
        title: its heading.
        noun: what the rows are, in the plural.
        columns: name → class of the cells. The first leads to the record; `text` cannot be sorted by. A column that
            is empty in all rows is left out.
        link: address of a record, with {} for the id.
        text: placeholder of the text filter.
        least: column whose least value can be asked for; "": there is none.
        home: address of the list.
    """

    def __init__(
        self,
        title: str,
        noun: str,
        columns: Mapping[str, str],
        rows: Sequence[Row],
        link: str,
        *,
        text: str,
        choices: Sequence[ListChoice],
        least: str = "",
        home: str = "/",
    ) -> None:
        self.home = home
        self.title, self.noun, self.rows, self.text, self.least = title, noun, rows, text, least
        self.columns = {
            name: kind for name, kind in columns.items() if not rows or any(row.values[name] != "" for row in rows)
        }
        self.sorts = [name for name, kind in self.columns.items() if kind != "text"]
        occurring = {one.name: sorted({one.of(row) for row in rows}, key=_numbers_by_size) for one in choices}
        self.choices = [(one, one.values or occurring[one.name]) for one in choices]
        self._link = link

    async def show(self, request: web.Request, **more: Any) -> web.Response:
        """Answer with the list.

        Args:
            more: values for the template.
        """
        links = request.app.get(LINKS, ())
        return page("records.html.jinja", links=links, **self.view(request), **more)

    def view(self, request: web.Request) -> dict[str, Any]:
        """Return what the macro `listing` needs. Raises `HttpRefusal`."""
        wanted = self._wanted(request)

        def at(number: int, **more: str) -> str:
            return self.home + _query({**wanted, **more, "page": str(number)})

        return {
            "records": self,
            "part": part(self._chosen(wanted), request),
            "wanted": wanted,
            "at": at,
            "record_at": lambda id: self._record_at(id, wanted),
        }

    def around(self, request: web.Request, id: str) -> dict[str, Any]:
        """Return what a record's page needs: the way back, its neighbours, and the addresses of other records."""
        wanted = self._wanted(request)

        def record_at(other: str) -> str:
            return self._record_at(other, wanted)

        ids = [row.id for row in self._chosen(wanted)]
        return {
            "home": self.home + _query(wanted),
            "records": self,
            "beside": beside(ids, id, record_at),
            "record_at": record_at,
        }

    def _record_at(self, id: str, wanted: Mapping[str, str]) -> str:
        return self._link.format(quote(id)) + _query(wanted)

    def _wanted(self, request: web.Request) -> dict[str, str]:
        """Return the filters of a request. Raises `HttpRefusal`: one cannot be understood."""
        names = ["text", *(one.name for one, _ in self.choices), self.least, "sort"]
        wanted = {name: request.query[name] for name in names if name and request.query.get(name)}
        sort = wanted.get("sort", "")
        if sort and sort.removeprefix("-") not in self.sorts:
            raise HttpRefusal(400, f"sort is {sort[:40]!r}; give one of {', '.join(self.sorts)}, or with - before it")
        for choice, values in self.choices:
            if choice.values and wanted.get(choice.name, values[0]) not in values:
                raise HttpRefusal(
                    400, f"{choice.name} is {short(wanted[choice.name])}; give one of {', '.join(values)}"
                )
        if self.least in wanted and not _is_finite(wanted[self.least]):
            raise HttpRefusal(
                400, f"{self.least} is {wanted[self.least][:40]!r}; give the least one, a number from 0 to 1"
            )
        return wanted

    def _chosen(self, wanted: Mapping[str, str]) -> list[Row]:
        text = wanted.get("text", "").strip().casefold()
        found = [
            row
            for row in self.rows
            if text in row.text and all(wanted.get(one.name) in (None, one.of(row)) for one, _ in self.choices)
        ]
        if least := wanted.get(self.least):
            values = ((row, row.values[self.least]) for row in found)
            found = [row for row, value in values if value is not None and value >= float(least)]
        sort = wanted.get("sort", "")
        name = sort.removeprefix("-")
        if not name:
            return found
        known = [row for row in found if row.values[name] is not None]
        unknown = [row for row in found if row.values[name] is None]
        return sorted(known, key=lambda row: _folded(row.values[name]), reverse=sort != name) + unknown


class StoredRecords(Generic[Record]):
    """Records of a dataset that need not fit into memory: only the rows of their list do.

    Args:
        row: the line of a record.

    Raises:
        DatasetError: the dataset cannot be read, or is corrupt.
        InputError: two records have one id.
    """

    def __init__(
        self, path: str | os.PathLike[str], kind: type[Record], noun: str, row: Callable[[Record], Row]
    ) -> None:
        self._path, self._kind, self._noun, self._row = path, kind, noun, row
        self.rows = [row(one) for one in each_record(path, kind)]
        self._index: dict[str, int] = {}
        for index, one in enumerate(self.rows):
            if self._index.setdefault(one.id, index) != index:
                raise InputError(f"two {noun} have the id {one.id!r}; write the dataset again")

    def read(self, id: str) -> Record:
        """Read a record. Raises `HttpRefusal`: there is none of this id, or the dataset was replaced."""
        if id not in self._index:
            raise HttpRefusal(404, f"none of the {self._noun} has the id {short(id)}; choose one of the list")
        try:
            record = read_record(self._path, self._kind, self._index[id])
            if self._row(record).id != id:
                raise DatasetError("its records have changed")
        except DatasetError as error:
            raise HttpRefusal(503, f"the dataset has changed since this started ({error}); start it again") from None
        return record


def _query(wanted: Mapping[str, str]) -> str:
    return f"?{urlencode(wanted)}" if wanted else ""


def _folded(value: Any) -> Any:
    return value.casefold() if isinstance(value, str) else value


def _numbers_by_size(text: str) -> tuple[int, str]:
    return (len(text) if text.isdecimal() else 0), text


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
