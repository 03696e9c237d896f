"""Answers in sentences of many languages, against tables of (answer, right sentence, wrong sentence)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from synthesis.core.locales import READ
from synthesis.core.matching import contains, match, same
from synthesis.core.readings import NormalizedOutput
from synthesis.core.records import Answer
from synthesis.core.reward import SubTask, solved_by

ROOT = Path(__file__).parent.parent.parent
TABLES = sorted((ROOT / "data" / "answers").glob("*.txt"))
"""By language; each line: the answer as JSON, or value and unit as an object; a right sentence; a wrong one."""
FEWEST, LEAST_FOUND, MOST_FALSE = 40, 0.95, 0.01

WHOLE = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d")
A = Answer


def rows(table: Path) -> list[tuple[Answer, str, str]]:
    found = []
    for line in table.read_text(encoding="utf-8").splitlines():
        answer, right, wrong = line.split(" | ")
        value: Any = json.loads(answer)
        found.append((A(**value) if isinstance(value, dict) else A(value), right, wrong))
    return found


def test_each_language_that_is_read_has_a_table() -> None:
    assert [table.stem for table in TABLES] == list(READ)
    assert {table.stem for table in TABLES if len(rows(table)) >= FEWEST} == set(READ)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_right_sentences_are_recognised(table: Path) -> None:
    pairs = rows(table)
    missed = [(answer.value, right) for answer, right, _ in pairs if not contains(right, answer, table.stem)]
    assert len(missed) <= (1 - LEAST_FOUND) * len(pairs), missed


def test_wrong_sentences_are_not() -> None:
    pairs = [(table.stem, *row) for table in TABLES for row in rows(table)]
    false = [
        (language, answer.value, wrong) for language, answer, _, wrong in pairs if contains(wrong, answer, language)
    ]
    assert len(false) <= MOST_FALSE * len(pairs), false


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_parts_of_dates_times_and_numbers_are_no_answers(table: Path) -> None:
    tried = 0
    for answer, right, _ in rows(table):
        value = answer.value
        if isinstance(value, bool) or (isinstance(value, str) and not WHOLE.fullmatch(value)) or "%" in right:
            continue
        whole = {abs(value)} if isinstance(value, int | float) else set()
        parts = {part for part in re.findall(r"[0-9]+", right) if len(part) < 4 and float(part) not in whole}
        for part in parts:
            tried += 2
            assert not contains(right, A(int(part)), table.stem) and not contains(right, A(part), table.stem), right
    assert tried > 20


YES: list[tuple[str, Any, Answer, str]] = [
    # What is ambiguous is read as the language writes it.
    ("de", "1.234", A(1234), "number"), ("en", "1.234", A(1.234), "number"), ("de", "1,234", A(1.234), "number"),
    ("en", "1,234", A(1234), "number"), ("fr", "1 234,5", A(1234.5), "number"), ("ko", "1,234", A(1234), "number"),
    ("de", "0.500", A(0.5), "number"), ("de", "3.14", A(3.14), "number"), ("es", "1,234.5", A(1234.5), "number"),
    ("de", "192.168.1.10 ist die Adresse des Servers.", A("192.168.1.10"), "string"),
    ("de", "03.05.2026", A("2026-05-03"), "date"), ("de", "2026-05-03", A("3. Mai 2026"), "date"),
    ("de", "25.12.2026", A("25. Dezember 2026"), "date"), ("de", "05/25/2026", A("2026-05-25"), "date"),
    # English in a text of another language.
    ("ko", "May 3, 2026", A("2026-05-03"), "date"), ("de", "It is 5 million.", A(5000000), "number"),
    ("ja", "yes", A(True), "boolean"), ("th", "2:30 PM", A("14:30"), "time"),
    # A billion is a million millions where the language says so.
    ("de", "5 Billionen", A(5 * 10**12), "number"), ("fr", "5 billions", A(5 * 10**12), "number"),
    ("pt", "5 bilhões", A(5 * 10**9), "number"), ("es", "5 billones", A(5 * 10**12), "number"),
    # JSON values of an output.
    ("de", {"Einwohner": "5 Millionen"}, A(5000000), "number"), ("ko", {"수도": "서울"}, A("서울"), "string"),
    ("de", {"laenge_km": "1.234,5"}, A(1234500, unit="m"), "number"), ("ru", {"ответ": "да"}, A(True), "boolean"),
    ("de", {"n": 1.234}, A(1.234), "number"), ("fr", ["rouge", "vert"], A(["vert", "rouge"]), "list"),
    # Yes and no as text, units and aliases in the language.
    ("fr", "Oui, bien sûr.", A("yes"), "boolean"), ("ru", "Нет.", A("no"), "boolean"),
    ("fr", "Oui, bien sûr.", A("oui"), "boolean"), ("de", "5000 Meter", A(5, unit="Kilometer"), "number"),
    ("de", "Das kostet 5 Millionen.", A(1, aliases=["5 Mio."]), "alias"),
    # Clitics, particles, endings and digits.
    ("ar", "وباريس", A("باريس"), "string"), ("ar", "للقاهرة", A("القاهرة"), "string"),
    ("ko", "서울에서는", A("서울"), "string"), ("tr", "Ankara’da.", A("Ankara"), "string"),
    ("fr", "La capitale est celle de l’Italie.", A("Italie"), "string"),
    ("hi", "४२", A(42), "number"), ("th", "๔๒", A(42), "number"), ("ar", "٤٢", A(42), "number"),
    ("ja", "４２です", A(42), "number"),
    # Judgements that a text starts with.
    ("en", "That is correct.", A(True), "boolean"), ("en", "The answer is **no**.", A(False), "boolean"),
    ("en", "**Yes**, it is.", A(True), "boolean"), ("en", "Yes. It is.", A(True), "boolean"),
    ("en", "That's not true.", A(False), "boolean"), ("en", "Incorrect. It is Oslo.", A(False), "boolean"),
    ("en", "Not really.", A(False), "boolean"), ("en", "This statement is true.", A(True), "boolean"),
    ("zh", "正确。", A(True), "boolean"), ("zh", "该说法不正确。", A(False), "boolean"), ("zh", "答案：否", A(False),
    "boolean"),
    ("zh", "不是的，它是鱼。", A(False), "boolean"), ("zh", "可以，支持退款。", A(True), "boolean"),
    ("it", "Purtroppo non è vero.", A(False), "boolean"), ("de", "Leider ist das falsch.", A(False), "boolean"),
    ("fr", "Malheureusement non.", A(False), "boolean"), ("ko", "아쉽지만 사실이 아닙니다.", A(False), "boolean"),
    ("tr", "Maalesef bu doğru değil.", A(False), "boolean"), ("en", "Unfortunately not.", A(False), "boolean"),
    ("ja", "残念ながら違います。", A(False), "boolean"), ("en", "Sorry, no.", A(False), "boolean"),
    # Times of the day.
    ("it", "L'ufficio chiude alle 17.", A("17:00"), "time"), ("es", "Cierra a las 17.", A("17:00"), "time"),
    ("pt", "Fecha às 17.", A("17:00"), "time"),
    ("en", "The meeting is at 6 PM.", A("18:00"), "time"), ("en", "18:00", A("6 PM"), "time"),
    ("zh", "下午3点", A("15:00"), "time"), ("zh", "晚上12点", A("00:00"), "time"), ("zh", "凌晨1点20分", A("01:20"),
    "time"),
    ("zh", "早上7点一刻", A("07:15"), "time"), ("zh", "十五时三十分", A("15:30"), "time"),
    ("it", "alle ore 9", A("09:00"), "time"), ("tr", "saat 9'da", A("09:00"), "time"),
    # Numbers and units.
    ("zh", "两个半小时", A(150, unit="min"), "number"), ("zh", "2小时30分", A(150, unit="min"), "number"),
    ("zh", "半小时", A(30, unit="min"), "number"), ("zh", "时速350公里", A(350, unit="km/h"), "number"),
    ("en", "minus 40 degrees Celsius", A(-40, unit="°C"), "number"), ("en", "MX$350", A(350, unit="mxn"), "number"),
    ("en", "40 °C below zero", A(-40, unit="°C"), "number"), ("en", "$350 MXN", A(350, unit="mxn"), "number"),
    ("ja", "2時間半です", A(150, unit="min"), "number"), ("ko", "2시간 반입니다", A(150, unit="min"), "number"),
    ("ja", "12万8000円です", A(128000, unit="jpy"), "number"), ("fr", "C'est 12€50.", A(12.5, unit="eur"), "number"),
    ("de", "Es kostet 45,- Euro.", A(45, unit="eur"), "number"), ("it", "300 km all'ora", A(300, unit="km/h"),
    "number"),
    # Elements of lists.
    ("en", "The colours of light are:\n- Red\n- Green", A(["red", "green"]), "list"),
    ("vi", "Ba màu là:\n1. Đỏ\n2. Vàng", A("đỏ"), "string"), ("vi", "Ở Khánh Hoà.", A("Khánh Hòa"), "string"),
    ("vi", "Thu do la Ha Noi.", A("Hà Nội"), "string"),
]  # fmt: skip
NO: list[tuple[str, Any, Answer]] = [
    ("de", "1.234", A(1.234)), ("de", "1,234", A(1234)), ("de", "3,5", A("5")), ("de", "1.234 km", A("234 km")),
    ("de", "1.234,5", A(1234)), ("de", "Am 3. Mai 2026 ist es so weit.", A(3)), ("de",
    "der 5. Präsident war er", A(5)),
    ("ko", "5월 3일", A(3)), ("ko", "제5공화국입니다", A(5)), ("fr", "le 5e président fut lui", A(5)),
    ("ru", "Кубов было много на столе.", A("Куба")), ("hi", "दिल्ली में है", A("दिल")), ("th", "กรุงเทพประกันภัย",
        A("กรุงเทพ")),
    ("ja", "東京都です", A("京都")), ("es", "No. de habitantes", A(False)), ("es", "ja, no, sv", A(False)),
    ("es", {"code": "NO"}, A(False)), ("fr", "oui, non", A(True)), ("de", "Jagd", A(True)),
    ("de", "5 Kilometer", A(5, unit="m")), ("ko", "5킬로그램", A(5, unit="g")), ("th", "3 พฤษภาคม 2569",
        A("2026-05-04")),
    ("ru", "2 дня", A("14:00")), ("fr", "2h30", A("14:30")), ("ko", "오후 2시 30분", A("02:30")),
    ("ko", "남수단입니다", A("수단")), ("it", "dell'Italiano", A("Italia")), ("fr", "O'Brien est là.", A("Brien")),
    ("en", "Correct answers: 5", A(True)), ("en", "Wrong number", A(False)), ("en", "Turn right.", A(True)),
    ("en", "Of course not, it isn't.", A(True)), ("en", "It is true crime.", A(True)),
    ("en", {"hand": "right"}, A(True)),
    ("en", "Definitely Maybe is an album.", A(True)), ("en", {"status": "Correct"}, A(True)),
    ("zh", "对北京来说很好。", A(True)), ("zh", "可以吗？", A(True)), ("zh", "是否正确？", A(True)),
    ("zh", "正确率为95%。", A(True)), ("zh", "错过了航班。", A(False)), ("zh", "假期是5天。", A(False)),
    ("zh", "给出3点建议。", A("03:00")), ("zh", "上午3点", A("15:00")), ("zh", "3小时", A("03:00")),
    ("en", "5 minus 3", A(-3)), ("en", "$350 MXN", A(350, unit="usd")), ("tr", "5'te 3", A("05:00")),
    ("hi", "शून्य से 12 डिग्री ऊपर", A(-12, unit="°C")), ("fr", "12€90", A(90)), ("it", "ore 21", A(21)),
    ("es", "Gana a las 12 provincias.", A("12:00")), ("it", "Dalle 17.500 voci", A("17:00")),
    ("vi", "Tác giả là Nguyễn Dữ.", A("Nguyễn Du")), ("en", "The columns of it are:\n- No\n- Yes", A("NO")),
]  # fmt: skip


@pytest.mark.parametrize(("language", "output", "answer", "rule"), YES, ids=lambda x: repr(x)[:50])
def test_contained(language: str, output: Any, answer: Answer, rule: str) -> None:
    assert match(output, answer, language) == rule


@pytest.mark.parametrize(("language", "output", "answer"), NO, ids=lambda x: repr(x)[:50])
def test_not_contained(language: str, output: Any, answer: Answer) -> None:
    assert not contains(output, answer, language)


def test_a_reading_has_its_language() -> None:
    assert contains(NormalizedOutput("5 Millionen", "de"), A(5000000)) and not contains(
        NormalizedOutput("5 Millionen"), A(5000000)
    )
    assert same(A("3. Mai 2026"), A("2026-05-03"), "de")


def test_outputs_of_tools_are_read_in_the_language_of_the_environment() -> None:
    sub = SubTask(1, "Wie viele?", A(5000000), [], 1, True, "population", given={})
    output = {"ergebnis": "rund 5 Millionen"}
    assert solved_by({"population": [sub]}, "population", output, "de") == [1]
    assert solved_by({"population": [sub]}, "population", output) == []


def test_a_language_without_tables_is_read_as_english() -> None:
    assert "sw" not in READ and contains("5 million", A(5000000), "sw") and not contains("ndiyo", A(True), "sw")


def test_english_and_chinese_load_no_tables() -> None:
    read = "contains('5 million', Answer(5000000)) and contains('500万', Answer(5000000), 'zh')"
    program = (
        "import sys; from synthesis.core.matching import contains; from synthesis.core.records import Answer\n"
        f"assert {read} and 'babel' not in sys.modules\n"
        "assert contains('5 Millionen', Answer(5000000), 'de') and 'babel' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, check=True)
