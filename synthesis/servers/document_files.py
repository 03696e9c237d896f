"""Files of tool documents: JSON, JSON Lines and YAML 1.2, in UTF-8, UTF-16 or UTF-32, also with `.gz`.

JSON may have comments and a comma behind the last value (JSONC), and a `.json` file may have a value a line. Plain
scalars of YAML are read by the core schema of YAML 1.2, as OpenAPI wants it: `no`, `on`, `10:00`, `0755`, `1_000` and
dates are texts. A name that is there twice in an object is an error in both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from astra_jax.base.files import read_unpacked, unpacked, unpacked_lines
from astra_jax.base.nesting import check_nesting
from synthesis.core.schemas import Unmappable

LINES, WHOLE = (".jsonl", ".ndjson"), (".json", ".jsonc", ".yaml", ".yml")
_YAML = (".yaml", ".yml")


def suffix(path: Path) -> str:
    """Return the suffix that says what a file holds, "" of other files."""
    name = path.name.lower().removesuffix(".gz")
    return next((one for one in (*LINES, *WHOLE) if name.endswith(one)), "")


def read_values(path: Path) -> Iterator[tuple[int | None, Any]]:
    """Yield the values of a file: the number of the line, None for a whole file; and the value, or why there is none.

    Raises:
        OSError, EOFError, zlib.error, InputError: the file cannot be read, also half-way.
    """
    if suffix(path) in LINES:
        yield from _lines(_encoded_lines(path))
        return
    data = read_unpacked(path)
    value = _parsed(data, _from_yaml if suffix(path) in _YAML else _from_json)
    if isinstance(value, Unmappable) and suffix(path) not in _YAML:
        lines = data.splitlines(keepends=True)
        if len(lines) > 1 and not isinstance(_parsed(lines[0], _from_json), Unmappable):
            yield from _lines(lines)
            return
    yield None, value


def _encoded_lines(path: Path) -> Iterator[bytes]:
    with unpacked(path) as file:
        encoding = json.detect_encoding(file.read(4))
    if encoding.startswith("utf-8"):
        yield from unpacked_lines(path)
    else:  # a line's end is several bytes
        yield from (line.encode() for line in read_unpacked(path).decode(encoding, "surrogateescape").split("\n"))


def _lines(lines: Iterator[bytes] | list[bytes]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _parsed(line, _from_json)


def _parsed(data: bytes, read: Callable[[str], Any]) -> Any:
    try:
        text = data.decode(json.detect_encoding(data)).removeprefix("\ufeff")
        return check_nesting(read(text))
    except UnicodeDecodeError as error:
        return Unmappable(
            "not_json",
            f"byte {error.start} is not {error.encoding}; convert the file to UTF-8, such "
            "as with `iconv -f GBK -t UTF-8`",
        )
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return Unmappable("not_json", f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------------------------------------------------------------
# JSON

_STRING = r'"(?:[^"\\]|\\.)*"?'
_COMMENTS = re.compile(rf"{_STRING}|//[^\n]*|/\*(?:[^*]|\*(?!/))*(?:\*/)?", re.DOTALL)
_LAST_COMMAS = re.compile(rf"{_STRING}|,(?=\s*[\]}}])", re.DOTALL)


def _from_json(text: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError:
        plain = _LAST_COMMAS.sub(_blank, _COMMENTS.sub(_blank, text))
        if plain == text:
            raise
        value = json.loads(plain, object_pairs_hook=_unique)
    if re.search(r"\\u[dD][89a-fA-F]", text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text has half of a surrogate pair, which is not a character; remove it") from None
    return value


def _blank(found: re.Match[str]) -> str:
    """Strings as they are; what else was found as spaces, so that places stay the same."""
    return found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r:.80} is there twice in one object; remove one")
    return named


# ---------------------------------------------------------------------------------------------------------------------
# YAML

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML was built with it: without, a large API's document takes a minute."""


class _Integer(int):
    """A number of a YAML document, with the text that it is `written` as."""

    written: str


class _Float(float):
    """The same of another number."""

    written: str


class _Loader(_SafeLoader):
    """YAML 1.2's core schema. Names are texts, as in JSON."""

    def flatten_mapping(self, node: Any) -> None:
        """Resolve `<<`; before it, each mapping is checked once for names that are there twice."""
        if not getattr(node, "checked", False):
            node.checked = True
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen if isinstance(key, yaml.ScalarNode) else True:
                    problem = f"the name {key.value!r:.80} is there twice, or is not a text; remove or correct it"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        super().flatten_mapping(node)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
        """Return the mapping's values by the names as they are written: `on`, `404`."""
        self.flatten_mapping(node)
        if any(key.value == "type" and value.value == "string" for key, value in node.value):
            for value in (one for key, one in node.value if key.value in ("enum", "const", "default", "examples")):
                for one in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if one.tag == "tag:yaml.org,2002:bool":  # as it is written: `True`
                        one.tag = "tag:yaml.org,2002:str"
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_yaml_int(self, node: Any) -> int:
        """Return the number, with its text where another number's would be the same."""
        text = self.construct_scalar(node)
        value = int(text, 16 if text.startswith("0x") else 8 if text.startswith("0o") else 10)
        if str(value) == text:
            return value
        number = _Integer(value)
        number.written = text
        return number

    def construct_yaml_float(self, node: Any) -> float:
        """Return the number, with its text where another number's would be the same."""
        text = self.construct_scalar(node)
        value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        number = _Float(value)
        number.written = text
        return number


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


def _from_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)
