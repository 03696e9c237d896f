"""The simulated user: what it is shown, what its faults are called, and whole conversations with a model over HTTP."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

import pytest
import pytest_asyncio
from emulated_model import EmulatedModel, kind_of, words_of, write_registry
from trajectories_world import context

from sandbox import SandboxConfig, SandboxPool
from synthesis.core.datasets import read_dataset
from synthesis.core.endpoint_settings import RoleSettings
from synthesis.core.records import Dialogue, Goal, Message, Task, TaskScores, ToolCall, Trajectory
from synthesis.core.stages import Journal, Rejected
from synthesis.offline import behaviour_author, trajectory_author
from synthesis.offline.facts.servers import fact_servers
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig, TeacherError, role_of
from synthesis.trajectories.behaviours import rounds
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.execution import Failures
from synthesis.trajectories.interact import interact
from synthesis.trajectories.judge import judge
from synthesis.trajectories.pipeline import synthesize
from synthesis.trajectories.runs import AgentRun, Ending
from synthesis.trajectories.teacher_answers import UserScore, UserTurn
from synthesis.trajectories.users import heard, judge_user, speak

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNTRIES = fact_servers("en", ("countries",))[0]
SERVERS = {COUNTRIES.id: COUNTRIES}
CAPITAL, AREA = "capital_of_country", "area_of_country"
GOALS = [
    Goal("Tell me the capital of a certain country.", [CAPITAL], ["I mean Japan."]),
    Goal("Sorry, I meant Norway.", [CAPITAL]),
    Goal("What is the area of Norway?", [AREA]),
]


def task(*goals: Goal, **more: Any) -> Task:
    dialogue = Dialogue("dialogue", list(goals or GOALS), more.pop("user_turns", 5), **more)
    tools = [tool for goal in dialogue.goals for tool in goal.tools]
    says = dialogue.goals[0].utterance
    return Task("t", COUNTRIES.id, "en", "dialogue", "original", says, tools, TaskScores(5, 5, 5), dialogue)


class Played(OfflineTeacher):
    """The offline teacher with a user that says what it is told to, and a judge of users that likes it."""

    def __init__(self, *turns: UserTurn, verdict: str = "") -> None:
        super().__init__()
        self.turns, self.verdict, self.seen = list(turns), verdict, []

    async def ask(self, answer, variables, *, language, seed):
        if answer is UserTurn:
            self.seen.append(variables)
            if self.turns:
                return self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        if answer is UserScore and self.verdict:
            return UserScore("so", self.verdict)
        return await super().ask(answer, variables, language=language, seed=seed)


async def conversation(pool: SandboxPool, teacher: Any = None, one: Task | None = None, seed: int = 2) -> AgentRun:
    (run,) = await interact(
        one or task(), context(teacher, sandbox=pool, seed=seed, failures=Failures(rate=0.0)), SERVERS
    )
    return run


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    async with SandboxPool(SandboxConfig()) as made:
        yield made


@pytest.fixture(autouse=True)
def careful(monkeypatch):
    """Nobody is careless: what goes wrong here is played."""
    for name in ("STOPS", "CONTRADICTS"):
        monkeypatch.setattr(behaviour_author, name, 0.0)
    for name in ("REDUNDANT", "FORGET", "MEDDLE", "GIVE_UP"):
        monkeypatch.setattr(trajectory_author, name, 0.0)


async def test_a_user_gives_bit_by_bit_what_it_wants_and_is_judged_with_its_agent(pool):
    run = await conversation(pool, one=task(thanks=True))
    said = [message.content for message in run.messages if message.role == "user"]
    assert said[:4] == [
        "Tell me the capital of a certain country.",
        "I mean Japan.",
        *(goal.utterance for goal in GOALS[1:]),
    ]
    assert run.ended is Ending.USER_CLOSED and len(said) == 5
    called = [[call.arguments for message in part for call in message.tool_calls] for part in rounds(run.messages)]
    assert called == [[], [{"country": "Japan"}], [{"country": "Norway"}], [{"country": "Norway"}], []]
    assert [run] == await judge_user(run, context(), SERVERS)
    (kept,) = await judge(run, context(), SERVERS)
    assert kept.reward == 1 and kept.needs == [CAPITAL, CAPITAL, AREA] and kept.dialogue == run.task.dialogue
    ids = [call.id for message in run.messages for call in message.tool_calls]
    assert len(ids) == len(set(ids)) == 3


async def test_the_user_sees_its_goals_and_what_was_said_and_no_tool(pool):
    teacher = Played()
    await conversation(pool, teacher, task(persona="a teacher", policy="Be kind."))
    assert len(teacher.seen) == 4
    for variables in teacher.seen:
        assert set(variables) == {"dialogue", "messages", "feedback"}
        for message in variables["messages"]:
            assert message.role in ("user", "assistant") and not message.tool_calls and not message.reasoning
    last = teacher.seen[-1]["messages"]
    assert [message.role for message in last] == ["user", "assistant"] * 4  # and not the policy
    assert heard([Message("system", "s"), Message("assistant", "", "r", [ToolCall("1", "x", {})])]) == []


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([UserTurn("", "", False)], "user_silent"),
        ([UserTurn("", "我要查的是挪威这个国家的首都。", False)], "user_wrong_language"),
        ([UserTurn("", "I mean Japan.<|im_end|>", False)], "user_leaked_markup"),
        ([UserTurn("", "I mean Japan.", False), UserTurn("", "", True)], "user_stopped_early"),
        ([UserTurn("", "", True)], "user_stopped_early"),
        ([UserTurn("", "I mean Japan.", False), UserTurn("", GOALS[1].utterance, False),
          UserTurn("", GOALS[1].utterance, False),
          UserTurn("", "", True)], "user_repeats"),
        ([UserTurn("", "I mean Japan.", False), UserTurn("", GOALS[1].utterance, False),
          UserTurn("", GOALS[2].utterance, False),
          UserTurn("", "What is the continent of Norway?", False), UserTurn("", "", False)], "user_silent"),
        ([UserTurn("", "I mean Japan.", False), UserTurn("", GOALS[1].utterance, False),
          UserTurn("", GOALS[2].utterance, False),
          UserTurn("", "What is the continent of Norway?", False)], "user_never_ended"),
        ([UserTurn("", "I mean Peru.", False), UserTurn("", GOALS[1].utterance, False),
          UserTurn("", GOALS[2].utterance, False),
          UserTurn("", "", True)], "user_contradicted"),
        ([UserTurn("", "I mean Japan.", False), UserTurn("", GOALS[2].utterance, False),
          UserTurn("", GOALS[1].utterance, False),
          UserTurn("", "", True)], "user_gave_away"),
    ],
)  # fmt: skip
async def test_the_users_faults_are_its_own(pool, turns, reason):
    with pytest.raises(Rejected, match=reason):
        run = await conversation(pool, Played(*turns))
        await judge_user(run, context(), SERVERS)


async def test_a_judge_names_what_no_rule_can_see_and_one_that_fails_rejects(pool):
    run = await conversation(pool)
    for verdict in ("gave_away", "contradicted", "invented", "stopped_early"):
        with pytest.raises(Rejected, match=f"user_{verdict}: t: so"):
            await judge_user(run, context(Played(verdict=verdict)), SERVERS)

    class Failing(OfflineTeacher):
        async def ask(self, answer, variables, *, language, seed):
            raise TeacherError("no valid answer")

    with pytest.raises(Rejected, match="user_judge_failed"):
        await judge_user(run, context(Failing()), SERVERS)
    with pytest.raises(Rejected, match="user_failed"):
        await speak(run.task, run.messages, context(Failing()))
    named = [Message("user", f"Call {CAPITAL} for me.") if message.content == GOALS[2].utterance else message
             for message in run.messages]  # fmt: skip
    with pytest.raises(Rejected, match="user_names_a_tool"):
        await judge_user(AgentRun(run.task, named, run.calls, run.ended), context(), SERVERS)


async def test_one_wrong_answer_among_right_ones_is_not_carried_by_them(pool):
    run = await conversation(pool)
    last = len(run.messages) - 1
    wrong = [*run.messages[:last], Message("assistant", "The answer is Tokyo.")]
    with pytest.raises(Rejected, match="low_"):
        await judge(AgentRun(run.task, wrong, run.calls, run.ended), context(), SERVERS)
    japan = Message("assistant", "The answer is Japan.")
    early = [japan if message.content.startswith("The answer is Tokyo") else message for message in run.messages]
    assert early != run.messages
    with pytest.raises(Rejected, match="low_"):
        await judge(AgentRun(run.task, early, run.calls, run.ended), context(), SERVERS)


# ---------------------------------------------------------------------------------------------------------------------
# Behind an endpoint


def _forbids(policy: str, request: str) -> bool:
    """Whether what is emulated takes a request for one that a policy forbids."""
    (kept_back,) = re.findall(r"Give out no (\w+)", policy)
    return kept_back == "records" or kept_back in words_of(request)


class Talking(EmulatedModel):
    """The emulated model, which also writes and plays conversations. One without a number leaves its item open."""

    def agent(self, messages: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
        return self._act(messages, self.offered)

    def message(self, kind: str, body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        self.offered = {tool["function"]["name"] for tool in body.get("tools", ())}
        return super().message(kind, body, rng)

    def _act(self, messages: list[dict[str, Any]], offered: set[str]) -> dict[str, Any]:
        starts = [index for index, one in enumerate(messages) if one["role"] == "user"]
        said = [messages[index]["content"] for index in starts]
        if "all I need" in said[-1]:
            return {"content": "You are welcome."}
        if messages[0]["role"] == "system" and _forbids(messages[0]["content"], said[-1]):
            return {"content": "I am not allowed to do that."}
        wanted = next(words for text in reversed(said) if (words := words_of(text)))
        items = re.findall(r"item (\d+)", said[-1])
        if not all(f"find_{word}" in offered for word in wanted):
            return {"content": "I have no tool for that."}
        if not items:
            return {"content": "Which item do you mean?"}
        results = [one["content"] for one in messages[starts[-1] :] if one["role"] == "tool"]
        if len(results) < len(wanted):
            arguments = json.dumps({"item": items[0]})
            call = {"name": f"find_{wanted[len(results)]}", "arguments": arguments}
            return {"content": None, "reasoning_content": "I look.",
                    "tool_calls": [{"id": "x", "type": "function", "function": call}]}  # fmt: skip
        return {"content": f"It is {results[-1]}."}

    def _restrained_task(self, prompt: str, rng: random.Random) -> Any:
        tools = re.findall(r"(?:order: |needs |near to )([a-z_ →]*_[a-z_ →]*)", prompt)[0].split(" → ")
        words = " and the ".join(tool.removeprefix("find_") for tool in tools)
        item = f"item {rng.randrange(10**8)}"
        given = {"analysis": "So.", "question": f"I need the {words} of {item} today {rng.random()}.", "tools": [],
                 "when_asked": [], "policy": ""}  # fmt: skip
        if "leave out one value" in prompt:
            question = f"I need the {words} of something from list {rng.random()}."
            return {**given, "question": question, "tools": tools, "when_asked": [f"I mean {item}."]}
        if "forbid exactly this" in prompt:
            return {**given, "policy": "Give out no records; say that you may not."}
        return given

    def _dialogue_plan(self, prompt: str, rng: random.Random) -> Any:
        tools = re.findall(r"The first thing needs (.*)\.$", prompt, re.M)[0].split(" → ")
        words = " and the ".join(tool.removeprefix("find_") for tool in tools)
        goals = [
            {"says": f"I need the {words} of item {rng.randrange(10**8)}.", "tools": tools, "when_asked": []}
            for _ in range(2)
        ]
        if not (forbidden := re.findall(r"forbids it find_(\w+)\.", prompt)):
            return {"analysis": "So.", "goals": goals, "policy": ""}
        goals[-1] = {"says": f"I need the {forbidden[0]} of item {rng.random()}.", "tools": [], "when_asked": []}
        return {"analysis": "So.", "goals": goals, "policy": f"Give out no {forbidden[0]}; say that you may not."}

    def _conduct_rating(self, prompt: str, rng: random.Random) -> Any:
        question = re.findall(r"opens the conversation with: (.*)$", prompt, re.M)[0]
        offered = re.findall(r"^- (\w+): ", prompt, re.M)
        standing = "servable"
        if (told := re.findall(r"^What the agent is told: (.*)$", prompt, re.M)) and _forbids(told[0], question):
            standing = "forbidden"
        elif not all(f"find_{word}" in offered for word in words_of(question)):
            standing = "tool_missing"
        elif not re.search(r"item \d", question):
            standing = "value_missing"
        return {"reason": "So.", "standing": standing, "question_quality": 5, "scenario_realism": 4}

    def _user_turn(self, prompt: str, rng: random.Random) -> Any:
        wants, said = prompt.split("The conversation so far")
        listed = re.findall(r"^(?:\d\. |   only when the agent asks: )(.*)$", wants, re.M)
        if "At the end: thanks" in wants:
            listed.append("Thank you, that is all I need.")
        spoken = len(re.findall(r"^\[user\]", said, re.M))
        message = listed[spoken] if spoken < len(listed) else ""
        return {"reasoning": "So.", "message": message, "finished": spoken + ("all I need" in message) >= len(listed)}

    def _user_score(self, prompt: str, rng: random.Random) -> Any:
        return {"reason": "Right.", "verdict": "fine"}


async def test_a_model_behind_an_endpoint_plays_user_and_agent(tmp_path):
    shares = {"missing_tool": 0.15, "irrelevant_tools": 0.15, "missing_parameter": 0.2, "refused": 0.15, "done": 0.15,
              "dialogue": 0.2}  # fmt: skip
    config = TrajectoriesConfig(
        trajectories=48, languages={"en": 1.0}, sources=(), mcp_share=0.0, walks=20, proposals=2,
        tools=(str(write_registry(tmp_path / "registry.jsonl")),), fact_servers=("numbers",),
        server_weights={"numbers": 1e-9}, failures=Failures(rate=0.0), behaviours=shares, policies=0.5,
    )  # fmt: skip
    model = Talking(bad_chains=0.0)
    async with model as url, SandboxPool(SandboxConfig()) as pool:
        # A role of its own: settings of the user's requests are not the author's.
        settings = OpenAITeacherConfig(
            url,
            "m",
            structured_output="json_schema",
            roles={"user": (RoleSettings(temperature=0.25),)},
            tries=1,
            judge_own_text=True,
        )
        teacher = OpenAITeacher(settings)
        try:
            with Journal(tmp_path / "journal.sqlite") as journal:
                summary = await synthesize(
                    config, executor=Executor(teacher, pool), journal=journal, out_dir=tmp_path / "out",
                    workdir=tmp_path, seed=2,
                )  # fmt: skip
        finally:
            await teacher.close()
    kept = read_dataset(tmp_path / "out" / "trajectories", Trajectory)
    counts = Counter(one.dialogue.behaviour for one in kept if one.dialogue)
    assert set(counts) == set(shares), (counts, summary.rejected)
    users = [body for body in model.requests if kind_of(body) == "user_turn"]
    assert users and role_of(UserTurn) == "user" and {body["temperature"] for body in users} == {0.25}
    for body in users:
        (prompt,) = [message["content"] for message in body["messages"]]
        assert "find_" not in prompt and "record" not in re.sub(r"\[assistant\].*", "", prompt)
        assert "tools" not in body and re.search(r"You are a[n]? ", prompt)
    told = [one for one in kept if one.dialogue and one.dialogue.forbids]
    assert told and all(one.messages[0].role == "system" and one.dialogue.goals[-1].tools == [] for one in told)
    assert any("not allowed" in message.content for message in told[0].messages)
    several = [one for one in kept if len(rounds(one.messages)) > 1]
    assert len(several) > 8 and all(one.reward == 1 for one in several)
    judged = [body["messages"][0]["content"] for body in model.requests if kind_of(body) == "final_answer_score"]
    assert any("None of the agent's tools serves this request" in prompt for prompt in judged)
    assert any("The user has spoken 2 times" in prompt for prompt in judged)
    assert sum(summary.statistics["trajectories"]["rejected_for"]["user"].values()) == 0
