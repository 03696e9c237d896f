"""Checks that environments can be trained on, before the run starts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from astra_jax.base.errors import InputError
from astra_jax.grpo.config import GRPOConfig
from astra_jax.rollout.episode import EpisodeConfig, EpisodeTask, longest_task
from astra_jax.rollout.sessions import reset_env, with_timeout
from astra_jax.tokenizer import ChatTokenizer
from sandbox import CallResult, Sandbox, SandboxError
from synthesis.core.environment import AnyEnvironment, ToolsUnavailable, fingerprint, solve_rate_of
from synthesis.core.own_objects import OwnEnvironment
from synthesis.core.own_workers import OwnCodeError
from synthesis.core.plays import paid_guesses
from synthesis.core.records import CodeTool, ReferenceCall, ToolEnvironment, World
from synthesis.core.reward import solved_by
from synthesis.core.rewards import Rewards, rewards_of
from synthesis.core.stages import Transient
from synthesis.core.worlds import EpisodeCalls

_AT_ONCE = 64


def select_environments(environments: Sequence[AnyEnvironment], config: GRPOConfig) -> Sequence[AnyEnvironment]:
    """Return the environments to train on: all, or those whose recorded solve rate is within `config.solve_rates`.

    Raises:
        ValueError: an environment has no solve rate although `solve_rates` or `order` needs one, or none is in range.
    """
    if config.solve_rates is None and config.order == "shuffled":
        return environments
    setting = f"order is {config.order!r}" if config.solve_rates is None else f"solve_rates is {config.solve_rates}"
    rates = [solve_rate_of(one) for one in environments]
    if None in rates:
        raise InputError(
            f"{setting}, but environment {environments[rates.index(None)].id} has no recorded solve rate "
            f"({rates.count(None)} of {len(rates)} have none); measure them with `astra difficulty`, and "
            f"{_use_of_rates(environments)}"
        )
    known = [rate for rate in rates if rate is not None]
    lowest, highest = config.solve_rates or (0.0, 1.0)
    kept = [one for one, rate in zip(environments, known, strict=True) if lowest <= rate <= highest]
    if environments and not kept:
        raise InputError(
            f"{setting}, but no environment's recorded solve rate lies within: the {len(known)} go from {min(known):g} "
            f"to {max(known):g}; widen it, or measure them again, by the policy that is trained, with "
            "`astra difficulty`"
        )
    return kept


def _use_of_rates(environments: Sequence[AnyEnvironment]) -> str:
    """Return advice on using the output of launch.difficulty."""
    if all(isinstance(one, ToolEnvironment) for one in environments):
        return "train on what it writes"
    return "give the folder that it writes as --difficulty"


async def check_environments(
    environments: Sequence[AnyEnvironment],
    tokenizer: ChatTokenizer,
    sandbox: Sandbox | None,
    config: EpisodeConfig,
) -> None:
    """Check that each environment can be used:

    - The prompt is rendered with the longest irrelevant tools.
    - Reference calls of records must solve their sub-questions and leave the required state.
    - Guesses of an answer (`echoes.guesses`) must earn no reward.
    - Of environments that are not records, the first one is started and closed; an object of the user's own also scores
    an episode without calls.

    Raises:
        ValueError: there are none, or one cannot be used; the message names the first and the fix.
        SandboxError: the sandbox failed on a call, twice.
    """
    if not environments:
        raise InputError("train needs at least one environment; the dataset is empty or its split has none")
    tasks = [await asyncio.to_thread(longest_task, one, tokenizer, config) for one in environments]
    check_rewards(environments, config)
    await rewards_of(config.reward).try_out(environments[0])
    await _check_begun(environments, rewards_of(config.reward))
    plays = _Plays(sandbox)
    problems = await plays.problems([task for task in tasks if isinstance(task.environment, ToolEnvironment)])
    if not problems:  # guesses are made with the reference calls
        records = [one for one in environments if isinstance(one, ToolEnvironment)]
        found = await asyncio.gather(*map(plays.check_guesses, records))
        problems = [problem for problem in found if problem]
    if problems:
        more = f"; {len(problems) - 1} more calls fail" if len(problems) > 1 else ""
        raise InputError(f"{problems[0]}{more}; synthesise such environments again, or drop them")


class _Plays:
    """Executes calls of records in the sandbox, a bounded number at once. Each check returns the problem, or ""."""

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox, self._gate = sandbox, asyncio.Semaphore(_AT_ONCE)

    @property
    def sandbox(self) -> Sandbox:
        assert self._sandbox is not None, "records run code"
        return self._sandbox

    async def problems(self, tasks: Sequence[EpisodeTask]) -> list[str]:
        """Execute the reference calls of records. Raises InputError if a call's tool is not in its record."""
        plays = []
        for task in tasks:
            environment = task.environment
            assert isinstance(environment, ToolEnvironment)
            names = {tool.spec.name for tool in environment.tools}
            needed = {sub.id for sub in environment.sub_questions if sub.needs_tool}
            for call in environment.reference_calls:
                if call.tool not in names:
                    raise InputError(f"environment {environment.id}: it has no tool {call.tool}; synthesise it again")
            references = [call for call in environment.reference_calls if call.sub_question in needed]
            # Calls that share a world run in order. All others are independent, and each failure is counted.
            in_turn = [references] if isinstance(environment.world, World) else [[call] for call in references]
            plays += [(task, environment, calls) for calls in in_turn]
        found = await asyncio.gather(*(self.check(*play) for play in plays))
        return [problem for problem in found if problem]

    async def _call(self, calls: EpisodeCalls, tool: CodeTool, call: ReferenceCall) -> CallResult:
        """Execute a call, again if the sandbox fails. Raises SandboxError if it fails twice."""
        async with self._gate:
            result = await calls.call(tool, call.arguments)
            if result.is_infrastructure:
                result = await calls.call(tool, call.arguments)
        if result.is_infrastructure:
            raise SandboxError(f"the sandbox failed on tool {call.tool}: {result.kind.value}: {result.error}")
        return result

    async def check(self, task: EpisodeTask, environment: ToolEnvironment, references: Sequence[ReferenceCall]) -> str:
        """Execute reference calls, which must solve their sub-questions and leave the required state."""
        calls = EpisodeCalls(self.sandbox, environment)
        tools = {tool.spec.name: tool for tool in environment.tools}
        states = {sub.id for sub in environment.sub_questions if sub.asks_state and sub.needs_tool}
        for call in references:
            result = await self._call(calls, tools[call.tool], call)
            where = f"environment {environment.id}: its tool {call.tool}, called with {call.arguments},"
            if not result.ok:
                return f"{where} fails ({result.kind.value}: {result.error})"
            solved = solved_by(task.sub_tasks, call.tool, result.value, environment.language, arguments=call.arguments)
            if call.sub_question not in {*states, *solved}:
                return f"{where} does not give the answer to its sub-question {call.sub_question}"
        if not isinstance(environment.world, World):
            return ""
        async with self._gate:
            grade = await calls.grade() or await calls.grade()
        if grade is None:
            raise SandboxError(f"the sandbox failed on the checks of environment {environment.id}")
        if grade.harm or grade.met != states:
            missing = sorted(states - grade.met)
            return (
                f"environment {environment.id}: its reference calls leave the sub-questions {missing} unsolved, and "
                f"{grade.harm} rows otherwise than they should be"
            )
        return ""

    async def check_guesses(self, environment: ToolEnvironment) -> str:
        """Call tools with guesses of the answer, which must not earn a reward."""
        async with self._gate:
            try:
                paid = await paid_guesses(environment, self.sandbox)
            except Transient as error:
                raise SandboxError(f"environment {environment.id}: {error}") from None
        if not paid:
            return ""
        guess = paid[0]
        return (
            f"environment {environment.id}: its tool {guess.tool}, called with the guess {dict(guess.arguments)}, "
            f"gives the answer to its sub-question {guess.step.id}, so that guesses would be rewarded"
        )


def digest_of_environments(environments: Sequence[AnyEnvironment]) -> str:
    """Return a digest of environments in their order, as hexadecimal SHA-256."""
    return hashlib.sha256(b"".join(map(fingerprint, environments))).hexdigest()


def check_rewards(environments: Sequence[AnyEnvironment], config: EpisodeConfig) -> None:
    """Check that a run's rewards can score episodes of all its environments.

    Raises:
        ValueError: a user's reward function does not exist, or an environment lacks data that a reward needs.
    """
    rewards = rewards_of(config.reward)
    for one in environments:
        rewards.check(one)


async def _check_begun(environments: Sequence[AnyEnvironment], rewards: Rewards) -> None:
    """Start, score and close the first environment that is not a record. Raises `InputError` if that fails."""
    foreign = next((one for one in environments if not isinstance(one, ToolEnvironment)), None)
    if foreign is None:
        return
    try:
        session = await reset_env(foreign)
    except ToolsUnavailable as error:
        raise InputError(f"environment {foreign.id} cannot be started: {error}") from error
    if isinstance(foreign, OwnEnvironment):  # a server's score may need a whole episode or a costly judge
        await rewards.try_out_score(foreign, lambda episode: with_timeout(lambda: session.score(episode)))
    try:
        await with_timeout(session.close)
    except (ToolsUnavailable, OwnCodeError) as error:
        raise InputError(f"environment {foreign.id} cannot be closed: close {error}") from error
