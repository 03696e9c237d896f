"""Whether the words of a final answer are right, which the reward does not ask."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from rollout_world import make_environment

from astra_jax.evaluation.episodes import answers_rightly, summarise
from astra_jax.rollout.episode import Episode
from synthesis.core.records import Answer, Message
from synthesis.core.reward import f1_reward

PARIS = Answer("Paris")
ENVIRONMENT = msgspec.structs.replace(make_environment(), answer=PARIS)


def episode(
    said: str, *, finish: str = "answered", solved: int = 2, id: str = "france", reasoning: str = ""
) -> Episode:
    return Episode(
        environment_id=id,
        token_ids=[],
        prompt_tokens=0,
        loss_mask=[],
        logprobs=[],
        versions=[],
        calls=[],
        score=None if finish == "masked" else f1_reward(solved=solved, needed=2, calls=2),
        turns=1,
        finish=finish,
        messages=[Message("user", "What?"), Message("assistant", said, reasoning=reasoning)],
    )


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("The capital is Paris.", PARIS, True),
        ("It is PARIS", PARIS, True),
        ("It is Lyon.", PARIS, False),
        ("It is Parisian weather.", PARIS, False),
        ("", PARIS, False),
        ('{"name": "capital_of", "arguments": {"country": "France"}}', PARIS, False),
        ("About 2,100,000 people.", Answer(2_100_000), True),
        ("2.1 million", Answer(2_100_000), True),
        ("About 21 people.", Answer(2_100_000), False),
        ("On 5 January 2026.", Answer("2026-01-05"), True),
        ("On 05/01/2026.", Answer("2026-01-05"), False),  # of two readings neither is taken
        ("Paris and Oslo", Answer(["Oslo", "Paris"]), True),
        ("Paris, and I do not know the other", Answer(["Oslo", "Paris"]), False),
        ("Yes and no: true, false", Answer(True), False),
        ("Lyon, Paris, Marseille or Nice", PARIS, False),
        ("The capital is not Paris.", PARIS, False),
        ("Not Lyon but Paris.", PARIS, True),
        ("One of " + ", ".join(map(str, range(1, 101))) + ".", Answer(40), False),
        ("Lutetia, as it was called", Answer("Paris", aliases=["Lutetia"]), True),
    ],
)
def test_the_answer_is_in_the_last_words_by_the_rules_of_the_reward(said: str, answer: Answer, right: bool) -> None:
    assert answers_rightly(episode(said), msgspec.structs.replace(ENVIRONMENT, answer=answer)) is right


@pytest.mark.parametrize("finish", ["turn_limit", "token_limit", "masked"])
def test_what_a_limit_ended_answers_nothing(finish: str) -> None:
    """Its last message may be cut off, a call, or what a tool has said."""
    assert not answers_rightly(episode("It is Paris.", finish=finish), ENVIRONMENT)


def test_thoughts_are_no_answer() -> None:
    assert not answers_rightly(episode("I cannot say.", reasoning="It is Paris."), ENVIRONMENT)


@pytest.mark.parametrize(
    ("solved", "finish", "right"), [(2, "answered", True), (1, "answered", False), (2, "turn_limit", False)]
)
def test_a_state_that_was_asked_for_is_the_answer(solved: int, finish: str, right: bool) -> None:
    last = msgspec.structs.replace(ENVIRONMENT.sub_questions[-1], check="def check(before, after):\n    return True\n")
    asked = msgspec.structs.replace(
        ENVIRONMENT, sub_questions=[*ENVIRONMENT.sub_questions[:-1], last], answer=Answer(True)
    )
    assert answers_rightly(episode("It is booked.", solved=solved, finish=finish), asked) is right


def summary(episodes: Sequence[tuple[str, Episode]]):
    environments = [make_environment(), msgspec.structs.replace(make_environment(), id="norway", answer=Answer("Oslo"))]
    return summarise(environments, episodes)


def test_accuracy_is_the_share_of_scored_episodes_and_not_of_the_calls() -> None:
    """Right calls may end in wrong words, and the other way round; a masked episode counts nowhere."""
    number = str(make_environment().answer.value)
    result = summary(
        [
            ("france", episode(number, solved=0)),
            ("france", episode("no idea", solved=2)),
            ("france", episode(number, finish="masked")),
            ("norway", episode("Oslo", id="norway")),
            ("norway", episode("Oslo", id="norway", finish="token_limit")),
        ]
    )
    assert result.answer_accuracy == 0.5 and result.episodes == 4 and result.masked_episodes == 1
    assert result.f1 == pytest.approx(0.75, abs=1e-5)
    assert result.full_reward == 0.75 and result.full_reward_accuracy == pytest.approx(1 / 3)
    assert summary([("france", episode(number, solved=0))]).full_reward_accuracy is None
    # Of the environments' means, which are both a half: their episodes are not independent.
    assert result.answer_interval[0] <= 0.5 <= result.answer_interval[1]
    assert result.answer_interval != (0.0, 1.0)
