"""Test whether a tool's output contains the expected answer, by typed rules, never by substring.

Synthesis (is this tool right?) and the RL reward (is this sub-task solved?) both call `contains`. `match` names the
rule that decided. Final answers of a policy must also commit to a value: see `final_answers`. An output is any JSON
value; its leaves are searched, and a string that holds JSON is opened first. Keys are not values, in JSON or in JSON
quoted in a text; only the unit in a key counts (`elevation_ft`). A leaf is a *value* or a *text*. A value is short: it,
or one of its comma-separated parts, must equal the answer. A text is a sentence: the answer may also be a whole-word
phrase of it.

Rules, by the answer's type:
  number    equal within `tolerance`. It may have thousands separators, signs, full-width and Chinese numerals,
            multipliers (million, k, 万, 亿), powers of ten and currencies. Units convert ("1.5 km" is 1500 m, 68 °F is
            20 °C). "5" is not in "15", "A5", "5G", "5-10", "5th", nor in a date, time, version or telephone number.
            2 h is not in "2 h 30 min", which is 150 min. Units and multipliers of keys count.
  date      an ISO date answer equals the same day in another notation ("5 January 2026", "2026年1月5日"). Where day and
            month could change places (05/01/2026) nothing matches.
  time      an answer such as "14:30" equals the same time in another notation ("2:30 PM", "14点30分").
  boolean   JSON booleans and the words for them, alone or as a part ("Yes, it is"). An output that says both true and
            false says neither. A "no" means false as a whole value, where a line begins with it ("No, it is not") or
            after a colon; "NO" beside other values, {"symbol": "No"} and the heading "No,Name" are codes and names.
  string    equal after folding width, case, spaces, quotes, brackets, accents, "&", a leading "the" and final
            punctuation. Identifiers stay whole: "Guinea" is not in "Guinea-Bissau", "Mexico" not in "New Mexico", 柏林
            not in 都柏林, and "02" is not 2. A Latin answer of up to three letters keeps its case in a text: "NO" is
            not "no". Numbers and times are not cut: "234 km" is not in "1,234 km", "5" not in "5 million", "12:30"
            not in "10:12:30".
  list      every element is found, in any order; "and" parts elements too.
Texts are read in English, in Chinese, and in the language that they are said to be in (`locales`): its signs, units,
months, clock, words for yes and no, and forms of names. Ambiguous text (1.234) is read as that language writes it.
Aliases count like the value, and the alias of a number may be a number ("1.5 km"). Anything else does
not match. An empty answer and an output too large to be one answer (see `readings`) match nothing: fail closed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Final

from synthesis.core.dates import whole_date, whole_time
from synthesis.core.locales import Locale, chinese_places_around
from synthesis.core.normal_text import QUOTES, bare, fold, with_tones
from synthesis.core.quantities import CJK, is_multiplied, plain, quantities, whole_quantity
from synthesis.core.readings import BRACKETS, BULLET, FALSE, TRUE, NormalizedOutput, ReadText, key
from synthesis.core.records import Answer
from synthesis.core.units import Quantity, same_quantity
from synthesis.core.word_forms import MOST_PLACES, is_letter

_CHINESE = re.compile(rf"[{CJK}]")
_GLUE = frozenset("-+/#@&_.")
"""Characters that join two words into one identifier: Guinea-Bissau, Europe/Oslo, +47, #f0f8ff, .no, GMT+1."""
_SHORT: Final = 3
"""Longest Latin answer that is searched in texts with its case: the code "NO" is not the word "no"."""
_DIGITS = re.compile(r"\d+(?:\.\d+)?|\d{1,3}(?:,\d{3})+")
_LONGER_BEFORE = frozenset(
    {"New", "North", "South", "East", "West", "Northern", "Southern", "Eastern", "Western", "Equatorial", "Papua"}
)
_LONGER_AFTER = frozenset({"City", "State", "Island", "Islands"})
"""Capitalised words that form another name with the name beside them: New Mexico, Mexico City."""
_LONGER_NAMES_BEFORE: Final = (
    "Nuev[ao]|Nov[ao]|Nuov[ao]|Nouvelle|Nouveau|Neue?|Papúa|(?:Нов|Южн|Северн|Западн|Восточн|Экваториальн)[а-я]{1,3}|Папуа|"
    "Güney|Kuzey|Yeni|Ekvator|Doğu|Batı|Uusi|दक्षिणी?|उत्तरी?|पश्चिमी?|पूर्वी?|नई|नया|न्यू|नॉर्थ|साउथ|جنوب|غينيا"
)
"""Pattern of words that make another name of the name behind them, in all languages but English."""
_LONGER_NAMES_AFTER: Final = (
    "(?:del|do|du|della|de la) (?:Norte|Sur|Sul|Nord|Sud|Este|Leste|Est|Oeste|Ovest|Ouest)|Ecuatorial|Equatorial|"
    "[Ee]quatoriale|"
    "الجنوبية|الشمالية|الاستوائية|الجديدة|بيساو|Moi|Nova|Nueva|Nuova|Ocidental|Occidental|occidental|occidentale"
)
"""Pattern of words that make another name of the name before them."""
_LONGER_NAME_BEFORE = re.compile(bare(_LONGER_NAMES_BEFORE))
_LONGER_NAME_AFTER = re.compile(rf"[ ](?:{_LONGER_NAMES_AFTER})(?!\w)")


def contains(output: Any, answer: Answer, language: str = "en") -> bool:
    """Return whether a tool's JSON output contains the answer; see `match`."""
    return match(output, answer, language) is not None


def match(output: Any, answer: Answer, language: str = "en") -> str | None:
    """Return the rule by which the output contains the answer (`number`, `date`, …, `alias`), or None.

    Args:
        output: a JSON value, or the `NormalizedOutput` of one to search for several answers.
        language: ISO 639-1 code of the language of the output's texts and of the answer; a `NormalizedOutput` has its
            own. In a language that is not in `language_words.READ` texts are read as in English.
    """
    reading = output if isinstance(output, NormalizedOutput) else NormalizedOutput(output, language)
    value = answer.value
    if isinstance(value, list):
        wanted = [Answer(one, tolerance=answer.tolerance, unit=answer.unit) for one in value]
        pieces = reading.in_pieces if len(value) > 1 else reading
        if wanted and all(_match_one(pieces, one) for one in wanted):
            return "list"
    elif rule := _match_one(reading, answer):
        return rule
    return (
        "alias"
        if any(_match_one(reading, one) for alias in answer.aliases for one in _meanings(alias, answer, reading.locale))
        else None
    )


def same(first: Answer, second: Answer, language: str = "en") -> bool:
    """Return whether two answers mean the same."""
    return contains(_as_output(first), second, language) and contains(_as_output(second), first, language)


def _as_output(answer: Answer) -> Any:
    return {"value": answer.value, "unit": answer.unit} if answer.unit else answer.value


def _meanings(alias: str, answer: Answer, locale: Locale | None) -> Iterator[Answer]:
    """Yield an alias unchanged and, for a number, as the one number that it is."""
    yield Answer(alias)
    if isinstance(answer.value, int | float) and not isinstance(answer.value, bool):
        numbers = quantities(locale.numbers(locale.dates(locale.spelled(alias))) if locale else alias)
        if len(numbers) == 1 and len(alias.split()) <= _SHORT:
            unit = numbers[0].unit or answer.unit
            tolerance = answer.tolerance if unit == answer.unit else 0.0
            yield Answer(numbers[0].value, unit=unit, tolerance=tolerance)


def _match_one(reading: NormalizedOutput, answer: Answer) -> str | None:
    value = answer.value
    if isinstance(value, bool):
        # Beside a JSON boolean a "no" that may be a code is one; beside a mere "yes" it may be its contrary.
        said = reading.said == {value} and (not value or bool(reading.booleans) or not reading.is_doubtful)
        return "boolean" if said else None
    if isinstance(value, int | float):
        if not isinstance(value, int) and not math.isfinite(value):
            return None
        wanted = Quantity(value, reading.locale.unit(answer.unit) if reading.locale else answer.unit)
        return "number" if any(same_quantity(one, wanted, answer.tolerance) for one in reading.numbers) else None
    locale = reading.locale
    if not isinstance(value, str) or not (wanted_key := key(value, locale)):
        return None
    if (day := whole_date(locale.dates(locale.spelled(value)) if locale else value)) and any(
        day in text.days(day.year) for text in reading.texts
    ):
        return "date"
    if fold(value) in reading.spelled or _string_in(reading, value, wanted_key):
        return "string"
    if time := whole_time(locale.clock(locale.spelled(value)) if locale else value):
        return "time" if any(time in text.times for text in reading.texts) else None
    if locale and value != "NO" and (fold(value) in TRUE | FALSE | {"no"} | locale.yes | locale.no):
        return _match_one(reading, Answer(fold(value) in TRUE | locale.yes))  # "yes" of an output that says "oui"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Strings


def _string_in(reading: NormalizedOutput, value: str, wanted: str) -> bool:
    locale = reading.locale
    # The quick no, also for long outputs.
    if wanted not in reading.keys and not (locale and locale.forms.may_hold(reading.keys, wanted)):
        return False
    phrase = bare(locale.spelled(value) if locale else plain(value)).strip(QUOTES + BRACKETS)
    number = locale.numbers(locale.dates(phrase)) if locale else phrase
    is_chinese = _CHINESE.search(phrase) is not None
    folded = fold(locale.spelled(value)) if locale and locale.words.tonal else ""
    accented = with_tones(folded) if bare(folded) != folded else ""
    return any(
        (locale is not None or wanted in text.key)
        and _in_text(reading, text, wanted, phrase, number, accented, is_chinese=is_chinese)
        for text in reading.texts
    )


def _in_text(
    reading: NormalizedOutput, text: ReadText, wanted: str, phrase: str, number: str, accented: str, *, is_chinese: bool
) -> bool:
    """Return whether a text contains a phrase.

    Args:
        number: the phrase, with numbers and units in the notation that `quantities` reads.
        accented: the phrase `with_tones` in a tonal language; empty where it has none.
    """
    if text.key == wanted or not reading.is_parted:
        return text.key == wanted
    if _DIGITS.fullmatch(number):
        # Bare digits follow the rule for numbers: not a part of a date, of 1,234 or of 5 million.
        if text.holds_digits(wanted, splits_and=reading.splits_and):
            return True
        return text.is_text and number in text.numerals
    quantity = whole_quantity(number)
    if quantity and phrase[0] != "+" and not any(same_quantity(one, quantity, 0.0) for one in text.quantities):
        return False  # $5 is not in $5 million, nor 2 h in 2 h 30 min; but +47 is in a telephone number
    if text.locale and text.locale.words.tonal and text.toned and accented not in text.toned:
        return False
    short = text.is_text and len(phrase) <= _SHORT and not is_chinese
    parts = text.parts_by_key.get(wanted, [])
    if is_chinese and text.is_text:
        parts = parts + text.clauses_by_key.get(wanted, [])
    if any(not short or phrase in part or _is_element(part, phrase) for part in parts):
        return True
    phrase = " ".join(phrase.split())
    # A name with its particle is a value too: 서울에서.
    if not text.is_text and not (text.locale and text.line.count(" ") == phrase.count(" ")):
        return False
    return _phrase_in(text, phrase, cased=short)


def _is_element(part: str, phrase: str) -> bool:
    """Return whether a part is an element of a list with a word, in small letters or not, and nothing else."""
    return phrase.islower() and phrase.capitalize() in part and BULLET.match(part) is not None


def _phrase_in(text: ReadText, phrase: str, *, cased: bool) -> bool:
    """Return whether the text contains the phrase as whole words. Compiles no pattern, as the RL reward calls it
    often."""
    if phrase.casefold().startswith("the ") and not cased:
        phrase = phrase[4:]
    line, folded, locale = text.line, text.line if cased else text.folded_line, text.locale
    is_name = phrase[:1].isupper()
    phrase = phrase if cased else phrase.casefold()
    if len(folded) != len(line):
        line = folded  # capitals are lost where folding changes lengths, as ß does
    one_character = len(phrase) == 1 and _CHINESE.match(phrase)
    for start, end in _places(folded, phrase, locale):
        before, after = folded[max(0, start - 1) : start], folded[end : end + 1]
        glued_before = before in _GLUE or _is_word(before)
        if before == "'":
            glued_before = _is_word(folded[max(0, start - 2) : start - 1])  # O'Brien is not Brien
        glued_after = _is_word(after)
        # "Oslo." and "Oslo: …" end a phrase; "Oslo.no" and "12:30" go on, and so does O'Brien, but not Oslo's.
        if after in _GLUE or after == ":":
            glued_after = after in "+#" or _is_word(folded[end + 1 : end + 2])  # C++ and C# are not C
        elif after == "'":
            possessive = folded[end + 1 : end + 2] == "s" and not _is_word(folded[end + 2 : end + 3])
            glued_after = _is_word(folded[end + 1 : end + 2]) and not possessive
        if one_character:  # one Chinese character is mostly a part of a word
            glued_before, glued_after = _CHINESE.match(before) is not None, _CHINESE.match(after) is not None
        if locale and before not in _GLUE:
            glued_before = not locale.forms.may_start(folded, start)
        if locale and (glued_after or locale.forms.beside) and (after not in _GLUE or not glued_after):
            last = locale.forms.end_of_word(folded, end)
            # A name with a case ending is still a name: Кубы, not кубы.
            glued_after = last is None or (
                is_name and last > end and not line[start].isupper() and line[start].islower()
            )
            end = end if last is None else last
        if glued_before or glued_after or _in_longer_name(line, start, end, locale):
            continue
        if not _cuts_a_number(line, start, end):
            return True
    return False


def _places(folded: str, phrase: str, locale: Locale | None) -> Iterator[tuple[int, int]]:
    """Yield start and end of each occurrence of the phrase, and of each form of it that the language knows."""
    start = -1
    for _ in range(MOST_PLACES):
        start = folded.find(phrase, start + 1)
        if start < 0:
            break
        yield start, start + len(phrase)
    if locale:
        yield from locale.forms.inflected(folded, phrase)


def _is_word(character: str) -> bool:
    return is_letter(character) and _CHINESE.match(character) is None  # Chinese words touch their neighbours


# 10:12:30 is not 12:30, 下午2:30 not 2:30, 1,234 and 1 234 apples are not 234, and 08:00 PM is not 08:00.
_NUMBER_BEFORE = re.compile(r"(?:\d[,:~]|\^|负|零下|下午|晚上)$")
_THOUSANDS_BEFORE = re.compile(r"(?<!\d)\d{1,3} $")
_NUMBER_AFTER = re.compile(r"[,~]\d|\s?[aApP]\.?[mM]\b")


def _cuts_a_number(text: str, start: int, end: int) -> bool:
    """Return whether a phrase that starts or ends in digits is cut from a longer number or time."""
    if text[start].isdigit():
        before, group = text[max(0, start - 5) : start], text[start : start + 4]
        if _NUMBER_BEFORE.search(before):
            return True
        if group[:3].isdecimal() and not group[3:].isdecimal() and _THOUSANDS_BEFORE.search(before):
            return True
    return text[end - 1].isdigit() and (is_multiplied(text, end) or _NUMBER_AFTER.match(text, end) is not None)


def _in_longer_name(text: str, start: int, end: int, locale: Locale | None) -> bool:
    before, after = text[max(0, start - 15) : start].split(), text[end : end + 9]
    if before and text[start - 1] == " " and before[-1] in _LONGER_BEFORE:
        return True
    if _CHINESE.match(text[start]) and any(chinese_places_around(text, start, end)):
        return True
    if locale and ((before and _LONGER_NAME_BEFORE.fullmatch(before[-1])) or _LONGER_NAME_AFTER.match(text, end)):
        return True
    return after.startswith(" ") and re.split(r"\W", after[1:], maxsplit=1)[0] in _LONGER_AFTER
