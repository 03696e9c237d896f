"""The F1 reward: the paper's examples, its bounds, and what counts as solved."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace
from state_world import PAID, bank

from synthesis.core.records import Answer, CodeTool, ReferenceCall, SubQuestion, ToolEnvironment, ToolSpec
from synthesis.core.reward import MadeCall, answered_by, f1_reward, score, solved_by, sub_tasks_by_tool


@pytest.mark.parametrize(
    ("solved", "needed", "calls", "want"),
    [(4, 4, 4, 1.0), (4, 4, 6, 0.8), (3, 4, 4, 0.75), (0, 4, 4, 0.0), (0, 4, 0, 0.0), (1, 1, 3, 0.5)],
)
def test_paper_examples(solved, needed, calls, want):
    assert f1_reward(solved=solved, needed=needed, calls=calls).value == pytest.approx(want, abs=1e-5)


def test_single_parts():
    assert f1_reward(solved=2, needed=4, calls=8).recall == 0.5
    assert f1_reward(solved=2, needed=4, calls=8).precision == pytest.approx(0.25)
    assert f1_reward(solved=1, needed=1, calls=1, epsilon=1.0).precision == 0.5
    harmful = f1_reward(solved=2, needed=2, calls=2, harm=2)
    assert harmful.precision == pytest.approx(0.5) and replace(harmful, value=1.0).f1 == harmful.value
    with pytest.raises(ValueError, match="harm is -1"):
        f1_reward(solved=2, needed=2, calls=2, harm=-1)


@given(needed=st.integers(1, 20), data=st.data())
def test_bounds_and_monotony(needed, data):
    solved = data.draw(st.integers(1, needed))
    calls = data.draw(st.integers(solved, 60))
    reward = f1_reward(solved=solved, needed=needed, calls=calls)
    assert 0 < reward.value <= 1
    assert min(reward.recall, reward.precision) <= reward.value <= max(reward.recall, reward.precision)
    assert f1_reward(solved=solved, needed=needed, calls=calls + 1).value < reward.value
    assert f1_reward(solved=solved - 1, needed=needed, calls=calls).value < reward.value


@pytest.mark.parametrize("counts", [(0, 0, 1), (3, 2, 4), (1, 2, 0), (-1, 2, 1), (2, 2, 1), (3, 3, 1)])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(ValueError):
        f1_reward(solved=counts[0], needed=counts[1], calls=counts[2])


@pytest.mark.parametrize("epsilon", [-1e-6, -1.0, float("nan"), float("inf")])
def test_an_epsilon_that_gives_no_share_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon"):
        f1_reward(solved=1, needed=1, calls=1, epsilon=epsilon)


def environment(*, needs: list[bool], references: list[int]) -> ToolEnvironment:
    def tool(name: str) -> CodeTool:
        return CodeTool(ToolSpec(name, "…", {"type": "object", "properties": {}}), f"def {name}(): return 1")

    answers = [Answer("Paris"), Answer(2_102_650, tolerance=0.5), Answer("Seine")]
    subs = [
        SubQuestion(
            id=i, question="?", answer=answers[i], depends_on=[], hop=1, needs_tool=needed, intent=f"intent{i % 2}"
        )
        for i, needed in enumerate(needs)
    ]
    return ToolEnvironment(
        id="env",
        language="en",
        domain="geography",
        structure="parallel_single_hop",
        question="?",
        answer=answers[0],
        sub_questions=subs,
        tools=[tool("tool0"), tool("tool1")],
        reference_calls=[ReferenceCall(i, f"tool{i % 2}", {}, answers[i].value) for i in references],
        distractors={},
        entities=[],
        signature="s",
        split="train",
    )


def test_solved_only_by_its_own_tool():
    subs = sub_tasks_by_tool(environment(needs=[True, True, True], references=[0, 1, 2]))
    assert solved_by(subs, "tool0", {"river": "Seine"}) == [2]
    assert solved_by(subs, "tool0", {"population": 2_102_650}) == []
    assert solved_by(subs, "tool1", {"population": 2_102_650}) == [1]
    assert solved_by(subs, "tool1", {"population": 12_102_650}) == []
    assert solved_by(subs, "other", "Paris") == []


def test_an_output_with_several_answers_solves_none():
    subs = sub_tasks_by_tool(environment(needs=[True, True, True], references=[0, 1, 2]))
    listed = {"capital": "Paris", "river": "Seine"}
    assert answered_by(subs, "tool0", listed) == [0, 2] and solved_by(subs, "tool0", listed) == []


def test_an_output_that_repeats_its_arguments_solves_its_own_sub_question():
    asked = environment(needs=[True, False, True], references=[0, 2])
    first, second = ReferenceCall(0, "tool0", {"of": "France"}, ""), ReferenceCall(2, "tool0", {"of": "Paris"}, "")
    subs = sub_tasks_by_tool(msgspec.structs.replace(asked, reference_calls=[first, second]))
    output = {"of": "paris", "found": "Seine"}
    assert answered_by(subs, "tool0", output) == [0, 2]
    assert solved_by(subs, "tool0", output, arguments={"of": "Paris"}) == [2]
    # A policy cannot have an answer left out by writing it itself.
    assert solved_by(subs, "tool0", output, arguments={"of": "Seine"}) == []
    both = {"of": "Paris", "found": ["Seine", "Paris"]}
    assert solved_by(subs, "tool0", both, arguments={"of": "France"}) == []


def test_a_call_that_states_the_answer_solves_nothing():
    asked = environment(needs=[True, True, True], references=[0, 1, 2])
    subs, people = sub_tasks_by_tool(asked), {"city": "2102600, 2102650", "population": None}
    assert solved_by(subs, "tool1", people, arguments={"city": "2102600, 2102650"}) == []
    assert solved_by(subs, "tool1", {"population": 2_102_650}, arguments={"city": "Paris"}) == [1]
    guessed = MadeCall("tool1", True, people, {"city": "2102600, 2102650"})
    assert score(asked, [guessed]).value == 0 and score(asked, [guessed._replace(arguments={})]).solved == 1


def test_what_a_world_has_stored_is_no_evidence():
    """The same calls of an environment without a world share nothing."""
    asked = bank()
    noted = MadeCall("transfer", True, {}, {"source": "A70, A71, A72"})
    read = MadeCall("find_account", True, {"notes": ["A70", "A71", "A72"]})
    assert score(asked, [read]).solved == 1 and score(asked, [noted, read]).solved == 0
    assert score(asked, [noted._replace(ok=False), read]).solved == 1
    # What the reference calls give, any episode may write.
    assert score(asked, [noted._replace(arguments=PAID), read]).solved == 1
    assert score(replace(asked, world=UNSET), [noted, read]).solved == 1


def test_no_output_solves_a_sub_task_that_asks_for_a_state():
    """Its answer is true, which a tool may return whatever it did."""
    for output in (True, {"done": True}, "yes"):
        assert score(bank(), [MadeCall("transfer", True, output, PAID)]).solved == 0


VALUES = ["Paris", "Oslo", "Rome", 5, 7, 2.5, True, False, "2026-01-05", "14:30", ["Paris", "Oslo"]]
found = st.sampled_from(VALUES)
outputs = st.recursive(
    found | st.lists(found, max_size=11).map(lambda values: ", ".join(map(str, values))),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner, max_size=4),
    max_leaves=12,
)
called = st.sampled_from(["tool0", "tool1", "other"])
given_arguments = st.dictionaries(st.sampled_from("abc"), found, max_size=2)
made_calls = st.lists(st.builds(MadeCall, called, st.booleans(), outputs, given_arguments), max_size=8)


@given(st.lists(found, min_size=1, max_size=6), made_calls, st.sampled_from([0.0, 1e-6, 0.5]), st.data())
def test_whatever_is_called_a_reward_is_a_share(values, calls, epsilon, data):
    """A call solves one sub-task at most, and no order or repetition of calls is worth more than one for each."""
    subs = [SubQuestion(i, "?", Answer(one), [], 1, True, "r") for i, one in enumerate(values)]
    tools = data.draw(st.lists(st.sampled_from(["tool0", "tool1"]), min_size=len(values), max_size=len(values)))
    references = [ReferenceCall(i, tools[i], {}, one) for i, one in enumerate(values)]
    asked = replace(environment(needs=[], references=[]), sub_questions=subs, reference_calls=references)
    by_tool = sub_tasks_by_tool(asked)
    assert all(len(solved_by(by_tool, call.tool, call.output)) <= 1 for call in calls)
    reward = score(asked, calls, epsilon=epsilon)
    assert 0 <= reward.value <= 1 and 0 <= reward.recall <= 1 and 0 <= reward.precision <= 1
    assert reward.solved <= min(len(calls), len(values))
    everything = MadeCall("tool0", True, values)
    assert score(asked, [everything] * 3).solved <= 1
    if sum(not isinstance(sub.answer.value, bool) for sub in by_tool.get("tool0", [])) > 1:
        assert score(asked, [everything] * 3).value == 0


def test_tool_free_sub_questions_do_not_count():
    subs = sub_tasks_by_tool(environment(needs=[True, False], references=[0]))
    assert {tool: [sub.id for sub in found] for tool, found in subs.items()} == {"tool0": [0]}


def test_environments_that_cannot_be_scored_are_refused():
    with pytest.raises(ValueError, match="sub-question 1 needs a tool but has no reference call"):
        sub_tasks_by_tool(environment(needs=[True, True], references=[0]))
    with pytest.raises(ValueError, match="no sub-question needs a tool"):
        sub_tasks_by_tool(environment(needs=[False], references=[]))
