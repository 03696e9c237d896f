"""Final answers commit to one value: enumerations, negations and contradictions state nothing, honest answers do."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rollout_world import make_environment

from synthesis.core.environment import CallRecord
from synthesis.core.final_answers import judge_answer, states_answer
from synthesis.core.language_words import READ
from synthesis.core.matching import contains
from synthesis.core.own_objects import OwnEnvironment
from synthesis.core.records import Answer, Message
from synthesis.core.rewards import played

DATA = Path(__file__).parent.parent.parent / "data"
LEAST_STATED, LEAST_FOUND, MOST_FALSE = 0.95, 0.95, 0.01
A = Answer


def answer_of(value: Any) -> Answer:
    return A(**value) if isinstance(value, dict) else A(value)


def rows(name: str) -> list[tuple[str, Answer, str]]:
    lines = (DATA / f"final_answers_{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [(language, answer_of(value), text) for language, value, text in map(json.loads, lines)]


def sentences() -> list[tuple[str, Answer, str, str]]:
    """The tables of `test_matching_languages`: language, answer, right sentence, wrong sentence."""
    found = []
    for table in sorted((DATA / "answers").glob("*.txt")):
        for line in table.read_text(encoding="utf-8").splitlines():
            value, right, wrong = line.split(" | ")
            found.append((table.stem, answer_of(json.loads(value)), right, wrong))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def test_honest_answers_are_stated() -> None:
    """Long and short ones: derivations, comparisons, corrections, tables, boxes, notes in brackets."""
    honest = rows("stated")
    lost = [(answer.value, text, judge_answer(text, answer, language).reason) for language, answer, text in honest
            if not states_answer(text, answer, language)]  # fmt: skip
    assert len(honest) > 400 and len(lost) <= (1 - LEAST_STATED) * len(honest), lost


def test_what_commits_to_nothing_is_not_stated() -> None:
    """Lists, ranges, hedged alternatives, negations, withdrawn values, questions, suppositions."""
    gamed = rows("not_stated")
    stated = [(answer.value, text) for language, answer, text in gamed if states_answer(text, answer, language)]
    assert len(gamed) > 650 and not stated


@pytest.mark.parametrize("language", READ)
def test_right_sentences_of_each_language_are_stated(language: str) -> None:
    pairs = [(answer, right) for one, answer, right, _ in sentences() if one == language]
    lost = [(answer.value, right) for answer, right in pairs if not states_answer(right, answer, language)]
    assert len(lost) <= (1 - LEAST_FOUND) * len(pairs), lost


def test_wrong_sentences_are_not_stated() -> None:
    every = sentences()
    stated = [(answer.value, wrong) for language, answer, _, wrong in every if states_answer(wrong, answer, language)]
    assert len(stated) <= MOST_FALSE * len(every), stated


# ---------------------------------------------------------------------------------------------------------------------
# Enumerations

SEPARATORS = [", ", ",", "; ", " ", "\n", "\n\n", "\n- ", "\n* ", " / ", "/", " | ", "\t", " or ", " and ", " & ", ". ",
              "... ", " or maybe ", ", possibly ", " → ", " - ", " — ", "? ", "、", "，", "；", "或", "或者",
              "还是", "和",
              "，也可能是"]  # fmt: skip
FRAMES = ["{}", "One of {}.", "It is {}.", "The answer is {}.", "Answer: {}", "答案是{}。", "可能是{}", "({})", "[{}]",
          "**{}**", "\\boxed{{{}}}", "I guess {}, but I am not sure.", "Maybe {}?", '{{"answer": [{}]}}']  # fmt: skip
NAMES = ["Paris", "Rome", "Oslo", "Berlin", "Madrid", "Lisbon", "Vienna", "Prague", "Warsaw", "Athens", "Dublin",
         "Helsinki", "Sofia", "Bern", "Riga", "Tallinn"]  # fmt: skip
PLACES = ["巴黎", "罗马", "奥斯陆", "柏林", "马德里", "里斯本", "维也纳", "布拉格", "华沙", "雅典", "伦敦", "索非亚"]
EITHER = {"ar": "أو", "de": "oder", "en": "or", "es": "o", "fi": "tai", "fr": "ou", "hi": "या", "it": "o",
       "ja": "または",
          "ko": "또는", "pt": "ou", "ru": "или", "th": "หรือ", "tr": "veya", "vi": "hoặc", "zh": "或"}  # fmt: skip


@settings(derandomize=True)
@given(
    first=st.integers(1, 500),
    size=st.integers(2, 100),
    at=st.integers(0, 99),
    separator=st.sampled_from(SEPARATORS),
    frame=st.sampled_from(FRAMES),
    language=st.sampled_from(READ),
)
@example(first=1, size=100, at=39, separator=", ", frame="One of {}.", language="en")
def test_no_list_of_numbers_states_one(
    first: int, size: int, at: int, separator: str, frame: str, language: str
) -> None:
    numbers = list(range(first, first + size))
    text = frame.format(separator.join(map(str, numbers)))
    assert not states_answer(text, A(numbers[at % size]), language), text


@settings(derandomize=True)
@given(
    names=st.permutations(NAMES),
    size=st.integers(3, 16),
    at=st.integers(1, 15),
    separator=st.sampled_from([one for one in SEPARATORS if one not in (" ", "\t", "，", "、", "；")]),
    frame=st.sampled_from(FRAMES),
)
def test_no_list_of_names_states_one(names: list[str], size: int, at: int, separator: str, frame: str) -> None:
    text = frame.format(separator.join(names[:size]))
    assert not states_answer(text, A(names[at % (size - 1) + 1]), "en"), text


@pytest.mark.parametrize(
    "frame", ["{}", "{}。", "是{}。", "答案是{}。", "答案：{}", "首都是{}。", "它位于{}。", "我认为是{}。"]
)
def test_a_chinese_name_within_another_one_is_not_stated(frame: str) -> None:
    for longer, name in [("都柏林", "柏林"), ("印度尼西亚", "印度"), ("索马里", "马里"), ("南苏丹", "苏丹"),
                         ("赤道几内亚", "几内亚"), ("羅馬尼亞", "羅馬"), ("尼日利亚", "尼日")]:  # fmt: skip
        assert not states_answer(frame.format(longer), A(name), "zh"), longer
        assert states_answer(frame.format(longer), A(longer), "zh"), longer
        assert states_answer(frame.format(name), A(name), "zh"), name


@settings(derandomize=True)
@given(
    names=st.permutations(PLACES),
    size=st.integers(2, 12),
    at=st.integers(0, 11),
    separator=st.sampled_from(["、", "；", "\n", "或", "或者", "还是", "和", "，也可能是", "/"]),
    frame=st.sampled_from(["{}", "答案是{}。", "可能是{}", "是{}吧。", "答案：{}"]),
)
def test_no_list_of_chinese_names_states_one(names: list[str], size: int, at: int, separator: str, frame: str) -> None:
    text = frame.format(separator.join(names[:size]))
    assert not states_answer(text, A(names[at % size]), "zh"), text


@settings(derandomize=True)
@given(
    sentence=st.sampled_from(
        [
            "It is {}.",
            "There are {} bolts.",
            "The answer is {}.",
            "Maybe it is {}.",
            "If you count again, {}.",
            "答案是{}。",
            "有{}个螺栓。",
            "可能有{}个。",
            "Es sind {}.",
            "Il y en a {}.",
            "Guess: {}",
            "The warehouse holds {} pieces.",
        ]
    ),  # fmt: skip
    size=st.integers(2, 60),
    at=st.integers(0, 59),
    language=st.sampled_from(["en", "zh", "de", "fr"]),
    separator=st.sampled_from([" ", "\n", "\n\n", "\n- "]),
)
def test_no_repeated_sentence_states_one_of_its_values(
    sentence: str, size: int, at: int, language: str, separator: str
) -> None:
    text = separator.join(sentence.format(40 + number) for number in range(size))
    assert not states_answer(text, A(40 + at % size), language), text


@pytest.mark.parametrize(
    "form",
    [
        "bolts: {} / nuts: {} / screws: {}", "Shelf A: {}. Shelf B: {}. Shelf C: {}.", "low: {}\nmiddle: {}\nhigh: {}",
        "There are {} bolts. The shelf holds {} nuts. We own {} screws.", '{{"bolts": {}, "nuts": {}, "screws": {}}}',
        "| bolts | {} |\n| nuts | {} |\n| screws | {} |", "bolts={} nuts={} screws={}",
        "Bolts ({}), nuts ({}), screws ({})",
        "John says {}. Mary says {}. Ann says {}.", "螺栓{}个，螺母{}个，螺丝{}个", "A架：{}。B架：{}。C架：{}。",
    ],
)  # fmt: skip
def test_labels_pay_at_most_the_first_value(form: str) -> None:
    text = form.format(38, 39, 40)
    assert [one for one in (38, 39, 40) if states_answer(text, A(one), "zh")] in ([], [38])


@pytest.mark.parametrize(
    ("form", "language"),
    [("A: {} B: {} C: {}", "en"), ("The north is {}; the south is {}; the west is {}.", "en"),
     ("A：{} B：{} C：{}", "zh"),
     ("red = {}, blue = {}, green = {}", "en"), ('{{"a": "{}", "b": "{}", "c": "{}"}}', "en")],
)  # fmt: skip
def test_labels_pay_at_most_the_first_name(form: str, language: str) -> None:
    names = NAMES[:3] if language == "en" else PLACES[:3]
    text = form.format(*names)
    assert [one for one in names if states_answer(text, A(one), language)] in ([], names[:1])


@pytest.mark.parametrize("language", READ)
def test_or_joins_alternatives_in_each_language(language: str) -> None:
    text = f"40 {EITHER[language]} 41"
    for value in (40, 41):
        assert judge_answer(text, A(value), language).reason == "several"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (A("05:00"), ", ".join(f"{hour:02}:00" for hour in range(24))),
        (A("2026-05-03"), "May 2, 2026, May 3, 2026 or May 4, 2026"),
        (A("2026-05-03"), "2026-05-02\n2026-05-03"),
        (A(45, unit="%"), "44 %, 45 %, 46 %"),
        (A(1500, unit="m"), "1.4 km, 1.5 km, 1.6 km"),
        (A(99.9, unit="usd"), "$89.90 or $99.90"),
        (A(True), "yes or no"),
        (A(["Oslo", "Bergen"]), "Oslo, Bergen, Trondheim, Stavanger"),
        (A(["12", "28"]), "10, 12, 14, 28"),
    ],
)
def test_lists_of_every_type_state_nothing(answer: Answer, text: str) -> None:
    assert not states_answer(text, answer)


# ---------------------------------------------------------------------------------------------------------------------
# Negations, hedges, corrections

VALUES = {
    "en": [("40", A(40), "41"), ("1.5 km", A(1500, unit="m"), "1.6 km"), ("May 3, 2026", A("2026-05-03"),
               "May 4, 2026"),
           ("2:30 PM", A("14:30"), "3:30 PM"), ("Paris", A("Paris"), "Rome"), ("45 %", A(45, unit="%"), "46 %")],
    "zh": [("40", A(40), "41"), ("1.5公里", A(1500, unit="m"), "1.6公里"), ("2026年5月3日", A("2026-05-03"),
               "2026年5月4日"),
           ("下午2点30分", A("14:30"), "下午3点30分"), ("巴黎", A("巴黎"), "罗马"), ("45%", A(45, unit="%"), "46%")],
}  # fmt: skip
NEGATED = {
    "en": ["It is not {}.", "It isn't {}.", "The answer is not {}.", "It is never {}.", "I don't think it is {}.",
           "It cannot be {}.", "{} is wrong.", "{} is not the answer.", "Not {}.", "I doubt that it is {}."],
    "zh": ["不是{}。", "答案不是{}。", "并非{}。", "我不认为是{}。", "{}不对。", "绝不是{}。", "{}是错的。"],
}  # fmt: skip
HEDGED = {
    "en": ["Maybe {}.", "I think it is {}.", "It is probably {}.", "I guess it could be {}.",
               "I am not sure, but it is {}."],
    "zh": ["可能是{}。", "我认为是{}。", "大概是{}。", "也许是{}。", "我不确定，但应该是{}。"],
}  # fmt: skip
CORRECTED = {
    "en": ["It is not {1} but {0}.", "{1}, no, {0}.", "{1}... wait, it is {0}.", "I said {1} but it is {0}.",
           "The answer is {1}. Actually, it is {0}.", "It is {0}, not {1}.", "I thought {1}, but the tool says {0}."],
    "zh": ["不是{1}，而是{0}。", "不是{1}而是{0}。", "{1}，不对，是{0}。", "我以为是{1}，但其实是{0}。",
               "是{0}，不是{1}。",
           "{1}，等等，应该是{0}。"],
}  # fmt: skip
CASES = [(language, *one) for language, ones in VALUES.items() for one in ones]


@pytest.mark.parametrize(("language", "said", "answer", "other"), CASES)
def test_negations_hedges_and_corrections(language: str, said: str, answer: Answer, other: str) -> None:
    def stated(forms: list[str], *values: str) -> list[str]:
        return [one for one in forms if states_answer(one.format(*values), answer, language)]

    assert not stated(NEGATED[language], said)
    assert stated(HEDGED[language], said) == HEDGED[language]
    assert stated(CORRECTED[language], said, other) == CORRECTED[language]
    assert not stated(CORRECTED[language], other, said)  # what was taken back


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("ar", "ليس 40"), ("de", "Es ist nicht 40."), ("en", "It is not 40."), ("es", "No es 40."),
        ("fi", "Se ei ole 40."), ("fr", "Ce n'est pas 40."), ("hi", "40 नहीं है।"), ("it", "Non è 40."),
        ("ja", "40ではありません。"), ("ko", "40이 아닙니다."), ("pt", "Não é 40."), ("ru", "Это не 40."),
        ("th", "ไม่ใช่ 40"), ("tr", "40 değil."), ("vi", "Không phải là 40."), ("zh", "不是40。"),
    ],
)  # fmt: skip
def test_each_language_negates(language: str, text: str) -> None:
    assert contains(text, A(40), language)
    assert judge_answer(text, A(40), language).reason == "negated"


# ---------------------------------------------------------------------------------------------------------------------
# Reasons, forms and bounds


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("There are 40.", "stated"), ("There are 41.", "missing"), ("It is not 40.", "negated"),
        ("40 or 41", "several"), ("If it is 40, we stop.", "supposed"), ("Is it 40?", "asked"),
        ("at least 40", "bounded"), ("40, no, 41", "withdrawn"),
        ("The answer is 41. There are 40 bolts.", "contradicted"),
        ("<tool_call>40</tool_call>", "markup"), ('{"name": "count", "arguments": {"n": 40}}', "markup"),
        ("<think>It is 40", "markup"), ("<think>It is 41.</think>There are 40.", "stated"),
        ("<think>It is 40.</think>There are 41.", "missing"), ("It is 40. " + "a" * 20_000, "too_long"),
        ("40\n" * 500, "too_long"),
    ],
)  # fmt: skip
def test_a_verdict_has_a_reason(text: str, reason: str) -> None:
    assert judge_answer(text, A(40)).reason == reason


def test_an_explicit_mark_decides_among_candidates() -> None:
    for text in (
        "Candidates are 38, 39, 40 and 41. The answer is 40.", "I see 38, 39, **40** and 41.",
        "38, 39, 40, 41: \\boxed{40}",
        "候选有38、39、40。答案是40。",
    ):  # fmt: skip
        assert states_answer(text, A(40), "zh") and not states_answer(text, A(39), "zh"), text
    for text in ("Answer: 40. Answer: 41.", "\\boxed{40} \\boxed{41}", "**40** **41**"):
        assert not states_answer(text, A(40)) and not states_answer(text, A(41)), text


@pytest.mark.parametrize(
    ("language", "value", "text"),
    [
        ("zh", ["Cyrillic", "53"], "最终答案：Cyrillic和53"), ("zh", ["Khar", "Maya"], "我查询了。\n答案：Khar和Maya"),
        ("en", "cyrillic small letter e", "According to the tools, it is cyrillic small letter e. Let me know if you "
         "need anything else!"), ("fr", 40, "Il y a 40 boulons, soit 5 de plus que le mois dernier."),
    ],
)  # fmt: skip
def test_words_around_an_answer_are_no_rivals(language: str, value: Any, text: str) -> None:
    assert states_answer(text, A(value), language)


def test_other_names_of_the_answer_are_no_rivals() -> None:
    coast = A("Côte d'Ivoire", aliases=["Ivory Coast"])
    assert states_answer("Côte d'Ivoire (Ivory Coast)", coast)
    assert states_answer("It is Ivory Coast, or Côte d'Ivoire in French.", coast)
    assert states_answer("The bridge is 1.5 km (1500 m) long.", A(1500, unit="m"))
    assert states_answer("About 2.1 million, 2,102,650 to be exact.", A(2_102_650))
    assert not states_answer("1.5 km or 1600 m", A(1500, unit="m"))


@pytest.mark.parametrize(
    "text",
    [", ".join(map(str, range(3000))), "40 or " * 2600, "It is 40. " * 390, "(" * 16_000 + "40", "not " * 4000 + "40",
     "Aa Bb " * 2600 + "Paris", "是" * 16_000 + "40", "巴黎、" * 5000, "\\boxed{" * 2000 + "40", "[" * 5000 + "40"],
)  # fmt: skip
@pytest.mark.parametrize("language", ["en", "zh", "de"])
def test_hostile_texts_are_read_in_bounded_time(text: str, language: str) -> None:
    started = time.process_time()
    for answer in (A(40), A("Paris"), A(["Paris", "Rome"]), A(True)):
        judge_answer(text[:16_384], answer, language)
    assert time.process_time() - started < 20


# ---------------------------------------------------------------------------------------------------------------------
# Callers


class Warehouse:
    question = "How many bolts are in the warehouse?"
    answer = 40

    def score(self, episode: Any) -> float:
        return float(episode.says(40))


def episode(said: str, finish: Any = "answered", language: str = "en") -> Any:
    environment = OwnEnvironment(Warehouse())
    environment.subject.language = language
    calls = [CallRecord(0, "stock_of", {}, "ok", "40")]
    return played(environment, [Message("user", "How many?"), Message("assistant", said)], calls, finish)


def test_an_episode_says_a_value() -> None:
    assert episode("There are 40 bolts.").says(40) and episode("There are 40 bolts.").says(A(40))
    assert not episode("There are 140 bolts.").says(40) and not episode("38, 39, 40").says(40)
    assert episode("Oslo and Bergen").says(["Bergen", "Oslo"])
    assert not episode("There are 40 bolts.", finish="token_limit").says(40)
    assert episode("Es sind 5 Millionen.", language="de").says(5_000_000)


def test_a_tools_output_may_list_what_a_final_answer_may_not() -> None:
    listed = ", ".join(map(str, range(1, 101)))
    assert contains(listed, A(40)) and not states_answer(listed, A(40))
    record = msgspec.structs.replace(make_environment(), answer=A(40))
    messages = [Message("user", "How many?"), Message("assistant", listed)]
    assert not played(record, messages, [], "answered").says(record.answer)
