"""The grammar: questions parse back to their plans, in every style, wording and language."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthesis.offline.facts.relations import all_relations
from synthesis.offline.grammar import STYLES, parse, question, sub_question
from synthesis.offline.plans import Step, chains, entities, evaluate, from_chains, signature, structure, terminals
from synthesis.offline.sampling import random_plan

STRUCTURES = ("single_hop", "parallel_single_hop", "multi_hop", "parallel_multi_hop")
JAPAN = (Step("capital_of_country", "Japan"), Step("population_of_city", 0))


@given(st.integers(0, 2**32), st.sampled_from(STRUCTURES), st.sampled_from(["en", "zh"]), st.sampled_from(STYLES))
def test_parse_is_the_inverse_of_question(seed, wanted, language, style):
    rng = random.Random(seed)
    plan = random_plan(rng, wanted)
    assert structure(plan) == wanted
    back = parse(question(plan, rng, language, style), language)
    assert back == plan
    assert evaluate(back) == evaluate(plan) and signature(back) == signature(plan)
    for index, step in enumerate(plan):
        (only,) = parse(sub_question(plan, index, rng, language), language)
        assert only.relation == step.relation and evaluate((only,)) == [evaluate(plan)[index]]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_phrase_of_every_relation_parses_back(language):
    rng = random.Random(0)
    for relation in all_relations().values():
        for subject in rng.sample(list(relation.rows), 12):
            plan = (Step(relation.id, subject),)
            asked = {question(plan, rng, language, rng.choice(STYLES)) for _ in range(6)}
            assert {parse(text, language) for text in asked} == {plan}


@given(st.integers(0, 2**32), st.sampled_from(STRUCTURES))
def test_random_plans_are_not_trivial(seed, wanted):
    plan = random_plan(random.Random(seed), wanted)
    values = evaluate(plan)
    ends = [str(values[index]) for index in terminals(plan)]
    assert len(set(ends)) == len(ends), "parallel answers must differ"
    for entity, relations in chains(plan):
        trail = [entity]
        for relation in relations:
            trail.append(str(all_relations()[relation].rows[trail[-1]]))
        assert len({one.casefold() for one in trail}) == len(trail), f"a value comes back: {trail}"
        assert len(relations) == 1 if wanted.endswith("single_hop") else 2 <= len(relations) <= 3


def test_random_plans_are_diverse_and_repeatable():
    drawn = {
        wanted: Counter(signature(random_plan(random.Random(seed), wanted)) for seed in range(400))
        for wanted in STRUCTURES
    }
    assert len(drawn["single_hop"]) > 90 and len(drawn["multi_hop"]) > 250
    assert max(count for one in drawn.values() for count in one.values()) <= 16
    assert random_plan(random.Random(7), "multi_hop") == random_plan(random.Random(7), "multi_hop")


def test_no_domain_is_most_of_what_is_drawn():
    """The last look-up's, of what is asked for; each of the thirteen is there, and none is half of it."""
    ends = Counter(
        all_relations()[relations[-1]].domain
        for wanted in STRUCTURES
        for seed in range(150)
        for _, relations in chains(random_plan(random.Random(seed), wanted))
    )
    assert set(ends) == {relation.domain for relation in all_relations().values()}
    assert max(ends.values()) < 0.4 * ends.total() and ends["mathematics"] < 0.1 * ends.total()


@pytest.mark.parametrize("former", ["Do not add any explanation.", "Use the tools and do not guess."])
def test_what_earlier_data_asked_for_is_still_read(former):
    assert parse(f"What is the capital of Japan? {former}", "en") == (JAPAN[0],)


def test_random_plans_keep_to_their_limits():
    servers = [r for r in all_relations().values() if r.server in ("countries", "cities")]
    allowed = {r.id for r in servers}
    for seed in range(60):
        rng = random.Random(seed)
        plan = random_plan(rng, "parallel_multi_hop", servers, 2, branches=(2, 2), keep=lambda e: "a" not in e)
        assert {s.relation for s in plan} <= allowed and len(terminals(plan)) == 2
        assert all(len(relations) == 2 for _, relations in chains(plan))
        assert not [e for e in entities(plan) if "a" in e]


def test_a_shared_step_is_one_step():
    plan = (
        Step("country_of_airport", "OSL"),
        Step("currency_of_country", 0),
        Step("calling_code_of_country", 0),
    )
    text = question(plan, random.Random(1), "en")
    assert text.count("OSL") == 2, "each terminal repeats the shared phrase"
    assert parse(text, "en") == plan
    assert evaluate(plan) == ["Norway", "NOK", "+47"] and terminals(plan) == [1, 2]
    assert entities(plan) == ["OSL", "Norway", "NOK", "+47"]
    assert signature(plan) == "country_of_airport>calling_code_of_country|country_of_airport>currency_of_country"


def test_known_questions():
    assert parse("What is the city population of the capital of Japan?", "en") == JAPAN
    assert parse("Japan的首都的城市人口是什么？", "zh") == JAPAN
    islands = parse("What are the capital of Trinidad and Tobago and the area of Antigua and Barbuda?", "en")
    assert [step.argument for step in islands] == ["Trinidad and Tobago", "Antigua and Barbuda"]
    assert parse("Tell me the capital of Japan, the area of Peru and the weekday of 2026-04-05.", "en")[2] == Step(
        "weekday_of_date", "2026-04-05"
    )


def test_a_question_says_nothing_of_order_and_copies_of_steps():
    copied = (Step("capital_of_country", "Japan"), Step("capital_of_country", "Japan"), Step("population_of_city", 1))
    assert from_chains(chains((copied[1], Step("population_of_city", 0)))) == JAPAN == from_chains(chains(JAPAN))
    merged = from_chains(chains(copied))
    assert from_chains(chains(merged)) == merged == parse(question(copied, random.Random(0), "en"), "en")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no wording fits"),
        ("How tall is Everest?", "no wording fits"),
        ("What is the height of Everest?", "no relation is called 'the height of Everest'"),
        ("What is the capital of Atlantis?", "has no row for 'Atlantis'"),
        (
            "What is the capital of the area of Japan?",
            "capital_of_country does not apply to a value of area_of_country",
        ),
        ("What are the capital of Japan?", "no wording fits"),
        ("What is the capital of Japan and the area of Peru?", "no wording fits"),
    ],
)
def test_parse_refuses_what_is_not_in_the_grammar(text, words):
    with pytest.raises(ValueError, match=words):
        parse(text, "en")


def test_evaluate_names_what_is_wrong():
    for plan, words in [
        ((Step("nonsense", "Japan"),), "unknown relation 'nonsense'"),
        ((Step("capital_of_country", "Atlantis"),), "has no row for 'Atlantis'"),
        ((Step("population_of_city", 0),), "not the index of an earlier step"),
    ]:
        with pytest.raises(ValueError, match=words):
            evaluate(plan)


def test_impossible_requests_are_refused():
    rng = random.Random(0)
    with pytest.raises(ValueError, match="no multi_hop path"):
        random_plan(rng, "multi_hop", [all_relations()["area_of_country"]])
    with pytest.raises(ValueError, match="max_hops"):
        random_plan(rng, "multi_hop", max_hops=1)
    with pytest.raises(ValueError, match="branches"):
        random_plan(rng, "parallel_single_hop", branches=(1, 2))
    with pytest.raises(ValueError, match="style"):
        question(JAPAN, rng, "en", "loud")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        question((), rng, "en")
