"""Our own held-out environments, for any endpoint: the episodes and the F1 reward of training, over messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from astra_jax.evaluation.endpoint_agent import EndpointAgent
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.suite import Category, Decoding, EvalItem, EvaluationError, SuiteContext, SuiteInfo
from astra_jax.rollout.episode import EpisodeConfig, offered_tools
from astra_jax.rollout.sessions import CodeSession
from astra_jax.rollout.tool_calls import EpisodeTools, outputs_of
from synthesis.core.agent_loop import run_agent
from synthesis.core.chat_format import Call, escape_tags, without_tags
from synthesis.core.datasets import DatasetError, read_card, read_dataset
from synthesis.core.records import ToolEnvironment
from synthesis.core.reward import sub_tasks_by_tool
from synthesis.core.stages import Transient

_REMEDY = "give the folder of held-out environments with --sources=environments=DIR (launch.environments writes it)"


class Environments:
    """Held-out environments of `launch.environments`. Implements `Suite`.

    One thing differs from training's episodes, which see tokens: a call that cannot be read is left in the message by
    most servers, so that the turn is an answer and ends the episode, where training shows the policy an error.
    """

    def __init__(self, context: SuiteContext) -> None:
        self._context = context
        self._config = EpisodeConfig()
        self._environments: dict[str, ToolEnvironment] = {}
        self._digest = ""

    @property
    def info(self) -> SuiteInfo:
        return SuiteInfo(
            name="environments",
            title="Held-out environments",
            harness="astra-jax",
            licence="the dataset's own",
            data_sha256={"environments": self._digest},
            categories=(
                Category(
                    name="held_out",
                    title="F1",
                    # The paper does not evaluate on its own environments; 0.6 is what it uses elsewhere.
                    decoding=Decoding(temperature=0.6),
                ),
            ),
            headline={"F1": ("held_out",)},
            notes=("a tool call that cannot be read ends the episode where the server leaves it in the text",),
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
        self._environments = {one.id: one for one in environments}

    def ids(self, category: str) -> Sequence[str]:
        return list(self._environments)

    async def run(self, item: EvalItem, decoding: Decoding) -> ItemResult:
        assert self._context.sandbox is not None
        environment, config = self._environments[item.id], self._config
        tools = offered_tools(environment, config, seed=item.seed)
        agent = EndpointAgent(
            self._context.endpoint,
            self._context.policy,
            decoding,
            seed=item.seed,
            messages=[{"role": "user", "content": escape_tags(environment.question)}],
            tools=[without_tags(tool.spec.to_openai()) for tool in tools.values()],
        )
        sub_tasks = sub_tasks_by_tool(environment)
        session = CodeSession(self._context.sandbox, environment, tools, sub_tasks, epsilon=config.reward_epsilon)
        specs = {name: tool.spec for name, tool in tools.items()}
        episode = EpisodeTools(session, specs, max_chars=config.max_output_chars)

        async def execute(turn: int, calls: Sequence[Call]) -> list[str] | None:
            return outputs_of(await episode.execute(turn, calls))

        finish = await run_agent(agent, execute, max_turns=config.max_turns)
        reward = None if finish == "voided" else await session.counted(episode.calls)
        if reward is None:
            raise Transient(f"the sandbox failed in environment {item.id}")
        needed = {tool.spec.name for tool in environment.tools}
        irrelevant = [call.name not in needed for call in episode.calls]
        return ItemResult(
            suite="environments",
            category=item.category,
            item=item.id,
            trial=item.trial,
            score=reward.value,
            metrics={
                "recall": reward.recall,
                "precision": reward.precision,
                "irrelevant_calls": float(np.mean(irrelevant)) if irrelevant else 0.0,
            },
            finish=finish,
            sub_tasks=reward.needed,
            steps=agent.steps,
            calls=len(episode.calls),
            prompt_tokens=agent.prompt_tokens,
            completion_tokens=agent.completion_tokens,
            messages=agent.messages,
        )

    async def close(self) -> None:
        """There is nothing to stop."""
