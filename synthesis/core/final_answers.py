"""Does a final answer state the expected value, and commit to it?

A tool may list what it knows; whoever answers may not. `matching` decides whether a text holds a value. `judge_answer`
also asks that the text commits to it: one value (or the asked list), stated, not negated, not one of several. The
reward `answer`, the score of MCP tasks, evaluation and `PlayedEpisode.says` use it; tool outputs keep `matching`.

How a text is read:

1. Thoughts are removed. A text with other markup of a chat format, or too long to be an answer, states nothing.
2. The text is cut into sentences and clauses; each place of the value becomes a slot. Clauses behind "than", in
   brackets, negated, or about an earlier opinion ("I thought 40") hold no candidates.
3. A correction ("no", "wait", 不对) takes back what was said before it.
4. An explicit mark decides where there is one: "the answer is", "Answer:", `\\boxed{}`, one bold value.
5. Other values of the same kind (numbers of the same dimension, days, times, names) are candidates. They contradict
   the value where they are joined with it ("or", "and", a list, a range), where another clause says the same of another
   value, and where a statement about nothing else ("It is 41.") names another one. In a text with many numbers only its
   first and its last sentence count.

One hedged value ("maybe 40") is still one value. What cannot be decided is not stated: fail closed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from synthesis.core import dates
from synthesis.core.answer_words import ReadWords, words_of
from synthesis.core.locales import Locale, locale_of
from synthesis.core.markup import markup_in, split_thought
from synthesis.core.matching import match
from synthesis.core.normal_text import fold
from synthesis.core.quantities import CJK, plain, whole_quantity
from synthesis.core.readings import FALSE, MOST_CHARACTERS, TRUE, Reading, ReadText
from synthesis.core.records import Answer
from synthesis.core.units import UNITS, Quantity, same_quantity, unit_named

Reason = Literal[
    "stated", "missing", "too_long", "markup", "negated", "withdrawn", "supposed", "asked", "several", "contradicted"
]


class Verdict(NamedTuple):
    """Whether a text states an answer, and why."""

    is_stated: bool
    reason: Reason


_STATED: Final = Verdict(True, "stated")
_MOST_PLACES: Final = 16
"""Places of a value in one sentence that are found."""
_MOST_CANDIDATES: Final = 6
"""Other values of a text whose sentences all count; the names of one sentence may be twice as many."""
_MOST_SENTENCES: Final = 12
_MOST_PIECES: Final = 400
"""Sentences, and lines, of a text that is read; an answer with more is none."""
_NEAR: Final = 120
"""Characters before and behind a value in which something negates it."""
_has_digit = re.compile(r"\d").search
_SHORT: Final = 60
"""A text that may be a hedged value and no sentence: "Perhaps Oslo."."""
_MOST_KEYS: Final = 4
_FIRST_SLOT: Final = 0xE000
_MOST_ELEMENTS: Final = 100
_SLOT = re.compile("[\ue000-\ue0ff]")
_FIRST_DAY: Final = 0xE200
_DAY = re.compile("[\ue200-\ue2ff]")
_MARK: Final = "\uf8f0"
"""Stands for a box, in which mathematics puts its answer."""
_ANSWER_KEYS = frozenset({"answer", "final_answer", "finalanswer", "result", "value", "答案", "结果"})
_BOXED = re.compile(r"\$?\\(?:boxed|fbox)\s?\{((?:[^{}]|\{[^{}]{0,200}\}){1,400})\}\$?|</?(?:final_)?answer>")
_OPENING = re.compile(r"^\s*[\[{]")
_LINES = re.compile(r"[.!?。]?\n|[.!?。]\s")
_LATEX = re.compile(r"\\(?:text|mathrm|mathbf)\{([^{}]{0,200})\}|\{(,)\}|\\[,;! ]|\\[()\[\]]|\\?\$(?=\D|$)")
_FENCE = re.compile(r"^[ \t]{0,8}(?:```|~~~)\w{0,20}[ \t]*$\n?", re.MULTILINE)
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*|__([^_\n]{1,200})__")
_BULLET = re.compile(r"^[ \t]{0,20}(?:[-*+•·‣▪>]|(\(?(?:\d{1,3}|[A-Za-z])[.):]))[ \t]{1,4}(?=\S)", re.MULTILINE)
_HEADING = re.compile(r"^[ \t]{0,3}#{1,6}[ \t]{1,4}", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[!?。।])\s*(?=\S)|(?<=\.)\s+(?=\S)|\n+")
_ABBREVIATED = re.compile(
    r"(?:^|[\s(])(?:Mr|Mrs|Ms|Dr|St|No|Nr|approx|ca|vs|Prof|Mt|etc|inc|bzw|z\.B|e\.g|i\.e|(?:[^\W\d_]\.)*[^\W\d_]"
    r"|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\.$"
)
_WORD = rf"(?:[^\W{CJK}\u0e00-\u0e7f]|[\u0300-\u036f\u064b-\u0652\u0900-\u0963])"
_TOKEN = re.compile(rf"[{CJK}\u0e00-\u0e7f]|{_WORD}+(?:(?:[.'’/-]|(?<=\d)[,:](?=\d)){_WORD}+)*|\s+|.", re.DOTALL)
_WORDS = re.compile(rf"[{CJK}\u0e00-\u0e7f]|{_WORD}+")
_AROUND: Final = " .,:;*_\"'!?-–—()[]{}<>"
_FIRST_NOTE: Final = 0xE300
_NOTED = re.compile("[\ue300-\ue3ff]")
_NOTE = re.compile(r"\(([^()\n]{0,400})\)|\[([^\[\]\n]{0,400})\]")
_SIDE_BY_SIDE = re.compile(r"[)\]][^\w()\[\]]{0,3}[(\[]")
_ADDS = re.compile(
    r"\b(?:sum|adding|added|plus|minus|times|total|together|product|difference|average|mean|divided|multiplied)\b"
    r"|加|减|乘|除以|之和|之差|之积|平均|合计|共",
    re.IGNORECASE,
)
_TOPIC = re.compile(r"[はがをにでも]\s*$")
_TOUCHING = re.compile(rf"[{CJK}\u0e00-\u0e7f]")
_RUN_OF_LETTERS = re.compile(rf"[^\s{CJK}\u0e00-\u0e7f]+")
_SUMS = re.compile(r"[=×*÷+≈]|\d\s?[-−/]\s?\d|\\times|\\cdot")
_COPULA = re.compile(r"\b(?:is|are|was|were)\b|'s\b|是|为", re.IGNORECASE)
_OPINION = re.compile(r"\b(?:think|believe|mean|say|that|true|likely|case|doubt)\b|认为", re.IGNORECASE)
_FALSE_AT_END = re.compile(r"\s(?:is|was) (?:false|wrong|incorrect|untrue)\W{0,3}$", re.IGNORECASE)
_WHETHER = re.compile(r"\bwhether\b|\b(?:know|sure|clear|tell) if\b|是否", re.IGNORECASE)
_YEAR = re.compile(r"(?:\b(?:in|of|since|by|from|until|year|after|before|as of|im jahr|en|em|nel|в|año|ano)\s)(\d{4})\b|(\d{4})\s?[年년]", re.IGNORECASE)
_JOINS = frozenset({"either", "listed", "and"})
_RUN = frozenset({"comma", "line", "stop", "semicolon", "listed", "and", "either"})


def states_answer(text: str, answer: Answer, language: str = "en") -> bool:
    """Return whether a final answer states the expected value and commits to it; see `judge_answer`."""
    return judge_answer(text, answer, language).is_stated


def judge_answer(text: str, answer: Answer, language: str = "en") -> Verdict:
    """Decide whether a final answer states the expected value and commits to it.

    Args:
        text: the last thing that a model said, with or without its thoughts.
        answer: the expected value, of any type; its aliases are the same value.
        language: ISO 639-1 code of the text's and the answer's language.
    """
    if len(text) > MOST_CHARACTERS:
        return Verdict(False, "too_long")
    said = _BOXED.sub(lambda one: f"\n{_MARK}{_LINES.sub(', ', one[1] or '')}\n", split_thought(text)[1])
    if markup_in(said, turn=True):
        return Verdict(False, "markup")
    locale = locale_of(language)
    if isinstance(answer.value, bool) or _is_word_of_truth(answer.value, locale):
        return _judge_boolean(said, answer, language)
    rule = match(_untangled(said), answer, language)
    if isinstance(answer.value, list):
        if rule == "alias":
            wanted = [Answer(answer.aliases[0], aliases=answer.aliases)]
        else:
            wanted = [Answer(one, unit=answer.unit, tolerance=answer.tolerance) for one in answer.value]
    else:
        wanted = [answer]
    lines = len(re.findall(r"\n|[.!?。।]\s", said))
    if len(wanted) > _MOST_ELEMENTS or lines > _MOST_PIECES:
        return Verdict(False, "too_long")
    opened = _opened(said.replace(_MARK, ""))
    judge = _Judge(said if opened is None else opened, wanted, language)
    if judge.finds_any:
        return judge.verdict()
    # A unit beside its number, each under a key of its own, is in no line by itself.
    is_one = rule is not None and opened is not None and opened.count("\n") < _MOST_KEYS and "[" not in opened
    return _STATED if is_one else Verdict(False, "missing")


def _is_word_of_truth(value: Any, locale: Locale | None) -> bool:
    if not isinstance(value, str) or value == "NO":
        return False
    return fold(value) in TRUE | FALSE | {"no"} | (locale.yes | locale.no if locale else frozenset())


def _untangled(text: str) -> str:
    """The text without the marks of LaTeX and Markdown."""
    text = _LATEX.sub(lambda one: one[1] or one[2] or " ", text)
    return _FENCE.sub("", text).replace(_MARK, " ")


def _opened(text: str) -> str | None:
    """A text that is JSON as lines of keys and values; None where it is none."""
    if not text.strip().startswith(("{", "[")):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        named = [one for key, one in value.items() if key.casefold() in _ANSWER_KEYS]
        value = named[0] if len(named) == 1 else value
    pairs = value.items() if isinstance(value, dict) else [("", one) for one in (value if isinstance(value, list) else [value])]
    return "\n".join(f"{key}: {one}" if key else f"{one}" for key, one in pairs)


# ---------------------------------------------------------------------------------------------------------------------
# Yes and no


def _judge_boolean(said: str, answer: Answer, language: str) -> Verdict:
    """The explicit statements decide where there are any, and all of them; else the text as a whole."""
    words, locale = words_of(language), locale_of(language)
    text = _untangled(said)
    marked = [line[1:] for line in said.split("\n") if line.startswith(_MARK)]
    marked += [text[found.end() :].lstrip(" :=*").split("\n")[0] for found in words.mark.finditer(text)]
    held = [one for one in marked if any(match(one, Answer(value), language) for value in (True, False))]
    if held:
        if all(match(one, answer, language) for one in held):
            return _STATED
        return Verdict(False, "contradicted" if len(held) > 1 else "missing")
    if not isinstance(answer.value, bool):
        is_true = fold(str(answer.value)) in TRUE | (locale.yes if locale else frozenset())
        answer = Answer(is_true) if match(text, answer, language) is None else answer
    if not (match(text, answer, language) or match(_first_word(text), answer, language)):
        return Verdict(False, "missing")
    said_words = {fold(words.generic.sub(" ", one)) for one in words.parts.split(text) if one and len(one) < _SHORT}
    both = (said_words & (TRUE | (locale.yes if locale else set())), said_words & (FALSE | {"no"} | (locale.no if locale else set())))
    return Verdict(False, "contradicted") if all(both) else _STATED


def _first_word(text: str) -> str:
    """The one word that is the first sentence of a text: "No. Norway is not."; but "No. 5" is a number."""
    found = re.match(r"\W{0,3}(\w{1,12})\.\s+[^\W\d_a-zà-ÿ]", text)
    return found[1] if found else ""


# ---------------------------------------------------------------------------------------------------------------------
# Values


@dataclass
class _Clause:
    """A part of a sentence.

    Attributes:
        link: what parts it from the clause before it (a group of `ReadWords.parts`), or "" at the start.
        sentence: the number of its sentence.
        end: where it ends in its sentence.
        slots: which elements of the answer it names.
        others: other values of the answer's kind in it.
        content: its words but for values, units and words that say nothing of a value.
        name: what is left of it, where that is shaped like the answer: a candidate that is a name.
        is_generic: whether words like "it is" were left out of it.
        is_void: whether nothing in it is stated: negated, compared, bracketed, an earlier opinion.
        is_guess: whether it is a value and a question mark.
        is_denied: whether the words behind it negate it (ではなく).
        is_marked: whether it stands behind "the answer is" in its sentence.
    """

    link: str
    text: str
    sentence: int
    slots: set[int] = field(default_factory=set)
    end: int = 0
    others: list[Any] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    name: str = ""
    is_generic: bool = False
    is_void: bool = False
    is_guess: bool = False
    is_denied: bool = False
    is_marked: bool = False


class _Judge:
    """One text against one answer.

    Args:
        text: what was said, with `_MARK` before what is in a box.
        wanted: the answer, or its elements.
        language: ISO 639-1 code.
    """

    def __init__(self, text: str, wanted: Sequence[Answer], language: str) -> None:
        self._wanted, self._language = wanted, language
        self._locale = locale_of(language)
        self._words: ReadWords = words_of(language)
        self._kinds = {_kind(one.value, self._locale) for one in wanted}
        self._units = {self._unit_of(one, text) for one in wanted}
        self._is_year = any(isinstance(one.value, int) and 1000 <= one.value <= 2100 and not one.unit for one in wanted)
        spelled = [one.value for one in wanted if isinstance(one.value, str)]
        self._is_capital = any(one[:1].isupper() for one in spelled)
        self._has_digits = any(map(_has_digit, spelled))
        self._most_words = max((len(one.split()) for one in spelled), default=1)
        self._has_ordinals = language in ("de", "fi", "ko", "tr")
        self._is_typed = "string" not in self._kinds
        self._days: list[Any] = []
        self._clauses = self._read(text)

    # -----------------------------------------------------------------------------------------------------------------
    # Reading

    def _read(self, text: str) -> list[_Clause]:
        bold = [one[1] or one[2] for one in _BOLD.finditer(text)]
        self._bold = bold[0] if len(bold) == 1 else ""
        text = _LATEX.sub(lambda one: one[1] or one[2] or " ", _FENCE.sub("", text))
        text = _HEADING.sub("", text).replace("**", "").replace("__", "").replace("`", "")
        text = self._locale.spelled(text) if self._locale else plain(text)
        found: list[_Clause] = []
        for number, (link, sentence) in enumerate(self._sentences(text)):
            if not self._is_typed and sentence.count(" = ") > 1:
                sentence = sentence.replace(" = ", " | ")  # of names it is a list, of numbers a sum
            slotted = self._with_days(self._slotted(sentence))
            found += self._clauses_of(slotted, number, link, is_asked=sentence.rstrip().endswith("?"))
        return found

    def _sentences(self, text: str) -> Iterator[tuple[str, str]]:
        lines: list[str] = []
        numbered = [one for one in _BULLET.finditer(text) if one[1]]
        for line in _BULLET.sub(lambda one: one[0] if one[1] and len(numbered) < 2 else "", text).split("\n"):
            heads = lines and (lines[-1].endswith(":") and self._words.mark.search(lines[-1]) or self._ends_in_mark(lines[-1]))
            if heads and line.strip():
                lines[-1] += " " + line.strip()
            elif line.strip():
                lines.append(line.strip())
        for line in lines:
            link, waiting = "line", ""
            for piece in _SENTENCE_END.split(line):
                waiting = f"{waiting} {piece}" if waiting else piece
                if _ABBREVIATED.search(waiting) or (self._has_ordinals and re.search(r"(?<!\d)\d{1,4}\.$", waiting)):
                    continue
                yield link, waiting
                link, waiting = "stop", ""
            if waiting:
                yield link, waiting

    def _ends_in_mark(self, line: str) -> bool:
        found = self._words.mark.search(line)
        return found is not None and not line[found.end() :].strip(" :=*")

    def _holds(self, text: str, element: Answer) -> bool:
        text = _OPENING.sub("(", text)  # a part of a text is not read as JSON
        for said in dict.fromkeys((text, self._said(text) if len(text) < _SHORT else text)):
            reading = Reading(said, self._language)
            if match(reading.in_pieces if len(self._wanted) > 1 else reading, element) is not None:
                return True
        return False

    def _slotted(self, sentence: str) -> str:
        """The sentence with a slot in each place of the answer."""
        places: list[tuple[int, int, int]] = []
        for number, element in enumerate(self._wanted):
            # A place that was found is masked by a word as long: what stands beside it is still read in its sentence.
            left = sentence
            for _ in range(_MOST_PLACES):
                if not self._holds(left, element):
                    break
                start, end = self._place(left, element)
                places.append((start, end, number))
                left = left[:start] + ("口" if _TOUCHING.search(left[start:end]) else "X") * (end - start) + left[end:]
        made, at = "", 0
        for start, end, number in sorted(places):
            if start >= at:
                made += sentence[at:start]
                at = end
            made += chr(_FIRST_SLOT + number)  # one place may name two elements that are the same
        return made + sentence[at:]

    def _with_days(self, text: str) -> str:
        """The text with a character for each other day: a comma in it parts nothing."""
        if "date" not in self._kinds:
            return text
        text = dates.digits_in_dates(self._locale.dates(text) if self._locale else text)
        for written, day in list(dates.dates_in(text)):
            self._days.append(day)
            text = text.replace(written, chr(_FIRST_DAY + min(len(self._days), _MOST_ELEMENTS) - 1), 1)
        return text

    def _place(self, text: str, element: Answer) -> tuple[int, int]:
        """Where the first place of an element starts and ends: the fewest words that still hold it."""
        spans = [one.span() for one in _TOKEN.finditer(text) if not one[0].isspace()]
        low, high = 0, len(spans) - 1
        while low < high:  # the first token with which the text up to it, and a bit beyond, holds the element
            middle = (low + high) // 2
            if self._holds(text[: spans[middle][1]], element):
                high = middle
            else:
                low = middle + 1
        last = low
        # A short text is a value, in which nothing is searched: the text up to the first place may not hold it yet.
        earliest = -1 if last < 60 else last - 8
        for size in range(1, 25):
            for end in range(last, earliest, -1):
                first = end - size + 1
                if first >= 0 and self._holds(text[spans[first][0] : spans[end][1]], element):
                    return spans[first][0], spans[end][1]
        return spans[last]

    def _clauses_of(self, sentence: str, number: int, link: str, *, is_asked: bool) -> list[_Clause]:
        mark = self._words.mark.search(sentence)
        marked_from = sentence.find(_MARK) if _MARK in sentence else mark.start() if mark else len(sentence)
        notes: list[str] = []

        def note(found: re.Match[str]) -> str:
            notes.append(found[1] or found[2])
            return chr(_FIRST_NOTE + min(len(notes), _MOST_ELEMENTS) - 1)

        if _SIDE_BY_SIDE.search(sentence):  # a list, each element of it in brackets
            sentence = re.sub(r"[()\[\]]", ",", sentence)
        clauses = list[_Clause]()
        for clause in self._parted(_NOTE.sub(note, sentence), number, link):
            clause.is_marked = clause.end > marked_from
            is_guess = not clause.is_generic and bool(clause.name or not clause.content) and not clause.slots
            clause.is_guess = is_asked and is_guess
            clause.is_void |= is_asked and not is_guess
            noted = [notes[ord(one) - _FIRST_NOTE] for one in _NOTED.findall(clause.text)]
            touches = re.search(r"[\ue000-\ue0ff]\W?\s*[\ue300-\ue3ff]", clause.text) is not None
            clause.text = _NOTED.sub(" ", clause.text)
            clauses.append(clause)
            for text in noted:
                clauses += self._noted(text, number, clause, touches=touches)
        return clauses

    def _noted(self, text: str, number: int, host: _Clause, *, touches: bool) -> list[_Clause]:
        """The clauses of a note in brackets, where it holds the answer or offers another; else it explains."""
        found = list(self._parted(text, number, "open"))
        offers = self._words.parts.match(text.lstrip())
        is_other = touches and any(
            not one.content and any(not isinstance(other, Quantity) or other.unit in self._units for other in one.others)
            for one in found
        )
        if not (any(one.slots for one in found) or is_other or (offers and offers.lastgroup == "either")) or host.link == "than":
            return []
        if is_other:
            found[0].link = "either"
        for one in found:
            one.is_marked = host.is_marked
        return found

    def _parted(self, sentence: str, number: int, link: str) -> Iterator[_Clause]:
        parts = list(self._words.parts.finditer(sentence))
        dashes = sum(one.lastgroup == "dash" for one in parts)
        at = 0
        waiting: _Clause | None = None
        for part in [*parts, None]:
            end = part.start() if part else len(sentence)
            text = sentence[at:end]
            if text.strip(" .*_\"'"):
                if waiting:
                    yield waiting
                waiting = _Clause(link, text, number, end=end)
                self._fill(waiting)
                waiting.is_void |= link == "than"
            if part is None:
                break
            kind = "listed" if part.lastgroup == "dash" and dashes > 1 else part.lastgroup or ""
            if waiting and kind == "contrast" and self._words.negated.match(part[0]):
                waiting.is_denied = True
                waiting.is_void |= not waiting.slots
            if waiting and kind == "than" and waiting.others and any(map(_has_digit, text.split()[-4:-1])):
                waiting.others.pop()  # 5 more than last month
            # Of two separators in a row (", or") the one that joins counts.
            link = kind if text.strip() or kind in _JOINS | {"contrast", "range", "than"} else link
            at = part.end()
        if waiting:
            yield waiting

    def _fill(self, clause: _Clause) -> None:
        text = clause.text
        clause.slots = {ord(one) - _FIRST_SLOT for one in _SLOT.findall(text)}
        bare = _SLOT.sub(" ", text)
        if self._is_typed:
            clause.others = list(self._others(bare))
        if self._is_typed:
            bare = _RUN_OF_LETTERS.sub(lambda one: " " if _has_digit(one[0]) else one[0], bare)
        left = self._words.generic.sub(" ", bare)
        clause.is_generic = len(left) < len(bare)
        clause.content = [one.casefold() for one in _WORDS.findall(left) if not self._is_unit(one)]
        if not self._is_typed and not clause.slots and not _TOPIC.search(text):
            name = self._said(text)
            clause.name = fold(name) if self._is_name(name) else ""
        words = self._words
        is_denied = words.negation.search(text) or words.negated.search(text)
        clause.is_void = bool(words.reports.search(text) or (not clause.slots and is_denied))

    def _said(self, text: str) -> str:
        """A clause without the words at its start and its end that say nothing of a value."""
        text = text.strip(_AROUND)
        while (found := self._words.generic.match(text)) and found.end() < len(text):
            text = text[found.end() :].strip(_AROUND)
        while self._words.is_spaced and (last := text.rfind(" ")) > 0 and self._words.generic.fullmatch(text[last + 1 :]):
            text = text[:last].strip(_AROUND)
        return text

    def _is_unit(self, word: str) -> bool:
        if not self._is_typed or word.casefold() == "in":
            return False
        return unit_named(word) in UNITS or (self._locale is not None and self._locale.unit(word) != word)

    def _others(self, text: str) -> Iterator[Any]:
        """Other values of the answer's kind that a clause names."""
        read = ReadText(text, self._locale)
        if "date" in self._kinds:
            yield from (self._days[ord(one) - _FIRST_DAY] for one in _DAY.findall(text))
        if "time" in self._kinds:
            yield from read.times
        if "number" in self._kinds:
            years = set() if self._is_year else {int(one[1] or one[2]) for one in _YEAR.finditer(text)}
            for one in read.quantities:
                if one.value in years or not any(self._is_rival(one, wanted) for wanted in self._wanted):
                    continue
                yield one

    def _is_rival(self, found: Quantity, wanted: Answer) -> bool:
        """Whether a number could be taken for the answer, and is not a rounded form of it."""
        goal = _quantity(wanted, self._locale)
        if goal is None:
            return False
        if found.unit and not goal.unit and found.unit not in self._units:
            return False
        if not same_quantity(found, goal, float("inf")) or same_quantity(found, goal, wanted.tolerance):
            return False
        return not (_is_rounded(found, goal) or _is_rounded(goal, found))

    def _unit_of(self, wanted: Answer, text: str) -> str:
        goal = _quantity(wanted, self._locale)
        found = Reading(_untangled(text), self._language).numbers if goal else []
        return next((one.unit for one in found if goal and same_quantity(one, goal, wanted.tolerance)), "")

    def _is_name(self, text: str) -> bool:
        """Whether what is left of a clause is shaped like the answer: a name, or as many words."""
        words = text.split()
        if _has_digit(text) and not self._has_digits:
            return False
        if not words or len(words) > 5 or _SUMS.search(text) or self._words.generic.fullmatch(text):
            return False
        if not self._words.is_spaced:
            return len(text) <= 12 and not re.search(r"[的在有了为被于很最据询经由其此]", text)
        if self._is_capital:
            ends = words[0][:1].isupper() and words[-1][:1].isupper()
            return ends and all(one[:1].isupper() or len(one) <= 3 for one in words) and not _COPULA.search(text)
        return len(words) <= self._most_words and not _COPULA.search(text)

    # -----------------------------------------------------------------------------------------------------------------
    # Judging

    @property
    def finds_any(self) -> bool:
        """Whether the answer is anywhere in the text."""
        return any(one.slots for one in self._clauses)

    @property
    def is_stated(self) -> bool:
        """Whether the text names the answer and commits to it."""
        return self.finds_any and self.verdict().is_stated

    def verdict(self) -> Verdict:
        """The verdict on the text."""
        clauses, is_withdrawn = self._uncorrected()
        if not any(one.slots for one in clauses):
            return Verdict(False, "withdrawn" if is_withdrawn else "contradicted")
        marked = [one for one in clauses if one.is_marked and not one.is_void]
        if len(self._wanted) == 1 and any(one.slots or one.others or (one.content and not self._is_typed) for one in marked):
            clauses = list(self._marked(clauses))
            if not any(one.slots for one in clauses):
                return Verdict(False, "contradicted")
        elif self._bold and len(self._wanted) == 1 and _Judge(self._bold, self._wanted, self._language).is_stated:
            return self._of_bold(clauses)
        else:
            clauses = self._deciding(clauses)
            if len({repr(other) for one in clauses if not one.is_void for other in one.others}) > _MOST_CANDIDATES:
                named = [at for at, one in enumerate(clauses) if one.slots]
                if not all(self._is_result(at, clauses) for at in named):
                    return Verdict(False, "several")
        return self._of(clauses)

    def _of_bold(self, clauses: list[_Clause]) -> Verdict:
        named = [one for one in clauses if one.slots]
        reason = next((reason for one in named if (reason := self._uncommitted(one, clauses))), None)
        return Verdict(False, reason) if reason else _STATED

    def _of(self, clauses: list[_Clause]) -> Verdict:
        worst: Reason = "missing"
        stated: set[int] = set()
        for at, clause in enumerate(clauses):
            if not clause.slots:
                continue
            reason = self._uncommitted(clause, clauses) or self._rivalled(at, clauses)
            if reason:
                worst = reason
                if reason == "negated":
                    stated -= clause.slots
            else:
                stated |= clause.slots
        return _STATED if stated == set(range(len(self._wanted))) else Verdict(False, worst)

    def _marked(self, clauses: list[_Clause]) -> Iterator[_Clause]:
        """The clauses behind an explicit mark, with a list of values that goes on in the lines below it."""
        goes_on = False
        for one in clauses:
            is_value = one.slots or one.others if self._is_typed else self._is_element(one)
            goes_on = one.is_marked or (goes_on and bool(is_value) and (not one.content or bool(one.name)))
            if goes_on:
                yield one
            goes_on &= _MARK not in one.text  # nothing goes on behind a box

    def _uncorrected(self) -> tuple[list[_Clause], bool]:
        """The clauses behind the last correction, and whether there is one."""
        clauses = self._clauses
        for at in range(len(clauses) - 1, 0, -1):
            found = self._words.corrects.match(clauses[at].text)
            if found is None:
                continue
            rest = clauses[at:]
            is_all = not clauses[at].text[found.end() :].strip(" .!*")
            if any(one.slots or one.others or one.name for one in rest[is_all:]) or (is_all and len(rest) == 1):
                return rest[is_all:], True
        return clauses, False

    def _deciding(self, clauses: list[_Clause]) -> list[_Clause]:
        """All clauses of a short text; of a long one those of its first and its last sentences with a value."""
        telling = [one for one in clauses if one.slots or (one.others and not one.is_void)]
        sentences = sorted({one.sentence for one in (telling if self._is_typed else clauses)})
        rivals = {repr(other) for one in telling for other in one.others}
        if len(rivals) <= _MOST_CANDIDATES and len(sentences) <= _MOST_SENTENCES:
            return clauses
        kept = {sentences[0], sentences[-1]} if self._is_typed else {*sentences[:2], *sentences[-3:]}
        return [one for one in clauses if one.sentence in kept]

    def _uncommitted(self, clause: _Clause, clauses: list[_Clause]) -> Reason | None:
        """Why a clause that names the answer does not state it, by itself."""
        words, text = self._words, clause.text
        first = _SLOT.search(text)
        assert first is not None, "it has a slot"
        before, after = text[max(0, first.start() - _NEAR) : first.start()], text[first.end() :][:_NEAR]
        if words.unsure.match(text) or _WHETHER.search(before):
            return "supposed"
        if clause.is_denied:
            return "negated"
        for found in words.negation.finditer(before):
            gap = before[found.end() :]
            is_far = len(_WORDS.findall(gap)) > (8 if _TOUCHING.search(gap) else 4)
            if not is_far and (not _COPULA.search(gap) or _OPINION.search(found[0] + gap)):
                return "negated"
        # A unit and what is counted may stand between: 40 % of it, 40个螺栓.
        nouns = list(_WORDS.finditer(after))[:3]
        if _FALSE_AT_END.search(after) or any(words.negated.match(after, at) for at in (0, *(one.end() for one in nouns))):
            return "negated"
        if words.negated.match(after.lstrip(" %°")):
            return "negated"
        at = clauses.index(clause)
        following = clauses[at + 1] if at + 1 < len(clauses) else None
        if words.reports.search(before) and following and following.link == "contrast":
            return "withdrawn"
        if clause.is_void and not words.reports.search(text):
            return "asked"
        return None

    def _rivalled(self, at: int, clauses: list[_Clause]) -> Reason | None:
        """Why a clause that names the answer does not state it, beside the others."""
        return self._rivalled_by_values(at, clauses) if self._is_typed else self._rivalled_by_names(at, clauses)

    def _rivalled_by_values(self, at: int, clauses: list[_Clause]) -> Reason | None:
        own = clauses[at]
        is_sum = _SUMS.search(own.text) is not None or self._is_result(at, clauses)
        if own.others and not own.content and not is_sum:
            return "several"
        if re.search(r"\d\s+[\ue000-\ue0ff]|[\ue000-\ue0ff]\s+\d", own.text):
            return "several"
        content = set(own.content)
        for near, other in enumerate(clauses):
            if near == at or other.is_void or not other.others:
                continue
            if near < at and own.sentence == other.sentence and self._is_result(at, clauses):
                continue
            if _SUMS.search(other.text) and (is_sum or near < at) and self._is_step(other, clauses[near + 1 :]):
                continue
            link = clauses[max(near, at)].link
            if abs(near - at) == 1:
                if link in ("either", "listed"):
                    return "several"
                if link == "range" and not (near < at and other.content):
                    return "several"
                if link == "and" and not (other.content and content):
                    return "several"
                if link == "range":
                    continue
            if set(other.content) == content:
                return "several"
            if not other.content:
                return "contradicted"
        return None

    def _is_result(self, at: int, clauses: list[_Clause]) -> bool:
        """Whether a sentence adds up what it names before the answer, and names nothing behind it."""
        own = clauses[at]
        same = [one for one in clauses if one.sentence == own.sentence]
        slot = _SLOT.search(own.text)
        said = "".join(one.text for one in same)
        behind = own.text[slot.end() :] + "".join(one.text for one in same[same.index(own) + 1 :]) if slot else said
        return _ADDS.search(said[: len(said) - len(behind)]) is not None and not list(self._others(behind))

    def _is_step(self, step: _Clause, later: list[_Clause]) -> bool:
        """Whether the result of a sum is used later, so that it is a step and not an answer."""
        if "=" not in step.text:
            return True
        result = list(self._others(step.text[step.text.rindex("=") :]))
        return not result or any(repr(result[-1]) in map(repr, one.others) for one in later)

    def _rivalled_by_names(self, at: int, clauses: list[_Clause]) -> Reason | None:
        own = clauses[at]
        for near in (at - 1, at + 1):
            if 0 <= near < len(clauses) and self._is_joined(clauses, at, near):
                return "several"
        if reason := self._in_run(at, clauses):
            return reason
        names = len(re.findall(r"(?<!^)(?<![.!?] )\b[^\W\d_a-zà-ÿ]\w+(?: [^\W\d_a-zà-ÿ]\w+)*", own.text))
        if self._is_capital and names > 2 * _MOST_CANDIDATES:
            return "several"
        if any(self._says_same(own, one) for one in clauses if one is not own):
            return "contradicted"
        shape = _shape(_SLOT.sub("Name", own.text))
        alike = sum(_shape(one.text) == shape for one in clauses if not one.is_void and not one.slots)
        return "several" if self._is_capital and len(own.content) > 1 and alike > 1 else None

    def _is_joined(self, clauses: list[_Clause], at: int, near: int) -> bool:
        """Whether "or", "and" or a mark of lists joins the answer with another name."""
        own, other = clauses[at], clauses[near]
        link = clauses[max(at, near)].link
        if link not in ("either", "listed", "and") or other.is_void or (len(self._wanted) > 1 and link != "either"):
            return False
        if other.slots:
            return link == "either" and not other.slots <= own.slots
        touches = _SLOT.search(own.text.strip()[-1:] if near > at else own.text.strip()[:1]) is not None
        is_bare = not own.content
        if not other.content:
            return False
        if link == "either" and (touches or is_bare):
            ends = other.text.split()[:6] if near > at else other.text.split()[-6:]
            return not self._is_capital or not self._words.is_spaced or any(one[:1].isupper() or not one[:1].isascii() for one in ends)
        side = other.text.split("/")[0 if near > at else -1]
        if other.name or (link == "listed" and self._is_name(self._said(side))):
            return touches or is_bare
        return is_bare and near < at and self._ends_in_name(other)

    def _ends_in_name(self, clause: _Clause) -> bool:
        words = clause.text.split()
        if not words or _TOPIC.search(clause.text):
            return False
        if not self._words.is_spaced:
            return True
        return words[-1][:1].isupper() if self._is_capital else bool(clause.name)

    def _in_run(self, at: int, clauses: list[_Clause]) -> Reason | None:
        """Whether the answer is an element of a list of names that nobody asked for."""
        first = last = at
        own_bare = not clauses[at].content
        touches = own_bare or _SLOT.search(clauses[at].text.rstrip(_AROUND)[-1:]) is not None
        while own_bare and first > 0 and clauses[first].link in _RUN and self._is_element(clauses[first - 1]):
            first -= 1
        while touches and last + 1 < len(clauses) and clauses[last + 1].link in _RUN and self._is_element(clauses[last + 1]):
            last += 1
        run = clauses[first : last + 1]
        extra = {one.name for one in run if one.name}
        links = [one.link for one in run[1:]]
        if len(self._wanted) > 1:
            return "several" if extra and not self._are_pairs(run) else None
        has_head = own_bare and first > 0 and clauses[first].link == "comma" and self._ends_in_name(clauses[first - 1])
        has_head = has_head and not clauses[first - 1].is_void and clauses[first - 1].content != []
        size = len(extra) + 1 + has_head
        if not extra and not has_head:
            return None
        if all(link == "comma" for link in links):
            is_first = at == first and not has_head and self._is_capital
            if size == 2:
                return None if is_first or (has_head and (self._is_capital or not self._words.is_spaced)) or not own_bare else "several"
            return None if is_first and size == 3 else "several"
        if all(link == "stop" for link in links) and not any(one.is_generic or one.is_guess for one in run if one.name):
            return "several" if size > 2 else None
        return "several"

    def _is_element(self, clause: _Clause) -> bool:
        return not clause.is_void and bool(clause.name or (clause.slots and not clause.content))

    def _are_pairs(self, run: list[_Clause]) -> bool:
        """Whether each extra name stands behind an element and a comma, and pairs are joined otherwise: Oslo, Norway
        and Paris, France."""
        for before, one in zip(run, run[1:], strict=False):
            if one.name and (one.link != "comma" or not before.slots):
                return False
            if one.slots and before.name and one.link == "comma":
                return False
        return not run[0].name

    def _says_same(self, own: _Clause, other: _Clause) -> bool:
        """Whether another clause says of another name what this one says of the answer."""
        if other.is_void or other.slots:
            return False
        mine = _SLOT.search(own.text)
        assert mine is not None, "it has a slot"
        before, after = _tidy(own.text[: mine.start()]), _tidy(own.text[mine.end() :])
        text = _tidy(other.text)
        if not (before or after) or not (text.startswith(before) and text.endswith(after)):
            return False
        if len(text) <= len(before) + len(after):
            return False
        filler = " ".join(re.sub(r"\d+", "#", other.text).split()).strip(" .,!")
        filler = filler[len(before) : len(filler) - len(after)].strip()
        return self._is_name(self._words.generic.sub(" ", filler)) and not re.match(r"(?:the|a|an|in|at|on) ", filler)


def _shape(text: str) -> str:
    """A clause with one word for each name: of what one says of many names."""
    return re.sub(r"\b[^\W\d_a-zà-ÿ]\w+(?: [^\W\d_a-zà-ÿ]\w+)*", "N", text).strip(_AROUND)


def _tidy(text: str) -> str:
    return " ".join(re.sub(r"\d+", "#", text.casefold()).split()).strip(" .,!")


def _kind(value: Any, locale: Locale | None) -> str:
    if not isinstance(value, str):
        return "number"
    text = locale.dates(locale.spelled(value)) if locale else value
    if dates.whole_date(text):
        return "date"
    if dates.whole_time(locale.clock(text) if locale else text):
        return "time"
    return "number" if whole_quantity(plain(value)) else "string"


def _quantity(wanted: Answer, locale: Locale | None) -> Quantity | None:
    if isinstance(wanted.value, str):
        return whole_quantity(plain(wanted.value))
    if isinstance(wanted.value, list):
        return None
    return Quantity(wanted.value, locale.unit(wanted.unit) if locale else wanted.unit)


def _is_rounded(rough: Quantity, exact: Quantity) -> bool:
    """Whether a number is another one, rounded to two digits or more: 709 thousand of 709,037, or 12.3 of 12.34."""
    if rough.value % 1000 and not exact.value % 1:
        return False  # 190 and 189 are neighbours
    digits = f"{abs(rough.value):.12g}".replace(".", "").lstrip("0").rstrip("0")
    if rough.unit != exact.unit or not 2 <= len(digits) < 12:
        return False
    try:
        return float(f"{exact.value:.{len(digits) - 1}e}") == float(rough.value) and exact.value != rough.value
    except OverflowError:
        return False
