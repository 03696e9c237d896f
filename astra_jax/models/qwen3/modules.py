"""Qwen3's forward pass: Flax NNX modules, built once and split once, under a pure function.

`Block` is an NNX module. `init_params` splits it into arrays that are stacked over layers, a plain pytree; `forward`
scans over the stack and merges the block inside the scan's body, while tracing. So a step is `jax.jit` over one
small pytree: no graph traversal in the hot loop, and the compile time does not grow with depth. (Measured on 64 layers:
nested `nnx.jit` 108 ms of blocking Python a step and 8.1 s to compile, a stacked pytree 0.5 ms and 0.3 s.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from astra_jax.attention import RESIDUALS, attention, cached_attention
from astra_jax.mesh import BATCH, WIDTH, constrain, platform_of
from astra_jax.models.qwen3.elementwise import rms_norm, swiglu
from astra_jax.models.qwen3.linear import linear
from astra_jax.models.qwen3.moe import MoE, RouterSums
from astra_jax.models.qwen3.presets import Qwen3Config

Params = dict[str, Any]
"""`{"embed_vd", "layers": {"attention": {...}, "mlp": {...}, ...}, "final_norm_d"[, "head_dv"]}`; leaves below `layers`
have a leading L. A leaf's suffix spells its axes (without L), which is what `sharding` goes by."""

Array = jax.Array

UNROLLED = 2
"""Up to so many layers are written out where XLA's CPU backend runs them, without rematerialisation: it copies into and
out of a scan's stacks (a step of the quickstart's model: 142 ms of both cores' time with the scan, 126 ms without)."""

_SAVE_DOTS = jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims
_SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(RESIDUALS)

REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(_SAVE_DOTS, _SAVE_ATTENTION),
    "attention": _SAVE_ATTENTION,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What the backward pass recomputes, layer by layer: nothing; all but the outputs of matmuls and attention; all but
attention's, from the layer's input (long rows, where attention is most of the work); all, from the layer's input."""


class Cache(NamedTuple):
    """Keys and values of past positions: slot s of a row holds the row's position s. With a leading L, or of one layer.

    The axes are in the order in which attention's two matmuls read them: turning [S, K, H] around in each step takes
    two thirds of a tiny model's decoding (2.4 ms against 7.4 ms a step of 16 rows of 256 on two cores).
    """

    k_bkhs: Array
    v_bksh: Array


Caches = Cache | tuple[Cache, ...]
"""One for all layers, or one a layer."""


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, config: Qwen3Config) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.dtype(config.param_dtype)))


def _filled(value: float, shape: tuple[int, ...], config: Qwen3Config) -> nnx.Param:
    return nnx.Param(jnp.full(shape, value, jnp.dtype(config.param_dtype)))


class Attention(nnx.Module):
    """Grouped-query attention with RMS norm on each head's queries and keys."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs) -> None:
        d, n, k, h = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
        self.config = config
        self.q_dnh = _normal(rngs, (d, n, h), d**-0.5, config)
        self.k_dkh = _normal(rngs, (d, k, h), d**-0.5, config)
        self.v_dkh = _normal(rngs, (d, k, h), d**-0.5, config)
        # Each layer adds twice to the residual stream; this keeps its variance at 1 over the depth.
        self.o_nhd = _normal(rngs, (n, h, d), (2 * config.n_layers * n * h) ** -0.5, config)
        self.q_norm_h = _filled(1.0, (h,), config)
        self.k_norm_h = _filled(1.0, (h,), config)
        if config.attention_bias:
            self.q_bias_nh = _filled(0.0, (n, h), config)
            self.k_bias_kh = _filled(0.0, (k, h), config)
            self.v_bias_kh = _filled(0.0, (k, h), config)
            self.o_bias_d = _filled(0.0, (d,), config)

    def project(self, x_btd: Array, angles_bth: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Queries, keys (both normed and rotated) and values."""
        config = self.config
        q_btnh = linear(x_btd, self.q_dnh[...])
        k_btkh = linear(x_btd, self.k_dkh[...])
        v_btkh = linear(x_btd, self.v_dkh[...])
        if config.attention_bias:
            q_btnh = q_btnh + self.q_bias_nh[...].astype(x_btd.dtype)
            k_btkh = k_btkh + self.k_bias_kh[...].astype(x_btd.dtype)
            v_btkh = v_btkh + self.v_bias_kh[...].astype(x_btd.dtype)
        q_btnh = rotate(rms_norm(q_btnh, self.q_norm_h[...], config.rms_eps), angles_bth)
        k_btkh = rotate(rms_norm(k_btkh, self.k_norm_h[...], config.rms_eps), angles_bth)
        return q_btnh, k_btkh, v_btkh

    def output(self, o_btnh: Array) -> Array:
        y_btd = linear(o_btnh, self.o_nhd[...], 2)
        return y_btd + self.o_bias_d[...].astype(y_btd.dtype) if self.config.attention_bias else y_btd


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs) -> None:
        d, f = config.d_model, config.d_ff
        self.gate_df = _normal(rngs, (d, f), d**-0.5, config)
        self.up_df = _normal(rngs, (d, f), d**-0.5, config)
        self.down_fd = _normal(rngs, (f, d), (2 * config.n_layers * f) ** -0.5, config)

    def __call__(self, x_btd: Array) -> Array:
        gate_btf = linear(x_btd, self.gate_df[...])
        up_btf = linear(x_btd, self.up_df[...])
        return linear(swiglu(gate_btf, up_btf), self.down_fd[...])


class Block(nnx.Module):
    """One layer. `attend(q, k, v)` is given by the caller: over the sequence, or over a cache."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.attention_norm_d = _filled(1.0, (config.d_model,), config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm_d = _filled(1.0, (config.d_model,), config)
        self.mlp = MoE(config, rngs=rngs) if config.n_experts else MLP(config, rngs=rngs)

    def __call__(
        self,
        x_btd: Array,
        angles_bth: tuple[Array, Array],
        real_bt: Array,
        attend: Callable[[Array, Array, Array], tuple[Array, Any]],
        mesh: Mesh | None = None,
    ) -> tuple[Array, Any, RouterSums | None]:
        """Returns the layer's output, whatever else `attend` returned, and the router's statistics if it has one."""
        eps = self.config.rms_eps
        qkv = self.attention.project(rms_norm(x_btd, self.attention_norm_d[...], eps), angles_bth)
        o_btnh, extra = attend(*qkv)
        x_btd = x_btd + self.attention.output(o_btnh)
        normed_btd = rms_norm(x_btd, self.mlp_norm_d[...], eps)
        if isinstance(self.mlp, MoE):
            y_btd, sums = self.mlp(normed_btd, real_bt, mesh)
            return x_btd + y_btd, extra, sums
        return x_btd + self.mlp(normed_btd), extra, None


def rotary_angles(positions_bt: Array, config: Qwen3Config) -> tuple[Array, Array]:
    """(cos, sin), each [B, T, H / 2], float32; with `config.yarn` stretched, and scaled by its attention factor."""
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    positions_bt1 = positions_bt[..., None].astype(jnp.float32)
    if (yarn := config.yarn) is None:
        angles = positions_bt1 / config.rope_theta**exponent
        return jnp.cos(angles), jnp.sin(angles)

    def dimension(turns: float) -> float:
        """Which pair of dimensions turns so often over the original length."""
        ratio = math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / math.log(config.rope_theta)
        return ratio * config.head_dim / 2

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    # HF bounds by head_dim - 1, not by the number of pairs; the weights were made with that.
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = jnp.clip((jnp.arange(config.head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    frequencies = (1 - ramp + ramp / yarn.factor) / config.rope_theta**exponent
    angles = positions_bt1 * frequencies
    return jnp.cos(angles) * yarn.scale, jnp.sin(angles) * yarn.scale


def _rotary_angles_once(positions_bt: Array, config: Qwen3Config) -> tuple[Array, Array]:
    """`rotary_angles` for layers that are written out, on CPUs: there XLA would compute the same cosines in each layer
    again, for each head. What a loop has made it takes as it is."""
    return jax.lax.map(functools.partial(rotary_angles, config=config), positions_bt)


def rotate(x_btnh: Array, angles_bth: tuple[Array, Array]) -> Array:
    """Rotary embedding over pairs (i, i + H/2), as in Hugging Face's layout."""
    cos, sin = (a[:, :, None] for a in angles_bth)
    first, second = jnp.split(x_btnh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_btnh.dtype)


@functools.cache
def _block_definition(config: Qwen3Config) -> tuple[Any, Any]:
    """The block's graph definition and its abstract state: built once for a config, without allocating."""
    return nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))


def _block(config: Qwen3Config, arrays: Params) -> Block:
    definition, abstract = _block_definition(config)
    state = jax.tree.map(lambda x: x, abstract)  # a copy: replacing works in place
    nnx.replace_by_pure_dict(state, arrays)
    return nnx.merge(definition, state)


def init_params(config: Qwen3Config, key: Array) -> Params:
    """Random weights for training from scratch. Loading a checkpoint does not need them: see `weights.load_hf`."""
    embed_key, head_key, layers_key = jax.random.split(key, 3)
    dtype = jnp.dtype(config.param_dtype)

    def layer(key: Array) -> Params:
        return nnx.to_pure_dict(nnx.state(Block(config, rngs=nnx.Rngs(params=key))))

    params: Params = {
        "embed_vd": 0.02 * jax.random.normal(embed_key, (config.vocab_size, config.d_model), dtype),
        "layers": jax.vmap(layer)(jax.random.split(layers_key, config.n_layers)),
        "final_norm_d": jnp.ones((config.d_model,), dtype),
    }
    if not config.tie_embeddings:
        scale = config.d_model**-0.5
        params["head_dv"] = scale * jax.random.normal(head_key, (config.d_model, config.vocab_size), dtype)
    return params


def abstract_params(config: Qwen3Config) -> Params:
    """The shapes and dtypes of `init_params`, without arrays."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def forward(
    params: Params,
    config: Qwen3Config,
    tokens_bt: Array,
    positions_bt: Array,
    segment_ids_bt: Array,
    *,
    remat: str = "none",
    backend: str = "auto",
    mesh: Mesh | None = None,
) -> tuple[Array, RouterSums | None]:
    """Hidden states after the final norm, [B, T, D] in `config.dtype`, and the router's statistics, stacked over layers
    (None for a dense model).

    Args:
        tokens_bt: int32 token ids.
        positions_bt: int32, from 0 in each document.
        segment_ids_bt: int32; 0 is padding, 1, 2, … are a row's documents, which do not see each other.
        remat: a name of `REMAT_POLICIES`.
        backend: of `astra_jax.attention`.
        mesh: on which parameters and batch live as `sharding` says, the sequence in `astra_jax.mesh`'s zig-zag order;
            None is one device.

    Raises:
        ValueError: an unknown remat policy or backend, or a mesh that does not divide heads or sequence.
    """
    if remat not in REMAT_POLICIES:
        raise ValueError(f"remat is {remat!r}; use one of {', '.join(REMAT_POLICIES)}")
    x_btd = _embed(params["embed_vd"], tokens_bt, config, mesh)
    unrolled = config.n_layers <= UNROLLED and remat == "none" and platform_of(mesh) == "cpu"
    angles_bth = _rotary_angles_once(positions_bt, config) if unrolled else rotary_angles(positions_bt, config)

    def attend(q_btnh: Array, k_btkh: Array, v_btkh: Array) -> tuple[Array, None]:
        operands = (q_btnh, k_btkh, v_btkh, segment_ids_bt, positions_bt)
        return attention(*operands, backend=backend, mesh=mesh), None

    def layer(x_btd: Array, arrays: Params) -> tuple[Array, RouterSums | None]:
        x_btd, _, sums = _block(config, arrays)(x_btd, angles_bth, segment_ids_bt > 0, attend, mesh)
        return constrain(x_btd, mesh, BATCH, "context", None), sums

    if (policy := REMAT_POLICIES[remat]) is not None:
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)  # a scan's body cannot be CSE'd anyway
    x_btd, sums_l = jax.lax.scan(layer, x_btd, params["layers"], unroll=unrolled)
    return rms_norm(x_btd, params["final_norm_d"], config.rms_eps), sums_l


def _embed(embed_vd: Array, tokens_bt: Array, config: Qwen3Config, mesh: Mesh | None) -> Array:
    """Look the tokens up where the table's columns are, then give each device its own tokens.

    Each device holds some columns of all words: it looks up all tokens of its part of the batch in them, and one
    exchange turns "all tokens, some columns" into "some tokens, all columns". So no device ever holds the table.
    """
    tokens_bt = constrain(tokens_bt, mesh, "data", None)
    x_btd = constrain(embed_vd[tokens_bt].astype(config.dtype), mesh, "data", None, WIDTH)
    return constrain(x_btd, mesh, BATCH, "context", None)


def head_kernel(params: Params, config: Qwen3Config) -> Array:
    """The output head's matrix, [D, V] in `config.dtype`; the transposed embedding when tied and not `unstacked`."""
    turned = config.tie_embeddings and "head_dv" not in params
    w_dv = params["embed_vd"].T if turned else params["head_dv"]
    return w_dv.astype(config.dtype)


def unstacked(params: Params, config: Qwen3Config) -> Params:
    """The same parameters with `layers` as a tuple of one tree a layer, for `forward_cached`, and a head of their own.

    It copies the layers, and a tied embedding: that is turned around here once, and not in each chunk of decoding.
    """
    n = jax.tree.leaves(params["layers"])[0].shape[0]
    layers = tuple(jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(n))
    return params | {"head_dv": head_kernel(params, config), "layers": layers}


def init_cache(config: Qwen3Config, batch: int, length: int, *, stacked: bool = True) -> Caches:
    """An empty cache for `batch` rows of up to `length` positions; `stacked` is for stacked parameters."""
    heads, width, layers = config.n_kv_heads, config.head_dim, config.n_layers

    def empty(*leading: int) -> Cache:
        k, v = ((*leading, heads, width, length), (*leading, heads, length, width))
        return Cache(jnp.zeros(k, config.dtype), jnp.zeros(v, config.dtype))

    return empty(layers, batch) if stacked else tuple(empty(batch) for _ in range(layers))


def forward_cached(
    params: Params, config: Qwen3Config, tokens_bt: Array, positions_bt: Array, cache: Caches
) -> tuple[Array, Caches]:
    """Hidden states of new tokens over a cache that is extended by them.

    Args:
        params: of `init_params`: the layers are scanned, so that compile time does not grow with depth. Or `unstacked`:
            the layers are written out, which XLA's CPU backend wants, because there a scan copies each layer's weights
            before it reads them (30 million parameters, one row, two cores: 35 ms a step against 16 ms).
        tokens_bt: the new tokens of each row.
        positions_bt: where they go; -1 is padding, which is not written and whose output is meaningless.
        cache: stacked as the parameters are; donate it, it is updated in place.

    Returns:
        (hidden states after the final norm [B, T, D], the extended cache). A token at position p attends to the slots
        0 … p of its row, so those must have been written.
    """
    rows_b1 = jnp.arange(tokens_bt.shape[0])[:, None]
    length = jax.tree.leaves(cache)[0].shape[-1]
    written_bt = jnp.where(positions_bt < 0, length, positions_bt)  # out of bounds: dropped
    visible_bts = jnp.arange(length) <= positions_bt[:, :, None]

    def attend(cache: Cache, q_btnh: Array, k_btkh: Array, v_btkh: Array) -> tuple[Array, Cache]:
        k_bkhs = cache.k_bkhs.at[rows_b1, :, :, written_bt].set(k_btkh, mode="drop")
        v_bksh = cache.v_bksh.at[rows_b1, :, written_bt].set(v_btkh, mode="drop")
        return cached_attention(q_btnh, (k_bkhs, v_bksh, visible_bts)), Cache(k_bkhs, v_bksh)

    return _over_caches(params, config, tokens_bt, positions_bt, cache, attend)


def forward_next(
    params: Params,
    config: Qwen3Config,
    tokens_b1: Array,
    positions_b1: Array,
    past: Caches,
    recent: Caches,
    step: Array,
) -> tuple[Array, Caches]:
    """Hidden states of one more token a row, when all rows go forward together.

    Their keys and values go to one place of a small cache, and the large one is only read: writing to another place of
    each row costs XLA's CPU backend a copy of the cache in each step.

    Args:
        params, past, recent: stacked, or not; see `forward_cached`.
        positions_b1: `step` + how many slots of `past` each row sees; -1 is padding.
        recent: room for as many tokens as there are steps; those before `step` are there. Updated in place.

    Returns:
        (hidden states after the final norm [B, 1, D], the extended `recent`).
    """
    before_bts = jnp.arange(jax.tree.leaves(past)[0].shape[-1]) < positions_b1[:, :, None] - step
    steps = jax.tree.leaves(recent)[0].shape[-1]
    since_bts = jnp.broadcast_to(jnp.arange(steps) <= step, (*positions_b1.shape, steps))

    def attend(caches: tuple[Cache, Cache], q_b1nh: Array, k_b1kh: Array, v_b1kh: Array) -> tuple[Array, Cache]:
        past, recent = caches
        k_bkhs = jax.lax.dynamic_update_slice_in_dim(recent.k_bkhs, k_b1kh.transpose(0, 2, 3, 1), step, axis=3)
        v_bksh = jax.lax.dynamic_update_slice_in_dim(recent.v_bksh, v_b1kh.transpose(0, 2, 1, 3), step, axis=2)
        return cached_attention(q_b1nh, (*past, before_bts), (k_bkhs, v_bksh, since_bts)), Cache(k_bkhs, v_bksh)

    caches = (past, recent) if isinstance(past, Cache) else tuple(zip(past, recent, strict=True))
    return _over_caches(params, config, tokens_b1, positions_b1, caches, attend)


def _over_caches(
    params: Params, config: Qwen3Config, tokens_bt: Array, positions_bt: Array, caches: Any, attend: Callable[..., Any]
) -> tuple[Array, Any]:
    """The layers, each with `attend(its cache, q, k, v)`. Returns hidden states and what became of the caches."""
    written_out = isinstance(params["layers"], tuple)
    angles = _rotary_angles_once if written_out else rotary_angles
    angles_bth = angles(jnp.maximum(positions_bt, 0), config)

    def layer(x_btd: Array, xs: tuple[Params, Any]) -> tuple[Array, Any]:
        arrays, cache = xs
        x_btd, cache, _ = _block(config, arrays)(x_btd, angles_bth, positions_bt >= 0, functools.partial(attend, cache))
        return x_btd, cache

    x_btd = params["embed_vd"][tokens_bt].astype(config.dtype)
    if written_out:
        extended = []
        for xs in zip(params["layers"], caches, strict=True):
            x_btd, cache = layer(x_btd, xs)
            extended.append(cache)
        caches = tuple(extended)
    else:
        x_btd, caches = jax.lax.scan(layer, x_btd, (params["layers"], caches))
    return rms_norm(x_btd, params["final_norm_d"], config.rms_eps), caches
