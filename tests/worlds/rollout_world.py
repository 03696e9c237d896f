"""A small world for rollout tests: one question, two needed tools, distractors, and a scripted policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax

from astra_jax.models.model import Model, Params
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.sampler import Completion, Sampling
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.records import Answer, CodeTool, ReferenceCall, SubQuestion, ToolEnvironment, ToolSpec


def tiny_model(vocab_size: int, max_positions: int) -> Qwen3Config:
    """The least that runs: what it says is noise."""
    return Qwen3Config(
        vocab_size=vocab_size,
        d_model=32,
        n_layers=1,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        d_ff=32,
        tie_embeddings=True,
        max_positions=max_positions,
    )


def engine_model(vocab_size: int) -> Qwen3Config:
    """What the engine's tests sample with: several layers, heads that share keys."""
    return Qwen3Config(
        vocab_size=vocab_size,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        d_ff=48,
        tie_embeddings=True,
        max_positions=256,
    )


def decisive(model: Model, seed: int = 1) -> Params:
    """Random weights, larger than the usual ones: distributions are far from uniform, greedy draws have one answer."""
    return jax.tree.map(lambda x: x * 3 if x.ndim > 2 else x, model.init(jax.random.key(seed)))


def table_tool(name: str, parameter: str, rows: dict) -> CodeTool:
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    code = (
        f"ROWS = {rows!r}\n"
        f"def {name}({parameter}):\n"
        f"    if {parameter} not in ROWS:\n"
        f"        raise ValueError('unknown {parameter} ' + repr({parameter}))\n"
        f"    return {{'{name}': ROWS[{parameter}]}}\n"
    )
    return CodeTool(ToolSpec(name, f"Looks up the {name} of a {parameter}.", schema), code)


CAPITAL = table_tool("capital_of", "country", {"France": "Paris", "Japan": "Tokyo"})
POPULATION = table_tool("population_of", "city", {"Paris": 2_102_650, "Tokyo": 14_094_034})
DISTRACTORS = {
    "high": [table_tool("mayor_of", "city", {"Paris": "Anne"}), table_tool("river_of", "city", {"Paris": "Seine"})],
    "low": [table_tool("boiling_point", "element", {"iron": 3134})],
}


def make_environment(id: str = "france", country: str = "France") -> ToolEnvironment:
    capital = {"France": "Paris", "Japan": "Tokyo"}[country]
    population = {"Paris": 2_102_650, "Tokyo": 14_094_034}[capital]
    subs = [
        SubQuestion(1, f"What is the capital of {country}?", Answer(capital), [], 1, True, "capital_of"),
        SubQuestion(2, f"What is the population of {capital}?", Answer(population), [1], 2, True, "population_of"),
    ]
    return ToolEnvironment(
        id=id,
        language="en",
        domain="geography",
        structure="multi_hop",
        question=f"How many people live in the capital of {country}?",
        answer=Answer(population),
        sub_questions=subs,
        tools=[CAPITAL, POPULATION],
        reference_calls=[
            ReferenceCall(1, "capital_of", {"country": country}, {"capital_of": capital}),
            ReferenceCall(2, "population_of", {"city": capital}, {"population_of": population}),
        ],
        distractors=DISTRACTORS,
        entities=[country, capital],
        signature="capital_of>population_of",
        split="train",
    )


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class ScriptedSampler:
    """Says what `script(session, turn, seed)` says; each token gets logprob -1. Checks that prompts are append-only."""

    tokenizer: ChatTokenizer
    script: Callable[[str, int, int], str]
    version: int = 0
    seen: dict[str, list[int]] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        earlier = self.seen.get(session, [])
        assert list(token_ids[: len(earlier)]) == earlier, "a prompt must begin with all earlier tokens"
        turn = self.turns.get(session, 0)
        new = self.tokenizer.encode(self.script(session, turn, sampling.seed) + "<|im_end|>")
        cut = new[: sampling.max_tokens]
        self.seen[session], self.turns[session] = [*token_ids, *cut], turn + 1
        return Completion(
            cut, [-1.0] * len(cut), [self.version] * len(cut), "stop" if len(cut) == len(new) else "length"
        )

    def release(self, session: str) -> None:
        self.seen.pop(session, None)
        self.turns.pop(session, None)

    aliases_params = False

    def metrics(self) -> dict[str, float]:
        return {}

    async def publish_weights(self, params, version: int) -> None:
        """Nothing."""

    async def load_weights(self, params, version: int) -> None:
        self.version = version

    async def sleep(self) -> None:
        """It holds nothing that could be let go of."""

    async def close(self) -> None:
        """There is nothing to give back."""
