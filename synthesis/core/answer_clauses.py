"""A final answer in clauses: where it names the expected value, and which other values it names.

`final_answers` decides by them whether the answer commits to the value. What a text may cost is bounded: all of it is
linear in the text, whose sentences and places of a value are counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from synthesis.core import dates
from synthesis.core.answer_words import ReadWords, words_of
from synthesis.core.locales import Locale, chinese_places_around, locale_of
from synthesis.core.matching import match
from synthesis.core.normal_text import fold
from synthesis.core.quantities import CJK, plain, whole_quantity
from synthesis.core.readings import NormalizedOutput, ReadText
from synthesis.core.records import Answer
from synthesis.core.units import UNITS, Quantity, same_quantity, unit_named

_MOST_PLACES: Final = 16
"""Places of a value in one sentence that are found."""
_has_digit = re.compile(r"\d").search
SHORT: Final = 60
"""A text that may be a hedged value and no sentence: "Perhaps Oslo."."""
_FIRST_SLOT: Final = 0xE000
MOST_ELEMENTS: Final = 100
SLOT = re.compile("[\ue000-\ue0ff]")
_FIRST_DAY: Final = 0xE200
_DAY = re.compile("[\ue200-\ue2ff]")
BOUND: Final = "\uf8f1"
"""Stands before a place of the answer that is only a bound, or an example."""
MARK: Final = "\uf8f0"
"""Stands for a box, in which mathematics puts its answer."""
_HIDDEN = re.compile(
    r"<!--(?:[^<]|<(?!!--))*?(?:-->|\Z)|~~[^~\n]{1,400}~~|<(del|s|strike)\b[^<>]{0,40}>(?:[^<]|<(?!/?\1\b)){0,400}</\1>"
    r"|<(\w{1,10})\b[^<>]{0,80}\b(?:hidden\b|display:\s?none)[^<>]{0,80}>(?:[^<]|<(?!/?\2\b)){0,400}</\2>",
    re.DOTALL | re.IGNORECASE,
)
"""Text that a reader does not see, or sees struck through."""
_SOURCE = re.compile(r"^[ \t]{0,3}\[(\^?\w{1,8})\]:?[ \t].*$", re.MULTILINE)
_QUOTED = re.compile(r"(?<=\w)[\"”»」]\s*[\"“«「](?=\w)")
_LABELLED = re.compile(r"(?<=\d)\s+(?=[^\W\d_]\w{0,20}\s?=)")
"""Before a name of a number behind another one: a=1 b=2."""
_ITALIC = re.compile(r"(?<![\w*])\*(?=[^\s*])([^*\n]{1,200})(?<=\S)\*(?![\w*])")
_LABEL_CELL = re.compile(r"^[ \t]{0,3}\|[ \t]{0,8}([^|\d\s][^|\d\n]{0,59})\|(?![ \t]*[-:]+[ \t]*\|)", re.MULTILINE)
_NOTED_SLOT = re.compile(r"[(\[]\W{0,4}[\ue000-\ue0ff][^()\[\]]{0,20}[)\]]")
_CONDITION = re.compile(
    r"\b(?:if|unless|depending|wenn|falls|selon|si|se|если|jos|eğer|nếu)\b|如果|若|要是|もし|만약|अगर|إذا|ถ้า"
)
_OPENING = re.compile(r"^\s*[\[{]")
_LATEX = re.compile(r"\\(?:text|mathrm|mathbf)\{([^{}]{0,200})\}|\{(,)\}|\\[,;! ]|\\[()\[\]]|\\?\$(?=\D|$)")
_ANSWER_KEYS = frozenset({"answer", "final_answer", "finalanswer", "result", "value", "答案", "结果"})
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
WORDS = re.compile(rf"[{CJK}\u0e00-\u0e7f]|{_WORD}+")
AROUND: Final = " .,:;*_\"'!?-–—()[]{}<>\uf8f0"
_FIRST_NOTE: Final = 0xE300
_NOTED = re.compile("[\ue300-\ue3ff]")
_NOTE = re.compile(r"\(([^()\n]{0,400})\)|\[([^\[\]\n]{0,400})\]")
_SIDE_BY_SIDE = re.compile(r"[)\]][^\w()\[\]]{0,3}[(\[]")
TOPIC = re.compile(r"[はがをにでも]\s*$")
TOUCHING = re.compile(rf"[{CJK}\u0e00-\u0e7f]")
_RUN_OF_LETTERS = re.compile(rf"[^\s{CJK}\u0e00-\u0e7f]+")
SUMS = re.compile(r"[=×*÷+≈]|\d\s?[-−/]\s?\d|\\times|\\cdot")
COPULA = re.compile(r"\b(?:is|are|was|were)\b|'s\b|是|为", re.IGNORECASE)
_NO_NAME = re.compile(r"^(?i:according|based|given|after|from|with|as|for|in|on|so) |\b(?:I|me|you|your|we|us)\b")
"""Text that starts like a clause around an answer, or addresses the reader."""
_YEAR = re.compile(
    r"(?:\b(?:in|of|since|by|from|until|year|after|before|as of|im jahr|en|em|nel|в|año|ano)\s)(\d{4})\b"
    r"|(\d{4})\s?[年년]",
    re.IGNORECASE,
)
_JOINS = frozenset({"either", "listed", "and"})


def untangled(text: str) -> str:
    """Return the text without the marks of LaTeX and Markdown."""
    text = _LATEX.sub(lambda one: one[1] or one[2] or " ", text)
    return _FENCE.sub("", text).replace(MARK, " ")


def visible(text: str) -> str:
    """Return the text without what is hidden or struck through, and without its sources and the references to them."""
    text = _HIDDEN.sub(" ", text)
    for source in {one[1] for one in _SOURCE.finditer(text)}:
        text = text.replace(f"[{source}]:", f"[{source}]").replace(f"[{source}]", "\ufffc")
    return re.sub(r"^[ \t]{0,3}\ufffc.*$", "", text, flags=re.MULTILINE).replace("\ufffc", "")


def json_lines(text: str) -> str | None:
    """Return a text that is JSON as lines of keys and values; None where it is none."""
    if not text.strip().startswith(("{", "[")):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        named = [one for key, one in value.items() if key.casefold() in _ANSWER_KEYS]
        value = named[0] if len(named) == 1 else value
    if isinstance(value, dict):
        return "\n".join(f"{key}: {one}" for key, one in value.items())
    return "\n".join(map(str, value if isinstance(value, list) else [value]))


@dataclass
class Clause:
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


class AnswerText:
    """A final answer, read for one expected value.

    Args:
        text: what was said, with `MARK` before what is in a box.
        wanted: the answer, or its elements.
        language: ISO 639-1 code.
    """

    def __init__(self, text: str, wanted: Sequence[Answer], language: str) -> None:
        self.wanted, self.language = wanted, language
        self._locale = locale_of(language)
        self.words: ReadWords = words_of(language)
        self._kinds = {_kind(one.value, self._locale) for one in wanted}
        self.units = {self._unit_of(one, text) for one in wanted}
        self._is_year = any(isinstance(one.value, int) and 1000 <= one.value <= 2100 and not one.unit for one in wanted)
        spelled = [one.value for one in wanted if isinstance(one.value, str)]
        self.is_capital = any(one[:1].isupper() for one in spelled)
        self._has_digits = any(map(_has_digit, spelled))
        self._most_words = max((len(one.split()) for one in spelled), default=1)
        self._has_ordinals = language in ("de", "fi", "ko", "tr")
        self.is_typed = "string" not in self._kinds
        # Its marks say that a Chinese text is no bare value, and are lost in the one notation of `spelled`.
        self._is_sentence = re.search(r"[。！？，：；]", text) is not None
        self._days: list[Any] = []
        self.clauses = self._read(text)

    def _read(self, text: str) -> list[Clause]:
        bold = list(dict.fromkeys(one[1] or one[2] for one in _BOLD.finditer(text)))
        if self.is_typed:  # **Total:** **40**
            bold = [one for one in bold if _has_digit(one)] or bold
        self.bold = bold[0] if len(bold) == 1 else ""
        text = _FENCE.sub("", _LATEX.sub(lambda one: one[1] or one[2] or " ", text))
        text = _HEADING.sub("", text).replace("**", "").replace("__", "").replace("`", "")
        text = _ITALIC.sub(r"\1", text)
        if self.is_typed:
            text = _LABEL_CELL.sub(r"\1: ", text)
        text = self._locale.spelled(text) if self._locale else plain(text)
        found: list[Clause] = []
        read: list[tuple[str, int, str, bool]] = []
        for number, (link, sentence) in enumerate(self._sentences(text)):
            if not self.is_typed and sentence.count(" = ") > 1:
                sentence = sentence.replace(" = ", " | ")  # of names it is a list, of numbers a sum
            sentence = _LABELLED.sub("; ", sentence) if self.is_typed else _QUOTED.sub(", ", sentence)
            slotted = self._with_days(self._slotted(sentence))
            if self.is_typed:
                slotted = self.words.in_digits(
                    self.words.bounded.sub(lambda one: SLOT.sub(lambda at: BOUND + at[0], one[0]), slotted)
                )
            read.append((slotted, number, link, sentence.rstrip().endswith("?")))
        self._is_in_note = any(_NOTED_SLOT.search(one[0]) for one in read)
        for slotted, number, link, is_asked in read:
            found += self._clauses_of(slotted, number, link, is_asked=is_asked)
        return found

    def _sentences(self, text: str) -> Iterator[tuple[str, str]]:
        lines: list[str] = []
        numbered = [one for one in _BULLET.finditer(text) if one[1]]
        for line in _BULLET.sub(lambda one: one[0] if one[1] and len(numbered) < 2 else "", text).split("\n"):
            heads = lines and (
                lines[-1].endswith(":") and self.words.mark.search(lines[-1]) or self._ends_in_mark(lines[-1])
            )
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
        found = self.words.mark.search(line)
        return found is not None and not line[found.end() :].strip(" :=*")

    def holds(self, text: str, element: Answer) -> bool:
        text = _OPENING.sub("(", text)  # a part of a text is not read as JSON
        for said in dict.fromkeys((text, self.trimmed(text) if len(text) < SHORT else text)):
            reading = NormalizedOutput(said + "。" * self._is_sentence, self.language)
            if match(reading.in_pieces if len(self.wanted) > 1 else reading, element) is not None:
                return True
        return False

    def _slotted(self, sentence: str) -> str:
        """Return the sentence with a slot in each place of the answer."""
        places: list[tuple[int, int, int]] = []
        for number, element in enumerate(self.wanted):
            # A place that was found is masked by a word as long: what stands beside it is still read in its sentence.
            left = sentence
            for _ in range(_MOST_PLACES):
                if not self.holds(left, element):
                    break
                start, end = self._place(left, element)
                self.is_capital &= not left[start:end][:1].islower()
                places.append((start, end, number))
                left = left[:start] + ("口" if TOUCHING.search(left[start:end]) else "X") * (end - start) + left[end:]
        made, at = "", 0
        for start, end, number in sorted(places):
            if start >= at:
                made += sentence[at:start]
                at = end
            made += chr(_FIRST_SLOT + number)  # one place may name two elements that are the same
        return made + sentence[at:]

    def _with_days(self, text: str) -> str:
        """Return the text with a character for each other day: a comma in it parts nothing."""
        if "date" not in self._kinds:
            return text
        text = dates.digits_in_dates(self._locale.dates(text) if self._locale else text)
        for written, day in list(dates.dates_in(text)):
            self._days.append(day)
            text = text.replace(written, chr(_FIRST_DAY + min(len(self._days), MOST_ELEMENTS) - 1), 1)
        return text

    def _place(self, text: str, element: Answer) -> tuple[int, int]:
        """Return start and end of the first occurrence of an element: the fewest words that still contain it."""
        spans = [one.span() for one in _TOKEN.finditer(text) if not one[0].isspace()]
        low, high = 0, len(spans) - 1
        while low < high:  # the first token with which the text up to it, and a bit beyond, holds the element
            middle = (low + high) // 2
            if self.holds(text[: spans[middle][1]], element):
                high = middle
            else:
                low = middle + 1
        last = low
        # A short text is a value, in which nothing is searched: the text up to the first place may not hold it yet.
        earliest = -1 if last < 60 else last - 8
        for size in range(1, 25):
            for end in range(last, earliest, -1):
                first = end - size + 1
                if first >= 0 and self.holds(text[spans[first][0] : spans[end][1]], element):
                    return spans[first][0], spans[end][1]
        return spans[last]

    def _clauses_of(self, sentence: str, number: int, link: str, *, is_asked: bool) -> list[Clause]:
        mark = self.words.mark.search(sentence)
        marked_from = sentence.find(MARK) if MARK in sentence else mark.start() if mark else len(sentence)
        notes: list[str] = []

        def note(found: re.Match[str]) -> str:
            notes.append(found[1] or found[2])
            return chr(_FIRST_NOTE + min(len(notes), MOST_ELEMENTS) - 1)

        if _SIDE_BY_SIDE.search(sentence):  # a list, each element of it in brackets
            sentence = re.sub(r"[()\[\]]", ",", sentence)
        clauses = list[Clause]()
        for clause in self._parted(_NOTE.sub(note, sentence), number, link):
            clause.is_marked = clause.end > marked_from
            is_guess = bool(clause.name or not clause.content) and not (clause.slots or COPULA.search(clause.text))
            clause.is_guess = is_asked and is_guess
            clause.is_void |= is_asked and not is_guess
            noted = [notes[ord(one) - _FIRST_NOTE] for one in _NOTED.findall(clause.text)]
            touches = re.search(r"[\ue000-\ue0ff]\W?\s*[\ue300-\ue3ff]", clause.text) is not None
            clause.text = _NOTED.sub(" ", clause.text)
            clauses.append(clause)
            for text in noted:
                clauses += self._noted(text, number, clause, touches=touches)
        return clauses

    def _noted(self, text: str, number: int, host: Clause, *, touches: bool) -> list[Clause]:
        """Return the clauses of a note in brackets, if it contains the answer or another one; else it only explains."""
        found = list(self._parted(text, number, "open"))
        offers = self.words.parts.match(text.lstrip())
        is_other = touches and any(
            (not one.content or (one.text[:1].isdigit() and _CONDITION.search(text)))
            and any(not isinstance(other, Quantity) or other.unit in self.units for other in one.others)
            for one in found
        )
        if (
            not (
                any(one.slots or (one.others and self._is_in_note) for one in found)
                or is_other
                or (offers and offers.lastgroup == "either")
            )
            or host.link == "than"
        ):
            return []
        if is_other:
            found[0].link = "either"
        for one in found:
            one.is_marked = host.is_marked
            if self._is_in_note:  # bolts (40)
                one.content = one.content or host.content
        return found

    def _parted(self, sentence: str, number: int, link: str) -> Iterator[Clause]:
        parts = list(self.words.parts.finditer(sentence))
        dashes = sum(one.lastgroup == "dash" for one in parts)
        at = 0
        waiting: Clause | None = None
        for part in [*parts, None]:
            end = part.start() if part else len(sentence)
            text = sentence[at:end]
            if text.strip(" .*_\"'"):
                if waiting:
                    yield waiting
                waiting = Clause(link, text, number, end=end)
                self._fill(waiting)
                waiting.is_void |= link == "than"
            if part is None:
                break
            kind = "listed" if part.lastgroup == "dash" and dashes > 1 else part.lastgroup or ""
            if waiting and kind == "contrast" and self.words.negated.match(part[0]):
                waiting.is_denied = True
                waiting.is_void |= not waiting.slots
            if waiting and kind == "than" and waiting.others and any(map(_has_digit, text.split()[-4:-1])):
                waiting.others.pop()  # 5 more than last month
            # Of two separators in a row (", or"), the conjunction counts.
            link = kind if text.strip() or kind in _JOINS | {"contrast", "range", "than"} else link
            at = part.end()
        if waiting:
            yield waiting

    def _fill(self, clause: Clause) -> None:
        text = clause.text
        clause.slots = {ord(one) - _FIRST_SLOT for one in SLOT.findall(text)}
        bare = SLOT.sub(" ", text)
        if self.is_typed:
            clause.others = list(self.others_in(bare))
        if self.is_typed:
            bare = _RUN_OF_LETTERS.sub(lambda one: " " if _has_digit(one[0]) else one[0], bare)
        left = self.words.generic.sub(" ", bare)
        clause.is_generic = len(left) < len(bare)
        clause.content = [one.casefold() for one in WORDS.findall(left) if not self._is_unit(one)]
        if not self.is_typed and not clause.slots and not TOPIC.search(text):
            name = self.trimmed(text)
            clause.name = fold(name) if self.is_name(name) else ""
        words = self.words
        is_denied = words.negation.search(text) or words.negated.search(text)
        clause.is_void = bool(words.reports.search(text) or (not clause.slots and is_denied))

    def trimmed(self, text: str) -> str:
        """Return a clause without the words at its start and its end that do not belong to a value."""
        text = text.strip(AROUND)
        while (found := self.words.generic.match(text)) and (end := found.end()) < len(text):
            if not self.words.is_spaced and any(chinese_places_around(text, end - 1, end + 1)):
                break  # 都 of 都柏林 is no word
            text = text[end:].strip(AROUND)
        while self.words.is_spaced and (last := text.rfind(" ")) > 0 and self.words.generic.fullmatch(text[last + 1 :]):
            text = text[:last].strip(AROUND)
        return text

    def _is_unit(self, word: str) -> bool:
        if not self.is_typed or word.casefold() == "in":
            return False
        return unit_named(word) in UNITS or (self._locale is not None and self._locale.unit(word) != word)

    def others_in(self, text: str) -> Iterator[Any]:
        """Yield other values of the answer's kind that a clause names."""
        read = ReadText(text, self._locale)
        if "date" in self._kinds:
            yield from (self._days[ord(one) - _FIRST_DAY] for one in _DAY.findall(text))
        if "time" in self._kinds:
            yield from read.times
        if "number" in self._kinds:
            years = set() if self._is_year else {int(one[1] or one[2]) for one in _YEAR.finditer(text)}
            for one in read.quantities:
                if one.value in years or not any(self._is_rival(one, wanted) for wanted in self.wanted):
                    continue
                yield one

    def _is_rival(self, found: Quantity, wanted: Answer) -> bool:
        """Return whether a number could be taken for the answer, and is not a rounded form of it."""
        goal = _quantity(wanted, self._locale)
        if goal is None:
            return False
        if found.unit and not goal.unit and found.unit not in self.units:
            return False
        if not same_quantity(found, goal, float("inf")) or same_quantity(found, goal, wanted.tolerance):
            return False
        return not (_is_rounded(found, goal) or _is_rounded(goal, found))

    def _unit_of(self, wanted: Answer, text: str) -> str:
        goal = _quantity(wanted, self._locale)
        found = NormalizedOutput(untangled(text), self.language).numbers if goal else []
        return next((one.unit for one in found if goal and same_quantity(one, goal, wanted.tolerance)), "")

    def is_name(self, text: str) -> bool:
        """Return whether what is left of a clause is shaped like the answer: a name, or as many words."""
        words = text.split()
        if _has_digit(text) and not self._has_digits:
            return False
        if (
            _NO_NAME.search(text)
            or not words
            or len(words) > 5
            or SUMS.search(text)
            or self.words.generic.fullmatch(text)
        ):
            return False
        if not self.words.is_spaced:
            return len(text) <= 12 and not re.search(r"[的在有了为被于很最据询经由其此]", text)
        if self.is_capital:
            ends = words[0][:1].isupper() and words[-1][:1].isupper()
            return ends and all(one[:1].isupper() or len(one) <= 3 for one in words) and not COPULA.search(text)
        return len(words) <= self._most_words and not COPULA.search(text)


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
    """Return whether a number is another one, rounded to two digits or more: 709 thousand of 709,037."""
    if rough.value % 1000 and not exact.value % 1:
        return False  # 190 and 189 are neighbours
    digits = f"{abs(rough.value):.12g}".replace(".", "").lstrip("0").rstrip("0")
    if rough.unit != exact.unit or not 2 <= len(digits) < 12:
        return False
    try:
        return float(f"{exact.value:.{len(digits) - 1}e}") == float(rough.value) and exact.value != rough.value
    except OverflowError:
        return False
