"""Echoes: no form of what a policy wrote is evidence, in any output, and what a tool found is."""

from __future__ import annotations

import base64
import html
import json
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processor_time import MOST_SECONDS, loop_seconds

from synthesis.core.echoes import guesses, is_evidence
from synthesis.core.matching import contains
from synthesis.core.records import Answer

ANSWERS: dict[str, list[Any]] = {
    "en": [
        "Reykjavik", "Guinea-Bissau", "São Tomé", "NOR", "A-1043", "New Zealand", 2_102_650, 7, 3.25, "2026-01-05",
        "14:30",
    ],
    "zh": ["北京", "长江", 1_400_000],
    "ko": ["서울"],
}  # fmt: skip
OTHERS = ["London", "Rome", "12", "99", "1999"]

# How a policy may write an answer down.
WRITTEN = {
    "plain": lambda text: text,
    "upper": str.upper,
    "wide": lambda text: "".join(chr(ord(one) + 0xFEE0) if "!" <= one <= "~" else one for one in text),
    "padded": lambda text: f"  {text} ",
    "reversed": lambda text: text[::-1],
    "percent-encoded": quote,
    "all percent-encoded": lambda text: "".join(f"%{byte:02X}" for byte in text.encode()),
    "HTML": lambda text: html.escape("".join(f"&#{ord(one)};" for one in text)).replace("&amp;", "&"),
    "escaped": lambda text: json.dumps(text)[1:-1],
    "JSON": lambda text: json.dumps({"guess": [text]}),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "hexadecimal": lambda text: text.encode().hex(),
    "list of guesses": lambda text: ", ".join([*OTHERS, text]),
    "lines": lambda text: "\n".join([text, *OTHERS]),
    "sentence": lambda text: f"Is it {text}, or not?",
}
# What a tool may make of it.
REPEATED = {
    "value": lambda text: text,
    "record": lambda text: {"query": text, "found": None},
    "lower": lambda text: {"query": text.lower()},
    "nested": lambda text: {"error": {"for": [text]}},
    "said": lambda text: f"You asked about {text}. Nothing was found",
    "repr": lambda text: {"error": f"unknown: {text!r}"},
    "JSON": lambda text: json.dumps({"query": text}),
    "parts": lambda text: [one.strip() for one in text.split(",")],
    "did you mean": lambda text: {"did you mean": text.split(", ")},
}


@pytest.mark.parametrize("how", WRITTEN)
def test_what_a_policy_wrote_is_no_evidence(how: str) -> None:
    taken, lost = [], []
    for language, answer in [(name, one) for name, ones in ANSWERS.items() for one in ones]:
        text, wanted = str(answer), Answer(answer)
        written = WRITTEN[how](text)
        for form, repeat in REPEATED.items():
            for output in (repeat(text), repeat(written), repeat(", ".join(OTHERS[:1] + [text]))):
                if is_evidence(output, wanted, {"query": written}, {"query": "Norway"}, language):
                    taken.append((answer, form, output))
            # The same output is evidence where the policy did not write the answer.
            if contains(repeat(text), wanted, language) and not is_evidence(
                repeat(text), wanted, {"query": "norway", "limit": 40}, {"query": "Norway"}, language
            ):
                lost.append((answer, form))
    assert not taken and not lost


@pytest.mark.parametrize(
    ("arguments", "output", "answer"),
    [
        ({"first": "Reyk", "second": "javik"}, "Reykjavik", "Reykjavik"),
        ({"second": "javik", "first": "Reyk"}, "Reyk javik", "Reyk javik"),
        ({"parts": ["Zealand", "New"]}, "New Zealand", "New Zealand"),
        ({"names": {"Oslo": 1, "Rome": 2}}, ["Oslo", "Rome"], "Oslo"),
        ({"Oslo": 1}, ["Oslo"], "Oslo"),
        ({"query": "Reykjavikkk"}, "Reykjavik", "Reykjavik"),
        ({"query": "Reykjavic"}, {"did you mean": ["Reykjavik"]}, "Reykjavik"),
        ({"code": "NO"}, {"code": "NO", "name": None}, "NO"),
        ({"codes": "DK, NO, SE"}, ["DK", "NO", "SE"], "NO"),
        # The rest of it is a value of the reference call.
        ({"query": "Oslo Norway"}, "Oslo, Norway", "Oslo, Norway"),
        ({"query": "Norway", "of": "Bank of"}, "Bank of Norway", "Bank of Norway"),
        ({"n": 7}, {"number": 7, "name": None}, 7),
        ({"n": [5, 6, 7]}, [7], 7),
        ({"n": "1,2,3,4,5,6,7"}, ["5", "7"], 7),
        ({"n": 7.4}, 7, 7),
        ({"n": "x7y"}, {"digits": "7"}, 7),
        ({"n": "seven 7"}, "7 units", Answer(7, unit="units")),
        ({"n": "2.1"}, {"people_in_millions": 2.1}, 2_100_000),
        ({"n": "2.1"}, "2.1 million people", 2_100_000),
        ({"n": 1.5}, {"km": 1.5}, Answer(1500, unit="m")),
        ({"n": 20, "unit": "C"}, {"celsius": 20}, Answer(68, unit="°F")),
        ({"year": 2026, "month": 1, "day": 5}, "2026-01-05", "2026-01-05"),
        ({"day": "5 January 2026"}, {"date": "2026-01-05"}, "2026-01-05"),
        ({"hour": 14, "minute": 30}, "14:30", "14:30"),
        ({"when": "2:30 PM"}, {"time": "14:30"}, "14:30"),
        ({"query": "Oslo"}, {"query": "Oslo", "found": ["Rome"]}, Answer(["Rome", "Oslo"])),
        ({"query": "NOK"}, {"query": "NOK"}, Answer("Norwegian krone", aliases=["NOK"])),
        ({"query": "yes"}, {"query": "yes"}, True),
        ({"query": "true or false"}, "true", True),
        ({"query": "x", "strict": True}, {"query": "x", "strict": True}, True),
        ({"query": ", ".join(f"guess {n}" for n in range(5000))}, "guess 7", "guess 7"),
        ({"query": "Oslo" + " " * 20_000}, "Oslo", "Oslo"),
    ],
)
def test_parts_lists_numbers_and_flags_that_a_policy_wrote(arguments: Any, output: Any, answer: Any) -> None:
    wanted = answer if isinstance(answer, Answer) else Answer(answer)
    assert contains(output, wanted), "it would be a find without the arguments"
    assert not is_evidence(output, wanted, arguments, {"query": "Norway"})


@pytest.mark.parametrize(
    ("given", "arguments", "output", "answer"),
    [
        # What the reference call gives too is no guess, in other words and another order either.
        ({"a": "Paris", "b": "Lyon"}, {"a": "lyon", "b": "Paris, France"}, {"larger": "Paris"}, "Paris"),
        ({"cities": ["Paris", "Lyon"]}, {"cities": ["Lyon", "Paris"]}, "Paris", "Paris"),
        ({"cities": ["Paris", "Lyon"]}, {"cities": '["Lyon", "Paris"]'}, "Paris", "Paris"),
        ({"name": "Singapore"}, {"name": "singapore"}, {"name": "Singapore", "capital": "Singapore"}, "Singapore"),
        ({"amount": 5}, {"amount": "5"}, 5, 5),
        ({"n": 4.0}, {"n": 4}, 4, 4),
        ({"n": -5}, {"n": -5}, 5, 5),
        ({"date": "5 January 2026"}, {"date": "2026-01-05"}, {"next": "2026-01-06"}, "2026-01-06"),
        ({"date": "5 January 2026"}, {"date": "2026-01-05"}, {"date": "2026-01-05"}, "2026-01-05"),
        # Nor is what states no answer, wherever the output repeats it.
        ({"city": "Oslo"}, {"city": "Oslo"}, {"city": "Oslo", "capital": True}, True),
        ({"city": "Oslo"}, {"city": "Oslo", "strict": True}, {"strict": True, "capital": True}, True),
        ({"id": "A5"}, {"id": "A5"}, {"id": "A5", "name": "Reykjavik"}, "Reykjavik"),
        ({"city": "Paris"}, {"city": "Paris, France"}, {"city": "Paris, France", "people": 2_102_650}, 2_102_650),
        ({"city": "Paris"}, {"city": "Paris", "limit": 10}, "In 2020 there were 2,102,650 people in Paris.", 2_102_650),
        ({"city": "Paris"}, {"city": "City of Paris"}, "The University of Paris is old.", "University of Paris"),
        ({"country": "TN"}, {"country": "TN", "language": "en"}, {"capital": "Tunis"}, "Tunis"),
        ({"country": "Tunisia"}, {"country": "Tunisia", "language": "en"}, {"capital": "Tunis"}, "Tunis"),
        ({"country": "Niger"}, {"country": "Niger", "language": "en"}, {"code": "NE"}, "NE"),
        ({"year": 1966}, {"year": 1966, "limit": 10}, {"easter": "1966-04-10"}, "1966-04-10"),
        ({}, {}, {"capital": "Tunis"}, "Tunis"),
    ],
)  # fmt: skip
def test_honest_calls_stay_right(given: Any, arguments: Any, output: Any, answer: Any) -> None:
    assert is_evidence(output, Answer(answer), arguments, given)


def test_a_choice_among_the_questions_values_wants_them_all() -> None:
    """Whoever passes one of two values has guessed which of them it is."""
    given, paris = {"a": "Paris", "b": "Lyon"}, Answer("Paris")
    assert not is_evidence("Paris", paris, {"a": "Paris", "b": "Paris"}, given)
    assert not is_evidence("Paris", paris, {"a": "Paris or Paris", "b": "Lyon"}, given)
    assert not is_evidence("Paris", paris, {"cities": ["Paris"]}, {"cities": ["Paris", "Lyon"]})


def test_a_world_may_give_back_what_was_stored_before() -> None:
    output, answer = {"notes": ["Oslo", "Rome"]}, Answer("Oslo")
    assert is_evidence(output, answer, {}, {})
    assert not is_evidence(output, answer, {}, {}, "en", ["Rome, Oslo"])


HOSTILE = {
    "many parts": ",".join(f"Reykjav{n}" for n in range(1_300)),
    "escapes": "&#65;" * 3_000,
    "numbers": "1.1," * 4_000,
    "letters that grow": "\ufdfb" * 1_900,
    "letters that grow more": "\ufdfa" * 16_000,
    "values of the reference call": [f"Norway {n}" for n in range(990)],
    "many values": [str(n) for n in range(10_000)],
    "a large number": 10**9_000,
    "no number": float("nan"),
    "half a character": "\ud800",
    "deep": "[" * 9_000,
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_arguments_cost_bounded_time_and_raise_nothing(hostile: Any) -> None:
    for answer in ("Reykjavik", 7, 10**400, "2026-01-05", True):
        for value in ("Norway", hostile):
            read = partial(is_evidence, [answer], Answer(answer), {"query": hostile, "more": hostile}, {"query": value})
            assert loop_seconds(read) < 4 * MOST_SECONDS


def test_a_reference_call_with_long_arguments_is_evidence() -> None:
    given = {"text": "x" * 20_000}
    assert is_evidence(7, Answer(7), given, given) and not is_evidence(7, Answer(7), {"text": "y" * 20_000}, given)


words = st.text(st.characters(categories=("Lu", "Ll", "Nd", "Zs", "Po")), max_size=20)
values = st.recursive(words | st.integers() | st.floats(allow_nan=False) | st.booleans(), st.lists, max_leaves=5)


@given(st.dictionaries(words, values, max_size=3), words, st.text(min_size=1, max_size=12))
def test_an_output_that_is_an_argument_is_never_evidence(arguments: Any, name: str, text: str) -> None:
    given = {"query": "\U0001f3d4"}
    wanted = Answer(text)
    assert not is_evidence(text, wanted, {**arguments, name: text}, given)
    assert not is_evidence({"query": text.upper()}, wanted, {**arguments, name: text}, given)
    # Nor more with more arguments; and reading arguments never fails.
    assert is_evidence(text, wanted, arguments, given) <= contains(text, wanted)


@pytest.mark.parametrize("answer", ["Reykjavik", "Oslo", 7, True, "2026-01-05", ["Oslo", "Rome"]])
def test_guesses_state_the_answer_in_each_text_argument(answer: Any) -> None:
    texts, listed = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
    schema = {
        "properties": {
            "country": texts,
            "names": listed,
            "more": {"anyOf": [texts, {"type": "null"}]},
            "how": {"type": "string", "enum": ["exact"]},
            "limit": {"type": "integer"},
        }
    }
    found = guesses(schema, {"country": "Iceland"}, Answer(answer))
    assert {name for one in found for name in one if one[name] != "Iceland"} == {"country", "names", "more"}
    assert all(set(one) <= {"country", "names", "more"} and "country" in one for one in found)
    in_country = [one["country"] for one in found if len(one) == 1]
    elements = answer if isinstance(answer, list) else [answer]
    assert all(contains(in_country[1].split(", "), Answer(one)) for one in elements)
    assert ("Reykj" in in_country) == (answer == "Reykjavik")
