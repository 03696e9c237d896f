"""Searchable form of a tool's output for `matching`: its values and texts, each form made once for all answers.

The cost of an output is bounded before the search. An output of more than `MOST_CHARACTERS` or `MOST_VALUES` lists
everything and contains no answer. A text with too many numbers, or too many parts, contains none of these either. All
work is linear in the output.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import islice
from typing import Any, Final

from synthesis.core import dates
from synthesis.core.json_leaves import MOST_CHARACTERS, NO, Code, Flag, leaves_of, names_a_code
from synthesis.core.judgements import judgement_at_start
from synthesis.core.locales import Locale, locale_of
from synthesis.core.normal_text import bare, fold, with_tones
from synthesis.core.quantities import (
    CJK,
    each_numeral,
    each_quantity,
    is_in_longer,
    plain,
)
from synthesis.core.units import LONGEST_UNIT, Quantity

MOST_VALUES: Final = 1_000
"""Roughly the number of short words in a list that a model is shown."""
_GROWING: Final = "\ufdfa"
"""The one letter that NFKC expands to eighteen; it expands any other to eight at most."""
_MOST_GROWING: Final = 100
_LONGEST_PIECED: Final = 10_000
_SAID_WITHIN: Final = 200
TRUE = frozenset({"true", "yes", "是", "是的", "对", "真"})
FALSE = frozenset({"false", "否", "不是", "不", "不对", "假"})
_EMPHASIS = re.compile(r"\*{2,3}|__")
_ANSWER = re.compile(r"(?i:answer|result|答案|结果)\W{0,3}$")
_CHINESE = re.compile(rf"[{CJK}]")
# A comma before three digits is a thousands separator and parts nothing.
_PARTS = re.compile(
    r"(?<!\d),|,(?!\d{3}(?!\d))|[;|\n()\[\]{}\"，；、「」『』《》【】«»]+|:\s"
    r"|(?<=[\u3400-\u9fff]):|:(?=[\u3400-\u9fff])| = | – | — |——|→| -> "
)
# Where a comma is the decimal sign.
_PARTS_OF_COMMAS = re.compile(_PARTS.pattern.replace(r"(?<!\d),|,(?!\d{3}(?!\d))", r"(?<!\d),|,(?!\d)"))
BULLET = re.compile(r"\s{0,9}(?:[-*+•·]|\d{1,2}[.)])\s{1,3}")
"""Start of a list element."""
_SENTENCE_END = re.compile(r"(?<=[.!?。])(?:\s+|(?=[^\s\d.]))")
_NO_SENTENCE = re.compile(r"\W{0,3}[Nn]o[.!]\s+[^\W\d_a-zà-ÿ]")  # not the number of "No. de"
_AND = re.compile(r" and | & |(?<=[\u3400-\u9fff])[和与及](?=[\u3400-\u9fff])")
_CHINESE_IS = re.compile(r"是|(?<=..)为(?=..)|(?<=..)(?:代表(?!团)|表示|名为|叫做)")
_CHINESE_MARK = re.compile(r"[。！？，：；]")
_VERB = re.compile(r"\b(?:is|are|was|were)\b")
_DIGITS = re.compile(r"\d[\d.,]*+")
_WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+")
_HYPHEN = re.compile(r"(?<=[a-z])-(?=[a-z])")
BRACKETS: Final = "「」『』《》【】«»*"
_MAX_VALUE_WORDS: Final = 5


class NormalizedOutput:
    """A tool's output, parsed for the search.

    Args:
        output: a JSON value.
        language: ISO 639-1 code of the language that its texts are in.

    Attributes:
        quantities: its JSON numbers, each with the unit beside it (`{"n": 5, "unit": "km"}`).
        booleans: its JSON booleans.
        texts: its strings; JSON within a string is opened.
        splits_and: True if it is split at "and", see `in_pieces`.
    """

    splits_and = False

    def __init__(self, output: Any, language: str = "en") -> None:
        self.locale = locale_of(language)
        self.language = language
        self.quantities: list[Quantity] = []
        self.booleans: set[bool] = set()
        self.texts: list[ReadText] = []
        self._flags: set[Flag] = set()
        characters = 0
        for count, leaf in enumerate(leaves_of(output, self.locale), start=1):
            if isinstance(leaf, str):
                characters += len(leaf)
                self.texts.append(ReadText(leaf, self.locale))
            elif isinstance(leaf, Code):
                characters += len(leaf.text)
                self.texts.append(ReadText(leaf.text, self.locale, is_code=True))
            elif isinstance(leaf, Flag):
                self.booleans.add(leaf.value)
                self._flags.add(leaf)
            elif isinstance(leaf, Quantity):
                characters += leaf.value.bit_length() // 3 if isinstance(leaf.value, int) else 0
                self.quantities.append(leaf)
            if leaf is None or count > MOST_VALUES or characters > MOST_CHARACTERS:
                self.quantities, self.booleans, self.texts = [], set(), []
                return

    @cached_property
    def said(self) -> set[bool]:
        """Return which of true and false it states, as JSON or in words."""
        said = set(self.booleans)
        for text in self.texts:
            said |= text.said
        alone = self.texts[0] if len(self.texts) == 1 and not (said or self.quantities) else None
        if alone and alone.is_doubtful and fold(alone.leaf) == NO:
            return {False}  # "NO", with nothing beside it that it could be the code of
        return said

    @property
    def is_doubtful(self) -> bool:
        """Return whether it has a "no" that may be a code, an abbreviation or a heading."""
        return any(text.is_doubtful for text in self.texts)

    @cached_property
    def numbers(self) -> list[Quantity]:
        """Return the JSON numbers and the numbers in texts; none if there are too many."""
        found = list(self.quantities)
        for text in self.texts:
            found += text.quantities
            if len(found) > MOST_VALUES:
                return []
        return found

    @cached_property
    def spelled(self) -> frozenset[str]:
        """Return its JSON numbers as strings, in their own notation alone: "02" is an identifier, not the number 2."""
        spelled: set[str] = set()
        for value, _ in self.quantities:
            if isinstance(value, float):
                spelled.add(str(value))
                if value.is_integer() and abs(value) < 1e15:
                    spelled.add(str(int(value)))
            elif value.bit_length() < 10_000:  # Python writes no integer of more than 4300 digits
                spelled.add(str(value))
        return frozenset(spelled)

    @cached_property
    def keys(self) -> str:
        """Return the keys of all texts, for a quick rejection."""
        return "\0".join(text.key for text in self.texts)

    @cached_property
    def in_pieces(self) -> NormalizedOutput:
        """Return a copy in which the elements that "and" joins in short texts are texts of their own."""
        whole = NormalizedOutput(None, self.language)
        whole.splits_and = True
        whole.quantities, whole.booleans, whole.texts = self.quantities, self.booleans, list(self.texts)
        if self.is_parted:
            short = [text for text in self.texts if len(text.leaf) < _LONGEST_PIECED]
            parts = ((text, part) for text in short for part in text.marks.split(text.plain))
            pieces = (piece for text, part in parts for piece in text.split_at_and(part) if piece != text.leaf)
            pieces = (piece for piece in pieces if not _DIGITS.fullmatch(piece.strip()))  # see `holds_digits`
            found = dict.fromkeys(islice(pieces, MOST_VALUES + 1))
            whole.texts += (ReadText(piece, self.locale) for piece in found) if len(found) <= MOST_VALUES else ()
        return whole

    def without(
        self, is_word: Callable[[str], bool], is_number: Callable[[float], bool], flags: Mapping[str, bool]
    ) -> NormalizedOutput:
        """Return a copy without the words and numbers for which these are true, and without these flags.

        Args:
            is_word: called for each run of letters, and each run of digits, of its texts.
            is_number: called for its JSON numbers.
            flags: names and values of JSON booleans.
        """
        rest = NormalizedOutput(None, self.language)
        rest.quantities = [one for one in self.quantities if not is_number(one.value)]
        rest.booleans = {one.value for one in self._flags if flags.get(one.name) is not one.value}
        for text in self.texts:
            leaf = _WORD.sub(lambda word: "·" if is_word(word[0]) else word[0], plain(text.leaf))
            rest.texts.append(ReadText(leaf, self.locale, is_code=text.is_code))
        return rest

    @cached_property
    def is_parted(self) -> bool:
        """Return whether the parts of its texts are few enough to be searched."""
        return sum(len(text.parts) + len(text.clauses) - 2 for text in self.texts) <= MOST_VALUES


class ReadText:
    """A string of an output, or a piece of one, in the forms in which it is searched.

    Args:
        locale: of the text's language; None for English and Chinese.
        is_code: True if its key marks it as a code or a name, so that "no" is one.
    """

    def __init__(self, leaf: str, locale: Locale | None = None, *, is_code: bool = False) -> None:
        self.leaf = leaf
        self.locale = locale
        self.marks = _PARTS_OF_COMMAS if locale and locale.has_decimal_comma else _PARTS
        self.is_code = is_code

    @cached_property
    def plain(self) -> str:
        """See `quantities.plain`; empty if the normal form is many times as long, as with some Arabic ligatures."""
        if self.leaf.count(_GROWING) > _MOST_GROWING:
            return ""
        text = plain(self.leaf)
        text = self.locale.plain(text) if self.locale else text
        return text if len(text) <= 2 * MOST_CHARACTERS else ""

    @cached_property
    def numeric(self) -> str:
        """`plain`, with numbers and units in the notation that `quantities` reads."""
        return self.locale.numbers(self.dated) if self.locale else self.plain

    @cached_property
    def dated(self) -> str:
        """`plain`, with days in the notation that `dates` reads."""
        return self.locale.dates(self.plain) if self.locale else self.plain

    @cached_property
    def bare(self) -> str:
        """`plain`, without the accents of Latin letters."""
        return bare(self.plain)

    @cached_property
    def key(self) -> str:
        return _key(self.bare)

    @cached_property
    def toned(self) -> str:
        """Return its words with their accents, for languages in which accents change the word; empty if it has no
        accents."""
        text = fold(self.plain)
        return with_tones(text) if bare(text) != text else ""

    @cached_property
    def is_text(self) -> bool:
        """Return whether it is a sentence, in which a phrase may be searched, and not a bare value."""
        leaf = self.leaf
        if len(leaf) > 1000 or (self.locale and self.locale.is_sentence(self.plain)):
            return True
        words = leaf.split()
        chinese = len(_CHINESE.findall(leaf))
        if chinese:
            return chinese >= 12 or bool(_CHINESE_MARK.search(leaf) or _CHINESE_IS.search(leaf))
        if len(words) > _MAX_VALUE_WORDS or (len(words) >= 3 and leaf.rstrip().endswith((".", "!", "?"))):
            return True
        return len(words) >= 3 and bool(_VERB.search(leaf))

    @cached_property
    def parts(self) -> list[str]:
        """Return the parts between commas, brackets and similar marks."""
        return self.marks.split(self.bare)

    @cached_property
    def clauses(self) -> list[str]:
        """Return the two sides of "is" in a Chinese sentence."""
        return _CHINESE_IS.split(self.bare) if self.is_text else [self.bare]

    @cached_property
    def parts_by_key(self) -> dict[str, list[str]]:
        return _by_key(self.parts)

    @cached_property
    def clauses_by_key(self) -> dict[str, list[str]]:
        return _by_key(self.clauses)

    @cached_property
    def line(self) -> str:
        """Return `bare` on one line, with single spaces."""
        return " ".join(self.bare.split())

    @cached_property
    def folded_line(self) -> str:
        return self.line.casefold()

    @cached_property
    def said(self) -> set[bool]:
        """Return which of true and false its parts state; agreement far inside a text refers to something else."""
        return self._words[0]

    @property
    def is_doubtful(self) -> bool:
        """Return whether a part is a "no" that may be a code, an abbreviation or a heading."""
        return self._words[1]

    @cached_property
    def _words(self) -> tuple[set[bool], bool]:
        """Return which of true and false it states, and whether it has a doubtful "no"."""
        head = _EMPHASIS.sub("", plain(self.leaf[:_SAID_WITHIN]))
        parts = self.marks.split(head)
        judged = judgement_at_start(head)
        if len(self.leaf) > _SAID_WITHIN:
            parts.pop()  # it is cut: the "no" of "nobody" is none
        words = {fold(part) for part in parts if len(part) < 20}
        said = {said for said, ones in ((True, TRUE), (False, FALSE)) if words & ones}
        if judged is not None:
            said.add(judged)
        if self.locale:
            said |= self._said_in_language(self.locale, head)
        if NO not in words or self.is_code:
            return said, False
        doubtful, start = False, 0
        for mark in [*_PARTS.finditer(head), None][: len(parts)]:
            end, behind = mark.span() if mark else (len(head), len(head))
            if fold(head[start:end]) == NO:
                if _says_no(head, start, end, behind):
                    said.add(False)
                else:
                    doubtful = True
            start = behind
        return said, doubtful

    def _said_in_language(self, locale: Locale, head: str) -> set[bool]:
        parts = [part for one in self.marks.split(locale.plain(head)) for part in (one, *_SENTENCE_END.split(one))]
        if len(self.leaf) > _SAID_WITHIN:
            parts.pop()
        if locale.forms.beside:  # a space parts clauses
            parts += [part.split()[0] for part in parts if " " in part.strip()]
        words = {fold(part) for part in parts}
        words |= {locale.judgement(word) for word in words}
        said = {said for said, ones in ((True, locale.yes), (False, locale.no)) if words & ones}
        return said | {False} if _NO_SENTENCE.match(head) else said

    @cached_property
    def quantities(self) -> list[Quantity]:
        """Return the numbers in it; of too many, only enough to show that they are too many."""
        return list(islice(each_quantity(self.numeric), MOST_VALUES + 1))

    def split_at_and(self, part: str) -> list[str]:
        """Split a part at the "and" of a list, in English, Chinese or the text's language."""
        elements = _AND.split(part)
        if self.locale:
            elements = [one for element in elements for one in self.locale.joins.split(element)]
        return elements

    def holds_digits(self, wanted: str, *, splits_and: bool) -> bool:
        """Return whether a part is these digits, outside telephone numbers, dates and longer numbers.

        Args:
            splits_and: True: "and" separates parts too.
        """
        if not splits_and and wanted not in self.parts_by_key:
            return False
        at = 0
        for part in self.parts:
            at = self.bare.index(part, at)
            if wanted in part:
                inner = at
                for piece in self.split_at_and(part) if splits_and else (part,):
                    inner = self.bare.index(piece, inner)
                    first = inner + len(piece) - len(piece.lstrip())
                    if _key(piece) == wanted and not is_in_longer(self.bare, first, inner + len(piece.rstrip())):
                        return True
                    inner += len(piece)
            at += len(part)
        return False

    @cached_property
    def numerals(self) -> frozenset[str]:
        """Return the numbers in it as written, except parts of larger quantities; none if there are too many."""
        found = list(islice(each_numeral(self.numeric if self.locale else self.bare), MOST_VALUES + 1))
        return frozenset(found) if len(found) <= MOST_VALUES else frozenset()

    @cached_property
    def times(self) -> set[tuple[int, int, int]]:
        return dates.times_in(self.locale.clock(self.dated) if self.locale else self.plain)

    @cached_property
    def _digits_in_dates(self) -> str:
        return dates.digits_in_dates(self.dated)

    def days(self, year: int) -> set[datetime.date]:
        """Return every calendar day of a year that it names in full."""
        return dates.dates_of_year(self._digits_in_dates, year)


def _says_no(head: str, start: int, end: int, behind: int) -> bool:
    """Return whether a "no" between two marks of a text is the word."""
    before, after = head[:start].rstrip(" \"'"), head[end : behind + 1].lstrip("\"'")
    if before.endswith((":", "=", "->", "→")):
        label = before[-LONGEST_UNIT:]
        return not names_a_code(label) and ("NO" not in head[start:end] or bool(_ANSWER.search(label)))
    if "NO" in head[start:end]:
        return False
    # A sentence continues after a space, a table does not; "No" between lines is an entry of a list.
    goes_on = not after or after[0] == " " or (after[0] in ",;" and after[1:2] == " ") or after[0] in "(：—→"
    if not before:
        return goes_on or after[0] == "\n"
    return before.endswith("\n") and goes_on and "No" in head[start:end]


def key(text: str, locale: Locale | None = None) -> str:
    """Return `fold(text)` without accents, brackets, "&", hyphens between letters and a leading "the"."""
    return _key(bare(locale.spelled(text) if locale else plain(text)))


def _key(bare_text: str) -> str:
    folded = fold(bare_text.strip(BRACKETS + " ")).strip(BRACKETS).replace(" & ", " and ")
    return _HYPHEN.sub(" ", folded).removeprefix("the ")


def _by_key(parts: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in dict.fromkeys(parts):
        found.setdefault(_key(BULLET.sub("", part)), []).append(part)
    return found
