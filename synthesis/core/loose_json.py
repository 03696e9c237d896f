"""JSON as models write it, read where one repair makes it JSON and nothing is lost or guessed.

Repairs, by their counted names:

    byte_order_mark     an invisible mark before the JSON
    code_fence          the whole text is one code block of Markdown
    full_width          punctuation or digits in their full-width forms outside of strings
    curly_quotes        curly quotation marks in place of all straight ones
    raw_control         a line break or tab in a string that is not escaped
    trailing_comma      a comma behind the last value
    stray_bracket       more closing brackets behind the JSON
    python_literal      a Python dictionary or list
    encoded_twice       a JSON string that holds a JSON object

Text behind the JSON, two values, and a name that an object has twice are refused: each has several readings.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from synthesis.core.chat_format import parse_arguments, parse_json
from synthesis.core.normal_text import normalized

JSON_STRING = re.compile(r'"[^"\\]*(?:\\.?[^"\\]*)*(?:"|\Z)', re.DOTALL)
"""A string of JSON; the last one of a text may lack its end."""
_PYTHON_ESCAPE = re.compile(r"""\\[^"'/bfnrtu]""")
_CONTROL = re.compile(r"[\x00-\x1f]")
_TRAILING_COMMA = re.compile(r",(?=\s{0,99}[}\]])")
_INVISIBLE = "\ufeff\u200b\u2060"
_CLOSING = frozenset("}] \t\r\n")
_CURLY = str.maketrans("“”„", '"""')
_LONGEST_LITERAL = 1 << 20
"""Characters of a Python literal; Python's parser takes a hundred times their memory."""


def read_loosely(text: str) -> tuple[Any, list[str]]:
    """Return the JSON value that a text holds, and the names of the repairs that it needed.

    Raises:
        ValueError: it holds none, or several readings are possible; the message says what is wrong.
        RecursionError: it is nested too deeply.
    """
    repairs: list[str] = []
    body = text.strip()
    if body.strip(_INVISIBLE) != body:
        body, repairs = body.strip(_INVISIBLE).strip(), ["byte_order_mark"]
    if (inside := unfenced(body)) is not None:
        body = inside.strip()
        repairs.append("code_fence")
    try:
        return parse_json(body, unique_names=True), repairs
    except ValueError as error:
        problem = error
    normal, changes = _normalised(body)
    if changes:
        try:
            return parse_json(normal, unique_names=True), [*repairs, *changes]
        except ValueError:
            pass
    try:
        _, end = json.JSONDecoder().raw_decode(normal)
    except ValueError:
        pass
    else:
        if not set(normal[end:]) <= _CLOSING:
            raise ValueError(f"there is text behind the JSON: {normal[end:].strip()[:40]!r}")
        if end == len(normal):  # JSON but for a name that is there twice, or a number beyond all
            raise problem
        return parse_json(normal[:end], unique_names=True), [*repairs, *changes, "stray_bracket"]
    return _python(body, problem), [*repairs, "python_literal"]


def unfenced(text: str) -> str | None:
    """Return what a code block of Markdown encloses; None where the text is not one block and nothing else."""
    for fence in ("```", "~~~"):
        inside = text[len(fence) : -len(fence)]
        if text.startswith(fence) and text.endswith(fence) and len(text) >= 2 * len(fence) and fence not in inside:
            language, _, rest = inside.partition("\n")
            return rest if not language.strip() or language.strip().isalnum() else inside
    return None


def read_arguments(given: Any) -> tuple[dict[str, Any], list[str]]:
    """Return a call's arguments, which an endpoint sends as JSON text or as an object, and the repairs they needed.

    No text, null and an empty list are no arguments: `{}`.

    Raises:
        ValueError: they are no object.
    """
    repairs: list[str] = []
    if isinstance(given, str):
        if not given.strip():
            return {}, []
        try:
            given, repairs = read_loosely(given)
            if isinstance(given, str):
                given, more = read_loosely(given)
                repairs += ["encoded_twice", *more]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments are not JSON: {error}") from None
    if given is None or given == []:
        return {}, []
    return parse_arguments(json.dumps(given, ensure_ascii=False)), repairs


def _normalised(text: str) -> tuple[str, list[str]]:
    """Replace full-width forms, curly quotation marks, raw control characters and trailing commas."""
    changes: list[str] = []
    if '"' not in text and text.translate(_CURLY) != text:
        text = text.translate(_CURLY)
        changes.append("curly_quotes")

    def outside(piece: str) -> str:
        # The repairs are few and each is named once, in the order in which they are first needed.
        narrow = normalized("NFKC", piece)
        repaired = _TRAILING_COMMA.sub("", narrow)
        for name, before, after in (("full_width", piece, narrow), ("trailing_comma", narrow, repaired)):
            if after != before and name not in changes:
                changes.append(name)
        return repaired

    pieces: list[str] = []
    place = 0
    for found in JSON_STRING.finditer(text):
        pieces.append(outside(text[place : found.start()]))
        inside = _CONTROL.sub(lambda one: f"\\u{ord(one[0]):04x}", found[0])
        if inside != found[0] and "raw_control" not in changes:
            changes.append("raw_control")
        pieces.append(inside)
        place = found.end()
    pieces.append(outside(text[place:]))
    return "".join(pieces), changes


def _python(text: str, problem: ValueError) -> Any:
    """Return the value of a Python dictionary or list. Raises `problem` where the text is none."""
    if not text.startswith(("{", "[")) or len(text) > _LONGEST_LITERAL:
        raise problem
    if _PYTHON_ESCAPE.search(text.replace("\\\\", "")):  # `\\alpha` is TeX, and not a bell
        raise problem
    try:
        tree = ast.parse(text, mode="eval")
        if any(_repeats_a_name(node) for node in ast.walk(tree)):
            raise problem
        value = ast.literal_eval(tree)
        again = parse_json(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise problem from None
    if again != value:  # tuples, or names that are no texts
        raise problem
    return again


def _repeats_a_name(node: ast.AST) -> bool:
    names = [key.value for key in node.keys if isinstance(key, ast.Constant)] if isinstance(node, ast.Dict) else []
    return len(set(names)) < len(names)
