"""Optimizers of SFT and GRPO: AdamW or Muon after a clip by the global norm.

Muon (Jordan et al. 2024; here Optax's, with the RMS matching of Liu et al., arXiv 2502.16982) makes each weight
matrix's update orthogonal. Embedding, head and norms use AdamW. Muon is for models trained from scratch: a tiny Qwen3
learns two to three times faster per token with it. Fine-tuning of pretrained weights uses AdamW, as in the paper.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from optax.contrib import MuonDimensionNumbers

from astra_jax.axes import stacked_matrices
from astra_jax.run import moments
from astra_jax.run.config import OPTIMIZERS, JitKey, TrainingConfig
from synthesis.core.references import referred


def make_optimizer(
    settings: TrainingConfig | JitKey, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformationExtraArgs:
    """Return the chain clip → optimizer. Norm scales and biases have no weight decay.

    Args:
        settings: `b1`, `b2` and `eps` are AdamW's; with Muon, of the parameters that use AdamW.
        learning_rate: of all parameters; Muon's updates are scaled to AdamW's usual root mean square of 0.2.

    `settings.optimizer` may name a user's function of (settings, learning_rate) that returns an Optax optimizer, which
    then follows the clip.

    Raises:
        InputError: the function does not exist.
    """
    name, eps, weight_decay = settings.optimizer, settings.eps, settings.weight_decay
    optimizer: Any = optax.adamw(
        learning_rate, b1=settings.b1, b2=settings.b2, eps=eps, weight_decay=weight_decay, mask=_decayed
    )
    if name == "muon":
        matrices = optax.contrib.muon(
            learning_rate,
            eps=eps,
            weight_decay=weight_decay,
            muon_weight_dimension_numbers=_dimension_numbers,
            consistent_rms=0.2,
        )
        # Muon's own Adam would decay norm scales too.
        optimizer = optax.partition({"muon": matrices, "adamw": optimizer}, _labels)
    if name not in OPTIMIZERS:
        optimizer = referred(name)(settings, learning_rate)
    clipped = _in_float32(optax.chain(_clipped(settings.max_grad_norm), optimizer))
    return moments.in_bfloat16(clipped) if settings.optimizer_state_dtype == "bfloat16" else clipped


def learning_rate(settings: TrainingConfig | JitKey, steps: int) -> optax.Schedule:
    """Return a linear warm-up that reaches the peak at its last step, then a cosine down to `final_fraction` of the
    peak.

    `settings.schedule` may name a user's function of (settings, steps) that returns an Optax schedule.
    """
    if settings.schedule != "cosine":
        schedule_of_own: optax.Schedule = referred(settings.schedule)(settings, steps)
        return schedule_of_own
    warmup = max(1, round(settings.warmup_fraction * steps))

    def schedule(count: jax.Array | int) -> jax.Array:
        ramp = (count + 1) / warmup
        progress = jnp.clip((count + 1 - warmup) / max(1, steps - warmup), 0.0, 1.0)
        cosine = settings.final_fraction + (1 - settings.final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return settings.learning_rate * jnp.where(count < warmup, ramp, cosine)

    return schedule


def _clipped(most: float) -> optax.GradientTransformationExtraArgs:
    """Return Optax's clip by the global norm, which may be passed in if only some gradients are given."""

    def update(
        gradients: Any, state: Any, params: Any = None, *, norm: jax.Array | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        del params, extra
        found = optax.tree.norm(gradients) if norm is None else norm
        return jax.tree.map(lambda g: jnp.where(found < most, g, g / found * most), gradients), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _in_float32(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Keep state and updates in float32 for any weight dtype: bfloat16 cannot represent a running mean with decay
    0.999."""

    def float32(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return optimizer.update(float32(gradients), state, float32(params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: optimizer.init(float32(params)), update)


def apply_updates(params: Any, updates: Any, *, rounding: Literal["nearest", "stochastic"], seed: jax.Array) -> Any:
    """Return params + updates, added in float32 and rounded to the parameters' type.

    Args:
        updates: float32.
        rounding: to bfloat16: `stochastic` takes one of the sum's two neighbours (`moments.rounded`). Float32 is not
            rounded.
        seed: int32, different in each step.
    """
    return _added(params, updates, _keys(params, seed), rounding)


def _keys(params: Any, seed: jax.Array) -> Any:
    """Return a random key for each weight."""
    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, list(jax.random.split(jax.random.key(seed), len(leaves))))


def _added(params: Any, updates: Any, keys: Any, rounding: Literal["nearest", "stochastic"]) -> Any:
    def add(param: jax.Array, update: jax.Array, key: jax.Array) -> jax.Array:
        total = param.astype(jnp.float32) + update
        if param.dtype != jnp.bfloat16 or rounding == "nearest":
            return total.astype(param.dtype)
        return moments.rounded(total, key)

    return jax.tree.map(add, params, updates, keys)


def apply_gradients(
    params: Any,
    opt_state: Any,
    gradients: Any,
    total: jax.Array,
    *,
    optimizer: optax.GradientTransformationExtraArgs,
    rounding: Literal["nearest", "stochastic"],
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """Run one optimizer step. If a gradient is not finite, weights and state stay unchanged, except for the position in
    the learning rate schedule, which counts the run's steps.

    New weights can be checked only after they replace the old ones, since keeping both would need another float32 copy
    of all weights. So a step with finite gradients that breaks a weight is reported, and its results must be discarded.
    With finite settings this needs a weight beyond its dtype's range.

    Args:
        gradients: sums over all micro-batches; a single NaN would reach every weight through the clip.
        total: the divisor of the sums, applied only here.

    Returns:
        (params, optimizer state, metrics): `train/grad_norm` before clipping, not finite if nothing was changed, and
        `weights_finite`, true if all new weights are finite.
    """

    def divided(gradients: Any) -> Any:
        return jax.tree.map(lambda g: g.astype(jnp.float32) / total, gradients)

    norm = optax.tree.norm(divided(gradients))
    steps = moments.steps_of(opt_state) + 1

    def unless_broken(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(jnp.isfinite(norm), x, y), new, old)

    def scheduled(x: Any) -> bool:
        return isinstance(x, optax.ScaleByScheduleState)

    def unless_scheduled(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda x, y: x if scheduled(x) else unless_broken(x, y), new, old, is_leaf=scheduled)

    def step(params: Any, state: Any, gradients: Any, keys: Any, part: Any) -> tuple[Any, Any]:
        updates, new_state = optimizer.update(divided(gradients), state, params, norm=norm, part=part)
        new_params = _added(params, updates, keys, rounding)
        return unless_broken(new_params, params), unless_scheduled(new_state, state)

    params, opt_state = moments.stepped(step, params, opt_state, gradients, _keys(params, steps))
    return params, opt_state, {"train/grad_norm": norm, "weights_finite": all_finite(params)}


def all_finite(tree: Any) -> jax.Array:
    """Return whether all numbers of a tree of arrays are finite, a scalar; the same on all hosts."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


def abstract_state(
    like: Any, optimizer: optax.GradientTransformation, shardings: Any = None, *, offload: bool = False
) -> tuple[Any, Any]:
    """Return shapes, dtypes and shardings of the weights and the optimizer's state; statistics are sharded like their
    weights.

    Args:
        like: shapes and dtypes of the weights, see `Model.abstract_params`.
        shardings: a `NamedSharding` for each parameter; None is one device.
        offload: keep the statistics of the layers' matrices in the host's memory; all others, and counters, are on the
            devices.
    """
    if shardings is None:
        shardings = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), like)
    by_path = {jax.tree_util.keystr(path): one for path, one in jax.tree_util.tree_flatten_with_path(shardings)[0]}
    first, away = next(iter(by_path.values())), moments.may_be_away(like)
    everywhere = NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first

    def placed(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        owner = moments.owner_of(path, x, by_path)
        place = everywhere if owner is None else by_path[owner]
        if offload and owner in away:
            place = place.with_memory_kind(moments.HOST)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    params = jax.tree.map(lambda x, one: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), like, shardings)
    return params, jax.tree.map_with_path(placed, jax.eval_shape(optimizer.init, params))


def initial_state(
    params: Any, optimizer: optax.GradientTransformation, shardings: Any = None, *, offload: bool = False
) -> tuple[Any, Any]:
    """Return the weights and the optimizer's state, committed to their devices.

    Everything is committed, including counters. An uncommitted array, or one with another sharding after a step or
    restore, would compile the step a second time.

    Args:
        params: taken over: arrays that are already placed correctly are not copied, and a step donates them.
        shardings: a `NamedSharding` for each parameter; None is one device.
        offload: as in `abstract_state`.
    """
    like, state = abstract_state(params, optimizer, shardings, offload=offload)
    places = jax.tree.map(lambda x: x.sharding, (like, state))
    params = jax.device_put(params, places[0])
    # Jitted, so the float32 copies of bfloat16 weights are never made; only their shapes are used.
    init = jax.jit(lambda params: moments.started(optimizer.init(params), places[1]), out_shardings=places[1])
    return params, init(params)


def _decayed(params: Any) -> Any:
    # By name: stacked over layers, a vector looks like a matrix.
    def decays(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path)
        return "norm" not in name and "bias" not in name

    return jax.tree.map_with_path(decays, params)


def _labels(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: "adamw" if stacked_matrices(path) is None else "muon", params)


def _dimension_numbers(params: Any) -> Any:
    def numbers(path: Any, _: Any) -> MuonDimensionNumbers | None:
        axes = stacked_matrices(path)
        return None if axes is None else MuonDimensionNumbers(*axes)

    return jax.tree.map_with_path(numbers, params)
