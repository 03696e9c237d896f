"""What must not be done: which records there are, what their runs may not call, and who is to blame for what."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import msgspec
import pytest
from trajectories_world import context

from astra_jax.base.settings import SettingError
from sandbox import SandboxConfig, SandboxPool
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import (
    Behaviour,
    Dialogue,
    Goal,
    Message,
    Task,
    TaskScores,
    ToolCall,
    ToolServer,
    Trajectory,
)
from synthesis.core.stages import Journal, Rejected, rng_for
from synthesis.offline.behaviour_words import SENTENCES, heard, say
from synthesis.offline.facts.servers import fact_servers
from synthesis.offline.situations import situation
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline.executors import Executor
from synthesis.trajectories.behaviours import PRECONDITIONS, check_behaviour, offered, rounds, score_any, write_any
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.execution import Failures
from synthesis.trajectories.judge import AXES, judge
from synthesis.trajectories.pipeline import synthesize
from synthesis.trajectories.runs import AgentRun, CallStatus, Ending
from synthesis.trajectories.task_sampler import TaskSampler
from synthesis.trajectories.tasks import TaskSeed
from synthesis.trajectories.teacher_answers import ConductRating, DialoguePlan, PlannedGoal, RestrainedTask
from synthesis.trajectories.todo_fixture import WRITES
from synthesis.trajectories.tool_graph import chains_of

BEHAVIOURS: tuple[Behaviour, ...] = get_args(Behaviour)
COUNTRIES = fact_servers("en", ("countries",))[0]
ELEMENTS = fact_servers("en", ("elements",))[0]
SERVERS = {one.id: one for one in (COUNTRIES, ELEMENTS)}
CAPITAL = "capital_of_country"


async def made(folder, *, replace=False, **more):
    config = TrajectoriesConfig(
        **{
            "trajectories": 80, "sources": (), "mcp_share": 0.0, "fact_servers": ("countries", "elements", "colors"),
            "emulated_servers": (), "partition": None, "proposals": 3, "walks": 20, **more,
        }
    )  # fmt: skip
    async with SandboxPool(SandboxConfig()) as pool:
        with Journal(folder / "journal.sqlite") as journal:
            return await synthesize(
                config, executor=Executor(OfflineTeacher(), pool), journal=journal, out_dir=folder / "out",
                workdir=folder, seed=6, replace=replace,
            )  # fmt: skip


@pytest.fixture(scope="module")
async def run(tmp_path_factory):
    """A run of which nine tenths teach something beside calling tools."""
    shares = {behaviour: {"dialogue": 0.18, "missing_parameter": 0.12}.get(behaviour, 0.09) for behaviour in BEHAVIOURS}
    return await made(tmp_path_factory.mktemp("behaviours"), behaviours=shares)


def called(one: Trajectory) -> list[list[str]]:
    return [[call.name for message in part for call in message.tool_calls] for part in rounds(one.messages)]


async def test_each_behaviour_is_in_the_records_and_held_by_them(run):
    """Re-derived from the records alone."""
    records = read_dataset(run.datasets["trajectories"], Trajectory)
    servers = {one.id: one for one in read_dataset(run.datasets["servers"], ToolServer)}
    marked = [one for one in records if one.dialogue]
    counts = Counter(one.dialogue.behaviour for one in marked)
    assert set(counts) == set(BEHAVIOURS) and {one.language for one in marked} == {"en", "zh"}
    for one in marked:
        dialogue, calls, names = one.dialogue, called(one), {tool.name for tool in one.tools}
        lacks = dialogue.hidden_at(len(calls))
        assert names == {tool.name for tool in servers[one.server_id].tools} - set(lacks)
        assert (
            bool(dialogue.restored_at_turn)
            == (dialogue.behaviour == "later_tool")
            == bool(dialogue.hidden_tools and not lacks)
        )
        assert len(calls) <= dialogue.user_turns and one.messages[-1].content and set(one.scores) <= set(AXES)
        every = {name for part in calls for name in part}
        assert set(one.needs) == every  # nothing beside what its goals need, and all of that
        assert bool(dialogue.policy) == (one.messages[0].role == "system")
        assert bool(dialogue.policy) == (dialogue.behaviour in ("refused", "confirmation") or bool(dialogue.forbids))
        if dialogue.behaviour in ("missing_tool", "irrelevant_tools", "infeasible", "refused"):
            assert not every and len(calls) == 1 and one.needs == []
        if dialogue.behaviour == "missing_tool":
            assert len(dialogue.hidden_tools) == 1
        if dialogue.behaviour == "later_tool":
            assert (
                len(calls) == 2 == dialogue.restored_at_turn and not calls[0] and dialogue.hidden_tools[0] in calls[1]
            )
            assert {tool.name for tool in one.tools_once(1)} == names - set(dialogue.hidden_tools)
            assert (
                one.tools_once(2) == one.tools
                and heard("again", rounds(one.messages)[1][0].content, one.language) == ()
            )
        if dialogue.behaviour == "missing_parameter":
            assert not calls[0] and one.messages[1].content.endswith(("?", "？"))
        if dialogue.behaviour == "confirmation":
            assert dialogue.writes == list(WRITES) and not any(calls[: len(dialogue.goals[0].when_asked)])
        if dialogue.thanks:
            assert not calls[-1] and len(calls) > 1
    answered = Counter(len(rounds(one.messages)) for one in marked if one.dialogue.behaviour == "missing_parameter")
    assert set(answered) == {1, 2}  # some end with the agent's question
    confirmed = {bool(one.needs) for one in marked if one.dialogue.behaviour == "confirmation"}
    assert confirmed == {True, False}  # some users take it back


async def test_conversations_have_two_to_five_turns_that_refer_to_each_other(run):
    records = read_dataset(run.datasets["trajectories"], Trajectory)
    talks = [one for one in records if one.dialogue and one.dialogue.behaviour == "dialogue"]
    assert {len(rounds(one.messages)) for one in talks} == {2, 3, 4, 5}
    said = [(message.content, one.language) for one in talks for message in one.messages if message.role == "user"]
    for what in ("follow_up", "changed", "value", "thanks"):
        assert any(heard(what, text, language) is not None for text, language in said), what
    assert all(one.dialogue.persona for one in talks) and {one.dialogue.thanks for one in talks} == {True, False}
    assert all(len(set(map(tuple, called(one)))) > 1 for one in talks)


async def test_a_policy_forbids_one_thing_of_some_conversations_and_is_kept(run):
    """What it forbids is asked for, and answered without the call; the rest is served."""
    records = read_dataset(run.datasets["trajectories"], Trajectory)
    talks = [one for one in records if one.dialogue and one.dialogue.behaviour == "dialogue"]
    told = [one for one in talks if one.dialogue.forbids]
    assert told and len(told) < len(talks)
    for one in told:
        (refused,) = [goal for goal in one.dialogue.goals if not goal.tools]
        parts, (forbidden,) = rounds(one.messages), one.dialogue.forbids
        asked = [part for part in parts if part[0].content == refused.utterance]
        assert len(asked) == 1 and not any(message.tool_calls for message in asked[0])
        assert heard("not_allowed", asked[0][-1].content, one.language)
        assert forbidden not in one.needs and set(one.needs) == {name for names in called(one) for name in names}
        assert forbidden in one.dialogue.policy and one.messages[0].content == one.dialogue.policy


async def test_the_card_counts_them_and_tells_the_users_faults_from_the_agents(run):
    card = read_card(run.datasets["trajectories"])["statistics"]
    records = read_dataset(run.datasets["trajectories"], Trajectory)
    assert card["behaviours"] == Counter(one.dialogue.behaviour for one in records if one.dialogue)
    assert card["user_turns_per_conversation"] == {
        str(turns): count for turns, count in Counter(len(rounds(one.messages)) for one in records).items()
    }
    of_user = {
        reason: count for stage in ("interact", "user", "judge") for reason, count in run.rejected[stage].items()
        if reason.startswith("user_")
    }  # fmt: skip
    assert card["rejected_for"]["user"] == of_user and sum(of_user.values()) > 0
    assert not any(reason.startswith("user_") for reason in run.rejected["judge"])
    assert card["rejected_for"]["agent"] > 0 and run.rejected["judge"]["unneeded_call"] > 0
    assert run.statistics["tasks"]["behaviours"].keys() == set(BEHAVIOURS)


async def test_shares_change_no_other_record_and_none_is_today(run, tmp_path):
    """What is drawn without them is drawn with them; without any, no record, card or server knows of them."""
    none = await made(tmp_path, behaviours={})
    tasks = {one.id: one for one in read_dataset(none.datasets["tasks"], Task)}
    assert not any(one.dialogue or one.mode in ("no_tool", "dialogue") for one in tasks.values())
    kept = [one for one in read_dataset(run.datasets["tasks"], Task) if not one.dialogue]
    originals = [one for one in kept if one.augmentation == "original" and one.id in tasks]
    assert len(originals) >= 5 and all(
        msgspec.json.encode(one) == msgspec.json.encode(tasks[one.id]) for one in originals
    )
    data = msgspec.json.encode(read_dataset(none.datasets["trajectories"], Trajectory))
    assert b'"dialogue"' not in data and "behaviours" not in none.statistics["trajectories"]
    assert not any(one.id.startswith("desk") for one in read_dataset(none.datasets["servers"], ToolServer))


async def test_what_is_finished_without_them_is_not_gone_on_with_under_the_default(tmp_path):
    """A card of a version that knew nothing of them was made with none, whatever the default is now."""
    await made(tmp_path, trajectories=3, behaviours={})
    file = tmp_path / "out" / "trajectories" / "dataset_card.json"
    card = msgspec.json.decode(file.read_bytes())
    del card["config"]["behaviours"]
    file.write_bytes(msgspec.json.encode(card))
    assert (await made(tmp_path, trajectories=3, behaviours={})).counts["trajectories"] == 3
    file.write_bytes(msgspec.json.encode(card))
    with pytest.raises(Exception, match="made with another config.behaviours: {}"):
        await made(tmp_path, trajectories=3)


def test_shares_are_what_they_say():
    with pytest.raises(SettingError, match="are 1.200 of the tasks; lower some"):
        TrajectoriesConfig(behaviours={"done": 0.6, "dialogue": 0.6})
    with pytest.raises(SettingError):
        TrajectoriesConfig(behaviours={"gossip": 0.1})  # type: ignore[dict-item]
    walks = {(CAPITAL,): 1.0, ("largest_neighbor_of_country", CAPITAL): 1.0, ("symbol_of_element",): 1.0}
    chains = [
        one for server in SERVERS.values()
        for one in chains_of(server, {walk: 1.0 for walk in walks if walk[0] in {tool.name for tool in server.tools}})
    ]  # fmt: skip
    shares = {"missing_tool": 0.2, "irrelevant_tools": 0.1}
    sampler = TaskSampler(
        TrajectoriesConfig(behaviours=shares, languages={"en": 1.0}), list(SERVERS.values()), chains, 0
    )
    drawn = [next(sampler.candidates(index)) for index in range(1_000)]
    counts = Counter(one.behaviour for one in drawn if one.behaviour)
    assert abs(counts["missing_tool"] - 200) < 40 and abs(counts["irrelevant_tools"] - 100) < 30
    assert all(one.chain for one in drawn if one.behaviour)
    assert all(
        one.offered_server and one.offered_server != one.server_id
        for one in drawn
        if one.behaviour == "irrelevant_tools"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The gate


def a_run(behaviour: Behaviour, *parts: tuple[str, list[str]], ended=Ending.USER_LEFT, **more) -> AgentRun:
    """A run: for each message of the user, what it says and which tools are called before the agent's answer."""
    messages, statuses = [], []
    for says, names in parts:
        messages.append(Message("user", says))
        for name in names:
            id = f"call_{len(statuses) + 1}"
            messages += [Message("assistant", "", "", [ToolCall(id, name, {})]), Message("tool", "{}", tool_call_id=id)]
            statuses.append(CallStatus(id, True))
        messages.append(Message("assistant", "So it is."))
    mode = more.pop("mode", "dialogue")
    goal = Goal(parts[0][0], ["a"], more.pop("when_asked", []))
    dialogue = Dialogue(behaviour, [goal], 5, **more)
    task = Task("t", COUNTRIES.id, "en", mode, "original", parts[0][0], ["a"], TaskScores(5, 5, 5), dialogue)
    return AgentRun(task, messages, statuses, ended)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (a_run("missing_tool", ("Q", ["a"]), mode="no_tool"), "unneeded_call: t: a was called"),
        (a_run("refused", ("Q", ["b", "a"]), mode="no_tool"), "unneeded_call: t: b was called"),
        (a_run("missing_parameter", ("Q", ["a"]), ("It is X", ["a"]), when_asked=["It is X"]), "called_too_early"),
        (a_run("missing_parameter", ("Q", []), ("It is X", ["a"]), when_asked=["It is X"]), ""),
        (a_run("confirmation", ("Q", ["a"]), ("Yes", []), when_asked=["Yes"], writes=["a"]), "unconfirmed_write"),
        (a_run("confirmation", ("Q", []), ("No, Y", ["a"]), ("Yes", []), when_asked=["No, Y", "Yes"], writes=["a"]),
         "unconfirmed_write"),
        (a_run("confirmation", ("Q", ["b"]), ("Yes", ["a"]), when_asked=["Yes"], writes=["a"]), ""),
        (a_run("done", ("Q", ["a"]), ("Thanks", ["a"]), ended=Ending.USER_CLOSED), "called_after_the_end"),
        (a_run("done", ("Q", ["a"]), ("Thanks", []), ended=Ending.USER_CLOSED), ""),
        (a_run("dialogue", ("Q", ["a"]), ("R", ["a"]), ended=Ending.USER_LEFT), ""),
        (a_run("later_tool", ("Q", ["b"]), ("R", ["a"]), hidden_tools=["a"], restored_at_turn=2),
         "called_too_early: t: b was"),
        (a_run("later_tool", ("Q", []), ("R", ["a"]), hidden_tools=["a"], restored_at_turn=2), ""),
    ],
)  # fmt: skip
def test_what_is_called_where_it_must_not_be_is_rejected(run, reason):
    if not reason:
        return check_behaviour(run)
    with pytest.raises(Rejected, match=reason):
        check_behaviour(run)


async def test_an_agent_that_meddles_is_rejected_and_one_that_answers_from_memory_too():
    """Judges that like everything are not asked about a call; a made-up answer is theirs to find."""
    question = "What is the capital of Japan?"
    dialogue = Dialogue("missing_tool", [Goal(question)], hidden_tools=[CAPITAL])
    task = Task("t", COUNTRIES.id, "en", "no_tool", "original", question, [], TaskScores(5, 5, 5), dialogue)
    honest = say("missing", rng_for(0), "en", "the capital of Japan")
    opening = [Message("user", task.question)]
    (kept,) = await judge(AgentRun(task, [*opening, Message("assistant", honest)], []), context(), SERVERS)
    assert kept.reward == 1 and kept.needs == [] and CAPITAL not in {tool.name for tool in kept.tools}
    assert kept.dialogue == task.dialogue and set(kept.scores) == {
        "query_understanding",
        "query_planning",
        "final_answer",
    }
    made_up = AgentRun(task, [*opening, Message("assistant", "The answer is Tokyo.")], [])
    with pytest.raises(Rejected, match="low_reward"):
        await judge(made_up, context(), SERVERS)
    call = ToolCall("call_1", "area_of_country", {"country": "Japan"})
    results = [Message("tool", '{"area": 1}', tool_call_id="call_1"), Message("assistant", honest)]
    meddling = AgentRun(task, [*opening, Message("assistant", "", "", [call]), *results], [CallStatus("call_1", True)])
    with pytest.raises(Rejected, match="unneeded_call"):
        await judge(meddling, context(), SERVERS)


async def test_a_tool_that_is_withheld_cannot_be_called():
    task = Task("t", COUNTRIES.id, "en", "no_tool", "original", "Q", [], TaskScores(5, 5, 5),
                Dialogue("missing_tool", [Goal("Q")], hidden_tools=[CAPITAL]))  # fmt: skip
    assert CAPITAL not in {tool.name for tool in offered(task, COUNTRIES)} and len(offered(task, COUNTRIES)) > 3
    session = context().executor.session(COUNTRIES, task, Failures(rate=0.0))
    (result,) = await session.call_all([ToolCall("call_1", CAPITAL, {"country": "Japan"})])
    assert result.error == "unknown_tool"


async def test_a_tool_that_returns_can_be_called_from_then_on():
    dialogue = Dialogue("later_tool", [Goal("Q"), Goal("R", [CAPITAL])], 2, hidden_tools=[CAPITAL], restored_at_turn=2)
    task = Task("t", COUNTRIES.id, "en", "dialogue", "original", "Q", [CAPITAL], TaskScores(5, 5, 5), dialogue)
    assert CAPITAL not in {tool.name for tool in offered(task, COUNTRIES)}
    assert offered(task, COUNTRIES, 2) == COUNTRIES.tools
    call = ToolCall("call_1", CAPITAL, {"country": "Japan"})
    async with SandboxPool(SandboxConfig()) as sandbox:
        session = context(sandbox=sandbox).executor.session(COUNTRIES, task, Failures(rate=0.0))
        (before,) = await session.call_all([call])
        session.spoken = 2
        (after,) = await session.call_all([call])
    assert before.error == "unknown_tool" and after.ok and "Tokyo" in after.content
    forever = msgspec.structs.replace(dialogue, restored_at_turn=0)
    assert forever.hidden_at(5) == [CAPITAL]


async def test_what_would_offer_nothing_later_is_refused():
    """One tool is no server with one missing; the author is told what its answer lacks."""
    seed = TaskSeed("t", COUNTRIES.id, "en", [CAPITAL], 0, "later_tool")
    alone = msgspec.structs.replace(COUNTRIES, tools=[tool for tool in COUNTRIES.tools if tool.name == CAPITAL])
    with pytest.raises(Rejected, match="has no tool beside capital_of_country"):
        await write_any(seed, context(), {alone.id: alone}, {"en": ["a teacher"]})
    twice = RestrainedTask("", "What is the capital of Peru?", [CAPITAL], ["You have it now.", "Try again."], "")
    with pytest.raises(Rejected, match="`when_asked` has 2 sentences; it must have one"):
        await write_any(seed, context(Author(twice), attempts=1), SERVERS, {"en": ["a teacher"]})
    (task,) = await write_any(seed, context(), SERVERS, {"en": ["a teacher"]})
    assert task.tools == task.dialogue.hidden_tools == [CAPITAL] and task.dialogue.goals[0].tools == []


# ---------------------------------------------------------------------------------------------------------------------
# Writing and rating


class Author(OfflineTeacher):
    """Answers one kind of request with what it is told to."""

    def __init__(self, *answers) -> None:
        super().__init__()
        self.answers, self.feedback = list(answers), []

    async def ask(self, answer, variables, *, language, seed):
        if self.answers and isinstance(self.answers[0], answer):
            self.feedback.append(variables["feedback"])
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await super().ask(answer, variables, language=language, seed=seed)


PEOPLE = {"en": ["a teacher"], "zh": ["老师"]}


def a_seed(behaviour: Behaviour) -> TaskSeed:
    return TaskSeed("task-0-000001", COUNTRIES.id, "en", [CAPITAL], 0, behaviour)


def restrained(**more) -> RestrainedTask:
    given = {"question": "What is the capital?", "tools": [CAPITAL], "when_asked": ["Of Japan."], "policy": ""}
    return RestrainedTask("", **{**given, **more})


def plan(*goals) -> DialoguePlan:
    return DialoguePlan("", [PlannedGoal(says, [CAPITAL], list(asked)) for says, *asked in goals], "")


def policed(policy: str, *tools: list[str]) -> DialoguePlan:
    return DialoguePlan("", [PlannedGoal(f"Number {n}?", names, []) for n, names in enumerate(tools)], policy)


@pytest.mark.parametrize(
    ("behaviour", "given", "reason"),
    [
        ("missing_parameter", restrained(when_asked=[]), "no_clarification"),
        ("missing_parameter", restrained(question="The capital of Japan?", when_asked=["of japan"]),
         "opening_leaks_answer"),
        ("missing_parameter", restrained(tools=["nothing"]), "unknown_tool"),
        ("missing_parameter", restrained(tools=[]), "no_tools"),
        ("missing_parameter", restrained(question=f"Call {CAPITAL}."), "names_a_tool"),
        ("missing_parameter", restrained(when_asked=[f"Use {CAPITAL}."]), "names_a_tool"),
        ("missing_parameter", restrained(when_asked=["我要查的是日本这个国家的首都。"]), "wrong_language"),
        ("refused", restrained(), "no_policy"),
        ("confirmation", restrained(), "no_policy"),
        ("confirmation", restrained(policy="Ask first.", when_asked=["v", "w", "x", "y", "z"]), "too_many_turns"),
        ("dialogue", plan(("One?",)), "too_few_turns"),
        ("dialogue", plan(*[(f"Number {n}?",) for n in range(6)]), "too_many_turns"),
        ("dialogue", policed("", [], []), "no_tools"),
        ("dialogue", plan(("One of Japan?", "of Japan"), ("Two?",)), "opening_leaks_answer"),
    ],
)  # fmt: skip
async def test_what_is_planned_badly_goes_back_to_the_author_and_is_rejected(behaviour, given, reason):
    author = Author(given)
    with pytest.raises(Rejected, match=reason):
        await write_any(a_seed(behaviour), context(author, policies=0.0), SERVERS, PEOPLE)
    assert len(author.feedback) == 3 and author.feedback[0] == "" and author.feedback[1]


@pytest.mark.parametrize("later", ["2", "Katarzyna Nowak, Łódź", "Calle de Alcalá, 45, 28014 Madrid"])
async def test_short_answers_of_a_user_are_neither_given_away_nor_in_another_language(later):
    """The opening has a 2 in a time and in a number alone."""
    author = Author(restrained(question="At 2:30 I ask: which capital has 1.2 million people?", when_asked=[later]))
    (made,) = await write_any(a_seed("missing_parameter"), context(author, policies=0.0), SERVERS, PEOPLE)
    assert made.dialogue is not None and made.dialogue.goals[0].when_asked == [later]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (policed("", [CAPITAL], []), "no_policy"),
        (policed("Not that.", [CAPITAL], [CAPITAL]), "not_refused"),
        (policed("Not that.", [CAPITAL], [], []), "not_refused"),
        (policed("Not that.", [], [CAPITAL]), "no_tools"),
        (policed("Not that.", [CAPITAL], [tool.name for tool in COUNTRIES.tools], []), "needs_forbidden"),
        (policed("这是不允许的，请告诉用户。", [CAPITAL], []), "wrong_language"),
    ],
)
async def test_a_policy_that_does_not_fit_its_conversation_goes_back_to_the_author(given, reason):
    author = Author(given)
    with pytest.raises(Rejected, match=reason):
        await write_any(a_seed("dialogue"), context(author, policies=1.0), SERVERS, PEOPLE)
    assert len(author.feedback) == 3 and author.feedback[1]


async def test_what_a_policy_forbids_may_not_be_called():
    (task,) = await write_any(a_seed("dialogue"), context(policies=1.0), SERVERS, PEOPLE)
    (forbidden,) = task.dialogue.forbids
    assert forbidden not in task.tools and forbidden in task.dialogue.policy
    call = Message("assistant", "", "", [ToolCall("call_1", forbidden, {})])
    broken = AgentRun(task, [Message("user", task.question), call], [])
    with pytest.raises(Rejected, match=f"forbidden_call: .*{forbidden} was called"):
        check_behaviour(broken)


@pytest.mark.parametrize("behaviour", [one for one in BEHAVIOURS if one != "confirmation"])
async def test_an_opening_that_stands_otherwise_than_meant_is_rejected(behaviour):
    seed = msgspec.structs.replace(
        a_seed(behaviour), offered_server=ELEMENTS.id if behaviour == "irrelevant_tools" else msgspec.UNSET
    )
    (task,) = await write_any(seed, context(), SERVERS, PEOPLE)
    (rated,) = await score_any(task, context(), SERVERS)
    assert rated.scores == TaskScores(5, 5, 5) and task.dialogue.behaviour == behaviour
    for standing in ("servable", "tool_missing", "value_missing", "impossible", "forbidden", "unconfirmed"):
        judge_of_it = Author(ConductRating("so", standing, 5, 5))
        if standing in PRECONDITIONS[behaviour]:
            assert await score_any(task, context(judge_of_it), SERVERS)
        else:
            with pytest.raises(Rejected, match=f"precondition_mismatch: .*{standing}, meant as"):
                await score_any(task, context(judge_of_it), SERVERS)
    with pytest.raises(Rejected, match="low_question_quality"):
        await score_any(task, context(Author(ConductRating("so", PRECONDITIONS[behaviour][0], 1, 5))), SERVERS)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_what_is_said_is_heard_as_that_and_nothing_else(language):
    """In its place: a value is only listened for where one was left open."""
    rng = rng_for(1, language)
    of_user = ("changed", "follow_up", "correct", *WRITES, "yes", "instead", "leave", "thanks")
    for what, sentences in SENTENCES[language].items():
        for sentence in sentences:
            gaps = tuple(f"gap {number}" for number in range(sentence.count("{}")))
            assert heard(what, sentence.format(*gaps), language) == gaps
            if what in of_user:
                others = [
                    other for other in of_user if other != what and heard(other, sentence.format(*gaps), language)
                ]
                assert not others, (sentence, others)
    assert all(say("shall", rng, language, "x").endswith(("?", "？")) for _ in range(9))


def test_where_the_agent_may_call_nothing_it_is_known_why():
    tools = COUNTRIES.tools
    ask = [Message("user", "What is the capital of a certain country?")]
    assert situation(ask, tools, "en").standing == "value_missing"
    answered = [*ask, Message("assistant", "Which country do you mean?"), Message("user", "I mean Japan.")]
    assert situation(answered, tools, "en").intent.arguments(0, {}) == {"country": "Japan"}
    with pytest.raises(ValueError):  # a value that nobody asked for
        situation([Message("user", "I mean Japan.")], tools, "en")
    lone = [Message("user", "And what is the capital of that?")]
    assert situation(lone, tools, "en").intent is None
    told = [Message("system", "Be kind.\n\n" + say("forbids", rng_for(0), "en", CAPITAL))]
    question = [Message("user", "What is the capital of Japan?")]
    assert situation([*told, *question], tools, "en").standing == "forbidden"
    assert situation(question, tools, "en").intent.tools == [CAPITAL]
    assert situation(question, ELEMENTS.tools, "en").standing == "tool_missing"
