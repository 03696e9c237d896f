"""No regular expression can be made to backtrack by what it reads: each is run over long texts made of its own parts.

For each part that a pattern repeats, a text leads up to it, has it 20,000 characters long, and ends in what does not
match. A square of that is at least a fifth of a second of processor time; a linear pattern takes a few hundredths. A
pattern that is written in several places is run once.
"""

from __future__ import annotations

import ast
import importlib
import re
import signal
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import FrameType
from typing import Any

import pytest
from processor_time import slowness
from selection import by_day

from synthesis.core.answer_words import words_of
from synthesis.core.language_words import READ
from synthesis.core.locales import locale_of

ROOT = Path(__file__).parent.parent
LAYERS = ("sandbox", "synthesis", "astra_jax", "launch")
ELSEWHERE = ("astra_jax/rollout/vllm/plugin", "astra_jax/evaluation/workers")
"""Run in environments of their own: nothing of them can be imported here."""
FUNCTIONS = ("compile", "match", "fullmatch", "search", "sub", "split", "findall", "finditer")
LENGTH, MOST_SECONDS = 20_000, 0.1
ENDS = ("\0", "é", "!", "")
MADE_AT_RUN_TIME = {
    "synthesis/astra_format/candidates.py": "words, escaped, with spaces between",
    "synthesis/audit/agent_phrases.py": "our own patterns",
    "synthesis/core/answer_words.py": "our own patterns",
    "synthesis/core/locales.py": "our own patterns, and the CLDR's words, escaped",
    "synthesis/core/echoes.py": "arguments of reference calls, escaped",
    "synthesis/core/chat_format.py": "a format's tags and a tokenizer's control tokens, escaped",
    "synthesis/core/markup.py": "tools' names, escaped",
    "synthesis/environments/proof.py": "arguments of a wrong call, escaped",
    "synthesis/offline/grammar.py": "our own wordings",
    "synthesis/offline/intents.py": "our own wordings",
    "synthesis/offline/templates.py": "our own wordings",
    "synthesis/pipeline/languages.py": "our own ranges of letters",
    "synthesis/trajectories/behaviours.py": "what a user is to say, escaped",
    "synthesis/trajectories/tasks.py": "a tool's name, escaped",
    "astra_jax/planner/hlo.py": "an attribute's name, our own, or a number",
    "astra_jax/planner/kernels.py": "our own names of a kernel's blocks",
    "astra_jax/run/chips.py": "names of cards, escaped",
    "astra_jax/sft/rename_entities.py": "names, escaped",
    "launch/flags/help_text.py": "our own patterns of flags",
}
"""The files that make patterns of what they are given, and of what; none of it is a pattern that others wrote."""
READS_OURS = {
    "synthesis/offline/environment_author.py": "the documents of our own relations",
    "astra_jax/planner/cycles.py": "the compiler's programs",
    "astra_jax/planner/hlo.py": "the compiler's programs",
    "astra_jax/planner/kernels.py": "the compiler's programs",
    "astra_jax/rollout/vllm/plugin/astra_vllm/model.py": "the names of a model's weights",
}
"""The files whose patterns may backtrack, and what they read."""


# ---------------------------------------------------------------------------------------------------------------------
# Patterns


@cache
def written() -> tuple[dict[str, re.Pattern[str]], set[str]]:
    """The patterns by the place where they are written, and the files of those that are only made when they run."""
    found: dict[str, re.Pattern[str]] = {}
    made: set[str] = set()
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            name = path.relative_to(ROOT)
            text = path.read_text(encoding="utf-8")
            if "build" in path.parts or "import re\n" not in text:
                continue
            names: dict[str, Any] = {"re": re}
            if not str(name).startswith(ELSEWHERE):
                names = vars(importlib.import_module(".".join(name.with_suffix("").parts)))
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and is_call_of(node, "re", FUNCTIONS):
                    try:
                        found[f"{name}:{node.lineno}"] = compiled(node, names)
                    except NameError:
                        made.add(str(name))
    return found, made


def is_call_of(node: ast.AST, module: str, functions: Sequence[str]) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    of = function.value if isinstance(function, ast.Attribute) else None
    return isinstance(of, ast.Name) and of.id == module and function.attr in functions  # type: ignore[union-attr]


def compiled(node: Any, names: dict[str, Any]) -> re.Pattern[str]:
    """Raises NameError where the pattern is made of what only a function knows."""
    flags = [one.value for one in node.keywords if one.arg == "flags"]
    flags += node.args[{"compile": 1, "sub": 99}.get(node.func.attr, 2) :][:1]
    return re.compile(evaluated(node.args[0], names), evaluated(flags[0], names) if flags else 0)


def evaluated(node: ast.expr, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "pattern", "eval"), dict(names))


# ---------------------------------------------------------------------------------------------------------------------
# Texts


LETTERS = "1aA ,.-_:/'\"éé五+eE%$°\n\t<>()[]{}|*=~`#@&;?!٣½²\u200b"


def sample(items: Any) -> str:
    """A text that a parsed pattern matches, roughly."""
    return "".join(map(one_of, items))


def one_of(item: tuple[Any, Any]) -> str:
    code, given = item
    if code is codes.LITERAL:
        return chr(given)
    if code is codes.NOT_LITERAL:
        return next(letter for letter in LETTERS if ord(letter) != given)
    if code is codes.ANY:
        return "a"
    if code is codes.IN:
        return next((letter for letter in letters_of(given) if is_in(letter, given)), "a")
    if code is codes.BRANCH:
        return sample(given[1][0])
    if code is codes.SUBPATTERN:
        return sample(given[3])
    if code is codes.ATOMIC_GROUP:
        return sample(given)
    if code in REPEATS:
        return sample(given[2]) * min(max(given[0], 1), 3)
    return ""


REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)


def letters_of(given: Sequence[tuple[Any, Any]]) -> str:
    own = "".join(chr(value if code is codes.LITERAL else value[0]) for code, value in given if code in OWN)
    return LETTERS + own


OWN = (codes.LITERAL, codes.RANGE)


def is_in(letter: str, given: Sequence[tuple[Any, Any]]) -> bool:
    negated = given[0][0] is codes.NEGATE
    ranges = {codes.CATEGORY_DIGIT: r"\d", codes.CATEGORY_SPACE: r"\s", codes.CATEGORY_WORD: r"\w"}
    others = {codes.CATEGORY_NOT_DIGIT: r"\D", codes.CATEGORY_NOT_SPACE: r"\S", codes.CATEGORY_NOT_WORD: r"\W"}
    for code, value in given:
        held = (
            (code is codes.LITERAL and ord(letter) == value)
            or (code is codes.RANGE and value[0] <= ord(letter) <= value[1])
            or (code is codes.CATEGORY and re.match((ranges | others)[value], letter) is not None)
        )
        if held:
            return not negated
    return negated


def parts_of(code: Any, given: Any) -> list[Any]:
    """The parts of a parsed pattern's item."""
    if code is codes.ATOMIC_GROUP:
        return [given]
    if code is codes.BRANCH:
        return list(given[1])
    at = dict.fromkeys(REPEATS, 2) | {codes.SUBPATTERN: 3, codes.ASSERT: 1, codes.ASSERT_NOT: 1}
    return [given[at[code]]] if code in at else []


def leads(items: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """For each part that may be repeated often: a text that leads up to it, and the part."""
    for item in items:
        code, given = item
        if code in REPEATS and given[1] >= 8:
            yield before, sample(given[2])
        for part in parts_of(code, given):
            yield from leads(part, before)
        before += one_of(item)


def texts(pattern: re.Pattern[str]) -> list[str]:
    parsed = parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)
    found = list(leads(parsed))
    whole = sample(parsed) or "a"
    # Two parts in turn, the whole again and again, and what begins as the whole does.
    found += [("", one + other) for (_, one), (_, other) in zip(found, found[1:], strict=False)]
    found += [("", whole), ("", whole[: len(whole) // 2] or "a"), ("", whole[:1]), ("", " "), ("", "1")]
    pumped = {(lead, part) for lead, part in found if part} | {("", part) for _, part in found if part}
    return [lead + part * (LENGTH // len(part)) + end for lead, part in sorted(pumped) for end in ENDS]


# ---------------------------------------------------------------------------------------------------------------------


class TooLong(Exception):
    pass


def stop(number: int, frame: FrameType | None) -> None:
    raise TooLong


@cache
def slow(pattern: re.Pattern[str]) -> str:
    """The text, described, on which a pattern takes too long; "" for none."""
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        for text in texts(pattern):
            for use in (pattern.fullmatch, pattern.sub):  # `sub` searches
                # Once more where it was too long, for the machine is shared, and may be slow.
                if spent(use, text) > MOST_SECONDS and spent(use, text, most := MOST_SECONDS * slowness()) > most:
                    return f"{use.__name__} of {text[:30]!r}…{text[-5:]!r}"
    finally:
        signal.signal(signal.SIGVTALRM, before)
    return ""


def spent(use: Any, text: str, most: float = MOST_SECONDS) -> float:
    """Processor time; of what takes longer, twice what is too long."""
    started = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * most)
    try:
        use("", text) if use.__name__ == "sub" else use(text)
    except TooLong:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return time.process_time() - started


def test_no_pattern_backtracks() -> None:
    foreign = {place: one for place, one in written()[0].items() if place.partition(":")[0] not in READS_OURS}
    distinct = {(one.pattern, one.flags): (place, one) for place, one in foreign.items()}
    found = {place: (one.pattern, text) for place, one in distinct.values() if (text := slow(one))}
    assert not found and len(distinct) > 90


@pytest.mark.parametrize("language", by_day(READ, "en", "zh", "ar"))
def test_no_pattern_of_a_language_backtracks(language: str) -> None:
    locale = locale_of(language)
    held: list[Any] = [*vars(words_of(language)).values()]
    held += [*vars(locale).values(), *vars(locale.forms).values()] if locale else []
    several = [list(one.values()) if isinstance(one, dict) else one for one in held]
    listed = [part for one in several for part in (one if isinstance(one, list) else [one])]
    parts = [two for part in listed for two in (part if isinstance(part, tuple) else [part])]
    patterns = [one for one in parts if isinstance(one, re.Pattern)]
    assert len(patterns) >= (19 if locale else 9)
    assert not {one.pattern: text for one in patterns if (text := slow(one))}
    assert not [one.pattern for one in patterns if groups_repeated(one)]


@pytest.mark.parametrize(
    "pattern",
    [r"(\d*)[ \u2064]?([¼½¾])", r"^(a+)+$", r"\s+$", r"\w*\d*x"],
)
def test_a_pattern_that_backtracks_is_found(pattern: str) -> None:
    assert slow(re.compile(pattern))


def possessive(items: Any) -> Iterator[Any]:
    """What a parsed pattern repeats and gives nothing back of."""
    for code, given in items:
        if code is codes.POSSESSIVE_REPEAT:
            yield given[2]
        for part in parts_of(code, given):
            yield from possessive(part)


UNITS = (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN)


def one_character(part: Any) -> bool:
    """Whether a part is a character or a choice between characters, so that it fails before it has read any."""
    if len(part) == 1 and part[0][0] is codes.BRANCH:
        return all(map(one_character, part[0][1][1]))
    return len(part) == 1 and part[0][0] in UNITS


def groups_repeated(pattern: re.Pattern[str]) -> bool:
    parts = possessive(parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG))
    return not all(map(one_character, parts))


def test_only_single_characters_are_repeated_possessively() -> None:
    """A possessive repeat (`(?:…)++`) of what may fail on its way matches wrongly before Python 3.11.5, so also in
    Debian 12's (CPython gh-106052, gh-100061). `(?>(?:…)+)` is the same and was right from the first, but keeps a place
    to go back to for each repeat until it ends."""
    assert not [place for place, one in written()[0].items() if groups_repeated(one)]
    examples = (r"(?:ab)++", r"(a|(?>b(?=(?:c\d)?+)))", r"(?:[ab]|c)*+a++", r"(?:[^a]|[bc]){3,}+", r"(?:[^a]|bc)++")
    assert [groups_repeated(re.compile(one)) for one in examples] == [True, True, False, False, True]


def test_patterns_are_made_at_run_time_only_of_what_is_ours_or_escaped() -> None:
    assert written()[1] == set(MADE_AT_RUN_TIME)


def test_normal_forms_are_asked_of_the_one_that_is_linear() -> None:
    """`unicodedata.normalize` takes seconds for 64,000 combining marks (`synthesis/core/normal_text.py`)."""
    places = {
        str(path.relative_to(ROOT))
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*.py")
        if "unicodedata" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if is_call_of(node, "unicodedata", ("normalize",))
    }
    assert places == {"synthesis/core/normal_text.py"}
