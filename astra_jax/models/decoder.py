"""Decoders: the forward pass of all families, as Flax NNX modules under pure functions.

`Block` is an NNX module. `Decoder.init` splits it into arrays that are stacked over layers, a plain pytree.
`Decoder.forward` scans over the stack and merges the block inside the scan's body, while tracing. So a step is
`jax.jit` over one small pytree: no graph traversal in the hot loop, and the compile time does not grow with depth.
(Measured on 64 layers: nested `nnx.jit` 108 ms of blocking Python per step and 8.1 s to compile, a stacked pytree 0.5
ms and 0.3 s.)
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from astra_jax import axes
from astra_jax.attention import (
    RESIDUALS,
    attention,
    best_backend,
    cached_attention,
    extending_attention,
    needs_prefix_flag,
)
from astra_jax.attention import cache as kv
from astra_jax.attention.cache import Cache, Caches, ChunkedCache, Layer
from astra_jax.base.errors import InputError
from astra_jax.cpu import programs as cpu
from astra_jax.mesh import BATCH, AnyMesh, constrain, platform_of
from astra_jax.models import flops, sharding
from astra_jax.models.layers import quantized
from astra_jax.models.layers.adapted import is_wrapped, materialize
from astra_jax.models.layers.attention import Attention
from astra_jax.models.layers.elementwise import rms_norm
from astra_jax.models.layers.embedding import embed
from astra_jax.models.layers.initial import filled
from astra_jax.models.layers.mlp import MLP
from astra_jax.models.layers.moe import MoE, RouterSums
from astra_jax.models.layers.rotary import rotary_angles
from astra_jax.models.layers.sizes import Sizes, Yarn
from astra_jax.models.matmuls import MATMUL_QUANTIZATIONS
from astra_jax.models.model import CacheView, Params
from astra_jax.models.names import NamedParam

Array = jax.Array

_SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(RESIDUALS)
_SAVE_PRODUCTS = jax.checkpoint_policies.save_only_these_names(RESIDUALS, cpu.PRODUCT)


def _save_dots(primitive: Any, *operands: Any, **options: Any) -> Any:
    """Save the outputs of matmuls, except the wider sums of 8-bit matmuls: their named results are saved."""
    narrow = any(jnp.dtype(one.dtype).itemsize == 1 for one in operands[:2] if hasattr(one, "dtype"))
    return not narrow and jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims(primitive, *operands, **options)


_HEADS, _INPUT = "heads", "layer_input"

REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(_save_dots, _SAVE_PRODUCTS),
    "heads": jax.checkpoint_policies.save_only_these_names(RESIDUALS, _HEADS),
    "attention": _SAVE_ATTENTION,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[RESIDUALS, _INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Policies of the names that `remat.REMATS` describes."""


class Block(nnx.Module):
    """One layer. The caller gives `attend(q, k, v)`: over the sequence, or over a cache."""

    def __init__(self, model: Sizes, *, rngs: nnx.Rngs) -> None:
        self.model = model
        self.attention_norm_d = filled(1.0, (model.d_model,), model)
        self.attention = Attention(model, rngs=rngs)
        self.mlp_norm_d = filled(1.0, (model.d_model,), model)
        self.mlp = MoE(model, rngs=rngs) if model.n_experts else MLP(model, rngs=rngs)

    def __call__(
        self,
        x_btd: Array,
        angles_bth: tuple[Array, Array],
        real_bt: Array,
        attend: Callable[[Array, Array, Array], tuple[Array, Any]],
        mesh: AnyMesh | None = None,
        matmul: str = "none",
    ) -> tuple[Array, Any, RouterSums | None]:
        """Return the layer's output, the other results of `attend`, and the router's statistics if it has one."""
        eps = self.model.rms_eps
        x_btd = checkpoint_name(x_btd, _INPUT)
        qkv = self.attention.project(rms_norm(x_btd, self.attention_norm_d[...], eps), angles_bth, mesh, matmul)
        o_btnh, extra = attend(*(cpu.named(x, _HEADS, mesh) for x in qkv))
        x_btd = x_btd + self.attention.output(o_btnh, mesh, matmul)
        normed_btd = rms_norm(x_btd, self.mlp_norm_d[...], eps)
        if isinstance(self.mlp, MoE):
            y_btd, sums = self.mlp(normed_btd, real_bt, mesh)
            return x_btd + y_btd, extra, sums
        return x_btd + self.mlp(normed_btd, mesh, matmul), extra, None


@functools.cache
def _block_definition(model: Sizes) -> tuple[Any, Any]:
    """Return the block's graph definition and its abstract state: built once per model, without allocating."""
    return nnx.split(nnx.eval_shape(lambda: Block(model, rngs=nnx.Rngs(0))))


def _block(model: Sizes, arrays: Params) -> Block:
    definition, abstract = _block_definition(model)
    state = jax.tree.map(lambda x: x, abstract)  # a copy: replacing works in place
    nnx.replace_by_pure_dict(state, arrays)
    return nnx.merge(definition, state)


FEWEST_ROWS = 8
"""Fewest rows of a decoding matmul on accelerators.

A TPU multiplies fewer rows with its vector unit, at a third of the speed at which it reads the weights. For GPUs XLA
turns a matmul of one row into a product as large as the weights, and its sum.
"""


def fewest_rows(caches: Caches, platform: str | None) -> int:
    """Return the fewest rows of a decoding matmul; for `platform` see `Decoder.forward_cached`."""
    return FEWEST_ROWS if isinstance(caches, Cache) or not _on_cpu(platform) else 1


def _on_cpu(platform: str | None) -> bool:
    return (platform or platform_of(None)) == "cpu"


def _whole(layer: Layer) -> Layer:
    return layer


def _seen(caches: Caches, look: CacheView) -> int:
    """Return the number of positions that are read."""
    return jax.eval_shape(look, kv.first(caches)).length


@dataclass(frozen=True)
class Decoder(Sizes, abc.ABC):
    """Decoder of these sizes: all of `Model` except a family's own part, its names and its `config.json`.

    A family may have `original_context`, the length from which its makers stretch by YaRN; None: its full length.
    """

    family: ClassVar[str]
    original_context: ClassVar[int | None] = None

    def with_context_length(self, tokens: int) -> Self:
        """Return the model for sequences of `tokens`: unchanged if they fit, else with the smallest whole YaRN factor.

        Raises:
            ValueError: its rotary embedding is scaled in another way, which YaRN cannot be combined with.
        """
        if tokens <= self.max_positions:
            return self
        if scaling := "llama3" if self.llama3 else "linear" if self.linear else None:
            raise InputError(
                f"sequences of {tokens} tokens: the model's max_positions is {self.max_positions}, which its {scaling} "
                "scaling already makes of a shorter context; make them shorter"
            )
        trained = self.yarn.original_max_positions if self.yarn else self.max_positions
        original = min(trained, self.original_context or trained)
        factor = math.ceil(tokens / original)
        return replace(self, yarn=Yarn(float(factor), original), max_positions=factor * original)

    @property
    def stretch(self) -> float:
        """Factor by which the context is stretched; 1 if it is not."""
        return self.yarn.factor if self.yarn else 1.0

    def in_training_precision(self) -> Self:
        """Use bfloat16 activations and float32 parameters: AdamW's updates at 2e-6 are below bfloat16's resolution."""
        return replace(self, param_dtype="float32", dtype="bfloat16")

    def check_length(self, tokens: int, field: str) -> None:
        """Check that sequences are not longer than the weights were made for.

        Args:
            tokens: the longest sequence.
            field: the setting of this length, for the message.

        Raises:
            ValueError: `tokens` is above `max_positions`.
        """
        if tokens > self.max_positions:
            raise InputError(
                f"{field} is {tokens}, the model's max_positions is {self.max_positions}; make it shorter, or stretch "
                f"the model with YaRN (rope_scaling in config.json, or {type(self).__name__}.with_context_length)"
            )

    def check_matmul(self, matmul: str, field: str) -> None:
        """Check that the layers support a matmul format; see `Model.check_matmul`."""
        if matmul not in MATMUL_QUANTIZATIONS:
            raise InputError(f"{field} is {matmul!r}; use one of {', '.join(MATMUL_QUANTIZATIONS)}")
        if matmul != "none" and self.n_experts:
            raise InputError(f"{field} is {matmul}; the grouped matmuls of experts are not quantised: use none")
        if matmul != "none":
            quantized.qwix()

    # ------------------------------------------------------------------------------------------------------ parameters

    def init(self, key: Array) -> Params:
        """Return random weights for training from scratch. A loaded checkpoint does not need them (`hf_checkpoint`)."""
        embed_key, head_key, layers_key = jax.random.split(key, 3)
        dtype = jnp.dtype(self.param_dtype)

        def layer(key: Array) -> Params:
            return nnx.to_pure_dict(nnx.state(Block(self, rngs=nnx.Rngs(params=key))))

        params: Params = {
            "embed_vd": 0.02 * jax.random.normal(embed_key, (self.vocab_size, self.d_model), dtype),
            "layers": jax.vmap(layer)(jax.random.split(layers_key, self.n_layers)),
            "final_norm_d": jnp.ones((self.d_model,), dtype),
        }
        if not self.tie_embeddings:
            scale = self.d_model**-0.5
            params["head_dv"] = scale * jax.random.normal(head_key, (self.d_model, self.vocab_size), dtype)
        return params

    def abstract_params(self) -> Params:
        """Return the shapes and dtypes of `init`, without arrays."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    def param_shardings(self, mesh: Mesh) -> Any:
        """See `sharding.param_shardings`."""
        return sharding.param_shardings(self.abstract_params(), mesh)

    def head_weights(self, params: Params) -> Array:
        """Return the head's matrix, [D, V], as stored; the transposed embedding if tied and not `for_decoding`."""
        turned = self.tie_embeddings and "head_dv" not in params
        return params["embed_vd"].T if turned else params["head_dv"]

    def head_kernel(self, params: Params) -> Array:
        """Return `head_weights` in `dtype`."""
        return self.head_weights(params).astype(self.dtype)

    def for_decoding(self, params: Params, *, unstacked: bool, weight_quantization: str = "none") -> Params:
        """Return the parameters in the form for repeated decoding: matrices in `dtype`, with a separate head.

        A tied embedding is transposed once here, and not in each chunk of decoding. Adapters are merged into their
        matrices. Changed leaves are copies.

        Args:
            unstacked: True for `layers` as a tuple with one tree per layer, to unroll them.
            weight_quantization: a name of `matmuls.WEIGHT_QUANTIZATIONS`: the form in which the layers' matrices are
                kept.
        """

        def read(path: Any, x: Any) -> Any:
            x = materialize(x, self.dtype if weight_quantization == "none" else None)
            if weight_quantization != "none" and (outputs := quantized.quantized_axes(path)) is not None:
                return quantized.quantize(x, outputs)
            return x if axes.is_small(path[-1].key) else x.astype(self.dtype)

        cast = jax.tree_util.tree_map_with_path(read, params, is_leaf=is_wrapped)
        layers, n = cast["layers"], self.n_layers
        if unstacked:
            layers = tuple(jax.tree.map(lambda x, i=i: x[i], layers) for i in range(n))
        return cast | {"head_dv": self.head_kernel(params), "layers": layers}

    def cache_sharding(self, mesh: Mesh) -> NamedSharding:
        """See `sharding.cache_sharding`."""
        return sharding.cache_sharding(self.n_kv_heads, mesh)

    # ------------------------------------------------------------------------------------------------------- computing

    def forward(
        self,
        params: Params,
        tokens_bt: Array,
        positions_bt: Array,
        segment_ids_bt: Array,
        *,
        remat: str = "none",
        matmul: str = "none",
        has_shared_prefix: bool = False,
        backend: str = "auto",
        mesh: AnyMesh | None = None,
    ) -> tuple[Array, RouterSums | None]:
        """Run the model; see `Model.forward`. The hidden states are taken after the final norm."""
        if remat not in REMAT_POLICIES:
            raise InputError(f"remat is {remat!r}; use one of {', '.join(REMAT_POLICIES)}")
        self.check_matmul(matmul, "matmul")
        dtype = cpu.trained_dtype(self.dtype, mesh)
        x_btd = embed(params["embed_vd"], tokens_bt, dtype, mesh)
        carried, unrolled = cpu.scanned_dtype(dtype, mesh), cpu.unrolls_training_layers(self.n_layers, remat, mesh)
        angles_bth = self._angles(positions_bt, is_unrolled=unrolled)

        def attend(q_btnh: Array, k_btkh: Array, v_btkh: Array) -> tuple[Array, None]:
            operands = (q_btnh, k_btkh, v_btkh, segment_ids_bt, positions_bt)
            return attention(*operands, has_shared_prefix=has_shared_prefix, backend=backend, mesh=mesh), None

        def layer(x_btd: Array, arrays: Params) -> tuple[Array, RouterSums | None]:
            x_btd = x_btd.astype(dtype)
            x_btd, _, sums = _block(self, arrays)(x_btd, angles_bth, segment_ids_bt > 0, attend, mesh, matmul)
            return constrain(x_btd.astype(carried), mesh, BATCH, "context", None), sums

        if (policy := REMAT_POLICIES[remat]) is not None:
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)  # a scan's body cannot be CSE'd anyway
        x_btd, sums_l = jax.lax.scan(layer, x_btd.astype(carried), params["layers"], unroll=unrolled)
        return rms_norm(x_btd.astype(dtype), params["final_norm_d"], self.rms_eps), sums_l

    def _angles(self, positions_bt: Array, *, is_unrolled: bool) -> tuple[Array, Array]:
        """Return the layers' rotary angles."""
        angles = functools.partial(rotary_angles, model=self)
        return cpu.computed_once(angles, positions_bt) if is_unrolled else angles(positions_bt)

    def cache(
        self,
        batch: int,
        length: int,
        *,
        stacked: bool = True,
        dtype: DTypeLike | None = None,
        part: int | None = None,
    ) -> Caches:
        """Return an empty cache for `batch` rows of up to `length` positions; `stacked` is for stacked parameters.

        Args:
            dtype: dtype of the cache; None: the model's.
            part: positions per array, if there are more. For separate layers with several queries per key head
                (`cpu.programs.kept_part`); None: all in one array.
        """
        heads, width, layers = self.n_kv_heads, self.head_dim, self.n_layers

        def empty(length: int, *leading: int) -> Cache:
            k, v = ((*leading, heads, width, length), (*leading, heads, length, width))
            return Cache(*(jnp.zeros(shape, dtype or self.dtype) for shape in (k, v)))

        def layer() -> Layer:
            if part is None or length <= part or heads == self.n_heads:
                return empty(length, batch)
            return ChunkedCache(tuple(empty(min(part, length - at), batch) for at in range(0, length, part)))

        return empty(length, layers, batch) if stacked else tuple(layer() for _ in range(layers))

    def forward_cached(
        self,
        params: Params,
        tokens_bt: Array,
        positions_bt: Array,
        past: Caches,
        *,
        look: CacheView = _whole,
        platform: str | None = None,
    ) -> tuple[Array, Caches]:
        """Return hidden states of each row's next tokens over its cache.

        Args:
            params: from `init`: the layers are scanned, so that compile time does not grow with depth. Or from
                `for_decoding`: separate layers are unrolled.
            tokens_bt: the new tokens of each row.
            positions_bt: their positions, ascending by one; -1, at a row's end, is padding with undefined output.
            past: stacked as the parameters are; a row sees the positions before its first new token. Not modified.
            look: selects the part of a layer's cache to read.
            platform: platform that the program is compiled for; None is that of JAX's default device.

        Returns:
            (hidden states after the final norm [B, T, D], keys and values of the T new tokens, for
            `attention.cache.put`).
        """

        # Stacked layers may be spread over a mesh, where XLA cannot split a kernel.
        alone = not isinstance(past, Cache)
        backend = best_backend(self.head_dim, platform or platform_of(None)) if alone else "blockwise"

        def attend(cache: Layer, q_btnh: Array, k_btkh: Array, v_btkh: Array) -> tuple[Array, Cache]:
            new = kv.of_tokens(k_btkh, v_btkh, cache.dtype)
            return extending_attention(q_btnh, look(cache), new, positions_bt, backend=backend), new

        return self._over_caches(params, tokens_bt, positions_bt, past, attend, platform)

    def forward_next(
        self,
        params: Params,
        tokens_b1: Array,
        positions_b1: Array,
        past: Caches,
        recent: Caches,
        step: Array,
        *,
        look: CacheView = _whole,
        platform: str | None = None,
    ) -> tuple[Array, Caches]:
        """Return hidden states of one more token per row, when all rows advance together.

        The tokens' keys and values are written to one slot of a small cache, and the large one is only read. To write
        to a different slot of each row would copy the cache in each step, or need a scatter.

        Args:
            params, past, look, platform: see `forward_cached`.
            positions_b1: `step` + the number of slots of `past` that each row sees; -1 is padding.
            recent: slots for as many tokens as there are steps, filled up to `step`. Updated in place.

        Returns:
            (hidden states after the final norm [B, 1, D], the extended `recent`).
        """
        before_bts = jnp.arange(_seen(past, look)) < positions_b1[:, :, None] - step
        steps = kv.first(recent).length
        since_bts = jnp.broadcast_to(jnp.arange(steps) <= step, (*positions_b1.shape, steps))

        more = max(0, -(-fewest_rows(past, platform) // len(tokens_b1)) - 1)

        def attend(caches: tuple[Layer, Cache], q_btnh: Array, k_btkh: Array, v_btkh: Array) -> tuple[Array, Cache]:
            past, recent = caches
            q_b1nh, k_b1kh, v_b1kh = (x[:, :1] for x in (q_btnh, k_btkh, v_btkh))
            recent = recent.at_step(step, kv.of_tokens(k_b1kh, v_b1kh, recent.dtype))
            o_b1nh = cached_attention(q_b1nh, (look(past), before_bts), (recent, since_bts))
            return jnp.pad(o_b1nh, ((0, 0), (0, more), (0, 0), (0, 0))), recent

        tokens_bt, positions_bt = (
            jnp.pad(x, ((0, 0), (0, more)), constant_values=fill) for x, fill in ((tokens_b1, 0), (positions_b1, -1))
        )
        caches = (past, recent) if isinstance(past, Cache) else tuple(zip(past, recent, strict=True))
        x_btd, recent = self._over_caches(params, tokens_bt, positions_bt, caches, attend, platform)
        return x_btd[:, :1], recent

    def _over_caches(
        self,
        params: Params,
        tokens_bt: Array,
        positions_bt: Array,
        caches: Any,
        attend: Callable[..., Any],
        platform: str | None,
    ) -> tuple[Array, Any]:
        """Run the layers, each with `attend(its cache, q, k, v)`. Return hidden states and results for the caches."""
        is_unrolled = isinstance(params["layers"], tuple)
        angles_bth = self._angles(jnp.maximum(positions_bt, 0), is_unrolled=is_unrolled and _on_cpu(platform))

        def layer(x_btd: Array, xs: tuple[Params, Any]) -> tuple[Array, Any]:
            arrays, cache = xs
            x_btd, cache, _ = _block(self, arrays)(
                x_btd, angles_bth, positions_bt >= 0, functools.partial(attend, cache)
            )
            return x_btd, cache

        x_btd = params["embed_vd"][tokens_bt].astype(self.dtype)
        if is_unrolled:
            extended = []
            # XLA inlines the calls; JAX traces and lowers the function once (30 layers: 0.8 s and not 1.5).
            traced_once = jax.jit(layer)
            for xs in zip(params["layers"], caches, strict=True):
                x_btd, cache = traced_once(x_btd, xs)
                extended.append(cache)
            caches = tuple(extended)
        else:
            x_btd, caches = jax.lax.scan(layer, x_btd, (params["layers"], caches))
        return rms_norm(x_btd, params["final_norm_d"], self.rms_eps), caches

    # ---------------------------------------------------------------------------------------------------------- counts

    def matmul_parameters(self) -> tuple[int, int]:
        """See `flops.matmul_parameters`."""
        return flops.matmul_parameters(self)

    def recomputed_parameters(self, remat: str) -> int:
        """See `flops.recomputed_parameters`."""
        return flops.recomputed_parameters(self, remat)

    def flops_per_token(self, tokens: int) -> tuple[float, float]:
        """See `flops.flops_per_token`."""
        return flops.flops_per_token(self, tokens)

    def batch_flops(self, segment_ids_bt: Any) -> float:
        """See `flops.batch_flops`."""
        return flops.batch_flops(self, segment_ids_bt)

    def needs_prefix_flag(self, mesh: AnyMesh | None) -> bool:
        """See `Model.needs_prefix_flag`."""
        return needs_prefix_flag(self.head_dim, mesh)

    # ---------------------------------------------------------------------------------------------------- Hugging Face

    @abc.abstractmethod
    def names(self) -> list[NamedParam]:
        """See `Model.names`."""

    @abc.abstractmethod
    def to_hf(self) -> dict[str, Any]:
        """See `Model.to_hf`."""

    @classmethod
    @abc.abstractmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32", param_dtype: str = "float32") -> Self:
        """See `Model.from_hf`."""
