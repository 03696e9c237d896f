"""Which of several values a final answer commits to, by the order in which it names them. `final_answers` uses it."""

from __future__ import annotations

import re
from typing import Final

from synthesis.core.answer_clauses import SLOT, SUMS, AnswerText, Clause

ADDS = re.compile(
    r"\b(?:sum|adding|added|plus|minus|times|total|together|product|difference|average|mean|divided|multiplied)\b"
    r"|加|减|乘|除以|之和|之差|之积|平均|合计|共",
    re.IGNORECASE,
)
_RESULT = re.compile(
    r"\b(?:so|thus|hence|therefore|now|result|finally|left|lea(?:ves|ving)|altogether|in all|overall|remain\w*|"
    r"gives?|makes?|total|also|somit|insgesamt|donc|"
    r"au total|en tout|entonces|en total|portanto|quindi|итого|всего|toplam|yhteensä)\b"
    r"|所以|因此|总共|共|合计|总计|结果|剩|合わせて|合計|총",
    re.IGNORECASE,
)
"""Marks a value as what the values before it lead to."""
_LABELLED = re.compile(
    r"\w\s?(?::|=|→|\bis\b|是|为)\s?([\ue000-\ue0ff]|[\u3400-\u9fff]{1,8}(?!\s?:)"
    r"|[^\W\d_a-zà-ÿ\u3400-\u9fff]\w+(?: [^\W\d_a-zà-ÿ]\w+)*)"
    r"(?!\w|\s?:)"
)
_FEWEST_RIVALS: Final = 2
"""Other values of a text beside which a value needs a place of its own; two values may be a comparison."""
RUN = frozenset({"comma", "line", "stop", "semicolon", "listed", "and", "either"})


def is_conditional(read: AnswerText, at: int, clauses: list[Clause]) -> bool:
    """Return whether the answer is one of several cases: "40, unless it is 41", "if bolts, 40; if nuts, 7"."""
    unsure = read.words.unsure.match
    after, before = clauses[at + 1 : at + 2], clauses[max(0, at - 1) : at]
    if any(unsure(one.text) and (one.others or one.is_void) for one in after if one.sentence == clauses[at].sentence):
        return True
    return any(unsure(one.text) for one in before) and sum(unsure(one.text) is not None for one in clauses) > 1


def is_led(read: AnswerText, at: int, clauses: list[Clause]) -> bool:
    """Return whether other values stand before this one, and it is not their result.

    Beside two others and more, whatever each is said of, the answer is the first, or the last that is marked
    as a result ("so", "in total").
    """
    telling = [near for near, one in enumerate(clauses) if one.slots or (one.others and not one.is_void)]
    if len({repr(other) for near in telling for other in clauses[near].others}) < _FEWEST_RIVALS:
        return False
    results = [near for near in telling if _is_marked_result(read, near, clauses)]
    if results and clauses[at].slots <= clauses[results[-1]].slots:
        return False
    slot = SLOT.search(clauses[at].text)
    beside = list(read.others_in(clauses[at].text[: slot.start()])) if slot else []
    return len(beside) >= _FEWEST_RIVALS or any(clauses[near].others for near in telling if near < at)


def _is_marked_result(read: AnswerText, at: int, clauses: list[Clause]) -> bool:
    own = clauses[at]
    if SUMS.search(own.text) or (own.slots and is_result(read, at, clauses)):
        return True
    same = [one.text for one in clauses[max(0, at - 2) : at] if one.sentence == own.sentence and not one.others]
    return _RESULT.search(" ".join([*same, own.text])) is not None


def is_in_row(read: AnswerText, at: int, clauses: list[Clause]) -> bool:
    """Return whether the whole text is a row of single words, whatever they are: "XXXIX, 40, XLI"."""
    row = [one for one in clauses if one.slots or (one.content and not one.is_generic)]
    is_row = all(not one.content if one.slots else len(one.content) == 1 for one in row)
    return is_row and len(row) > _FEWEST_RIVALS and all(one.link in RUN for one in row[1:])


def is_result(read: AnswerText, at: int, clauses: list[Clause]) -> bool:
    """Return whether a sentence adds up what it names before the answer, and names nothing behind it."""
    own = clauses[at]
    same = [one for one in clauses if one.sentence == own.sentence]
    slot = SLOT.search(own.text)
    said = "".join(one.text for one in same)
    later = [one.text for one in clauses[at + 1 :] if one.sentence == own.sentence]
    behind = own.text[slot.end() :] + "".join(later) if slot else said
    return ADDS.search(said[: len(said) - len(behind)]) is not None and not list(read.others_in(behind))


def is_labelled(read: AnswerText, own: Clause, clauses: list[Clause]) -> bool:
    """Return whether the answer is one of several labelled names, and not the first: "A: Paris B: Rome C: Oslo"."""
    if own.is_marked or len(read.wanted) > 1 or not (read.is_capital or not read.words.is_spaced):
        return False
    said = "".join(
        f"{' = ' if one.link == 'listed' else ' ; '}{one.text}" for one in clauses if one.slots or not one.is_void
    )
    names = [one[1].strip() for one in _LABELLED.finditer(said)]
    return len({*names}) > _FEWEST_RIVALS and any(SLOT.match(one) for one in names) and not SLOT.match(names[0])
