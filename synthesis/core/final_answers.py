"""Test whether a final answer states the expected value, and commits to it.

A tool may list what it knows; a final answer may not. `matching` decides whether a text holds a value. `judge_answer`
also asks that the text commits to it: one value (or the asked list), stated, not negated, not one of several. The
reward `answer`, the score of MCP tasks, evaluation and `PlayedEpisode.says` use it; tool outputs keep `matching`.

How a text is read:

1. Thoughts are removed. A text with other markup of a chat format, or too long to be an answer, states nothing.
2. The text is cut into sentences and clauses; each place of the value becomes a slot. Clauses behind "than", in
   brackets, negated, or about an earlier opinion ("I thought 40") hold no candidates.
3. A correction ("no", "wait", 不对) takes back what was said before it.
4. An explicit mark decides where there is one: "the answer is", "Answer:", `\\boxed{}`, one bold value.
5. Other values of the same kind (numbers of the same dimension, days, times, names) are candidates. They contradict
   the value if they are joined with it ("or", "and", a list, a range). So does another clause that states the same of
   another value, and a statement about nothing else ("It is 41.") with another value. In a text with many numbers only
   its first and its last sentence count.

One hedged value ("maybe 40") is still one value. What cannot be decided is not stated: fail closed.

A language's words are in `languages/NAME.toml` (`language_words`). The patterns here are English and Chinese, which
count in every language.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

from synthesis.core.answer_clauses import (
    AROUND,
    BOUND,
    COPULA,
    MARK,
    MOST_ELEMENTS,
    SHORT,
    SLOT,
    SUMS,
    TOPIC,
    TOUCHING,
    WORDS,
    AnswerText,
    Clause,
    json_lines,
    untangled,
    visible,
)
from synthesis.core.answer_order import ADDS, RUN, is_conditional, is_in_row, is_labelled, is_led, is_result
from synthesis.core.answer_words import words_of
from synthesis.core.locales import Locale, locale_of
from synthesis.core.markup import markup_in, split_thought
from synthesis.core.matching import match
from synthesis.core.normal_text import fold
from synthesis.core.readings import FALSE, MOST_CHARACTERS, TRUE
from synthesis.core.records import Answer

Reason = Literal[
    "stated",
    "missing",
    "too_long",
    "markup",
    "negated",
    "bounded",
    "withdrawn",
    "supposed",
    "asked",
    "several",
    "contradicted",
]


class AnswerVerdict(NamedTuple):
    """Verdict on a text: whether it states an answer, and why."""

    is_stated: bool
    reason: Reason


_STATED: Final = AnswerVerdict(True, "stated")
_MOST_CANDIDATES: Final = 6
"""Other values of a text whose sentences all count; the names of one sentence may be twice as many."""
_MOST_SENTENCES: Final = 12
_MOST_PIECES: Final = 400
"""Sentences, and lines, of a text that is read; an answer with more is none."""
_NEAR: Final = 120
"""Characters before and behind a value in which something negates it."""
_MOST_KEYS: Final = 4
_BOXED = re.compile(r"\$?\\(?:boxed|fbox)\s?\{((?:[^{}]|\{[^{}]{0,200}\}){1,400})\}\$?|</?(?:final_)?answer>")
_LINES = re.compile(r"[.!?。]?\n|[.!?。]\s")
_OPINION = re.compile(r"\b(?:think|believe|mean|say|that|true|likely|case|doubt)\b|认为", re.IGNORECASE)
_FALSE_AT_END = re.compile(r"\s(?:is|was) (?:false|wrong|incorrect|untrue)\W{0,3}$", re.IGNORECASE)
_WHETHER = re.compile(r"\bwhether\b|\b(?:know|sure|clear|tell) if\b|是否", re.IGNORECASE)
_BESIDE = re.compile(r"\d\s+[\ue000-\ue0ff]|[\ue000-\ue0ff]\s+\d")
_OPERAND = re.compile(r"[\ue000-\ue0ff]\s?(?:[×*÷+]|\\times|\\cdot|\s−\s)\s?\d|\d\s?[×*÷+]\s?[\ue000-\ue0ff]")
_SENTENCES = re.compile(r"(?<=[.!?。！？])|\n")
_BRIEF: Final = 4
"""Words of a sentence that is a truth value by itself: "It is not true."."""


def states_answer(text: str, answer: Answer, language: str = "en") -> bool:
    """Return whether a final answer states the expected value and commits to it; see `judge_answer`."""
    return judge_answer(text, answer, language).is_stated


def judge_answer(text: str, answer: Answer, language: str = "en") -> AnswerVerdict:
    """Decide whether a final answer states the expected value and commits to it.

    Args:
        text: the last thing that a model said, with or without its thoughts.
        answer: the expected value, of any type; its aliases are the same value.
        language: ISO 639-1 code of the text's and the answer's language.
    """
    if len(text) > MOST_CHARACTERS:
        return AnswerVerdict(False, "too_long")
    said = visible(split_thought(text)[1])
    said = _BOXED.sub(lambda one: f"\n{MARK}{_LINES.sub(', ', one[1] or '')}\n", said)
    if markup_in(said, turn=True):
        return AnswerVerdict(False, "markup")
    locale = locale_of(language)
    if isinstance(answer.value, bool) or _is_word_of_truth(answer.value, locale):
        return _judge_boolean(said, answer, language)
    rule = match(untangled(said), answer, language)
    if isinstance(answer.value, list):
        if rule == "alias":
            wanted = [Answer(answer.aliases[0], aliases=answer.aliases)]
        else:
            wanted = [Answer(one, unit=answer.unit, tolerance=answer.tolerance) for one in answer.value]
    else:
        wanted = [answer]
    lines = len(re.findall(r"\n|[.!?。।]\s", said))
    if len(wanted) > MOST_ELEMENTS or lines > _MOST_PIECES:
        return AnswerVerdict(False, "too_long")
    opened = json_lines(said.replace(MARK, ""))
    judge = _Judge(AnswerText(said if opened is None else opened, wanted, language))
    if judge.finds_any:
        return judge.verdict()
    # A unit beside its number, each under a key of its own, is in no line by itself.
    is_one = rule is not None and opened is not None and opened.count("\n") < _MOST_KEYS and "[" not in opened
    return _STATED if is_one else AnswerVerdict(False, "missing")


def _is_word_of_truth(value: Any, locale: Locale | None) -> bool:
    if not isinstance(value, str) or value == "NO":
        return False
    return fold(value) in TRUE | FALSE | {"no"} | (locale.yes | locale.no if locale else frozenset())


# ---------------------------------------------------------------------------------------------------------------------
# Yes and no


def _judge_boolean(said: str, answer: Answer, language: str) -> AnswerVerdict:
    """The explicit statements decide where there are any, and all of them; else the text as a whole."""
    words, locale = words_of(language), locale_of(language)
    text = untangled(said)
    marked = [line[1:] for line in said.split("\n") if line.startswith(MARK)]
    marked += [text[found.end() :].lstrip(" :=*").split("\n")[0] for found in words.mark.finditer(text)]
    held = [one for one in marked if any(match(one, Answer(value), language) for value in (True, False))]
    if held:
        if all(match(one, answer, language) for one in held):
            return _STATED
        return AnswerVerdict(False, "contradicted" if len(held) > 1 else "missing")
    if not isinstance(answer.value, bool):
        is_true = fold(str(answer.value)) in TRUE | (locale.yes if locale else frozenset())
        answer = Answer(is_true) if match(text, answer, language) is None else answer
    if not (match(text, answer, language) or match(_first_word(text), answer, language)):
        return AnswerVerdict(False, "missing")
    parts = [one for one in words.parts.split(re.sub(r"[()\[\]]", ";", text)) if one and len(one) < SHORT]
    said_words = {fold(form) for one in parts for form in (one, words.generic.sub(" ", one))}
    both = (
        said_words & (TRUE | (locale.yes if locale else set())),
        said_words & (FALSE | {"no"} | (locale.no if locale else set())),
    )
    brief = [one for one in _SENTENCES.split(text) if 0 < len(WORDS.findall(one)) <= _BRIEF]
    is_both = all(any(match(one, Answer(value), language) for one in brief) for value in (True, False))
    return AnswerVerdict(False, "contradicted") if all(both) or is_both else _STATED


def _first_word(text: str) -> str:
    """The one word that is the first sentence of a text: "No. Norway is not."; but "No. 5" is a number."""
    found = re.match(r"\W{0,3}(\w{1,12})\.\s+[^\W\d_a-zà-ÿ]", text)
    return found[1] if found else ""


# ---------------------------------------------------------------------------------------------------------------------
# Values


class _Judge:
    """The verdict on a text that was read for an answer."""

    def __init__(self, read: AnswerText) -> None:
        self._read = read

    @property
    def finds_any(self) -> bool:
        """Return whether the answer is anywhere in the text."""
        return any(one.slots for one in self._read.clauses)

    @property
    def is_stated(self) -> bool:
        """Return whether the text names the answer and commits to it."""
        return self.finds_any and self.verdict().is_stated

    def verdict(self) -> AnswerVerdict:
        """Return the verdict on the text."""
        clauses, is_withdrawn = self._uncorrected()
        if not any(one.slots for one in clauses):
            return AnswerVerdict(False, "withdrawn" if is_withdrawn else "contradicted")
        read = self._read
        is_one = len(read.wanted) == 1
        marked = [one for one in clauses if one.is_marked and not one.is_void]
        if is_one and any(one.slots or one.others or (one.content and not read.is_typed) for one in marked):
            clauses = list(self._marked(clauses))
            if not any(one.slots for one in clauses):
                return AnswerVerdict(False, "contradicted")
        elif is_one and read.bold and _Judge(AnswerText(read.bold, read.wanted, read.language)).is_stated:
            return self._of_bold(clauses)
        else:
            clauses = self._deciding(clauses)
            rivals = {repr(other) for one in clauses if not one.is_void for other in one.others}
            named = [at for at, one in enumerate(clauses) if one.slots]
            if len(rivals) > _MOST_CANDIDATES and not all(is_result(self._read, at, clauses) for at in named):
                return AnswerVerdict(False, "several")
        return self._of(clauses)

    def _of_bold(self, clauses: list[Clause]) -> AnswerVerdict:
        named = [at for at, one in enumerate(clauses) if one.slots]
        reason = next((reason for at in named if (reason := self._uncommitted(at, clauses))), None)
        return AnswerVerdict(False, reason) if reason else _STATED

    def _of(self, clauses: list[Clause]) -> AnswerVerdict:
        worst: Reason = "missing"
        stated: set[int] = set()
        for at, clause in enumerate(clauses):
            if not clause.slots:
                continue
            reason = self._uncommitted(at, clauses) or self._rivalled(at, clauses)
            if reason:
                worst = reason
                if reason == "negated":
                    stated -= clause.slots
            else:
                stated |= clause.slots
        return _STATED if stated == set(range(len(self._read.wanted))) else AnswerVerdict(False, worst)

    def _marked(self, clauses: list[Clause]) -> Iterator[Clause]:
        """Yield the clauses behind an explicit mark, with a list of values that continues in the lines below it."""
        goes_on = False
        for one in clauses:
            is_value = one.slots or one.others if self._read.is_typed else self._is_element(one)
            goes_on = one.is_marked or (goes_on and bool(is_value) and (not one.content or bool(one.name)))
            if goes_on:
                yield one
            goes_on &= MARK not in one.text  # nothing goes on behind a box

    def _uncorrected(self) -> tuple[list[Clause], bool]:
        """Return the clauses behind the last correction, and whether there is one."""
        clauses = self._read.clauses
        for at in range(len(clauses) - 1, 0, -1):
            found = self._read.words.corrects.match(clauses[at].text)
            if found is None:
                continue
            rest = clauses[at:]
            is_all = not clauses[at].text[found.end() :].strip(" .!*")
            if any(one.slots or one.others or one.name for one in rest[is_all:]) or (is_all and len(rest) == 1):
                return rest[is_all:], True
        return clauses, False

    def _deciding(self, clauses: list[Clause]) -> list[Clause]:
        """Return all clauses of a short text; of a long one those of its first and its last sentences with a value."""
        telling = [one for one in clauses if one.slots or (one.others and not one.is_void)]
        sentences = sorted({one.sentence for one in (telling if self._read.is_typed else clauses)})
        rivals = {repr(other) for one in telling for other in one.others}
        if len(rivals) <= _MOST_CANDIDATES and len(sentences) <= _MOST_SENTENCES:
            return clauses
        kept = {sentences[0], sentences[-1]} if self._read.is_typed else {*sentences[:2], *sentences[-3:]}
        return [one for one in clauses if one.sentence in kept]

    def _uncommitted(self, at: int, clauses: list[Clause]) -> Reason | None:
        """Return why a clause that names the answer does not state it, by itself."""
        clause, words = clauses[at], self._read.words
        text = clause.text
        first = SLOT.search(text)
        assert first is not None, "it has a slot"
        before, after = text[max(0, first.start() - _NEAR) : first.start()], text[first.end() :][:_NEAR]
        following = clauses[at + 1] if at + 1 < len(clauses) else None
        if words.unsure.match(text) or _WHETHER.search(before) or is_conditional(self._read, at, clauses):
            return "supposed"
        if BOUND in text:
            return "bounded"
        if clause.is_denied:
            return "negated"
        for found in words.negation.finditer(before):
            gap = before[found.end() :]
            is_far = len(WORDS.findall(gap)) > (8 if TOUCHING.search(gap) else 4)
            if not is_far and (not COPULA.search(gap) or _OPINION.search(found[0] + gap)):
                return "negated"
        # A unit and what is counted may stand between: 40 % of it, 40个螺栓.
        ends = [0, len(after) - len(after.lstrip(" %°")), *(one.end() for one in WORDS.finditer(after))]
        if _FALSE_AT_END.search(after) or any(words.negated.match(after, end) for end in ends[:5]):
            return "negated"
        if words.reports.search(before) and following and following.link == "contrast":
            return "withdrawn"
        if clause.is_void and not words.reports.search(text):
            return "asked"
        return None

    def _rivalled(self, at: int, clauses: list[Clause]) -> Reason | None:
        """Return why a clause that names the answer does not state it, beside the others."""
        return self._rivalled_by_values(at, clauses) if self._read.is_typed else self._rivalled_by_names(at, clauses)

    def _rivalled_by_values(self, at: int, clauses: list[Clause]) -> Reason | None:
        own = clauses[at]
        is_total = is_result(self._read, at, clauses)
        is_sum = SUMS.search(own.text) is not None or is_total
        if own.others and not own.content and not is_sum:
            return "several"
        if _BESIDE.search(own.text) or (_OPERAND.search(own.text) and own.others):
            return "several"
        if is_led(self._read, at, clauses) or is_in_row(self._read, at, clauses):
            return "several"
        content = set(own.content)
        for near, other in enumerate(clauses):
            if near == at or not other.others:
                continue
            if near == at - 1 and own.link == "either" and not own.content:
                return "several"
            if other.is_void and not (own.is_void and self._read.words.reports.search(other.text)):
                continue
            if near < at and is_total and (own.sentence == other.sentence or ADDS.search(own.text)):
                continue
            if SUMS.search(other.text) and (is_sum or near < at) and self._is_step(other, clauses[near + 1 :]):
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

    def _is_step(self, step: Clause, later: list[Clause]) -> bool:
        """Return whether the result of a sum is used later, so that it is a step and not an answer."""
        if "=" not in step.text:
            return True
        result = list(self._read.others_in(step.text[step.text.rindex("=") :]))
        return not result or any(repr(result[-1]) in map(repr, one.others) for one in later)

    def _rivalled_by_names(self, at: int, clauses: list[Clause]) -> Reason | None:
        own = clauses[at]
        for near in (at - 1, at + 1):
            if 0 <= near < len(clauses) and self._is_joined(clauses, at, near):
                return "several"
        if reason := self._in_run(at, clauses):
            return reason
        names = len(re.findall(r"(?<!^)(?<![.!?] )\b[^\W\d_a-zà-ÿ]\w+(?: [^\W\d_a-zà-ÿ]\w+)*", own.text))
        if self._read.is_capital and names > 2 * _MOST_CANDIDATES:
            return "several"
        if is_labelled(self._read, own, clauses):
            return "several"
        if any(self._says_same(own, one) for one in clauses if one is not own):
            return "contradicted"
        shape = _shape(SLOT.sub("Name", own.text))
        alike = sum(_shape(one.text) == shape for one in clauses if not one.is_void and not one.slots)
        return "several" if self._read.is_capital and len(own.content) > 1 and alike > 1 else None

    def _is_joined(self, clauses: list[Clause], at: int, near: int) -> bool:
        """Return whether "or", "and" or a mark of lists joins the answer with another name."""
        own, other = clauses[at], clauses[near]
        link = clauses[max(at, near)].link
        joins = ("either",) if len(self._read.wanted) > 1 else ("either", "listed", "and")
        if link not in joins or other.is_void:
            return False
        if other.slots:
            return link == "either" and not other.slots <= own.slots
        touches = SLOT.search(own.text.strip()[-1:] if near > at else own.text.strip()[:1]) is not None
        is_bare = not own.content
        if not other.content:
            return False
        if link == "either" and (touches or is_bare):
            ends = other.text.split()[:6] if near > at else other.text.split()[-6:]
            return (
                not self._read.is_capital
                or not self._read.words.is_spaced
                or any(one[:1].isupper() or not one[:1].isascii() for one in ends)
            )
        side = other.text.split("/")[0 if near > at else -1]
        if other.name or (link == "listed" and self._read.is_name(self._read.trimmed(side))):
            return touches or is_bare
        return is_bare and near < at and self._ends_in_name(other)

    def _ends_in_name(self, clause: Clause) -> bool:
        words = clause.text.split()
        if not words or TOPIC.search(clause.text):
            return False
        if not self._read.words.is_spaced:
            return True
        return words[-1][:1].isupper() if self._read.is_capital else bool(clause.name)

    def _in_run(self, at: int, clauses: list[Clause]) -> Reason | None:
        """Return whether the answer is an element of a list of names that nobody asked for."""
        first = last = at
        own_bare = not clauses[at].content
        touches = own_bare or SLOT.search(clauses[at].text.rstrip(AROUND)[-1:]) is not None
        while own_bare and first > 0 and clauses[first].link in RUN and self._is_element(clauses[first - 1]):
            first -= 1
        while (
            touches
            and last + 1 < len(clauses)
            and clauses[last + 1].link in RUN
            and self._is_element(clauses[last + 1])
        ):
            last += 1
        run = clauses[first : last + 1]
        extra = {one.name for one in run if one.name}
        links = [one.link for one in run[1:]]
        if len(self._read.wanted) > 1:
            return "several" if extra and not self._are_pairs(run) else None
        head = clauses[first - 1] if own_bare and first > 0 and clauses[first].link == "comma" else None
        has_head = head is not None and not head.is_void and bool(head.content) and self._ends_in_name(head)
        size = len(extra) + 1 + has_head
        if not extra and not has_head:
            return None
        if all(link == "comma" for link in links):
            is_first = at == first and not has_head and self._read.is_capital
            if size == 2:
                is_place = has_head and (self._read.is_capital or not self._read.words.is_spaced)  # in Oslo, Norway
                return None if is_first or is_place or not own_bare else "several"
            return None if is_first and size == 3 else "several"
        if set(links) == {"stop"} and not any(one.is_generic or one.is_guess for one in run if one.name):
            return "several" if size > 2 else None
        return "several"

    def _is_element(self, clause: Clause) -> bool:
        return not clause.is_void and bool(clause.name or (clause.slots and not clause.content))

    def _are_pairs(self, run: list[Clause]) -> bool:
        """Return whether each extra name belongs to the element before it: Oslo, Norway and Paris, France."""
        for before, one in zip(run, run[1:], strict=False):
            if one.name and (one.link != "comma" or not before.slots):
                return False
            if one.slots and before.name and one.link == "comma":
                return False
        return not run[0].name

    def _says_same(self, own: Clause, other: Clause) -> bool:
        """Return whether another clause says of another name what this one says of the answer."""
        if other.is_void or other.slots:
            return False
        mine = SLOT.search(own.text)
        assert mine is not None, "it has a slot"
        before, after = _tidy(own.text[: mine.start()]), _tidy(own.text[mine.end() :])
        text = _tidy(other.text)
        if not (before or after) or not (text.startswith(before) and text.endswith(after)):
            return False
        if len(text) <= len(before) + len(after):
            return False
        filler = " ".join(re.sub(r"\d+", "#", other.text).split()).strip(" .,!")
        filler = filler[len(before) : len(filler) - len(after)].strip()
        is_name = self._read.is_name(self._read.words.generic.sub(" ", filler))
        return is_name and not re.match(r"(?:the|a|an|in|at|on) ", filler)


def _shape(text: str) -> str:
    """Return a clause with one word in place of each name, to compare statements about many names."""
    return re.sub(r"\b[^\W\d_a-zà-ÿ]\w+(?: [^\W\d_a-zà-ÿ]\w+)*", "N", text).strip(AROUND)


def _tidy(text: str) -> str:
    return " ".join(re.sub(r"\d+", "#", text.casefold()).split()).strip(" .,!")
