"""Sessions in which episodes run: the tools of an environment of any kind, and the score at the end."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import msgspec
from absl import logging

from astra_jax.base.files import first_line
from sandbox import Sandbox
from synthesis.core.agent_loop import Finish
from synthesis.core.environment import (
    CallRecord,
    Environment,
    EnvironmentDied,
    EnvironmentSession,
    ToolsUnavailable,
)
from synthesis.core.own_process import named
from synthesis.core.own_workers import OwnCodeError, workers_of
from synthesis.core.records import CodeTool, Message, ToolEnvironment
from synthesis.core.reward import Reward, SubTask, graded_reward, solved_by
from synthesis.core.rewards import MOST_SECONDS, Rewards, played
from synthesis.core.tool_results import error_text, outcome_text, server_error_text, server_text
from synthesis.core.worlds import EpisodeCalls

T = TypeVar("T")

MaskReason = Literal[
    "environment_not_begun", "tool_unavailable", "sandbox_failed", "score_unavailable", "reward_failed",
    "request_failed",
]  # fmt: skip
MASK_REASONS: tuple[MaskReason, ...] = get_args(MaskReason)

_PATIENCE = 24
"""Multiple of `MOST_SECONDS` that an episode may take to start, since it may queue for a server's capacity."""


ENVIRONMENT_DIED = "environment_died"
"""Outcome of a call that ended its environment, and of all later calls."""


class Masked(msgspec.Struct, frozen=True):
    """Reason why an episode has no reward and is excluded from training, with a message."""

    reason: MaskReason
    message: str


class CallOutcome(NamedTuple):
    """Result of a call; fields as in `CallRecord`.

    Attributes:
        infrastructure: the infrastructure failed, so the result says nothing about the policy; the episode is masked.
    """

    outcome: str
    output: str
    solved: list[int]
    infrastructure: bool = False


class EpisodeSession(Protocol):
    """Tools and score of one episode.

    Attributes:
        stateful: later calls see state that earlier ones leave.
        failure: the first infrastructure failure of this episode, or None.
    """

    stateful: bool
    failure: Masked | None

    async def open(self) -> bool:
        """Start the episode. Return False if the infrastructure failed."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any], *, max_chars: int) -> CallOutcome:
        """Execute a valid call; several may run at once."""
        ...

    async def score(
        self, messages: Sequence[Message], calls: Sequence[CallRecord], finish: Finish, rewards: Rewards
    ) -> Reward | None:
        """Return the reward of the episode, or None if the infrastructure failed.

        Raises:
            Unscorable: as `Rewards.score`.
        """
        ...

    async def close(self) -> None:
        """Release its resources."""
        ...


class CodeSession:
    """An episode of a record, with code in the sandbox and F1. See `EpisodeSession`.

    Args:
        tools: the tools offered, by name.
        sub_tasks: by the name of the tool that solves them.
        epsilon: in the precision's denominator.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        environment: ToolEnvironment,
        tools: Mapping[str, CodeTool],
        sub_tasks: Mapping[str, Sequence[SubTask]],
        *,
        epsilon: float = 1e-6,
    ) -> None:
        self._environment, self._tools, self._sub_tasks, self._epsilon = environment, tools, sub_tasks, epsilon
        self._calls = EpisodeCalls(sandbox, environment)
        self.stateful = self._calls.stateful
        self._earlier: list[Mapping[str, Any]] = []
        self.failure: Masked | None = None

    async def open(self) -> bool:
        """Return True: there is nothing to start."""
        return True

    async def call(self, name: str, arguments: Mapping[str, Any], *, max_chars: int) -> CallOutcome:
        """Execute a call; calls that share state run one after the other."""
        earlier = list(self._earlier)
        if self.stateful:
            self._earlier.append(arguments)  # before it ends, since a later call may see what it stores
        result = await self._calls.call(self._tools[name], arguments)
        if result.is_infrastructure:
            self._fail(f"tool {name}: {result.kind.value}: {result.error.partition(chr(10))[0]}")
        solved: list[int] = []
        if result.ok:
            language = self._environment.language
            solved = solved_by(self._sub_tasks, name, result.value, language, arguments=arguments, earlier=earlier)
        shown = outcome_text(result, max_characters=max_chars)
        return CallOutcome(result.kind.value, shown, solved, result.is_infrastructure)

    async def counted(self, calls: Sequence[CallRecord]) -> Reward | None:
        """Return the F1 reward of these calls and the final state, or None if the sandbox failed."""
        grade = await self._calls.grade()
        if grade is None:
            self._fail("the checks of the final state could not be run")
            return None
        found = {sub_id for call in calls for sub_id in call.solved}
        return graded_reward(self._sub_tasks, found, len(calls), grade, epsilon=self._epsilon)

    async def score(
        self, messages: Sequence[Message], calls: Sequence[CallRecord], finish: Finish, rewards: Rewards
    ) -> Reward | None:
        """See `EpisodeSession`."""
        counted = await self.counted(calls)
        if counted is None:
            return None

        async def own() -> float:
            return counted.value

        return await rewards.score(played(self._environment, messages, calls, finish), counted, own)

    def _fail(self, what: str) -> None:
        self.failure = self.failure or Masked("sandbox_failed", f"environment {self._environment.id}: {what}")

    async def close(self) -> None:
        """Do nothing: there are no resources."""


class ExternalEnvSession:
    """An episode of any other environment; its calls run in order. See `EpisodeSession`."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._session: EnvironmentSession | None = None
        self._one_at_a_time = asyncio.Lock()
        self._death = ""  # reason why the environment accepts no more calls
        self.stateful = True
        self.failure: Masked | None = None

    async def open(self) -> bool:
        """See `EpisodeSession`."""
        try:
            self._session = await reset_env(self._environment)
        except ToolsUnavailable as error:
            self._fail("environment_not_begun", error)
            return False
        return True

    async def call(self, name: str, arguments: Mapping[str, Any], *, max_chars: int) -> CallOutcome:
        """Execute one call at a time, in order of arrival.

        After a call that timed out or ended the environment's process, no call reaches the environment.
        """
        assert self._session is not None, "open it first"
        async with self._one_at_a_time:
            try:
                if self._death:
                    raise EnvironmentDied(self._death)
                # A copy, since foreign code may change its arguments.
                answer = await with_timeout(partial(self._session.call, name, copy.deepcopy(dict(arguments))))
            except (EnvironmentDied, Late) as error:
                if not self._death:
                    self._death = f"{name} {error}" if isinstance(error, Late) else first_line(error)
                    logging.warning("an episode of %s scores 0: %s", self._environment.id, self._death)
                return CallOutcome(ENVIRONMENT_DIED, error_text(self._death, max_characters=max_chars), [])
            except (ToolsUnavailable, OwnCodeError) as error:
                self._fail("tool_unavailable", error, name)
                return CallOutcome("unavailable", error_text(first_line(error), max_characters=max_chars), [], True)
        if answer.ok:
            return CallOutcome("ok", server_text(answer.text, max_characters=max_chars), [])
        return CallOutcome("tool_error", server_error_text(answer.text, max_characters=max_chars), [])

    async def score(
        self, messages: Sequence[Message], calls: Sequence[CallRecord], finish: Finish, rewards: Rewards
    ) -> Reward | None:
        """See `EpisodeSession`."""
        assert self._session is not None, "open it first"
        session = self._session

        async def own() -> float:
            if self._death:
                raise EnvironmentDied(self._death)
            shown = played(self._environment, copy.deepcopy(list(messages)), copy.deepcopy(list(calls)), finish)
            return await with_timeout(partial(session.score, shown))

        try:
            episode = played(self._environment, messages, calls, finish)
            return await rewards.score(episode, None, own, workers_of(self._environment))
        except ToolsUnavailable as error:
            self._fail("score_unavailable", error)
            return None

    def _fail(self, reason: MaskReason, error: Exception, what: str = "") -> None:
        message = masked(self._environment, error, what)
        logging.warning("%s", message)
        self.failure = self.failure or Masked(reason, message)

    async def close(self) -> None:
        """Close the session. Errors of the environment are only logged."""
        try:
            if self._session is not None:
                await with_timeout(self._session.close)
        except (ToolsUnavailable, OwnCodeError) as error:
            logging.warning("environment %s: an episode was not closed: close %s", self._environment.id, error)


async def reset_env(environment: Environment) -> EnvironmentSession:
    """Start an episode of an environment, which may queue; a warning is logged if it takes long.

    Raises:
        ToolsUnavailable: it cannot start, or does not start in time.
    """

    def warn() -> None:
        logging.log_every_n_seconds(
            logging.WARNING,
            "an episode of %s has not begun after %g s: begin() waits for room, or hangs; it is given up after %g",
            MOST_SECONDS, environment.id, MOST_SECONDS, _PATIENCE * MOST_SECONDS,
        )  # fmt: skip

    warning = asyncio.get_running_loop().call_later(MOST_SECONDS, warn)
    try:
        # In the task that also closes it, since resources of a session may be bound to their task.
        return await with_timeout(environment.begin, _PATIENCE)
    except OwnCodeError as error:
        raise ToolsUnavailable(f"begin {error}") from error
    finally:
        warning.cancel()


class Late(OwnCodeError):
    """Foreign code exceeded its time limit."""


async def with_timeout(work: Callable[[], Awaitable[T]], times: int = 1) -> T:
    """Await foreign code, for at most `times` x `MOST_SECONDS`.

    Raises:
        Late: it took longer.
        OwnCodeError: it raised any other error, including SystemExit, StopIteration and its own cancellation.
        ToolsUnavailable, EnvironmentDied: raised by the code.
    """
    seconds = times * MOST_SECONDS
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work()
    except (ToolsUnavailable, EnvironmentDied, OwnCodeError):
        raise
    except BaseException as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise Late(f"did not end in {seconds:g} s") from None
        if _is_of_the_loop(error):
            raise
        raise OwnCodeError(f"raised {named(error)}") from error


def _is_of_the_loop(error: BaseException) -> bool:
    """Return whether the error ends our task, rather than being raised by the code called."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # the loop has ended
        return True
    return task is None or (isinstance(error, asyncio.CancelledError) and task.cancelling() > 0)


def masked(environment: Environment, error: Exception, what: str = "") -> str:
    """Return the log line about a masked episode.

    Args:
        what: the part of the environment's code that raised or was late.
    """
    of = f"{what} " if isinstance(error, OwnCodeError) else ""
    return f"an episode of {environment.id} is masked: {of}{first_line(error)}"
