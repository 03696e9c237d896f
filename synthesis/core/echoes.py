"""Echoes: outputs that repeat what the caller wrote, which is no evidence that the tool found anything.

A policy that passes lists of guesses to a tool that repeats its argument would be paid for naming the answer. So an
output counts as evidence of an answer only where the call's own arguments do not state that answer:

  given     A value that the reference call gives too is the question's, not a guess: `larger(a="Paris", b="Lyon")` may
            answer "Paris". Each value counts once, and of a list only where the call gives the whole list.
  strings   All other text of the arguments, read as a tool might transform it: split, joined, cut, reversed, in another
            case, percent-encoded, as JSON, or misspelt ("did you mean Oslo?"). If it states the answer, one of its
            aliases or one element of a list, the output is no evidence. Nor is it if the text states the answer only
            together with values of the reference call: the zone "Asia" of the city "Kabul".
  numbers   The same. Besides, the answer is searched in the output without the numbers that the arguments have:
            `{"people_in_millions": 2.1}` repeats a 2.1.
  booleans  A flag is passed for other reasons. Only what repeats it is left out: a value under the argument's name, and
            "yes" or "true" in texts.

In a world, the arguments of the episode's earlier calls count as well: they may have been stored, and read back.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cached_property, lru_cache
from typing import Any, Final
from urllib.parse import unquote_plus

from synthesis.core.dates import whole_date, whole_time
from synthesis.core.json_leaves import MOST_CHARACTERS, opened
from synthesis.core.matching import contains
from synthesis.core.normal_text import bare, fold
from synthesis.core.quantities import CJK, plain, written_number
from synthesis.core.readings import FALSE, MOST_VALUES, TRUE, NormalizedOutput
from synthesis.core.records import Answer

_TOKEN: Final = re.compile(rf"\d+(?:[.,]\d+)*|[{CJK}]|[^\W\d_{CJK}]+")
_SEPARATOR: Final = re.compile(r"[,;|/\n，；、]")
_MOST_BITS: Final = 10_000
_GROWING: Final = "\ufdfa"
_GROWTH: Final = 17
"""Characters by which NFKC lengthens this letter; all others grow to eight at most."""
_SHORTEST_PART: Final = 4
_SHORTEST_OF_OTHER_SCRIPTS: Final = 2
"""Characters of an answer that is looked for inside of longer words; a shorter one must be a word of its own."""
_SHORTEST_REVERSED: Final = 3
"""Letters of a word that is read backwards too: the language "en" is not Niger's code NE."""
_MISSPELT: Final = 0.75
"""Similarity from which one word counts as another, misspelt; `difflib` suggests from 0.6 on."""

Call = Mapping[str, Any]
"""The arguments of a call, by name."""


def is_evidence(
    output: Any, answer: Answer, arguments: Call, given: Call, language: str = "en", earlier: Iterable[Any] = ()
) -> bool:
    """Return whether a tool's output holds an answer that its caller did not write; see above.

    Args:
        output: the JSON value that the call returned, or its `NormalizedOutput`.
        answer: of the sub-question.
        arguments: of the call.
        given: the arguments of the sub-question's reference call.
        language: of the output's texts; a `NormalizedOutput` has its own.
        earlier: values written earlier that a world may have stored; none of them is a value of a reference call.
    """
    reading = output if isinstance(output, NormalizedOutput) else NormalizedOutput(output, language)
    if not contains(reading, answer):
        return False
    own = [*_not_given(arguments, given), *earlier]
    if not own:
        return True
    written = Written(own, reading.language)
    if written.states(answer, misspelt=True):
        return False
    known, every = (Written(one, reading.language) for one in (list(values_of(given)), [*_values(arguments), *own]))
    if every.states(answer) and not known.states(answer):
        return False
    if isinstance(answer.value, str):
        return True
    flags = {name: value for name, value in arguments.items() if isinstance(value, bool) and given.get(name) != value}
    return contains(reading.without(written.repeats, written.has_number, flags), answer)


def without_values(output: Any, values: Iterable[str | int | float | bool]) -> Any:
    """Return a JSON value without the leaves that equal one of some values, and without these values in its texts."""
    known = [one for one in values if not isinstance(one, bool)]
    forms, phrases = set(map(form_of, known)), [one for one in known if isinstance(one, str) and one.strip()]

    def pruned(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: pruned(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [pruned(one) for one in value]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return value
        if form_of(value) in forms:
            return None
        if isinstance(value, str) and len(value) <= MOST_CHARACTERS:
            for phrase in phrases:
                if found := _place(value, phrase):
                    value = f"{value[: found.start()]} · {value[found.end() :]}"
        return value

    return pruned(output)


def values_of(value: Any) -> Iterator[str | int | float | bool]:
    """Yield the values of a JSON value, and the keys of its objects; of a string that holds JSON what is in it."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str) and (inside := opened(one)) is not None:
            one = inside
        if isinstance(one, Mapping):
            waiting += [*reversed(list(one.values())), *reversed(one)]
        elif isinstance(one, list | tuple):
            waiting += reversed(one)
        elif isinstance(one, str | int | float):
            yield one


@lru_cache(maxsize=128, typed=True)  # a call's values are compared with those of the reference call, twice
def form_of(value: str | float) -> str | float:
    """Return the form in which a value equals others that say the same: `"5"` and 5.0, `OSLO ` and `Oslo`."""
    if isinstance(value, bool):
        return str(value).casefold()
    if isinstance(value, str):
        number, day = written_number(value), whole_date(plain(value))
        return str(day) if day else number if number is not None else "".join(fold(plain(value)).split())
    return value


def _values(arguments: Call) -> list[str | int | float | bool]:
    """Return all values of a call."""
    return list(values_of(list(arguments.values())))


def _not_given(arguments: Call, given: Call) -> list[str | int | float | bool]:
    """Return the values of a call that its reference call does not give."""
    found = [*(name for name in arguments if name not in given), *_values(arguments)]
    if _is_endless(found):
        return [] if arguments == given else found
    forms = Counter(map(form_of, found))
    free: Counter[str | float] = Counter()
    texts: dict[str | float, str] = {}
    for value in given.values():
        inside = list(values_of(value))
        wanted = Counter(map(form_of, inside))
        if len(inside) > 1 and not wanted <= forms:
            continue  # a call with only some elements of a list chooses among them
        free += wanted
        texts |= {form_of(one): one if isinstance(one, str) else _digits(one) for one in inside}
    kept: list[str | int | float | bool] = []
    for value in found:
        if free[form := form_of(value)]:
            free[form] -= 1
        else:
            kept.append(value)
    # Values of the reference call that stand in longer ones: the Paris of "Paris, France".
    for place, value in enumerate(kept):
        for form, text in texts.items():
            if isinstance(value, str) and text and free[form] and (found_at := _place(value, text)):
                free[form] -= 1
                value = kept[place] = f"{value[: found_at.start()]} · {value[found_at.end() :]}"
    return kept


def _is_endless(values: Sequence[str | int | float | bool]) -> bool:
    """Return whether values are too many, or too long, to be searched: they may state anything."""
    texts = [one for one in values if isinstance(one, str)]
    characters = sum(len(one) + _GROWTH * one.count(_GROWING) for one in texts)
    return len(values) > MOST_VALUES or characters > MOST_CHARACTERS


def _place(text: str, phrase: str) -> re.Match[str] | None:
    return re.search(rf"(?<![^\W_]){re.escape(phrase)}(?![^\W_])", text, re.IGNORECASE)


class Written:
    """Values that a policy wrote itself, in the forms in which a tool may repeat them.

    Args:
        leaves: strings, numbers and booleans.
        language: of their texts.
    """

    def __init__(self, leaves: Sequence[str | int | float | bool], language: str = "en") -> None:
        self.leaves = leaves
        self.language = language
        self._texts = [_digits(one) if isinstance(one, int | float) else one for one in leaves]
        self._is_endless = _is_endless(leaves)

    def states(self, answer: Answer, *, misspelt: bool = False) -> bool:
        """Return whether the values state an answer, one of its aliases, or one element of it.

        Args:
            misspelt: whether nearly the same word counts.
        """
        if isinstance(answer.value, bool):
            return self._is_endless
        values = answer.value if isinstance(answer.value, list) else [answer.value]
        return self._is_endless or any(
            contains(self._reading, Answer(one, unit=answer.unit, tolerance=answer.tolerance))
            or (
                self._says(one) or (misspelt and self._nearly_says(one))
                if isinstance(one, str)
                else self._has_about(one, answer.tolerance)
            )
            for one in (*values, *answer.aliases)
        )

    def has_number(self, value: float) -> bool:
        """Return whether a number is one of the values, or stands in one of their texts."""
        return value in self._numbers

    def repeats(self, token: str) -> bool:
        """Return whether a word of an output is a number, or a word for true or false, of the values."""
        if token[0].isdigit():
            return not self._numbers.isdisjoint(_numbers_of(token))
        return token.casefold() in self._judgements

    @cached_property
    def _reading(self) -> NormalizedOutput:
        return NormalizedOutput([one for one in self.leaves if not isinstance(one, bool)], self.language)

    @cached_property
    def _forms(self) -> list[tuple[str, ...]]:
        """The tokens of each value and, where they differ, of what it says when it is decoded."""
        decoded = [form for text in self._texts for form in dict.fromkeys([text, *_decoded(text)])]
        return [_tokens(form) for form in decoded]

    @cached_property
    def _tokens(self) -> frozenset[str]:
        tokens = {token for form in self._forms for token in form}
        return frozenset(tokens | {token[::-1] for token in tokens if len(token) >= _SHORTEST_REVERSED})

    @cached_property
    def _joined(self) -> list[str]:
        """All of it without a space, from either end and in either direction."""
        pieces = ["".join(form) for form in self._forms]
        words = ["".join(reversed(form)) for form in reversed(self._forms)]
        forwards = [*pieces, "".join(pieces), "".join(reversed(pieces)), "".join(words)]
        return [*forwards, *(one[::-1] for one in forwards)]

    @cached_property
    def _numbers(self) -> frozenset[float]:
        decoded = {form for one in self.leaves if isinstance(one, str) for form in (one, *_decoded(one))}
        tokens = {token for form in decoded for token in _TOKEN.findall(plain(form))}
        tokens |= {token[::-1] for token in tokens if token[-1] != "0"}
        found = {number for token in tokens for number in _numbers_of(token)}
        return frozenset(found | {one for one in self.leaves if not isinstance(one, str | bool)})

    @cached_property
    def _judgements(self) -> frozenset[str]:
        locale = self._reading.locale
        words = TRUE | FALSE | {"no"} | (locale.yes | locale.no if locale else frozenset())
        return words & {token for form in self._forms for token in form}

    @cached_property
    def _parts(self) -> list[str]:
        parts = (part for text in self._texts for part in _SEPARATOR.split(text))
        return list(dict.fromkeys("".join(_tokens(part)) for part in parts))

    def _says(self, text: str) -> bool:
        tokens = _tokens(text)
        wanted = "".join(tokens)
        if not wanted:
            return fold(text) in map(fold, self._texts)
        if self._tokens.issuperset(tokens):
            return True
        day, time = whole_date(text), whole_time(text)
        if (day and self._numbers.issuperset((day.year, day.month, day.day))) or (
            time and self._numbers.issuperset(time if time[2] else time[:2])
        ):
            return True
        shortest = _SHORTEST_PART if wanted.isascii() else _SHORTEST_OF_OTHER_SCRIPTS
        return len(wanted) >= shortest and any(wanted in one for one in self._joined)

    def _nearly_says(self, text: str) -> bool:
        wanted = "".join(_tokens(text))
        is_word = len(wanted) >= _SHORTEST_PART and not re.search(r"\d", wanted)
        return is_word and any(_is_misspelt(part, wanted) for part in self._parts)

    def _has_about(self, value: float, tolerance: float) -> bool:
        """Return whether the values have a number, or a fraction that it is when rounded in any way."""
        digits = _digits(value)
        if len(digits) >= _SHORTEST_PART and any(digits in one for one in self._joined):
            return True
        return any(_is_about(one, value, tolerance) for one in self._numbers)


def _is_about(number: float, value: float, tolerance: float) -> bool:
    try:
        by = abs(number - value)
    except OverflowError:  # an integer beyond every float
        return False
    return by <= tolerance or (by < 1 and value % 1 == 0 and number % 1 != 0)


def _is_misspelt(text: str, word: str) -> bool:
    if not len(word) / 2 <= len(text) <= 2 * len(word) or len(word) > 100:
        return False
    matcher = SequenceMatcher(None, text, word, autojunk=False)
    return matcher.quick_ratio() >= _MISSPELT and matcher.ratio() >= _MISSPELT


def _decoded(text: str) -> Iterator[str]:
    """Yield what a text says in the notations that programs write texts in."""
    yield unquote_plus(text)
    yield html.unescape(text)
    decoders: tuple[Callable[[str], Any], ...] = (
        lambda one: json.loads(f'"{one}"'),
        lambda one: base64.b64decode(one, altchars=b"-_" if "-" in one or "_" in one else None, validate=True).decode(),
        lambda one: bytes.fromhex(one).decode(),
    )
    for decode in decoders:
        try:
            yield decode(text)
        except ValueError:
            continue


@lru_cache(maxsize=128)  # a call's own values are read alone, and with those of the reference call
def _tokens(text: str) -> tuple[str, ...]:
    """Return the words and numbers of a text, without differences of width, case and accents."""
    return tuple(part for one in _TOKEN.findall(bare(fold(plain(text)))) for part in one.split(",") if part)


def _digits(value: float) -> str:
    if isinstance(value, float):
        return f"{value:.15g}"
    return str(value) if value.bit_length() < _MOST_BITS else ""  # Python writes no integer of more than 4300 digits


def _numbers_of(token: str) -> list[float]:
    """Return the numbers that a token may be: `1,234` is 1234, or 1 and 234."""
    if not token[0].isdecimal() or len(token) > 300:
        return []
    pieces = [token.replace(",", ""), token.replace(".", "").replace(",", "."), *token.split(",")]
    found = []
    for one in pieces:
        try:
            found.append(float(one))
        except ValueError:
            continue
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Guesses

_NAMES: Final = ("Oslo", "Rome", "Paris", "Lima", "Cairo", "Tokyo")
_COUNT: Final = 100
_SHORTEST_HALF: Final = 4
"""Characters; three are often a code, for which a tool has an answer of its own: "Din" of "Dinka"."""


def guesses(parameters: Mapping[str, Any], given: Call, answer: Answer) -> list[dict[str, Any]]:
    """Return calls that state an answer: the reference call with each text argument made a guess, optional ones too.

    A guess is the answer, a list of candidates with the answer among them, or the answer's first half, from which a
    tool might suggest the rest.

    Args:
        parameters: JSON schema of the tool's arguments.
        given: arguments of the reference call.
        answer: of its sub-question.
    """
    values = answer.value if isinstance(answer.value, list) else [answer.value]
    stated = [json.dumps(one) if isinstance(one, bool) else str(one) for one in values]
    numbers = [str(one) for one in range(1, _COUNT + 1)]
    candidates = [*(_NAMES if isinstance(values[0], str) else numbers), *stated] if stated else []
    half = stated[0][: (len(stated[0]) + 1) // 2] if len(stated) == 1 and isinstance(values[0], str) else ""
    texts = [", ".join(stated), ", ".join(candidates), *([half] if len(half) >= _SHORTEST_HALF else [])]
    found: list[dict[str, Any]] = []
    properties = parameters.get("properties", {})
    for name, schema in properties.items() if isinstance(properties, Mapping) else ():
        if _takes(schema, "array"):
            found += [{**given, name: one} for one in (stated, candidates)]
        elif _takes(schema, "string"):
            found += [{**given, name: one} for one in texts]
    return [one for one in found if one != given]


def _takes(schema: Any, kind: str) -> bool:
    """Return whether an argument may be any text, or any list of texts."""
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return False
    kinds = schema.get("type", [])
    if kind not in ([kinds] if isinstance(kinds, str) else kinds):
        ways = schema.get("anyOf", schema.get("oneOf", []))
        return isinstance(ways, list) and any(_takes(one, kind) for one in ways)
    items = schema.get("items")
    return kind != "array" or not items or _takes(items, "string")
