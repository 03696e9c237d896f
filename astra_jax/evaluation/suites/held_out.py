"""Environments as suites, for any endpoint: the episodes and rewards of training, over messages.

`environments` are the held-out records of `astra environments`. The caller opens any other environments: objects of
the user, tasks over MCP servers, a verifiers taskset, or an OpenEnv server.

There is one difference from the episodes of training, which see tokens. Most servers leave an unreadable call in the
message, so the turn is an answer and ends the episode. In training the policy sees an error instead.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import numpy as np

from astra_jax.base.errors import InputError
from astra_jax.evaluation.endpoint_agent import EndpointAgent
from astra_jax.evaluation.episodes import OTHER_KINDS, check_is_share, kinds_of
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.suite import Category, Decoding, EvalItem, EvaluationError, SuiteContext, SuiteInfo
from astra_jax.rollout.episode import EpisodeConfig, EpisodeTask, offered_tools
from astra_jax.rollout.tool_calls import EpisodeTools, outputs_of
from synthesis.core.agent_loop import run_agent
from synthesis.core.chat_format import Call, escape_tags, without_tags
from synthesis.core.datasets import DatasetError, read_card, read_dataset
from synthesis.core.environment import AnyEnvironment, fingerprint, kind_of, prompt_of
from synthesis.core.openai_messages import read_reply
from synthesis.core.records import Message, ToolCall, ToolEnvironment
from synthesis.core.reward import sub_tasks_by_tool
from synthesis.core.rewards import Unscorable, answers, played, rewards_of
from synthesis.core.stages import Transient

_REMEDY = "give the folder of held-out environments with --sources=environments=DIR (astra environments writes it)"
# The paper does not evaluate on its own environments; 0.6 is what it uses elsewhere.
_DECODING = Decoding(temperature=0.6)
_NOTE = "a tool call that cannot be read ends the episode where the server leaves it in the text"


class _Suite(ABC):
    """Runs environments, by id and category, and scores them by named rewards. Most of a `Suite`."""

    def __init__(self, context: SuiteContext, reward: str) -> None:
        check_is_share(reward)
        self._context, self._reward, self._config = context, reward, EpisodeConfig(reward=reward)
        self._environments: dict[str, dict[str, AnyEnvironment]] = {}

    @property
    @abstractmethod
    def info(self) -> SuiteInfo: ...

    def ids(self, category: str) -> Sequence[str]:
        return list(self._environments.get(category, ()))

    async def run(self, item: EvalItem, decoding: Decoding) -> ItemResult:
        environment, config = self._environments[item.category][item.id], self._config
        task = _task(environment, config, item.seed)
        agent = EndpointAgent(
            self._context.endpoint,
            self._context.policy,
            decoding,
            seed=item.seed,
            messages=[{"role": one.role, "content": escape_tags(one.content)} for one in task.prompt],
            tools=[without_tags(spec.to_openai()) for spec in task.tools.values()],
        )
        session = task.session(self._context.sandbox, epsilon=config.reward_epsilon)
        episode = EpisodeTools(session, task.tools, max_chars=config.max_output_chars)

        async def execute(turn: int, calls: Sequence[Call]) -> list[str] | None:
            return outputs_of(await episode.execute(turn, calls))

        try:
            finish = await run_agent(agent, execute, max_turns=config.max_turns) if await session.open() else "masked"
            messages = _messages(task, agent)
            reward = None
            if finish != "masked":
                reward = await session.score(messages, episode.calls, finish, rewards_of(self._reward))
        except Unscorable as error:
            raise Transient(f"environment {item.id}: {error}") from None
        finally:
            await session.close()
        if reward is None:
            raise Transient(f"the sandbox or a server failed in environment {item.id}; the log says how")
        metrics = dict(reward.parts)
        if isinstance(environment, ToolEnvironment):
            needed = {tool.spec.name for tool in environment.tools}
            irrelevant = [call.name not in needed for call in episode.calls]
            metrics |= {"recall": reward.recall, "precision": reward.precision}
            metrics["irrelevant_calls"] = float(np.mean(irrelevant)) if irrelevant else 0.0
        if _has_answer(environment):
            metrics["answer"] = float(answers(played(environment, messages, episode.calls, finish), reward))
        return ItemResult(
            suite=self.info.name,
            category=item.category,
            item=item.id,
            trial=item.trial,
            score=min(1.0, reward.value),
            metrics=metrics,
            finish=finish,
            sub_tasks=max(1, reward.needed),
            steps=agent.steps,
            calls=len(episode.calls),
            prompt_tokens=agent.prompt_tokens,
            completion_tokens=agent.completion_tokens,
            messages=agent.messages,
        )


class Environments(_Suite):
    """Held-out environments of `astra environments`. Implements `Suite`."""

    def __init__(self, context: SuiteContext) -> None:
        super().__init__(context, context.reward or "f1")
        self._digest = ""

    @property
    def info(self) -> SuiteInfo:
        title = "F1" if self._reward == "f1" else "Reward"
        return SuiteInfo(
            name="environments",
            title="Held-out environments",
            harness=_harness(self._reward, "f1"),
            license="the dataset's own",
            data_sha256={"environments": self._digest},
            categories=(Category(name="held_out", title=title, decoding=_DECODING),),
            headline={title: ("held_out",)},
            notes=(_NOTE,),
        )

    async def prepare(self) -> None:
        source = self._context.sources.get("environments")
        if source is None:
            raise EvaluationError(f"the suite environments has no data; {_REMEDY}")
        if self._context.sandbox is None:
            raise EvaluationError("the suite environments runs tool code and was given no sandbox")
        try:
            environments = read_dataset(source, ToolEnvironment)
            self._digest = read_card(source)["digest"]
        except DatasetError as error:
            raise EvaluationError(f"{error}; {_REMEDY}") from None
        if trained := [one.id for one in environments if one.split != "held_out"]:
            raise EvaluationError(
                f"{source}: {len(trained)} environments are for training, such as {trained[0]}; {_REMEDY}"
            )
        if not environments:
            raise EvaluationError(f"{source} holds no environment; {_REMEDY}")
        (repeated, count), *_ = Counter(one.id for one in environments).most_common(1)
        if count > 1:
            raise EvaluationError(f"{source}: {count} environments have the id {repeated!r}; synthesise them again")
        for one in environments:
            rewards_of(self._reward).check(one)
        self._environments = {"held_out": {one.id: one for one in environments}}

    async def close(self) -> None:
        """Do nothing: there is nothing to stop."""


class OpenedEnvironments(_Suite):
    """Environments that are not records, with a category for each kind of task. Implements `Suite`.

    Args:
        name: name in `--suites`.
        opened: yields the environments, and keeps their servers running while it is open.
    """

    def __init__(
        self,
        name: str,
        opened: Callable[[], AbstractAsyncContextManager[Sequence[AnyEnvironment]]],
        context: SuiteContext,
    ) -> None:
        super().__init__(context, context.reward or "score")
        self._name, self._opened, self._stack = name, opened, AsyncExitStack()
        self._titles: Mapping[str, str] = {"environments": "environments"}  # until they are opened
        self._digest = ""

    @property
    def info(self) -> SuiteInfo:
        kinds = (Category(name=name, title=title, decoding=_DECODING) for name, title in self._titles.items())
        return SuiteInfo(
            name=self._name,
            title=self._name,
            harness=_harness(self._reward, ""),
            license="the environments' own",
            data_sha256={"environments": self._digest},
            categories=tuple(kinds),
            headline={"Reward": tuple(self._titles)},
            notes=(_NOTE,),
        )

    async def prepare(self) -> None:
        try:
            environments = await self._stack.enter_async_context(self._opened())
            rewards = rewards_of(self._reward)
            for one in environments:
                rewards.check(one)
            await rewards.try_out(environments[0])
        except InputError as error:
            raise EvaluationError(f"--suites={self._name}: {error}") from error
        self._digest = hashlib.sha256(b"".join(map(fingerprint, environments))).hexdigest()
        kinds = list(zip(environments, kinds_of(environments), strict=True))
        self._titles = {kind: kind if kind == OTHER_KINDS else kind_of(one) for one, kind in kinds}
        for one, kind in kinds:
            self._environments.setdefault(kind, {})[one.id] = one

    async def close(self) -> None:
        await self._stack.aclose()


def _harness(reward: str, usual: str) -> str:
    return "astra-jax" if reward == usual else f"astra-jax, reward {reward}"


def _task(environment: AnyEnvironment, config: EpisodeConfig, seed: int) -> EpisodeTask:
    """Return the task of an episode, without token ids."""
    if not isinstance(environment, ToolEnvironment):
        return EpisodeTask(environment, {spec.name: spec for spec in environment.tools}, environment.prompt, ())
    code = offered_tools(environment, config, seed=seed)
    tools = {name: tool.spec for name, tool in code.items()}
    return EpisodeTask(environment, tools, prompt_of(environment), (), code, sub_tasks_by_tool(environment))


def _messages(task: EpisodeTask, agent: EndpointAgent) -> list[Message]:
    """Return the conversation, as rewards see it."""
    found = list(task.prompt)
    for message in agent.messages[len(task.prompt) :]:
        if message["role"] == "tool":
            found.append(Message("tool", message["content"], tool_call_id=message["tool_call_id"]))
            continue
        turn = read_reply(message, task.tools)
        calls = [call for call in turn.calls if isinstance(call, ToolCall)]
        found.append(Message("assistant", turn.content, reasoning=turn.reasoning, tool_calls=calls))
    return found


def _has_answer(environment: AnyEnvironment) -> bool:
    """Return whether a final answer can be judged: there is an expected one, in a language that is read."""
    try:
        rewards_of("answer").check(environment)
    except InputError:
        return False
    return True
