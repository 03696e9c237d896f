"""What a tool may return costs the trainer's event loop next to nothing: bounded, linear, never an error."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processor_time import MOST_SECONDS, grows_as_the_text, loop_seconds
from selection import by_day

from sandbox.limits import Limits
from synthesis.core.json_leaves import MOST_CHARACTERS
from synthesis.core.locales import READ, locale_of
from synthesis.core.matching import contains, match
from synthesis.core.normal_text import fold, normalized
from synthesis.core.quantities import quantities, written_number
from synthesis.core.readings import MOST_VALUES, NormalizedOutput
from synthesis.core.records import Answer
from synthesis.core.units import unit_of_key

A = Answer
RESULT_BYTES = Limits().result_bytes

# Each is repeated: digits of all kinds, separators, dates, units, marks, invisible characters, brackets, words.
UNITS = [
    "1", "1é", "1,", "1,234,", "1.", "1.234.", "1 ", "1 234 ", "1'234", "1_234", "1,11,", "11,11,111", "+1 22 ", "(",
    "(123)", "(123) 456-7890", "1-", "−1", "5-10 ", "1/2 ", "1½", "½", "1 ½", "1²", "²", "1\u2064½", "1e", "1e5 ",
    "10^5 ", "1^", "x 10^", "٣", "٣٫", "１", "１，", "五", "五点", "一万", "亿", "第", "1百万", "三百二十万", "5 km ",
    "5km", "5 degrees celsius ", "5/", "5 per ", "$5 ", "$", "USD ", "2.5bn ", "5年", "5月", "Jan 5 ", "Jan 5 2026 ",
    "5 Jan 2026 ", "5th of ", "2026", "2026 ", "2026-05-01 ", "05/01/2026 ", "二〇二六年五月一日", "12:30 ",
    "下午2点30分",
    "\u200b", "1\u200b", "\u00a0", "1\u00a0", "\u0301", "\u0301\u0316", "a\u0301\u0316", "1\u0301", "\uff9e\u0316",
    "\ufdfa", "ß", "İ", "x", "ab\n", "a, ", "a,b;c|", "éa,", "a and b and ", "a & b & ", "一和一和", "是", "北京是",
    "the ", "reykjavik", "reykjavikx ", "reykjavikx,", "reykjavik x,", "The reykjavika. ", "New Reykjavik ", "77,",
    "7.7,", "yes,", "true ", "yes no ", "[", "{", '"a":', '"', "'", "\"'", '{"a":1}', "\\", "\0",
]  # fmt: skip
ANSWERS = [
    A(77), A(77.5, unit="km", aliases=["77 m"]), A("Reykjavik"), A("2026-01-02"), A("14:30"), A(True), A("77"),
    A(["Reykjavik", "Oslo"]), A("北京"), A("a"), A("是"),
]  # fmt: skip


def outputs(unit: str, size: int) -> dict[str, Any]:
    """A text, a list and an object of about a size."""
    count = max(size // len(unit), 1)
    return {
        "text": unit * count,
        "list": [unit] * max(size // (len(unit) + 3), 1),
        "object": {f"{unit}{i}": unit for i in range(max(size // (len(unit) + 10), 1))},
    }


@pytest.mark.parametrize("size", [MOST_CHARACTERS, RESULT_BYTES], ids=["searched", "returned"])
@pytest.mark.parametrize("unit", by_day(UNITS, *UNITS[::4]), ids=ascii)
def test_no_result_holds_the_loop(unit: str, size: int) -> None:
    def search(output: Any) -> None:
        reading = NormalizedOutput(output)
        for answer in ANSWERS:
            match(reading, answer)

    for form, output in outputs(unit, size).items():
        assert loop_seconds(lambda given=output: search(given)) < MOST_SECONDS, form


@pytest.mark.parametrize("unit", by_day(UNITS, *UNITS[::4]), ids=ascii)
def test_reading_numbers_and_notation_grows_as_the_text_does(unit: str) -> None:
    text = unit * (8_000 // len(unit)) + "é"  # a square of it is half a second
    for read in (quantities, fold, written_number, unit_of_key):
        assert grows_as_the_text(read, text), read.__name__


IN_LANGUAGES = {
    "ar": ["و", "وال", "القاهرة", "للقاهرة ", "٥٬٠٠٠", "5 ملايين ", "3 مايو 2026 ", "الساعة 2:30 مساء ", "\u064e"],
    "de": ["5 Millionen ", "1.234,", "1.234.", "1.", "3. Mai 2026 ", "3.5.2026", "14 Uhr 30 ", "am 5. ", "ja, ",
    " und "],
    "es": ["5 mil millones ", "3 de ", "3 de mayo de 2026 ", "a las 2 de la tarde ", "5.º ", "sí. ", "No. A"],
    "fi": ["helsingi", "helsinki", "Helsingissä ", "5. ", "kello 14.30 "],
    "fr": ["14h30 ", "l'", "5 millions d'", "5 millions d'euros ", "1er mai ", "oui "],
    "hi": ["दिल्ली", "ि", "५", "5 लाख ", "3 मई 2026 ", "दोपहर 2:30 बजे "],
    "it": ["dell'", "5 mila ", "alle 2 di pomeriggio ", "5 ore e "],
    "ja": ["東京", "東京は", "は", "5千1百", "5千1百万", "1億2", "令和8年5月3日", "午後2時半", "赤、"],
    "ko": ["서울", "서울은", "은는이가", "12만 3", "5천1", "5천1백만", "2026년 5월 3일", "오후 2시 반", "시속 5km",
    "서울과 "],
    "pt": ["R$ 5 ", "14h30 ", "5 milhões de ", "1º de maio de 2026 "],
    "ru": ["москв", "москвами", "Москве ", "нижний нижнем ", "5 млн ", "5 г. ", "3 мая 2026 года ", "в 2 часа дня "],
    "th": ["และ", "คือ", "กรุงเทพ", "คือกรุงเทพครับ", "๕", "5 ล้าน", "พ.ศ. 2569", "3 พ.ค. 2569 ", "14.30 น. ", "ใช่ "],
    "tr": ["ankara", "ankara'", "Ankara'dır ", "'", "%50 ", "5. a", "saat 14.30'da "],
    "vi": ["ngày 3 tháng 5 năm 2026 ", "14 giờ 30 phút ", "5 nghìn tỷ ", "tháng "],
}  # fmt: skip
NAMES = {
    "ar": "القاهرة",
    "fi": "Helsinki",
    "hi": "दिल्ली",
    "ja": "東京",
    "ko": "서울",
    "ru": "Нижний Новгород",
    "th": "กรุงเทพ",
}


@pytest.mark.parametrize("language", by_day(sorted({*IN_LANGUAGES}), "ar", "de", "ja", "th"))
def test_no_language_holds_the_loop(language: str) -> None:
    locale = locale_of(language)
    assert locale is not None and {*IN_LANGUAGES} == {*READ} - {"en", "zh"}
    answers = [*ANSWERS, A(NAMES.get(language, "Ankara")), A("Москва")]

    def search(output: Any) -> None:
        reading = NormalizedOutput(output, language)
        for answer in answers:
            match(reading, answer)

    for unit in [*IN_LANGUAGES[language], *UNITS[::18]]:
        for form, output in outputs(unit, MOST_CHARACTERS).items():
            assert loop_seconds(lambda given=output: search(given)) < 1.5 * MOST_SECONDS, (form, unit)
        text = unit * (16_000 // len(unit)) + "é"
        for read in (locale.plain, locale.dates, locale.clock, locale.numbers, locale.is_sentence, locale.joins.split):
            assert grows_as_the_text(read, text), (read, unit)


WIDE = [
    ({"height_km": "1" * 5_000}, A(7)),  # Python reads and writes no integer of more than 4300 digits
    ("1" * 5_000 + "½", A(7)),
    ("5 " + "1" * 5_000, A(5)),
    ("10^400亿1.5万", A(7)),  # an integer beyond every float, and a fraction of it
    ({"unit": "x" * 10**5, "n": 5}, A(5, unit="km")),
    ([10**4000] * 3, A("7")),
    (float("nan"), A(7)),
    ([float("inf"), "NaN", "-Infinity"], A(7)),
]


@pytest.mark.parametrize(("output", "answer"), WIDE, ids=lambda one: repr(one)[:30])
def test_numbers_beyond_pythons_own_limits_are_no_error(output: Any, answer: Answer) -> None:
    assert match(output, answer) in (None, "number")


@given(st.lists(st.sampled_from(UNITS) | st.text(max_size=3), max_size=40).map("".join), st.sampled_from(ANSWERS))
def test_no_text_is_an_error(text: str, answer: Answer) -> None:
    assert contains(text, answer) in (True, False) and contains({text: [text]}, answer) in (True, False)


def test_what_lists_everything_holds_nothing() -> None:
    assert contains(list(range(MOST_VALUES)), A(77)) and not contains(list(range(MOST_VALUES + 1)), A(77))
    assert not contains("; ".join(map(str, range(MOST_VALUES + 1))), A(77))
    assert not contains(", ".join(f"w{i}" for i in range(MOST_VALUES + 2)), A("w7"))
    assert contains("Oslo. " + "x" * 10_000, A("Oslo")) and not contains("Oslo. " + "x" * MOST_CHARACTERS, A("Oslo"))
    assert not contains({"Oslo": ["Oslo"], "rest": [None] * 30_000}, A("Oslo"))


def test_normal_forms_are_linear_and_change_nothing_that_people_write() -> None:
    written = "São Paulo, Việt Nam, 北京 ①½ ﷺ, ｶﾞ, กำ, हिन्दी, e\u0301\u0323\u0302"
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert normalized(form, written) == unicodedata.normalize(form, written)
        for marks in ("\u0301\u0316", "\u0316\u0301", "\uff9e\u0316", "\u0344\u0316"):
            assert loop_seconds(lambda form=form, marks=marks: normalized(form, "a" + marks * 40_000)) < MOST_SECONDS
            assert len(normalized(form, "a" + marks * 40_000)) < 100
    # All characters that a normal form could sort are counted as marks.
    pairs = ((chr(one), unicodedata.normalize("NFKD", chr(one))) for one in range(0x110000))
    marks = "".join(one for one, apart in pairs if unicodedata.combining(apart[0]))
    assert len(marks) > 900 and len(normalized("NFC", "a" + marks)) < 100
