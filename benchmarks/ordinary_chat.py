"""Measure whether a model that learns to use tools keeps its chat ability, for a run of the profile `pretrained`.

    python -m benchmarks.ordinary_chat --workdir=DIR

There are 200 ordinary requests without tools. The run's initial weights answer each of them, at temperature 1. Then
each stage's weights give the likelihood of those answers. Their loss, minus that of the initial weights, estimates the
divergence KL(first, stage), in nats per token: how far a stage has moved where it had nothing to learn. Each stage's
weights also answer themselves. Measured are the shares of answers that call a tool although there is none, and of those
that end. Intervals are of 95 %, over requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from astra_jax.base.settings import Length
from benchmarks import rows
from launch.flags import cli
from launch.flags.numbers import number_flag

if TYPE_CHECKING:  # --help does not wait for them
    import numpy as np

    from astra_jax.models.model import Model, Params
    from astra_jax.rollout.sampler import Completion
    from astra_jax.tokenizer import ChatTokenizer
    from configs.quickstart import QuickstartConfig

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run of the profile, after SFT.", required=True)
_MAX_TOKENS = number_flag("max_tokens", 96, Length, "Of an answer.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to the results.")

FORMS = (
    "What is {}?",
    "Explain {} to a child of ten.",
    "Write a short poem about {}.",
    "Give me three tips about {}.",
    "Why do people care about {}?",
    "Tell me a joke about {}.",
    "I know nothing about {}. Where should I begin?",
    "Write two sentences for a letter to a friend about {}.",
    "What are common mistakes people make with {}?",
    "Summarise the history of {} in one paragraph.",
    "Describe {} without using the word itself.",
    "What would a day without {} look like?",
    "Name a book about {} and say why it is worth reading.",
    "I'm tired of hearing about {}. Can you cheer me up?",
    "What is the difference between {} and a hobby?",
    "Make a list of five words that have to do with {}.",
    "Is it expensive to spend time on {}?",
    "Write a title and a first line for a story about {}.",
    "How could I teach my neighbours about {}?",
    "Argue against {}, then for it, one sentence each.",
)
TOPICS = (
    "gardening", "photosynthesis", "football", "cycling", "baking bread",
    "honesty", "the night sky", "learning to sing", "rain", "neural networks",
)  # fmt: skip
REQUESTS = tuple(form.format(topic) for form, topic in product(FORMS, TOPICS))
STAGES = {"start": "weights", "sft": "sft/tools", "grpo": "grpo"}
"""Folders of a run, in the order in which they are trained."""


def _settings() -> QuickstartConfig:
    from configs.quickstart import PROFILES

    return PROFILES["pretrained"]()


def main() -> None:
    config = cli.overridden(_settings())
    figures = asyncio.run(measured(config, cli.local_folder(_WORKDIR), max_tokens=_MAX_TOKENS.value))
    rows.report("ordinary_chat", figures, save=_SAVE.value)
    print(table(figures))


async def measured(config: QuickstartConfig, workdir: Path, *, max_tokens: int) -> dict[str, Any]:
    """A row: of each stage that the run has come to what its newest weights think of the first weights' answers, and
    their own answers.

    `drawn_loss` is that of the first weights as the engine had it when it drew them: `start`'s loss but for rounding.

    Args:
        config: of the run: its model, and seed.
        max_tokens: of one answer.

    Raises:
        WeightsError: the run has not come to the end of SFT.
    """
    from astra_jax.run import weights
    from astra_jax.tokenizer import ChatTokenizer
    from launch.quickstart import pretrained
    from synthesis.core.records import Message

    tokenizer = ChatTokenizer.load(workdir / "tokenizer")
    prompts = []
    for request in REQUESTS:
        opened = tokenizer.format.render([Message("user", request)], [], add_generation_prompt=True, thinking=False)
        prompts.append(tokenizer.encode_segments(opened)[0])
    stages: dict[str, Any] = {}
    given: list[Completion] = []
    first: list[float] = []
    for name, folder in STAGES.items():
        if name == "grpo" and not (workdir / folder).exists():
            continue
        if name == "start":
            params = pretrained.load(config.model, workdir / folder)
        else:
            params = weights.load_orbax(workdir / folder / "checkpoints", config.model)
        own = await _answers(params, config, tokenizer, prompts, max_tokens)
        given = given or own
        losses = _losses(params, config.model, prompts, [one.token_ids for one in given], tokenizer.pad_id, max_tokens)
        first = first or losses
        stages[name] = _figures(losses, first, own, tokenizer)
    return {
        "requests": len(prompts),
        "tokens": sum(len(one.token_ids) for one in given),
        "seed": config.seed,
        "drawn_loss": round(-sum(sum(one.logprobs) / len(one.logprobs) for one in given) / len(given), 4),
        "stages": stages,
    }


def table(figures: Mapping[str, Any]) -> str:
    """A row as markdown."""
    lines = ["| | nats a token | more than at first | calls a tool | comes to an end |", "| --- " * 5 + "|"]
    for name, one in figures["stages"].items():
        low, high = one["more_interval"]
        more = "" if name == "start" else f"{one['more']:.3f} ({low:.3f} to {high:.3f})"
        lines.append(f"| {name} | {one['loss']:.3f} | {more} | {one['calls_a_tool']:.3f} | {one['ends']:.3f} |")
    return "\n".join(lines)


async def _answers(
    params: Params, config: QuickstartConfig, tokenizer: ChatTokenizer, prompts: Sequence[list[int]], max_tokens: int
) -> list[Completion]:
    """Return an answer to each prompt, sampled at temperature 1."""
    from astra_jax.rollout.engine.engine import Engine
    from astra_jax.rollout.engine.slots import EngineConfig
    from astra_jax.rollout.sampler import Sampling

    shapes = EngineConfig(slots=32, max_length=max(map(len, prompts)) + max_tokens)
    stops = tokenizer.end_ids
    draws = [
        Sampling(max_tokens=max_tokens, stop_ids=stops, seed=config.seed * len(prompts) + i)
        for i in range(len(prompts))
    ]
    async with Engine(params, config.model, shapes) as engine:
        return await asyncio.gather(*map(engine.generate, prompts, draws))


def _losses(
    params: Params, model: Model, prompts: Sequence[list[int]], answers: Sequence[list[int]], pad: int, most: int
) -> list[float]:
    """Return the loss of each answer, in nats per token."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from astra_jax.head import token_logprobs

    @jax.jit
    def scored(params: Params, ids_bt: np.ndarray, mask_bt: np.ndarray) -> jax.Array:
        """[B], the mean over an answer's tokens."""
        positions_bt = jnp.broadcast_to(jnp.arange(ids_bt.shape[1]), ids_bt.shape)
        x_btd, _ = model.forward(params, ids_bt, positions_bt, jnp.ones_like(ids_bt))
        logps_bt, _ = token_logprobs(x_btd[:, :-1], model.head_weights(params), ids_bt[:, 1:])
        return -jnp.sum(logps_bt * mask_bt[:, 1:], axis=1) / jnp.sum(mask_bt, axis=1)

    length, batch, found = max(map(len, prompts)) + most, 8, list[float]()
    for at in range(0, len(prompts), batch):
        ids_bt = np.full((batch, length), pad, np.int32)
        mask_bt = np.zeros((batch, length), np.float32)
        for row, (prompt, answer) in enumerate(zip(prompts[at:][:batch], answers[at:][:batch], strict=True)):
            ids_bt[row, : len(prompt) + len(answer)] = [*prompt, *answer]
            mask_bt[row, len(prompt) : len(prompt) + len(answer)] = 1
        found += map(float, scored(params, ids_bt, mask_bt))
    return found[: len(prompts)]


def _figures(
    losses: Sequence[float], first: Sequence[float], own: Sequence[Completion], tokenizer: ChatTokenizer
) -> dict[str, Any]:
    from astra_jax.evaluation.intervals import estimate

    more = [loss - before for loss, before in zip(losses, first, strict=True)]
    most = max(1.0, *map(abs, more))
    moved = estimate(more, least=-most, most=most)
    frame = tokenizer.format.call_frame
    opening = frame.opens or frame.before
    called = [opening in tokenizer.decode(one.token_ids) for one in own]
    return {
        "loss": round(sum(losses) / len(losses), 4),
        "more": round(moved.mean, 4),
        "more_interval": [round(moved.low, 4), round(moved.high, 4)],
        "calls_a_tool": round(sum(called) / len(called), 4),
        "ends": round(sum(one.finish == "stop" for one in own) / len(own), 4),
    }


if __name__ == "__main__":
    cli.with_cpu_environment("benchmarks.ordinary_chat", large=True)
    cli.run(main, settings=_settings)
