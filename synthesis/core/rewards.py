"""Rewards by name: what an episode is worth is the weighted sum of named functions.

    rewards = rewards_of("f1:1.0,format:0.1,my_module:my_reward:0.5")
    reward = await rewards.score(episode, counted, own)

Each function gives a share, from 0 to 1; a weight is 1 where none is written, and may be negative. One that raises, or
gives what is no share, has judged nothing: its episode is masked, never counted as good or bad. Functions of the user's
run in processes of their own (`own_workers.py`), where one that hangs is killed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.settings import SettingError
from synthesis.core.agent_loop import Finish
from synthesis.core.environment import (
    AnyEnvironment,
    CallRecord,
    EnvironmentDied,
    PlayedEpisode,
    ToolsUnavailable,
    language_of,
)
from synthesis.core.language_words import READ
from synthesis.core.markup import markup_in
from synthesis.core.own_process import named, number_of
from synthesis.core.own_workers import OwnCodeError, OwnWorkers, workers_of
from synthesis.core.records import Message, ToolEnvironment
from synthesis.core.references import FORM, is_reference, referred
from synthesis.core.reward import Reward

BUILT_IN: Final = {
    "f1": "of the sub-tasks solved and the calls made (paper eq. 30-31)",
    "recall": "solved sub-tasks over all",
    "precision": "solved sub-tasks over calls",
    "score": "the environment's own: of a record of ours, F1",
    "answer": "whether the final answer states the expected value and commits to it",
    "format": "share of the calls that could be carried out; 0 without a final answer, or without a call",
}
_COUNTED: Final = ("f1", "recall", "precision")
"""Rewards over sub-tasks, which only records of ours have."""
_HEAVIEST: Final = 1_000.0
_OF_SILENT: Final = "of an episode without calls whose answer is empty; fix it"
_ROUNDING: Final = 1e-6
"""A share may lie so far outside of 0 to 1, as sums of floats do; it counts as 0 or 1."""
MOST_SECONDS: Final = 600.0
"""For a function of somebody else's, which has no deadline of its own: a judge that is a model may take a while."""
_UNREADABLE: Final = ("malformed", "unknown_tool", "invalid_arguments")


class Unscorable(Exception):
    """A reward function judged nothing; the message says which, and what it did."""


@dataclass(frozen=True)
class WeightedReward:
    """A named reward and what it counts."""

    name: str
    weight: float

    @property
    def metric(self) -> str:
        """Name of the reward in a run's metrics."""
        return self.name.replace(":", ".").replace("/", ".")


def parsed(text: str) -> tuple[WeightedReward, ...]:
    """Return the rewards of a setting; the user's functions are not resolved yet.

    Raises:
        SettingError: a name that there is not or that is there twice, or a weight that is none.
    """
    found: list[WeightedReward] = []
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, _, last = part.rpartition(":")
        weight = _weight(last) if name else None
        one = WeightedReward(part, 1.0) if weight is None else WeightedReward(name, weight)
        if not (one.name in BUILT_IN or is_reference(one.name)):
            raise SettingError(
                f"reward is {text!r:.200}: there is no reward {one.name!r:.80}; use {', '.join(BUILT_IN)}, or a "
                f"function of your own, {FORM}, each with :WEIGHT where it is not 1"
            )
        if not (one.weight and abs(one.weight) <= _HEAVIEST):
            raise SettingError(
                f"reward is {text!r:.200}: the weight of {one.name} is {last}; use a number up to {_HEAVIEST:g}, not 0"
            )
        if one.metric in {other.metric for other in found}:
            raise SettingError(f"reward is {text!r:.200}: {one.name} is there twice; give it one weight")
        found.append(one)
    if not found:
        raise SettingError(f"reward is {text!r}; name at least one, such as f1")
    return tuple(found)


def bounds_of(text: str) -> tuple[float, float]:
    """Return the least and the greatest value of the rewards of a setting.

    Raises:
        SettingError: as `parsed`.
    """
    weights = [one.weight for one in parsed(text)]
    return sum(min(0.0, weight) for weight in weights), sum(max(0.0, weight) for weight in weights)


def _weight(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class Rewards:
    """The rewards of a run; what is one's own is imported.

    Raises:
        SettingError: as `parsed`.
        InputError: a function of one's own is not there.
    """

    def __init__(self, text: str) -> None:
        self.parts = parsed(text)
        self._own: dict[str, Callable[[PlayedEpisode], Any]] = {}
        self._workers = OwnWorkers([])  # for episodes whose environment has none
        for name in (part.name for part in self.parts if part.name not in BUILT_IN):
            if not callable(function := referred(name)):
                raise InputError(f"reward {name} is {function!r:.80}; write a function of an episode")
            self._own[name] = function
            self._position(name, self._workers)

    def check(self, environment: AnyEnvironment) -> None:
        """Check that the rewards can judge an environment's episodes.

        Raises:
            InputError: names the reward, and what to use.
        """
        for name in (part.name for part in self.parts):
            if name == "answer":
                check_language(language_of(environment), f"reward answer: environment {environment.id}")
            if isinstance(environment, ToolEnvironment):
                continue
            if name in _COUNTED:
                raise InputError(
                    f"reward {name} counts sub-tasks, and environment {environment.id} has none: it scores its "
                    "episodes itself; use --config.grpo.episode.reward=score"
                )
            if name == "answer" and environment.answer is None:
                raise InputError(f"reward answer: environment {environment.id} expects none; use score")

    async def try_out(self, environment: AnyEnvironment) -> None:
        """Call the user's rewards on an episode without calls and with an empty answer.

        Raises:
            InputError: one of them cannot judge it.
        """
        silent = _silent(environment)
        workers = workers_of(environment) or self._workers
        for name in self._own:
            self._position(name, workers)  # all of them, so that they are loaded once
        for name in self._own:
            try:
                await self._asked(name, silent, workers)
            except Unscorable as error:
                raise InputError(f"{error}, {_OF_SILENT}") from error

    async def try_out_score(
        self, environment: AnyEnvironment, own: Callable[[PlayedEpisode], Awaitable[float]]
    ) -> None:
        """Ask an environment for its score of such an episode, where `score` is one of the rewards.

        Args:
            own: asks a session of the environment.

        Raises:
            InputError: it cannot judge it.
        """
        if "score" not in (part.name for part in self.parts):
            return
        silent = _silent(environment)
        try:
            await self._share("score", silent, None, lambda: own(silent), None)
        except (Unscorable, ToolsUnavailable) as error:
            raise InputError(f"environment {environment.id}: {error}, {_OF_SILENT}") from error

    async def score(
        self,
        episode: PlayedEpisode,
        counted: Reward | None,
        own: Callable[[], Awaitable[float]],
        workers: OwnWorkers | None = None,
    ) -> Reward:
        """Return the reward of an episode, with its parts.

        The reward `score` of an environment that a call has ended is the worst there is: 0, or 1 where its weight is
        negative.

        Args:
            counted: what is known of its sub-tasks; None where the environment has none.
            own: asks the environment for its own score.
            workers: the processes that have the environment's object already, where there are such.

        Raises:
            Unscorable: a function raised, or gave what is no share from 0 to 1.
            ToolsUnavailable: the environment could not say.
        """
        value, parts = 0.0, dict[str, float]()
        for part in self.parts:
            try:
                share = await self._share(part.name, episode, counted, own, workers)
            except EnvironmentDied:
                share = float(part.weight < 0)
            parts[part.metric] = share
            value += part.weight * share
        base = counted or Reward(0.0, 0.0, 0.0, solved=0, needed=0, calls=len(episode.calls))
        return msgspec.structs.replace(base, value=value, parts=parts)

    async def _share(
        self,
        name: str,
        episode: PlayedEpisode,
        counted: Reward | None,
        own: Callable[[], Awaitable[float]],
        workers: OwnWorkers | None,
    ) -> float:
        if name in self._own:
            return await self._asked(name, episode, workers)
        if name == "score":
            try:
                return _checked(name, await own())
            except (Unscorable, ToolsUnavailable, EnvironmentDied):
                raise
            except OwnCodeError as error:
                raise Unscorable(f"reward {name} {error}") from error
            except Exception as error:  # a foreign environment fails in as many ways as there are
                raise Unscorable(f"reward {name} raised {named(error)}") from error
        if name == "answer":
            return float(answers(episode, counted))
        if name == "format":
            return _format(episode)
        assert counted is not None, "checked by `check`"
        return {"f1": counted.value, "recall": counted.recall, "precision": counted.precision}[name]

    async def _asked(self, name: str, episode: PlayedEpisode, workers: OwnWorkers | None) -> float:
        workers = workers or self._workers
        try:
            return _checked(name, await workers.reward(self._position(name, workers), episode, seconds=MOST_SECONDS))
        except OwnCodeError as error:
            raise Unscorable(f"reward {name} {error}") from error
        except ToolsUnavailable as error:
            raise Unscorable(f"reward {name} could not be asked: {error}") from error

    def _position(self, name: str, workers: OwnWorkers) -> int:
        """Return the position of a user's function in the processes. Raises `InputError`: it cannot be sent there."""
        try:
            return workers.add(self._own[name])
        except InputError as error:
            raise InputError(f"reward {name}: {error}") from error


@cache
def rewards_of(text: str) -> Rewards:
    """See `Rewards`; made once for each text."""
    return Rewards(text)


def played(
    environment: AnyEnvironment, messages: Sequence[Message], calls: Sequence[CallRecord], finish: Finish
) -> PlayedEpisode:
    """Return a finished episode of an environment, as rewards see it."""
    if isinstance(environment, ToolEnvironment):
        with_calls = any(one.needs_tool for one in environment.sub_questions)
        return PlayedEpisode(environment, environment.answer, messages, calls, finish, with_calls)
    return PlayedEpisode(environment.subject, environment.answer, messages, calls, finish, bool(environment.tools))


def _silent(environment: AnyEnvironment) -> PlayedEpisode:
    """Return an episode that has no calls and an empty answer."""
    shown = (
        [Message("user", environment.question)]
        if isinstance(environment, ToolEnvironment)
        else list(environment.prompt)
    )
    return played(environment, [*shown, Message("assistant", "")], [], "answered")


def answers(episode: PlayedEpisode, counted: Reward | None) -> bool:
    """Return whether the last thing that the model says, with no call in it, states the expected answer.

    It must commit to it: lists of guesses and negations state nothing (`core.final_answers`). An episode that a limit
    has ended answers nothing, whatever was said on the way. Thoughts are no answer. Where the question asks for a
    state, the answer is right when all of it was done and the model then says something.
    """
    environment = episode.environment
    if episode.finish != "answered":
        return False
    if isinstance(environment, ToolEnvironment) and environment.sub_questions[-1].check is not msgspec.UNSET:
        return counted is not None and counted.solved == counted.needed
    return episode.expected is not None and episode.says(episode.expected)


def check_language(language: str, of: str) -> None:
    """Check that final answers in a language can be read.

    Args:
        of: what has the language, as the message names it.

    Raises:
        InputError: names it, its language and the languages that are read.
    """
    if language not in READ:
        raise InputError(
            f"{of} has language {language!r:.20}; the languages in which answers are read are {', '.join(READ)}. Leave "
            "out those in others, or score them without the reward answer"
        )


def _format(episode: PlayedEpisode) -> float:
    """Share of the calls that could be carried out.

    0 where the final answer is empty (a limit ended the episode, or a thought was not closed), or where a turn's text
    has markup of a chat format. Without a call 1 where none is needed, else 0: saying nothing is not paid.
    """
    turns = [message.content for message in episode.messages if message.role == "assistant"]
    if not episode.answer.strip() or any(markup_in(turn) for turn in turns):
        return 0.0
    if not episode.calls:
        return float(not episode.is_answered_with_calls)
    return sum(call.outcome not in _UNREADABLE for call in episode.calls) / len(episode.calls)


def _checked(name: str, value: Any) -> float:
    try:
        share = number_of(value)
    except (TypeError, ValueError, OverflowError):
        raise Unscorable(f"reward {name} gave {value!r:.80}, which is not a number from 0 to 1") from None
    if not -_ROUNDING <= share <= 1 + _ROUNDING:
        raise Unscorable(f"reward {name} gave {share!r}, which is not from 0 to 1")
    return min(max(share, 0.0), 1.0)
