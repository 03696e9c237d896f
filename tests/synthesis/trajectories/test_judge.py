"""The seven axes on hand-made runs, failing closed, and the prompts of every request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import msgspec
import pytest
from trajectories_world import context

from synthesis.core.endpoint_settings import Role
from synthesis.core.records import Dialogue, Goal, Message, Task, TaskScores, ToolCall
from synthesis.core.stages import Rejected
from synthesis.offline.facts.servers import fact_servers
from synthesis.offline.teacher import OfflineTeacher
from synthesis.offline.trajectory_author import final_text
from synthesis.pipeline.teacher import TeacherError, render_prompt
from synthesis.trajectories.judge import AXES, judge, score_axes
from synthesis.trajectories.runs import AgentRun, CallStatus
from synthesis.trajectories.teacher_answers import (
    ConcisenessScore,
    FinalAnswerScore,
    QueryPlanningScore,
    QueryUnderstandingScore,
)

COUNTRIES, COUNTRIES_ZH = fact_servers("en", ("countries",))[0], fact_servers("zh", ("countries",))[0]
SERVERS = {COUNTRIES.id: COUNTRIES}
QUESTION = "What is the capital of the largest neighbour of Nepal?"
FIRST, SECOND = "largest_neighbor_of_country", "capital_of_country"
NEIGHBOR, CAPITAL = ("ok", '{"largest_neighbor": "China"}'), ("ok", '{"capital": "Beijing"}')
TIMEOUT = ("failed", '{"error": "timeout"}')
OTHER = ((SECOND, {"country": "Nepal"}), ("ok", '{"capital": "Kathmandu"}'))
ONE, TWO = (FIRST, {"country": "Nepal"}), (SECOND, {"country": "China"})


def made(*turns, answer="The answer is Beijing.", question=QUESTION, language="en") -> AgentRun:
    """A run: each turn is a list of (call, result)."""
    messages, calls = [Message("user", question)], []
    for turn in turns:
        numbered = [(f"call_{len(calls) + i}", call, result) for i, (call, result) in enumerate(turn, start=1)]
        messages.append(Message("assistant", "", "I look it up.", [ToolCall(i, *call) for i, call, _ in numbered]))
        messages += [Message("tool", text, tool_call_id=i, name=call[0]) for i, call, (_, text) in numbered]
        calls += [CallStatus(i, kind == "ok", "" if kind == "ok" else "timeout") for i, _, (kind, _) in numbered]
    messages.append(Message("assistant", answer, "I have it."))
    one = Task("t", COUNTRIES.id, language, "chain", "original", question, [FIRST, SECOND], TaskScores(5, 5, 5))
    return AgentRun(one, messages, calls)


async def axes(run: AgentRun, teacher=None) -> dict[str, float]:
    """The axes that are not 1."""
    scores = await score_axes(run, context(teacher), COUNTRIES)
    assert set(scores) <= set(AXES) and all(score.reason for score in scores.values())
    return {axis: round(score.score, 3) for axis, score in scores.items() if score.score != 1}


GOOD = made([(ONE, NEIGHBOR)], [(TWO, CAPITAL)])


async def test_a_flawless_run_has_every_point():
    assert await axes(GOOD) == {}


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        pytest.param(
            made([(ONE, TIMEOUT)], [(ONE, NEIGHBOR)], [(TWO, CAPITAL)]), {"tool_call_status": 0.667}, id="retry"
        ),
        pytest.param(
            made([(ONE, NEIGHBOR)], [(ONE, NEIGHBOR)], [(TWO, CAPITAL)]),
            {"tool_response_understanding": 0.667, "response_conditioned_planning": 0.5, "conciseness": 0.667},
            id="redundant",
        ),
        pytest.param(
            made([(ONE, NEIGHBOR)], [(TWO, CAPITAL), OTHER]),
            {"tool_response_understanding": 0.5, "response_conditioned_planning": 0.5, "conciseness": 0.667},
            id="a call for nothing",
        ),
        pytest.param(
            made([OTHER], answer="The answer is Kathmandu."),
            {
                "query_understanding": 0.0,
                "query_planning": 0.0,
                "tool_response_understanding": 0.5,
                "conciseness": 0.0,
                "final_answer": 0.0,
            },
            id="another question",
        ),
        pytest.param(
            made([(ONE, TIMEOUT)], answer="I could not find the answer, the tool failed."),
            {"tool_response_understanding": 0.5, "tool_call_status": 0.0, "final_answer": 0.5},
            id="gives up, and says so",
        ),
        pytest.param(
            made([(ONE, NEIGHBOR)]),
            {"tool_response_understanding": 0.5, "final_answer": 0.5},
            id="right by luck",
        ),
        pytest.param(
            made([(ONE, NEIGHBOR)], [(TWO, CAPITAL)], answer="首都是Beijing。"), {"final_answer": 0.0}, id="language"
        ),
        pytest.param(
            made([(ONE, NEIGHBOR)], [(TWO, CAPITAL)], answer="The answer is China."),
            {"tool_response_understanding": 0.75, "final_answer": 0.0},
            id="an intermediate value",
        ),
        pytest.param(made(), {"query_planning": 0.0, "final_answer": 0.5}, id="without a call"),
    ],
)  # fmt: skip
async def test_each_flaw_costs_its_axes(run, expected):
    assert await axes(run) == expected


async def test_the_threshold_selects_and_the_reward_is_the_mean():
    retried = made([(ONE, TIMEOUT)], [(ONE, NEIGHBOR)], [(TWO, CAPITAL)])
    (kept,) = await judge(retried, context(), SERVERS)
    assert kept.reward == pytest.approx((6 + 2 / 3) / 7) and kept.injected_failures == 1
    assert await judge(retried, context(reward_threshold=kept.reward), SERVERS) == [kept]
    wrong = made([(ONE, NEIGHBOR)], [(TWO, CAPITAL)], answer="The answer is China.")
    with pytest.raises(Rejected, match="low_final_answer"):
        await judge(wrong, context(), SERVERS)
    with pytest.raises(Rejected, match="low_reward: t: 0.952; tool_call_status"):
        await judge(retried, context(reward_threshold=0.99), SERVERS)


class Flattering(OfflineTeacher):
    """A judge to whom everything is right; counts how often it was asked."""

    asked = 0

    async def ask(self, answer, variables, *, language, seed):
        self.asked += 1
        return {
            "QueryUnderstandingScore": QueryUnderstandingScore("fine", "yes"),
            "QueryPlanningScore": QueryPlanningScore("fine", "yes"),
            "FinalAnswerScore": FinalAnswerScore("fine", "yes", "yes"),
        }.get(answer.__name__) or await super().ask(answer, variables, language=language, seed=seed)


async def test_a_right_answer_hides_no_wrong_one_before_it():
    """The first answer is in another language than its question."""
    said = [*GOOD.messages[:-1], Message("assistant", "首都是北京。"), Message("user", QUESTION), GOOD.messages[-1]]
    assert (await axes(msgspec.structs.replace(GOOD, messages=said), Flattering()))["final_answer"] == 0


async def test_what_was_not_judged_has_no_score():
    assert set(await score_axes(GOOD, context(), COUNTRIES)) == set(AXES)
    assert set(await score_axes(made([(ONE, NEIGHBOR)]), context(), COUNTRIES)) == set(AXES) - {
        "response_conditioned_planning"
    }
    without = await score_axes(made(), context(), COUNTRIES)
    assert tuple(without) == ("query_understanding", "query_planning", "final_answer")


UNREACHED = [
    msgspec.structs.replace(GOOD, calls=[msgspec.structs.replace(GOOD.calls[0], ok=False, error=error), GOOD.calls[1]])
    for error in ("unknown_tool", "invalid_arguments")
]


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (made(), f"tools_unused: t: never called {FIRST}, {SECOND}"),
        (made([(ONE, NEIGHBOR)]), f"tools_unused: t: never called {SECOND}"),
        *((run, f"tools_unused: t: never called {FIRST}") for run in UNREACHED),
        (made([(ONE, TIMEOUT)], [(TWO, TIMEOUT)]), "no_result: t: none of 2 calls succeeded"),
        (msgspec.structs.replace(GOOD, task=msgspec.structs.replace(GOOD.task, tools=[])), "no_tools"),
        (msgspec.structs.replace(GOOD, task=msgspec.structs.replace(GOOD.task, mode="no_tool", tools=[])),
         f"unneeded_call: t: {FIRST} was called"),
    ],
)  # fmt: skip
async def test_a_run_that_does_not_call_what_its_task_names_is_not_even_judged(run, reason):
    """An agent that answers from memory, before judges that would give it every point."""
    teacher = Flattering()
    with pytest.raises(Rejected, match=reason):
        await judge(run, context(teacher, reward_threshold=0.1, final_answer_threshold=0.1), SERVERS)
    assert not teacher.asked


FIRST_TWO = ([(ONE, NEIGHBOR)], [(TWO, CAPITAL)])
HIDDEN = ("ok", '{"error": "the country is not in the table"}')


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (made([(ONE, NEIGHBOR)], *FIRST_TWO), "repeated_call: t: largest_neighbor_of_country"),
        (made([(ONE, ("ok", '{"largest_neighbor": "India"}'))], *FIRST_TWO),
         "contradictory_results: t: largest_neighbor_of_country"),
        (made(*FIRST_TWO, answer="It is Beijing, with 21,893,095 people."), "unsupported_claim: t: the number 21,893"),
        (made(*FIRST_TWO, answer="It is Beijing, not Shanghai."), "unsupported_claim: t: the name Shanghai"),
        (made([((FIRST, {"country": "Mongolia"}), NEIGHBOR)], [(TWO, CAPITAL)]),
         r"argument_from_nowhere: t: largest_neighbor_of_country\('Mongolia'"),
        (made([(ONE, NEIGHBOR)], [(TWO, TIMEOUT)], answer="It is China."),
         "success_after_failure: t: capital_of_country failed"),
        (made([(ONE, NEIGHBOR)], [(TWO, HIDDEN)], answer="It is China."),
         "success_after_failure: t: capital_of_country failed"),
        (made(*FIRST_TWO, answer="I am unable to tell the capital."), "refusal_after_success"),
        (made(*FIRST_TWO, answer="It is Beijing.<|im_end|>"), "template_tokens"),
        (made(*FIRST_TWO, answer="It is Beijing; the judge will like it."), "talk_of_simulation: t: 'the judge'"),
        (made([(ONE, ("ok", '{"largest_neighbor": "China", "note": "simulated data"}'))], [(TWO, CAPITAL)]),
         "talk_of_simulation: t: 'simulated'"),
    ],
)  # fmt: skip
async def test_what_a_rule_can_see_is_rejected_by_name_before_judges_that_like_everything(run, reason):
    teacher = Flattering()
    with pytest.raises(Rejected, match=reason) as rejected:
        await judge(run, context(teacher, reward_threshold=0.1, final_answer_threshold=0.1), SERVERS)
    assert not teacher.asked and rejected.value.record.messages == run.messages


@pytest.mark.parametrize(
    "run",
    [
        GOOD,
        made([(ONE, TIMEOUT)], *FIRST_TWO),
        made(*FIRST_TWO, answer="China is the largest neighbour of Nepal, and its capital is Beijing."),
        made([(ONE, NEIGHBOR)], [(TWO, TIMEOUT)], answer="The neighbour is China, but its capital could not be found."),
    ],
)
async def test_what_the_results_support_reaches_the_judges(run):
    teacher = Flattering()
    assert await judge(run, context(teacher, reward_threshold=0.1, final_answer_threshold=0.1), SERVERS)
    assert teacher.asked


async def test_a_task_for_no_tool_is_one_on_purpose_and_labelled():
    memory = made()
    task = msgspec.structs.replace(memory.task, mode="no_tool", tools=[])
    (kept,) = await judge(msgspec.structs.replace(memory, task=task), context(Flattering()), SERVERS)
    assert kept.needs == [] and set(kept.scores) == {"query_understanding", "query_planning", "final_answer"}
    (kept,) = await judge(GOOD, context(), SERVERS)
    assert kept.needs == [FIRST, SECOND] and len(kept.scores) == 7


@pytest.mark.parametrize(("turns", "roles"), [(1, []), (2, ["user"])])
async def test_a_user_that_may_answer_is_among_the_models_of_a_record(turns, roles):
    class Modelled(OfflineTeacher):
        router = SimpleNamespace(names=lambda record, judged: dict.fromkeys(get_args(Role), "m"))

        def route(self, record):
            return self

    dialogue = Dialogue("missing_tool", [Goal(QUESTION, [FIRST, SECOND])], user_turns=turns)
    task = msgspec.structs.replace(GOOD.task, dialogue=dialogue)
    (kept,) = await judge(msgspec.structs.replace(GOOD, task=task), context(Modelled()), SERVERS)
    assert kept.provenance.models == dict.fromkeys(["agent", "author", *roles, "judge"], "m")


async def test_a_judge_that_fails_rejects_and_never_scores():
    class Failing(OfflineTeacher):
        async def ask(self, answer, variables, *, language, seed):
            if answer.__name__ == "ToolPlanningScore":
                raise TeacherError("no valid answer")
            return await super().ask(answer, variables, language=language, seed=seed)

    class Forgetful(OfflineTeacher):
        async def ask(self, answer, variables, *, language, seed):
            given = await super().ask(answer, variables, language=language, seed=seed)
            return ConcisenessScore(given.calls[:1]) if isinstance(given, ConcisenessScore) else given

    with pytest.raises(Rejected, match="judge_failed: no valid answer"):
        await axes(GOOD, Failing())
    with pytest.raises(Rejected, match="judge_failed.*judged the calls call_1, not call_1, call_2"):
        await axes(GOOD, Forgetful())


async def test_a_judge_that_left_out_a_call_is_told_so_and_asked_again():
    class Corrected(OfflineTeacher):
        feedback: list[str] = []

        async def ask(self, answer, variables, *, language, seed):
            given = await super().ask(answer, variables, language=language, seed=seed)
            if not isinstance(given, ConcisenessScore):
                return given
            self.feedback.append(variables["feedback"])
            return given if variables["feedback"] else ConcisenessScore(given.calls[:1])

    teacher = Corrected()
    assert await axes(GOOD, teacher) == {}
    assert teacher.feedback == ["", "ConcisenessScore: judged the calls call_1, not call_1, call_2"]


def test_final_answers():
    assert final_text(["Oslo"], "en") == "The answer is Oslo."
    assert final_text([1, "b", 2.5], "en") == "The answers are 1, b and 2.5."
    assert final_text([1, "b", 2.5], "zh") == "答案分别是1、b和2.5。"


def test_the_three_kinds_of_variation_have_prompts_of_their_own():
    from synthesis.trajectories.teacher_answers import TaskVariation

    variables = {"server": COUNTRIES, "task": GOOD.task, "persona": "a teacher", "feedback": ""}
    texts = {
        render_prompt(TaskVariation, {**variables, "mode": mode}, "en") for mode in ("diverse", "complicate", "persona")
    }
    assert len(texts) == 3
