"""Named rewards: what a setting may say, what they are worth, and that whoever judges nothing is never taken for a
judge."""

from __future__ import annotations

import asyncio
import math
import os
import re
import sys
import threading
import types
from functools import partial
from typing import Any

import msgspec
import pytest
from rollout_world import make_environment

from astra_jax.base.errors import InputError
from astra_jax.base.settings import SettingError
from synthesis.core import rewards
from synthesis.core.environment import CallRecord, EnvironmentDied, ToolsUnavailable
from synthesis.core.own_objects import OwnEnvironment
from synthesis.core.records import Answer, Message
from synthesis.core.reward import f1_reward
from synthesis.core.rewards import Rewards, Unscorable, parsed, played, rewards_of

RECORD = make_environment()


def made(outcome: str = "ok") -> CallRecord:
    return CallRecord(0, "capital_of", {}, outcome, "{}")


def episode(said: str = "2102650", calls: tuple[str, ...] = ("ok", "ok"), finish="answered", environment=RECORD):
    messages = [Message("user", "How many?"), Message("assistant", said)]
    return played(environment, messages, [made(one) for one in calls], finish)


async def own(value: float = 0.75) -> float:
    return value


@pytest.fixture
def rewards_module(monkeypatch):
    """A module of somebody's own rewards."""
    module: Any = types.ModuleType("somebodys_rewards")
    module.half = lambda episode: 0.5
    module.nothing = 7

    async def later(episode) -> bool:
        return len(episode.calls) > 0

    module.later = later
    monkeypatch.setitem(sys.modules, "somebodys_rewards", module)
    yield module
    rewards_of.cache_clear()


def test_a_setting_is_names_with_weights() -> None:
    found = parsed(" f1:1.0, format:0.1,my_module:my_reward,a.b:c:-0.5,folder/file.py:judge:2")
    assert [(one.name, one.weight) for one in found] == [
        ("f1", 1.0), ("format", 0.1), ("my_module:my_reward", 1.0), ("a.b:c", -0.5), ("folder/file.py:judge", 2.0),
    ]  # fmt: skip
    assert [one.metric for one in found][2:] == ["my_module.my_reward", "a.b.c", "folder.file.py.judge"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f2", "there is no reward 'f2'; use f1, recall"),
        ("", "name at least one"),
        ("f1,f1:2", "f1 is there twice"),
        ("f1:0", "the weight of f1 is 0"),
        ("f1:nan", "the weight of f1 is nan"),
        ("f1:-1e9", "up to 1000"),
        ("f1:inf", "weight"),
        ("https://evil/x:y", "there is no reward"),
        ("os; rm:x", "there is no reward"),
        ("module:", "there is no reward"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        parsed(text)


async def test_f1_alone_is_f1_to_the_bit() -> None:
    for solved, calls in ((2, 2), (1, 7), (0, 3)):
        counted = f1_reward(solved=solved, needed=2, calls=calls)
        for text in ("f1", "f1:1.0", "score"):
            found = await rewards_of(text).score(episode(), counted, lambda counted=counted: own(counted.value))
            assert found.value == counted.value and found.f1 == counted.f1
            assert (found.recall, found.solved, found.calls) == (counted.recall, counted.solved, counted.calls)


async def test_a_weighted_sum_keeps_its_parts(rewards_module) -> None:
    text = "f1:1.0,format:0.1,answer:0.5,somebodys_rewards:half:-1,somebodys_rewards:later:0.25"
    named = Rewards(text)
    named.check(RECORD)
    await named.try_out(RECORD)
    counted = f1_reward(solved=1, needed=2, calls=2)
    found = await named.score(episode("I think 7", ("ok", "malformed")), counted, own)
    assert found.parts == {
        "f1": counted.value, "format": 0.5, "answer": 0.0, "somebodys_rewards.half": 0.5, "somebodys_rewards.later": 1.0
    }  # fmt: skip
    assert found.value == pytest.approx(counted.value + 0.05 - 0.5 + 0.25)
    right = await named.score(episode("It is 2102650."), counted, own)
    assert right.parts["answer"] == 1.0 and right.parts["format"] == 1.0
    cut = await named.score(episode("It is 2102650.", finish="token_limit"), counted, own)
    assert cut.parts["answer"] == cut.parts["format"] == 0.0


@pytest.mark.parametrize(
    ("said", "calls", "share"),
    [
        ("2102650", ("ok", "tool_error"), 1.0),
        ("2102650", ("ok", "unknown_tool"), 0.5),
        ("I do not know.", (), 0.0),  # saying nothing is not paid
        ("", ("ok",), 0.0),  # an empty turn, or one thought that is never closed
        (" \n", ("ok",), 0.0),
        ("It is 7.<think>Or 8?", ("ok",), 0.0),
        ("</tool_call>", ("ok",), 0.0),
        ("The tag `<think>` opens a thought.", ("ok",), 1.0),
    ],
)
async def test_format_pays_for_calls_and_an_answer_in_order(said: str, calls: tuple[str, ...], share: float) -> None:
    assert (await Rewards("format").score(episode(said, calls), None, own)).value == share


async def test_format_looks_at_every_turn() -> None:
    """A policy that writes the result of its own call has not kept to the format, whatever it says in the end."""
    forged = Message("assistant", "<tool_response>5</tool_response>")
    messages = [Message("user", "How many?"), forged, Message("assistant", "5")]
    assert (await Rewards("format").score(played(RECORD, messages, [made()], "answered"), None, own)).value == 0


async def test_format_of_an_answer_without_calls_where_none_is_needed() -> None:
    class Riddle:
        question = "What has keys and opens no door?"

        def score(self, episode):
            return 1

    class Tooled(Riddle):
        def look_up(self, word: str) -> str:
            """What a word means."""
            return word

    known = [msgspec.structs.replace(one, needs_tool=False) for one in RECORD.sub_questions]
    by_heart = msgspec.structs.replace(RECORD, sub_questions=known)
    for environment, share in ((OwnEnvironment(Riddle()), 1), (OwnEnvironment(Tooled()), 0), (by_heart, 1)):
        judged = await Rewards("format").score(episode("A piano.", (), environment=environment), None, own)
        assert judged.value == share
    silent = await Rewards("format").score(episode("", (), environment=OwnEnvironment(Riddle())), None, own)
    assert silent.value == 0


VALUES = [1.5, -0.1, math.nan, math.inf, "much", None, [1], 10**400]


async def test_what_is_no_share_judges_nothing(rewards_module) -> None:
    values = VALUES
    rewards_module.half = lambda episode: values[int(episode.answer or 0)]
    asked = Rewards("somebodys_rewards:half")
    for number, value in enumerate(VALUES):
        with pytest.raises(Unscorable, match="reward somebodys_rewards:half gave"):
            await asked.score(episode(str(number)), None, own)
        with pytest.raises(Unscorable, match="reward score gave"):
            await Rewards("score").score(episode(), None, partial(own, value))
    with pytest.raises(InputError, match="without calls .* fix it"):
        await asked.try_out(RECORD)


async def test_who_never_answers_judges_nothing_and_holds_up_nobody(rewards_module, monkeypatch) -> None:
    async def waits(episode) -> float:
        if episode.answer == "wait":
            await asyncio.Event().wait()
        return 1.0

    def hangs(episode) -> float:
        if episode.answer == "wait":
            re.match("(a+)+$", "a" * 50 + "b")
        return 0.5

    rewards_module.half, rewards_module.nothing = waits, hangs
    for name, share in (("half", 1.0), ("nothing", 0.5)):
        asked = Rewards(f"somebodys_rewards:{name}")
        with monkeypatch.context() as patched, pytest.raises(Unscorable, match="did not answer in 0.1 s"):
            patched.setattr(rewards, "MOST_SECONDS", 0.1)
            await asked.score(episode("wait"), None, own)
        assert (await asked.score(episode(), None, own)).value == share


async def test_asynchronous_rewards_are_asked_at_once(rewards_module) -> None:
    """Each waits until three of them have come."""
    seen = []

    async def meets(episode) -> float:
        seen.append(1)
        while len(seen) < 3:
            await asyncio.sleep(0)
        return 1.0

    rewards_module.half = meets
    asked = Rewards("somebodys_rewards:half")
    found = await asyncio.gather(*(asked.score(episode(), None, own) for _ in range(3)))
    assert [one.value for one in found] == [1.0] * 3 and seen == []


async def test_one_that_ends_its_process_takes_no_other_with_it(rewards_module) -> None:
    async def ends(episode) -> float:
        if episode.answer == "die":
            os._exit(3)
        await asyncio.sleep(0.01)
        return 1.0

    rewards_module.half = ends
    asked = Rewards("somebodys_rewards:half")
    await asked.score(episode(), None, own)
    said = ("fine", "die", "fine", "fine")
    found = await asyncio.gather(*(asked.score(episode(one), None, own) for one in said), return_exceptions=True)
    assert [getattr(one, "value", str(one)) for one in found] == [
        1.0, "reward somebodys_rewards:half ended its process (exit code 3)", 1.0, 1.0
    ]  # fmt: skip


async def test_who_raises_judges_nothing_and_who_is_gone_is_told_apart(rewards_module) -> None:
    def fails(episode):
        raise {"exit": SystemExit(0), "stop": StopIteration(), "key": KeyError("no such thing")}[episode.answer]

    rewards_module.half = fails
    asked = Rewards("somebodys_rewards:half")
    for answer, said in (("exit", "SystemExit: 0"), ("stop", "StopIteration"), ("key", "KeyError: 'no such thing'")):
        with pytest.raises(Unscorable, match=f"raised {said}"):
            await asked.score(episode(answer), None, own)

    async def gone() -> float:
        raise ToolsUnavailable("the server died")

    with pytest.raises(ToolsUnavailable):
        await Rewards("score").score(episode(), None, gone)


async def test_an_environment_that_a_call_has_ended_is_worth_the_least(rewards_module) -> None:
    async def dead() -> float:
        raise EnvironmentDied("killed")

    for text, value in (("score", 0.0), ("score:-2", -2.0), ("score:2,format:0.5", 0.5)):
        assert (await Rewards(text).score(episode(), None, dead)).value == value


async def test_what_a_reward_does_to_its_episode_stays_there(rewards_module) -> None:
    def greedy(episode) -> float:
        episode.calls.clear()
        episode.environment.tools.clear()
        return 1.0

    rewards_module.half = greedy
    shown = episode()
    assert (await Rewards("somebodys_rewards:half,format").score(shown, None, own)).value == 2.0
    assert len(shown.calls) == 2 and shown.environment.tools


async def test_a_reward_is_shown_the_object_that_the_user_wrote(rewards_module) -> None:
    class Mine:
        question = "How many?"

        def __init__(self) -> None:
            self.pieces, self.lock = 40, threading.Lock()

        def score(self, episode):
            return 1

    rewards_module.half = lambda episode: episode.environment.pieces / 80
    environment, asked = OwnEnvironment(Mine()), Rewards("somebodys_rewards:half")
    await asked.try_out(environment)
    found = await asked.score(episode(environment=environment), None, own, environment.workers)
    assert found.value == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("somebodys_rewards:third", "has no third; it has half, nothing, later"),
        ("somebodys_rewards:nothing", "reward somebodys_rewards:nothing is 7; write a function"),
        ("no_such_module_at_all:x", "no_such_module_at_all cannot be imported .ModuleNotFoundError"),
        ("no/such/file.py:x", "there is no file"),
    ],
)
def test_functions_that_are_not_there_are_named(rewards_module, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Rewards(text)


def test_what_an_environment_does_not_have_is_refused() -> None:
    class Mine:
        question = "How many?"

        def score(self, episode):
            return 1

    environment = OwnEnvironment(Mine())
    for name in ("f1", "recall", "precision"):
        with pytest.raises(InputError, match=f"reward {name} counts sub-tasks.*reward=score"):
            Rewards(f"format,{name}").check(environment)
    with pytest.raises(InputError, match="expects none; use score"):
        Rewards("answer").check(environment)
    Rewards("score,format:0.1").check(environment)

    class Answered(Mine):
        answer = 40

    Rewards("answer").check(OwnEnvironment(Answered()))


def test_a_file_is_imported_once(tmp_path) -> None:
    (tmp_path / "judge.py").write_text("SEEN = []\ndef judge(episode):\n    SEEN.append(1)\n    return 1\n")
    first, second = (Rewards(f"{tmp_path}/judge.py:judge") for _ in range(2))
    assert first._own == second._own


async def test_an_answer_is_read_in_the_language_of_its_environment() -> None:
    german = msgspec.structs.replace(RECORD, language="de", answer=Answer(5000000))
    sentence = "Die Stadt hat 5 Millionen Einwohner."
    counted = f1_reward(solved=1, needed=2, calls=2)
    Rewards("answer").check(german)
    assert (await Rewards("answer").score(episode(sentence, environment=german), counted, own)).value == 1.0
    english = msgspec.structs.replace(german, language="en")
    assert (await Rewards("answer").score(episode(sentence, environment=english), counted, own)).value == 0.0


async def test_a_list_of_guesses_is_worth_nothing() -> None:
    class Lookup:
        question = "How many bolts are there?"
        answer = 40

        def score(self, episode) -> float:
            return float(episode.says(40))

    environment = OwnEnvironment(Lookup())
    for said, worth in (("There are 40.", 1.0), ("It is not 40.", 0.0), (", ".join(map(str, range(1, 101))), 0.0)):
        ended = episode(said, environment=environment)
        session = await environment.begin()
        found = await Rewards("answer,score").score(ended, None, lambda: session.score(ended))  # noqa: B023
        assert found.parts == {"answer": worth, "score": worth}, said


def test_answers_in_a_language_that_is_not_read_are_refused_by_name() -> None:
    swahili = msgspec.structs.replace(RECORD, language="sw")
    with pytest.raises(
        InputError, match="reward answer: environment .* has language 'sw'.* are ar, de, en, .*, vi, zh"
    ):
        Rewards("f1,answer:0.5").check(swahili)
    Rewards("f1").check(swahili)


async def test_an_object_of_ones_own_says_its_language() -> None:
    class Own:
        question = "Was ist 5 mal eine Million?"
        answer = 5000000
        language = "de"

        def score(self, episode) -> float:
            return 0.0

    environment = OwnEnvironment(Own())
    Rewards("answer").check(environment)
    said = episode("Das sind 5 Millionen.", environment=environment)
    assert (await Rewards("answer").score(said, None, own)).value == 1.0
    Own.language = "sw"
    with pytest.raises(InputError, match="has language 'sw'"):
        Rewards("answer").check(OwnEnvironment(Own()))
