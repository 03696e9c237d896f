"""One episode: a policy answers a question with tools until it stops calling them or a limit ends it.

Token ids are the only state. They are append-only and never rendered or tokenised again. Sampled ids are kept as they
are, and only new tool outputs are rendered and encoded: O(new tokens) per turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any

import msgspec
from absl import logging

from astra_jax.base.errors import InputError
from astra_jax.base.files import first_line
from astra_jax.base.settings import Bound, Count, CountOrZero, Length, Settings, Temperature, TopP
from astra_jax.rollout.sampler import RequestFailed, Sampler, Sampling
from astra_jax.rollout.sessions import ENVIRONMENT_DIED, CodeSession, EpisodeSession, ExternalEnvSession, Masked
from astra_jax.rollout.tool_calls import EpisodeTools, ToolCallResult, outputs_of
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.core.agent_loop import Finish, run_agent
from synthesis.core.chat_format import Call
from synthesis.core.environment import AnyEnvironment, CallRecord
from synthesis.core.records import CodeTool, Message, ToolEnvironment, ToolSpec
from synthesis.core.reward import Reward, SubTask, sub_tasks_by_tool
from synthesis.core.rewards import Unscorable, parsed, rewards_of
from synthesis.core.stages import rng_for
from synthesis.core.tool_results import MAX_CHARACTERS


@dataclass(frozen=True)
class EpisodeConfig(Settings):
    """Limits, sampling and reward of an episode; defaults are the paper's where it gives one.

    Attributes:
        max_turns: maximum assistant turns.
        max_prompt_tokens: maximum tokens of the question and the tool documents. An environment with a longer prompt is
            refused.
        max_response_tokens: maximum tokens after the prompt, tool outputs included.
        max_turn_tokens: maximum tokens of one assistant turn. None: only the limits above.
        temperature: sampling temperature. Ours: 1.0, the policy's own distribution, so that the update is on-policy.
        top_p: probability mass of nucleus sampling. Ours: 1.0, the whole distribution, for the same reason as
            `temperature`.
        max_output_chars: maximum characters of a tool output; a longer one is cut, with a marker. Ours: 8,192, as in
            the SFT data.
        distractors_per_band: maximum irrelevant tools from each of the three similarity bands. Ours: 2, so up to 6 in
            all, within the 5-9 of the paper's examples.
        reward: named rewards with weights, for example `f1:1.0,format:0.1,my_module:my_reward`
            (`synthesis.core.rewards`). `recall` or `precision` alone is the paper's ablation. `score` is the
            environment's own score, for environments that are not records of this project.
        reward_epsilon: constant in the denominator of the precision. Ours: 1e-6, so that 4 correct of 4 calls score 1,
            as in the paper.
    """

    max_turns: Count = 32
    max_prompt_tokens: Length = 25_600
    max_response_tokens: Length = 49_152
    max_turn_tokens: Length | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    max_output_chars: Count = MAX_CHARACTERS
    distractors_per_band: CountOrZero = 2
    reward: str = "f1"
    reward_epsilon: Annotated[float, Bound(above=0, most=1)] = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        parsed(self.reward)


class Episode(msgspec.Struct, frozen=True):
    """A finished episode.

    Attributes:
        token_ids: prompt and response.
        prompt_tokens: how many of them are the prompt.
        loss_mask: 1 on sampled tokens; same length as `token_ids`.
        logprobs: the sampler's, 0.0 where the mask is 0.
        versions: of the weights that sampled each token, 0 where the mask is 0; same length as `token_ids`.
        calls: in the order in which they were made.
        score: None exactly if `finish` is `masked`: the infrastructure or a reward failed, so there is no valid result.
        messages: for people and rewards; never used to make tokens.
        masked: the reason for a missing score; else None.
    """

    environment_id: str
    token_ids: list[int]
    prompt_tokens: int
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]
    calls: list[CallRecord]
    score: Reward | None
    turns: int
    finish: Finish
    messages: list[Message]
    masked: Masked | None = None

    @property
    def is_masked(self) -> bool:
        return self.score is None

    @property
    def unscored(self) -> str:
        """The failed reward and its message; "" if none failed."""
        return self.masked.message if self.masked is not None and self.masked.reason == "reward_failed" else ""

    @property
    def sampled_by(self) -> list[int]:
        """The versions that sampled its tokens, oldest first."""
        return sorted({version for version, drawn in zip(self.versions, self.loss_mask, strict=True) if drawn})

    @property
    def reward(self) -> float:
        """The scalar reward for training.

        Raises:
            ValueError: the episode has no score.
        """
        if self.score is None:
            raise ValueError(f"a masked episode (environment {self.environment_id}) has no reward; leave it out")
        return self.score.value


@dataclass(frozen=True)
class EpisodeTask:
    """Data shared by all episodes of a group: the environment, the tools offered, the prompt.

    Attributes:
        tools: by name, in the order in which they are shown.
        code: for records: the tools with their code.
        sub_tasks: for records: by the name of the tool that solves them.
    """

    environment: AnyEnvironment
    tools: Mapping[str, ToolSpec]
    prompt: Sequence[Message]
    prompt_ids: tuple[int, ...]
    code: Mapping[str, CodeTool] = field(default_factory=dict, repr=False)
    sub_tasks: Mapping[str, list[SubTask]] = field(default_factory=dict, repr=False)

    def session(self, sandbox: Sandbox | None, *, epsilon: float) -> EpisodeSession:
        """Return an unopened session for one episode.

        Args:
            sandbox: runs code; only records have any.
            epsilon: of F1.
        """
        if not isinstance(self.environment, ToolEnvironment):
            return ExternalEnvSession(self.environment)
        assert sandbox is not None, "records run code"
        return CodeSession(sandbox, self.environment, self.code, self.sub_tasks, epsilon=epsilon)


def offered_tools(environment: ToolEnvironment, config: EpisodeConfig, *, seed: int) -> dict[str, CodeTool]:
    """Return the tools of an episode by name, in the order shown: required ones mixed with irrelevant ones.

    Raises:
        ValueError: two tools have one name.
    """
    rng = rng_for(seed, "task", environment.id)
    offered = list(environment.tools)
    for band in sorted(environment.distractors):
        band_tools = environment.distractors[band]
        offered += rng.sample(band_tools, min(config.distractors_per_band, len(band_tools)))
    rng.shuffle(offered)
    return _by_name(environment, offered)


def _by_name(environment: ToolEnvironment, tools: Sequence[CodeTool]) -> dict[str, CodeTool]:
    """Return the tools by name. Raises `InputError` if two have one name."""
    named = {tool.spec.name: tool for tool in tools}
    if len(named) != len(tools):
        raise InputError(f"environment {environment.id}: two tools have one name; make the names unique")
    return named


def make_task(
    environment: AnyEnvironment, tokenizer: ChatTokenizer, config: EpisodeConfig, *, seed: int
) -> EpisodeTask:
    """Render the prompt. For records, choose irrelevant tools and shuffle all. The same seed gives the same task.

    Raises:
        ValueError: the environment cannot be scored, has two tools of one name, or its prompt is too long.
    """
    code = offered_tools(environment, config, seed=seed) if isinstance(environment, ToolEnvironment) else {}
    return _task(environment, tokenizer, config, code)


def longest_task(environment: AnyEnvironment, tokenizer: ChatTokenizer, config: EpisodeConfig) -> EpisodeTask:
    """Return the task with the longest prompt that a seed can give, using the longest irrelevant tools of each band. If
    it fits, any sampled task fits, up to differences in tokenisation where texts join.

    Raises:
        ValueError: as `make_task`; also if two possible tools share a name, though few samples include both.
    """
    if not isinstance(environment, ToolEnvironment):
        return _task(environment, tokenizer, config, {})
    offered, most = list(environment.tools), config.distractors_per_band

    def length(tool: CodeTool) -> int:
        return len(tokenizer.encode(msgspec.json.encode(tool.spec).decode()))

    if most:
        _by_name(environment, [*environment.tools, *chain.from_iterable(environment.distractors.values())])
        for band in environment.distractors.values():
            offered += band if len(band) <= most else sorted(band, key=length)[-most:]
    return _task(environment, tokenizer, config, _by_name(environment, offered))


def _task(
    environment: AnyEnvironment, tokenizer: ChatTokenizer, config: EpisodeConfig, code: dict[str, CodeTool]
) -> EpisodeTask:
    sub_tasks: dict[str, list[SubTask]] = {}
    prompt: Sequence[Message]
    if isinstance(environment, ToolEnvironment):
        sub_tasks = sub_tasks_by_tool(environment)
        tools = {name: tool.spec for name, tool in code.items()}
        prompt = [Message(role="user", content=environment.question)]
    else:
        tools, prompt = {spec.name: spec for spec in environment.tools}, environment.prompt
        if len(tools) != len(environment.tools):
            raise InputError(f"environment {environment.id}: two tools have one name; make the names unique")
    segments = tokenizer.format.render(list(prompt), list(tools.values()), add_generation_prompt=True)
    prompt_ids, _ = tokenizer.encode_segments(segments)
    if len(prompt_ids) > config.max_prompt_tokens:
        raise InputError(
            f"environment {environment.id}: its prompt has {len(prompt_ids)} tokens, max_prompt_tokens is "
            f"{config.max_prompt_tokens}; raise it, lower distractors_per_band, or drop the environment"
        )
    return EpisodeTask(environment, tools, prompt, tuple(prompt_ids), code, sub_tasks)


async def run_episode(
    policy: Sampler,
    sandbox: Sandbox | None,
    task: EpisodeTask,
    tokenizer: ChatTokenizer,
    config: EpisodeConfig,
    *,
    seed: int,
    session: str,
    on_turn: Callable[[Sequence[int]], None] = lambda versions: None,
) -> Episode:
    """Run one episode to its end and score it.

    Args:
        sandbox: runs the code of records.
        seed: of sampling; with equal weights, the same seed gives the same episode.
        session: a name that is unique among running episodes.
        on_turn: called after each turn, if the episode continues after it, with the versions of the weights that
            sampled the turn's tokens. An error that it raises ends the episode.
    """
    agent = _PolicyAgent(policy, task, tokenizer, config, seed=seed, session=session, on_turn=on_turn)
    env_session = task.session(sandbox, epsilon=config.reward_epsilon)
    tools = EpisodeTools(env_session, task.tools, max_chars=config.max_output_chars)

    async def execute(turn: int, calls: Sequence[Call]) -> list[str] | None:
        results = await tools.execute(turn, calls)
        agent.record(results)
        return outputs_of(results)

    finish: Finish = "masked"
    reward, failed = None, None
    try:
        try:
            if await env_session.open():
                finish = await run_agent(agent, execute, max_turns=config.max_turns)
        except RequestFailed as error:  # other requests continue
            failed = Masked("request_failed", f"environment {task.environment.id}: {first_line(error)}")
            logging.warning("an episode of %s is masked: %s", task.environment.id, error)
        finally:
            policy.release(session)
        if finish != "masked":
            reward = await env_session.score(agent.messages, tools.calls, finish, rewards_of(config.reward))
    except Unscorable as error:
        failed = Masked("reward_failed", str(error))
        logging.warning("an episode of %s is masked: %s", task.environment.id, error)
    finally:
        await env_session.close()

    return Episode(
        environment_id=task.environment.id,
        token_ids=agent.token_ids,
        prompt_tokens=len(task.prompt_ids),
        loss_mask=agent.loss_mask,
        logprobs=agent.logprobs,
        versions=agent.versions,
        calls=tools.calls,
        score=reward,
        turns=agent.turns,
        finish="masked" if reward is None else finish,
        messages=agent.messages,
        masked=None if reward is not None else failed or env_session.failure,
    )


class _PolicyAgent:
    """A policy that acts in token ids, which are appended and never rendered again. Implements `Agent`."""

    def __init__(
        self,
        policy: Sampler,
        task: EpisodeTask,
        tokenizer: ChatTokenizer,
        config: EpisodeConfig,
        *,
        seed: int,
        session: str,
        on_turn: Callable[[Sequence[int]], None],
    ) -> None:
        self.token_ids = list(task.prompt_ids)
        self.loss_mask, self.logprobs = [0] * len(self.token_ids), [0.0] * len(self.token_ids)
        self.versions, self.turns = [0] * len(self.token_ids), 0
        self.messages = list(task.prompt)
        self._policy, self._tokenizer, self._config = policy, tokenizer, config
        self._seed, self._session, self._on_turn = seed, session, on_turn
        self._turn_versions: Sequence[int] = ()
        self._limit = len(self.token_ids) + config.max_response_tokens

    async def act(self) -> Sequence[Call] | None:
        room = self._limit - len(self.token_ids)
        sampling = Sampling(
            max_tokens=min(room, self._config.max_turn_tokens or room),
            stop_ids=self._tokenizer.end_ids,
            seed=self._seed,
            temperature=self._config.temperature,
            top_p=self._config.top_p,
        )
        completion = await self._policy.generate(self.token_ids, sampling, session=self._session)
        self._turn_versions = completion.versions
        self._append(completion.token_ids, completion.logprobs, completion.versions, mask=1)
        self.turns += 1
        if completion.finish == "length":
            self.messages.append(Message(role="assistant", content=self._tokenizer.decode(completion.token_ids)))
            return None
        said = self._tokenizer.format.parse_assistant(self._tokenizer.decode(completion.token_ids[:-1]))
        self.messages.append(Message(role="assistant", content=said.content, reasoning=said.reasoning))
        return said.calls

    def record(self, results: Sequence[ToolCallResult]) -> None:
        """Add the last turn's calls and outputs to the messages."""
        called = [result.call for result in results if result.call is not None]
        self.messages[-1] = msgspec.structs.replace(self.messages[-1], tool_calls=called)
        for result in results:
            shown, name = result.record.output, result.record.name
            self.messages.append(Message(role="tool", content=shown, tool_call_id=result.call_id, name=name))

    async def observe(self, outputs: Sequence[str]) -> bool:
        # A turn's outputs can be a megabyte, a second of tokenising, so other episodes must not wait for it.
        tokenizer = self._tokenizer
        observation = await asyncio.to_thread(
            lambda: tokenizer.encode(tokenizer.format.tool_results_text(list(outputs)))
        )
        if self.token_ids[-1] != tokenizer.eos_id:  # the format closes the turn
            observation = [tokenizer.eos_id, *observation]
        if len(self.token_ids) + len(observation) >= self._limit:
            return False
        self._append(observation, [0.0] * len(observation), [0] * len(observation), mask=0)
        self._on_turn(self._turn_versions)
        return True

    def _append(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, mask: int
    ) -> None:
        self.token_ids += token_ids
        self.loss_mask += [mask] * len(token_ids)
        self.logprobs += logprobs
        self.versions += versions


def episode_stats(episodes: list[Episode]) -> dict[str, Any]:
    """Return means over the scored episodes by metric name; empty if there are none. Metrics of sub-tasks are means
    over the episodes that have some."""
    scored = [(episode, episode.score) for episode in episodes if episode.score is not None]
    if not scored:
        return {}
    n = len(scored)
    values = {"reward": sum(score.value for _, score in scored) / n}
    for name in dict.fromkeys(name for _, score in scored for name in score.parts):
        shares = [score.parts[name] for _, score in scored if name in score.parts]
        values[f"reward_{name}"] = sum(shares) / len(shares)
    if counted := [score for _, score in scored if score.needed]:
        values |= {
            "recall": sum(score.recall for score in counted) / len(counted),
            "precision": sum(score.precision for score in counted) / len(counted),
            "harm": sum(score.harm for score in counted) / len(counted),
            "unevaluated_checks": sum(score.unevaluated for score in counted) / len(counted),
        }
    values |= {
        "calls": sum(score.calls for _, score in scored) / n,
        "turns": sum(episode.turns for episode, _ in scored) / n,
        "sampled_tokens": sum(sum(episode.loss_mask) for episode, _ in scored) / n,
        "total_tokens": sum(len(episode.token_ids) for episode, _ in scored) / n,
        "failed_calls": sum(not call.ok for episode, _ in scored for call in episode.calls) / n,
        "dead_environments": sum(
            any(call.outcome == ENVIRONMENT_DIED for call in episode.calls) for episode, _ in scored
        )
        / n,
    }
    for finish in ("answered", "turn_limit", "token_limit"):
        values[f"finish_{finish}"] = sum(episode.finish == finish for episode, _ in scored) / n
    return values
