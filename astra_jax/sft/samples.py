"""Samples of a model during training: greedy next turns for the openings of a few conversations.

Sampling uses the training weights in place, on any mesh and number of hosts, with the embedded engine's programs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from astra_jax.attention.cache import put
from astra_jax.cpu import programs as cpu
from astra_jax.mesh import platform_of
from astra_jax.models.model import Model, Params
from astra_jax.rollout.engine.device_steps import DecodeRows, decode
from astra_jax.sft.data import DataConfig, shown
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chat_format import NotInFormat
from synthesis.core.records import Trajectory

_CHUNK = 256
"""Tokens of a prompt prefilled at once; prompts are padded to a multiple."""


@dataclass(frozen=True)
class Sample:
    """An opening, the dataset's next turn, and the model's next turn."""

    id: str
    prompt: str
    wanted: str
    said: str

    def __str__(self) -> str:
        return f"=== {self.id}\n{self.prompt}\n--- the dataset\n{self.wanted}\n--- the model\n{self.said}\n"


class TurnSampler:
    """Samples next turns of a fixed set of openings.

    Args:
        trajectories: uses the first `count` whose opening, up to the first assistant turn, leaves room for `max_tokens`
            in `data.seq_len`.
        mesh: of the weights; on several hosts all must call `draw`.
    """

    def __init__(
        self,
        trajectories: Iterable[Trajectory],
        tokenizer: ChatTokenizer,
        model: Model,
        data: DataConfig,
        *,
        count: int,
        max_tokens: int,
        mesh: Mesh | None = None,
    ) -> None:
        self._tokenizer, self._model, self._mesh, self._max_tokens = tokenizer, model, mesh, max_tokens
        self._openings: list[tuple[str, list[int], str]] = []
        for trajectory in trajectories:
            if len(self._openings) == count:
                break
            messages, tools = shown(trajectory, data)
            first = next((i for i, message in enumerate(messages) if message.role == "assistant"), None)
            if not first:
                continue
            try:
                opened = tokenizer.format.render(messages[:first], tools, add_generation_prompt=True)
                segments = tokenizer.format.render(messages[: first + 1], tools)
            except NotInFormat:
                continue
            ids, _ = tokenizer.encode_segments(opened)
            if len(ids) + max_tokens <= data.seq_len:
                wanted = "".join(segment.text for segment in segments if segment.trainable)
                self._openings.append((trajectory.id, ids, wanted))

    @property
    def is_empty(self) -> bool:
        """Return whether no opening fits, so that nothing is sampled."""
        return not self._openings

    def draw(self, params: Params) -> list[Sample]:
        """Return one sample for each opening; empty if none fits."""
        if not self._openings:
            return []
        lengths_r = np.array([len(ids) for _, ids, _ in self._openings], np.int32)
        tokens_rt = np.zeros((len(lengths_r), -(-lengths_r.max() // _CHUNK) * _CHUNK), np.int32)
        for row, (_, ids, _) in enumerate(self._openings):
            tokens_rt[row, : len(ids)] = ids
        drawn_rt = _next_turns(
            params,
            tokens_rt,
            lengths_r,
            model=self._model,
            steps=self._max_tokens,
            stops=self._tokenizer.end_ids,
            mesh=self._mesh,
        )
        said = [[int(token) for token in row if token >= 0] for row in np.asarray(drawn_rt)]
        return [
            Sample(id, self._tokenizer.decode(ids), wanted, self._tokenizer.decode(drawn))
            for (id, ids, wanted), drawn in zip(self._openings, said, strict=True)
        ]


@partial(jax.jit, static_argnames=("model", "steps", "stops", "mesh"))
def _next_turns(
    params: Params,
    tokens_rt: Any,
    lengths_r: Any,
    *,
    model: Model,
    steps: int,
    stops: tuple[int, ...],
    mesh: Mesh | None,
) -> jax.Array:
    """Return greedy tokens, [R, steps], padded with -1. Every host gets all of them."""
    rows, padded = tokens_rt.shape
    # All but the last token of each row are prefilled; decoding starts with the last.
    places_t = jnp.arange(padded)
    positions_rt = jnp.where(places_t < lengths_r[:, None] - 1, places_t, -1)

    def chunk(i: Any, cache: Any) -> Any:
        tokens, positions = (
            jax.lax.dynamic_slice_in_dim(x_rt, i * _CHUNK, _CHUNK, axis=1) for x_rt in (tokens_rt, positions_rt)
        )
        new = model.forward_cached(params, tokens, positions, cache)[1]
        count_r = jnp.sum(positions >= 0, axis=1)
        return put(cache, jnp.arange(rows), positions[:, 0], count_r, new)

    cache = model.cache(rows, padded + steps, dtype=cpu.kept_dtype(model.dtype, platform_of(mesh)))
    cache = jax.lax.fori_loop(0, padded // _CHUNK, chunk, cache)
    every_r = jnp.zeros(rows, jnp.int32)
    to_draw = DecodeRows(
        index_r=jnp.arange(rows),
        last_r=jnp.take_along_axis(tokens_rt, lengths_r[:, None] - 1, axis=1)[:, 0],
        positions_r=lengths_r - 1,
        budget_r=every_r + steps,
        seeds_r=every_r.astype(jnp.uint32),
        temperature_r=every_r.astype(jnp.float32),
        top_p_r=every_r + 1.0,
        stops_rk=every_r[:, None] + jnp.asarray(stops, jnp.int32),
    )
    _, drawn_rt, _, _ = decode(
        params, cache, to_draw, model=model, window=padded + steps, steps=steps, nucleus=False, whole=True
    )
    if mesh is not None:
        drawn_rt = jax.lax.with_sharding_constraint(drawn_rt, NamedSharding(mesh, PartitionSpec()))
    return drawn_rt
