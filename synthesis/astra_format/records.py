"""The released ASTRA-RL record (`ASTRA-RL-1k` on Hugging Face): its four columns, and what is wrong with one.

    prompt        [{"role": "user", "content": …}]
    tool_schema   JSON string: OpenAI tools, needed and irrelevant ones mixed
    tool_dict     JSON string: tool name → Python source
    sub_qa_dict   tool name → its gold answers; needed tools only

The record has neither the reference calls nor the sub-questions; `astra_rl` finds them again.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.files import check_held, read_unpacked, unpacked_lines
from astra_jax.base.typed import decode_json, value_or_json
from synthesis.core.matching import contains
from synthesis.core.quantities import quantities
from synthesis.core.records import Answer, ToolSpec
from synthesis.core.stages import Rejected
from synthesis.core.tool_schemas import UncheckableSchema, check_schema, check_size
from synthesis.environments.implement import check_source

COLUMNS = ("prompt", "tool_schema", "tool_dict", "sub_qa_dict")
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_ROWS_AT_ONCE = 256
"""Rows of a .parquet file that are read at a time; a row of the paper's length is some 100 kB."""

T = TypeVar("T")

Scalar = str | int | float | bool
Value = Scalar | list[str]


class AstraRecord(msgspec.Struct, frozen=True):
    """A row with its JSON strings opened. `row` counts from 0; `schemas` are as they were given, unchecked."""

    row: int
    question: str
    schemas: list[Any]
    code: dict[str, str]
    answers: dict[str, list[Value]]


class Defect(msgspec.Struct, frozen=True):
    """Something wrong with a record that shows without running anything; `detail` is one line for a person."""

    name: str
    detail: str


@dataclass(frozen=True)
class Imported(Generic[T]):
    """Result of importing a file of records.

    Attributes:
        records: the kept rows, in their order.
        rejected: number of dropped rows, by reason, such as a defect's name; `bad_record`: the row is no record.
        details: one example for each reason.
        defects: number of rows with each named defect, kept rows included.
        rows: number of all rows of the file.
    """

    records: list[T]
    rejected: Counter[str]
    details: dict[str, str]
    defects: Counter[str]
    rows: int

    def account(self) -> dict[str, Any]:
        """For a dataset's card: how many rows there were, and what was wrong with which."""
        return {
            "rows": self.rows,
            "defects": dict(sorted(self.defects.items())),
            "rejected": dict(sorted(self.rejected.items())),
            "examples": self.details,
        }


class _Message(msgspec.Struct):
    role: Literal["user"]
    content: str


class _Row(msgspec.Struct):
    prompt: list[_Message]
    tool_schema: str | list[Any]
    tool_dict: str | dict[str, Any]
    sub_qa_dict: str | dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------------
# Files


def read_records(path: Path | str) -> list[AstraRecord]:
    """Return all records of a .jsonl, .jsonl.gz, .json (a list) or .parquet file.

    Raises:
        ValueError: the file cannot be read, or a row is broken; the message names the file, the row and the column.
    """
    try:
        return [parse(data, row, path) for row, data in enumerate(read_rows(path))]
    except Rejected as rejection:
        raise InputError(rejection.detail) from None


def read_rows(path: Path | str) -> list[bytes]:
    """Return all rows of `each_row`."""
    return list(each_row(path))


def each_row(path: Path | str) -> Iterator[bytes]:
    """Yield the rows of a file as JSON, unchecked, for a reader that counts broken rows; one at a time, but for .json.

    Raises:
        InputError: there is no such file, its name has none of the suffixes, or it is no such file inside.
    """
    path = Path(path)
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"{path}: the suffix says what a file is; give one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise InputError(f"{path}: there is no such file; give the released records as one file")
    try:
        if path.suffix == ".parquet":
            with parquet(path).ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                    yield from (msgspec.json.encode(_without_filling(row)) for row in batch.to_pylist())
        elif path.suffix == ".json":
            yield from (bytes(row) for row in decode_json(read_unpacked(path), list[msgspec.Raw]))
        else:
            yield from (line.rstrip(b"\n") for line in unpacked_lines(path) if line.strip())
    except (OSError, EOFError, ValueError, zlib.error) as error:
        # msgspec's and pyarrow's errors are ValueErrors; so is our own about pyarrow, which says enough.
        if str(path) in str(error):
            raise
        raise InputError(f"{path} cannot be read ({error}); fetch or write it again") from None


def _without_filling(value: Any) -> Any:
    """Return a value of a columnar file without null fields: its objects have the fields of all rows.

    Arguments stay: their tool's schema decides which of their nulls were filled in (`null_arguments`).
    """
    if isinstance(value, dict):
        return {
            name: one if name == "arguments" else _without_filling(one)
            for name, one in value.items()
            if one is not None
        }
    return [_without_filling(one) for one in value] if isinstance(value, list) else value


def write_rows(path: Path | str, rows: Iterable[dict[str, Any]], *, lists_of_json: Sequence[str] = ()) -> int:
    """Write rows as a .jsonl or .parquet file, whole or not at all; returns how many.

    Args:
        lists_of_json: columns whose lists hold objects of different fields. In .parquet their items are of Arrow's
            type `arrow.json`, which `datasets` opens from 4.7 on; structs would have the fields of all rows, as nulls.

    Raises:
        ValueError: another suffix, or .parquet without pyarrow.
        RemovedError: the folder that this process holds was removed or replaced.
    """
    path = Path(path)
    check_held(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise InputError(f"{path}: records are written as .jsonl or .parquet; give a name that ends in one of them")
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    try:
        if path.suffix == ".parquet":
            module = parquet(path)
            import pyarrow

            every = [
                {**row, **{name: [json.dumps(one, ensure_ascii=False) for one in row[name]] for name in lists_of_json}}
                for row in rows
            ]
            count = len(every)
            table = pyarrow.Table.from_pylist(every)
            for name in set(lists_of_json) & set(table.column_names):
                place, texts = table.column_names.index(name), table.column(name)
                table = table.set_column(place, name, texts.cast(pyarrow.list_(pyarrow.json_())))
            module.write_table(table, partial)
        else:
            with open(partial, "w", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    count += 1
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def parquet(path: Path) -> Any:
    """`pyarrow.parquet`. Raises `ValueError` where pyarrow is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: .parquet needs pyarrow; pip install pyarrow, or give a .jsonl file") from None
    return pyarrow.parquet


def parse(data: bytes, row: int, path: Path | str) -> AstraRecord:
    """One row, checked.

    Raises:
        Rejected: `bad_record`; the detail names the file, the row and the column.
    """

    def broken(column: str, problem: object) -> Rejected:
        where = f", column {column}" if column else ""
        return Rejected("bad_record", f"{path}: row {row}{where}: {problem}; correct the row or delete it")

    try:
        given = decode_json(data, _Row)
    except msgspec.ValidationError as error:
        column = next((one for one in COLUMNS if f"$.{one}" in str(error) or f"`{one}`" in str(error)), "")
        raise broken(column, error) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise broken("", f"not JSON ({error})") from None
    if len(given.prompt) != 1 or not given.prompt[0].content.strip():
        raise broken("prompt", f"{len(given.prompt)} messages; expected one of the user that is not empty")

    def opened(column: str, kind: Any) -> Any:
        value = getattr(given, column)
        try:
            return value_or_json(value, kind)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise broken(column, error) from None

    answers: dict[str, list[Value] | Scalar | None] = opened("sub_qa_dict", dict[str, list[Value] | Scalar | None])
    return AstraRecord(
        row=row,
        question=given.prompt[0].content,
        schemas=opened("tool_schema", list[Any]),
        code=opened("tool_dict", dict[str, str]),
        # Columnar files fill the tools that a row does not have with null.
        answers={tool: _listed(one) for tool, one in answers.items() if one is not None},
    )


def _listed(given: list[Value] | Scalar) -> list[Value]:
    return [*given] if isinstance(given, list) else [given]


# ---------------------------------------------------------------------------------------------------------------------
# Answers and documents

# With a sign in its exponent, as programs print it: 1e20 may be anything.
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d*)(?:\.(\d+))?([eE][-+]\d+)?(?![\d,.])")
_LONGEST_NUMBER = 300
_CURRENCIES = {"$": "usd", "€": "eur", "£": "gbp", "¥": "", "￥": ""}


def answer_text(answer: Answer) -> str:
    """Return an answer for the record: a bare value, which the released reward searches in a tool's output."""
    value = answer.value
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def typed_answer(value: Value) -> Answer:
    """Return a gold answer with its type. A written number is a number, with its unit and its written precision."""
    if not isinstance(value, str):
        return Answer(value)
    text = value.strip()
    if text.casefold() in ("true", "false"):
        return Answer(text.casefold() == "true")
    if text.startswith("["):
        try:
            return Answer(decode_json(text, list[str]))
        except msgspec.MsgspecError:
            return Answer(value)
    unit = _CURRENCIES.get(text[:1])
    number = _NUMBER.match(text if unit is None else text[1:].lstrip())
    if number is None:
        return Answer(value)
    if number.end() > _LONGEST_NUMBER:
        return Answer(value)
    digits = number[0].replace(",", "")
    written: int | float = float(digits) if number[1] or number[2] else int(digits)
    rest, times = number.string[number.end() :].strip(), 1.0
    if rest:
        found = quantities(text)
        # One word after it, all of which is a unit: "450 km", not "450 km long" and not "5 May".
        if unit is not None or len(found) != 1 or not found[0].unit or not re.fullmatch(r"[^\W\d]+[23²³]?|[%°]", rest):
            return Answer(value)
        unit = found[0].unit
        times = found[0].value / written if written else 1.0  # 10,000 of 5万元
        written = found[0].value
    tolerance = 0.5 * 10.0 ** -len(number[1]) * times if number[1] and not number[2] else 0.0
    return Answer(written, unit=unit or "", tolerance=tolerance)


def spec_of(schema: Any) -> ToolSpec:
    """Return the tool of a `tool_schema` entry; a bare function without its `type` is taken too.

    Raises:
        Rejected: `bad_schema`.
    """
    function = schema.get("function", schema) if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise Rejected("bad_schema", f"no tool with a name: {json.dumps(schema, ensure_ascii=False)[:100]}")

    def bad(problem: str) -> Rejected:
        return Rejected("bad_schema", f"{name}: {problem}")

    if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name):
        raise bad("a name has 1 to 64 letters, digits, _ and -")
    parameters = function.get("parameters") or {}
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise bad(f"the description is not a text but {type(description).__name__}")
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise bad("parameters are no schema of type object")
    # Readers of environments rely on these three being there.
    parameters = {**parameters, "type": "object"}
    properties, required = parameters.setdefault("properties", {}), parameters.setdefault("required", [])
    if not isinstance(properties, dict) or not all(isinstance(one, dict) for one in properties.values()):
        raise bad("properties are not an object of schemas")
    if not isinstance(required, list) or not all(isinstance(one, str) and one in properties for one in required):
        raise bad(f"required {required} names no properties, which are {list(properties)}")
    try:
        check_size(parameters)
    except UncheckableSchema as error:
        raise bad(str(error)) from None
    return ToolSpec(name, description, parameters)


# ---------------------------------------------------------------------------------------------------------------------
# Defects


def defects(record: AstraRecord) -> list[Defect]:
    """Return the defects of a record, found without running it; each name at most once.

    `missing_tool`: a schema or a gold tool without code, or code without schema. `colliding_names`: two schemas share a
    name, so one has no code. The others are `bad_schema`, `bad_code`, `no_answers` and `empty_answer`.
    """
    found: dict[str, list[str]] = {}
    for name, detail in _defects(record):
        found.setdefault(name, []).append(detail)
    return [Defect(name, "; ".join(details)) for name, details in found.items()]


def _defects(record: AstraRecord) -> Iterator[tuple[str, str]]:
    names: list[str] = []
    for schema in record.schemas:
        try:
            spec = spec_of(schema)
        except Rejected as rejection:
            yield rejection.reason, rejection.detail
            continue
        names.append(spec.name)
        try:
            check_schema(spec.parameters)
        except UncheckableSchema as error:
            yield "bad_schema", f"{spec.name}: {error}"
    for name, count in Counter(names).items():
        if count > 1:
            yield "colliding_names", f"{count} schemas share the name {name}; a call cannot say which it means"
    for name in dict.fromkeys([*names, *record.answers]):
        if name not in record.code:
            yield "missing_tool", f"{name} has no code in tool_dict"
    for name in record.answers:
        if name not in names and name in record.code:
            yield "missing_tool", f"{name} has answers but no schema"
    for name, code in record.code.items():
        if name not in names and name not in record.answers:
            yield "missing_tool", f"{name} has code but no schema"
        try:
            check_source(code, name)
        except Rejected as rejection:
            yield "bad_code", f"{name}: {rejection.detail}"
    if not record.answers:
        yield "no_answers", "sub_qa_dict names no tool; nothing could be scored"
    for name, values in record.answers.items():
        typed = [typed_answer(value) for value in values]
        if not typed or not all(contains(answer.value, answer) for answer in typed):
            yield "empty_answer", f"{name} has an answer that holds nothing to look for: {values}"
