"""Values that an unknown call may have been made with: what the search for reference calls tries.

They come from the tool's document, the literals of its own source, the question, and what other tools return. The most
likely come first: what both the question and the tool's source name is rarely anything but an argument.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astra_jax.base.nesting import check_nesting
from synthesis.core.dates import dates_in, whole_date
from synthesis.core.matching import fold
from synthesis.core.normal_text import normalized
from synthesis.core.quantities import numerals, quantities
from synthesis.core.records import CodeTool

_CJK = r"\u3400-\u4dbf\u4e00-\u9fff"
_LONGEST = 200
"""Characters of a string that may be an argument; longer constants are messages."""
_LARGEST = 2**53
"""Numbers beyond it are not the same in every JSON reader."""
_OBJECTS = 32
"""Maximum number of objects composed for a parameter that takes one."""

# ---------------------------------------------------------------------------------------------------------------------
# Texts

_QUOTED = re.compile(
    r"\"([^\"\n]+)\"|“([^”\n]+)”|‘([^’\n]+)’|「([^」\n]+)」|《([^》\n]+)》|`([^`\n]+)`|(?<!\w)'([^'\n]+)'(?!\w)"
)
_TOKEN = re.compile(rf"[#@+$.]?[^\W{_CJK}](?:[^\W{_CJK}]|[#@+/'’.&:_-](?=[^\W{_CJK}]))*")
_SPECIAL = re.compile(r"[A-Z0-9#@/_.]")
_JOINS = frozenset({"of", "the", "de", "la", "and", "in", "for", "von", "van", "&"})
_SIGNS = frozenset("-/_@#&+.")
"""Characters that join two words into one identifier."""
# A number is read from its first digit on and given back to nothing, so that no long one is read again and again.
_N = r"(?<!\d)(?>\d+(?:\.\d+)?)"
_PERCENT = re.compile(rf"({_N})\s*+[%％]")
_TERM = re.compile(rf"(?>(?:(?<!\()\(+)?){_N}\)*+(?>(?:\s*+[-+*/×÷^]\s*+\(*+{_N}\)*+)+)")
_LISTED = re.compile(rf"-?{_N}(?>(?:\s*+(?>(?:,|、|;|and|和|与)+)\s*+(?>(?:and\s+)?)-?{_N})+)")
_CHINESE_RUN = re.compile(rf"[{_CJK}][{_CJK}·]*")
_CHINESE_BREAK = re.compile(
    "查询|请问|请|告诉|需要|多少|什么|哪里|哪个|哪些|如何|怎么|以及|之间|[的是在和与及了吗呢我你他她它从到有为将把被对于]"
)


def values_in(text: str) -> list[Any]:
    """Strings and numbers that a text names, without repeats: quoted phrases, dates, names, codes, numbers.

    An ISO date is added for every date; a fraction for every percentage; a list for numbers in a row.
    """
    text = normalized("NFKC", text)
    found: list[Any] = [next(group for group in one.groups() if group) for one in _QUOTED.finditer(text)]
    for written, day in dates_in(text):
        found += [written, day.isoformat()]
    found += _names(text)
    found += [one[0].strip() for one in _TERM.finditer(text)]
    for run in _CHINESE_RUN.findall(text):
        found += [part for part in _CHINESE_BREAK.split(run) if len(part) > 1]
        found.append(run)
    found += [quantity.value for quantity in quantities(text)]
    for one in _LISTED.finditer(text):
        found.append([quantity.value for quantity in quantities(re.sub("[,，、;]|and|和|与", " ; ", one[0]))])
    found += numerals(text)
    found += [float(one[1]) / 100 for one in _PERCENT.finditer(text)]
    found.append(text.strip())
    return _distinct(found)


def _names(text: str) -> Iterator[str]:
    """Runs of words with a capital, a digit or a sign in them: whole, without the first word, and word by word."""
    run: list[str] = []
    end = 0
    for one in [*_TOKEN.finditer(text), None]:
        word = re.sub(r"['’]s$", "", one[0]) if one else ""
        joined = one is not None and not text[end : one.start()].strip()
        special = bool(_SPECIAL.search(word))
        if run and not (joined and (special or word in _JOINS)):
            while run[-1] in _JOINS:
                run.pop()
            yield " ".join(run)
            if len(run) > 1:
                yield " ".join(run[1:])
                yield from run
            run = []
        if one is not None and (special or run):
            run.append(word)
            end = one.end()


def names_value(text: str, value: Any, *, identifiers: bool = False) -> bool:
    """Return whether a text names a string or a number; Latin words and numbers count only as a whole.

    Args:
        identifiers: True: words joined by a sign are one word; America/Nuuk does not name Nuuk then.
    """
    if isinstance(value, bool) or value is None:
        return False
    if isinstance(value, int | float):
        return value in _numbers_of(text) or str(value) in _numbers_of(text)
    if not isinstance(value, str) or not fold(value):
        return False
    return bool(_spelled(text, value, identifiers=identifiers))


@functools.lru_cache(maxsize=64)
def _numbers_of(text: str) -> frozenset[int | float | str]:
    """Return the values of a text's numbers, and how they are written. It is asked for every constant of a source."""
    return frozenset([*(quantity.value for quantity in quantities(text)), *numerals(text)])


def _spelled(text: str, value: str, *, identifiers: bool = False) -> str:
    """Return a phrase as the text writes it, whatever its case and spaces; "" where the text does not have it."""
    text, words = normalized("NFKC", text), normalized("NFKC", value).split()
    if not words or any(word.casefold() not in text.casefold() for word in words):
        return ""  # no pattern is compiled for most
    for one in re.finditer(r"\s+".join(map(re.escape, words)), text, re.IGNORECASE):
        before, after = text[max(0, one.start() - 2) : one.start()], text[one.end() : one.end() + 2]
        if _glued(before[-1:], one[0][0]) or _glued(one[0][-1], after[:1]):
            continue
        joined = _glued(before[:1], one[0][0]) and before[1:] in _SIGNS
        joined = joined or (_glued(one[0][-1], after[1:]) and after[:1] in _SIGNS)
        if not (identifiers and joined):
            return one[0]
    return ""


def _glued(left: str, right: str) -> bool:
    """Return whether two characters are inside one word; Chinese words touch their neighbours."""
    return all(re.fullmatch(rf"[^\W{_CJK}]", one) for one in (left, right))


def leaves(value: Any, *, sentences: bool = False) -> Iterator[Any]:
    """Yield the strings and numbers of a JSON value; what a string holds as JSON too.

    Args:
        sentences: whether what a longer string names is given besides the string.
    """
    if isinstance(value, dict):
        for one in value.values():
            yield from leaves(one, sentences=sentences)
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one, sentences=sentences)
    elif isinstance(value, str):
        try:
            opened = check_nesting(json.loads(value)) if value.lstrip().startswith(("{", "[")) else None
        except (ValueError, RecursionError):  # the latter: of what is nested too deep
            opened = None
        if isinstance(opened, dict | list):
            yield from leaves(opened, sentences=sentences)
        else:
            yield value
            if sentences and len(value.split()) > 3:
                yield from values_in(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


# ---------------------------------------------------------------------------------------------------------------------
# Source


def literals(code: str) -> tuple[list[Any], list[Any]]:
    """Return the constants of a module that may be arguments: keys of dictionaries, and all others.

    Documentation, parts of formatted strings and what an error says are none. A string that holds JSON is opened.

    Raises:
        SyntaxError: the code is not Python.
    """
    keys: list[Any] = []
    others: list[Any] = []

    def put(value: Any, into: list[Any]) -> None:
        if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
            try:
                opened = check_nesting(json.loads(value))
            except (ValueError, RecursionError):
                return
            keys.extend(_keys(opened))
            others.extend(leaves(opened))
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            into.append(value)

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr | ast.Raise) or (isinstance(node, ast.Expr) and _is_text(node.value)):
            return
        if isinstance(node, ast.Dict):
            for key in node.keys:
                # A key that is a pair holds the values of two parameters.
                parts = key.elts if isinstance(key, ast.Tuple) else [key]
                for part in parts:
                    if isinstance(part, ast.Constant):
                        put(part.value, keys)
            for value in node.values:
                visit(value)
            return
        if isinstance(node, ast.Constant):
            put(node.value, others)
        for child in ast.iter_child_nodes(node):
            visit(child)

    with contextlib.suppress(RecursionError, MemoryError):  # what is nested deeper than Python's parser goes has none
        visit(ast.parse(code))
    return _distinct(keys), _distinct(others)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from _keys(one)
    elif isinstance(value, list):
        for one in value:
            yield from _keys(one)


# ---------------------------------------------------------------------------------------------------------------------
# Parameters


@dataclass(frozen=True)
class Sources:
    """Possible sources of the values of one tool's arguments.

    Attributes:
        question: its text.
        named: values that the question names, from `values_in`.
        known: answers and outputs of other calls.
        keys: keys of the tool's tables.
        others: its other constants.
    """

    question: str
    named: Sequence[Any]
    known: Sequence[Any]
    keys: Sequence[Any]
    others: Sequence[Any]

    @classmethod
    def of(cls, tool: CodeTool, question: str, known: Iterable[Any]) -> Sources:
        """Return the sources of a tool whose code is Python."""
        keys, others = literals(tool.code)
        return cls(question, values_in(question), _distinct(known), keys, others)

    def ranked(self, closed: Sequence[Any]) -> list[Any]:
        """Return all values, the likeliest first.

        Args:
            closed: what the parameter's document names: its enum, its default, its examples.
        """
        own = [*closed, *self.keys, *self.others]
        own_folded = {_folded(one) for one in own}
        in_question = sorted((one for one in own if names_value(self.question, one)), key=lambda one: -len(str(one)))
        known_folded = {_folded(one) for one in self.known}
        tiers = [
            # As the question writes it, before the spelling of a table that the tool may fold its arguments for.
            [_spelled(self.question, one) if isinstance(one, str) else one for one in in_question],
            [one for one in self.named if _folded(one) in own_folded],
            in_question,
            [one for one in self.known if _folded(one) in own_folded],
            [one for one in own if _folded(one) in known_folded],
            self.named,
            self.known,
            own,
        ]
        return _distinct(one for tier in tiers for one in tier)


def candidates(name: str, schema: Mapping[str, Any], sources: Sources) -> list[Any]:
    """Return the values to try for one parameter, the likeliest first, all of its type."""
    if isinstance(closed := schema.get("enum"), list) and closed:
        named = [one for one in closed if names_value(sources.question, one)]
        return _distinct([*named, *closed])
    examples = schema.get("examples")
    document = [
        *(examples if isinstance(examples, list) else []),
        *(schema[key] for key in ("default", "example") if key in schema),
    ]
    match _type(schema):
        case "boolean":
            return [True, False]
        case "integer" | "number" as wanted:
            return _distinct(_numbers(sources.ranked(document), whole=wanted == "integer"))
        case "array":
            return _lists(name, schema, sources)
        case "object":
            return _objects(schema, sources)
        case "string":
            texts = [one if isinstance(one, str) else str(one) for one in sources.ranked(document) if _is_plain(one)]
            return _distinct(_dates_first(texts) if _wants_date(name, schema) else texts)
    return sources.ranked(document)


def _type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        return next((one for one in kind if isinstance(one, str) and one != "null"), "")
    return kind if isinstance(kind, str) else ""


def _wants_date(name: str, schema: Mapping[str, Any]) -> bool:
    return "date" in name.casefold() or schema.get("format") == "date"


def _dates_first(texts: Sequence[str]) -> list[str]:
    return sorted(texts, key=lambda one: whole_date(one) is None)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _numbers(values: Iterable[Any], *, whole: bool) -> Iterator[int | float]:
    for value in values:
        if isinstance(value, str):
            text = value.replace(",", "").strip()
            if not re.fullmatch(r"[-+]?\d{1,18}(\.\d{1,18})?", text):
                continue
            value = float(text) if "." in text else int(text)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not whole:
            yield value
        elif value == int(value):
            yield int(value)


def _lists(name: str, schema: Mapping[str, Any], sources: Sources) -> list[Any]:
    item = schema.get("items")
    item = item if isinstance(item, dict) else {}
    single = candidates(name, item, sources)
    rows = [one for one in sources.named if isinstance(one, list) and _type(item) != "string"]
    # All that the question names, then one at a time.
    named = [one for one in single if names_value(sources.question, one)]
    plain = [one for one in single if not isinstance(one, list)]
    return _distinct([*rows, *([named] if len(named) > 1 else []), *([one] for one in plain)])


def _objects(schema: Mapping[str, Any], sources: Sources) -> list[Any]:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties:
        return []
    required = schema.get("required")
    names = [one for one in required if one in properties] if isinstance(required, list) else list(properties)
    choices = {one: candidates(one, properties[one], sources) for one in names if isinstance(properties[one], dict)}
    return list(itertools.islice(combinations(choices), _OBJECTS))


def combinations(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every combination of one value each, those of likely values first: by the sum of the values' positions."""
    names = list(choices)
    sizes = [len(choices[name]) for name in names]
    if not all(sizes):
        return

    def positions(total: int, left: Sequence[int]) -> Iterator[tuple[int, ...]]:
        if not left:
            if total == 0:
                yield ()
            return
        rest = sum(left[1:]) - len(left[1:])
        for position in range(max(0, total - rest), min(left[0] - 1, total) + 1):
            for others in positions(total - position, left[1:]):
                yield (position, *others)

    for total in range(sum(sizes) - len(sizes) + 1):
        for chosen in positions(total, sizes):
            yield {name: choices[name][position] for name, position in zip(names, chosen, strict=True)}


def _folded(value: Any) -> Any:
    return fold(value) if isinstance(value, str) else _key(value)


def _key(value: Any) -> tuple[str, str]:
    return type(value).__name__, json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Return valid JSON arguments in order, without repeats. 1, 1.0 and "1" are three values."""
    return list({_key(value): value for value in values if _is_usable(value)}.values())


def _is_usable(value: Any) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= _LONGEST and not any("\ud800" <= one <= "\udfff" for one in value)
    return not isinstance(value, int | float) or abs(value) <= _LARGEST  # false for NaN
