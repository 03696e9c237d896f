"""The optimizers of SFT and GRPO: AdamW or Muon behind a clip by the global norm.

Muon (Jordan et al. 2024; here Optax's, with the RMS matching of Liu et al., arXiv 2502.16982) makes each weight
matrix's update orthogonal; embedding, head and norms go on with AdamW. It is for models trained from scratch: a tiny
Qwen3 learns two to three times faster per token with it. Fine-tuning of pretrained weights stays with AdamW, as in the
paper.
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
from astra_jax.run.config import OPTIMIZERS, JitKey, OptimizerMemory, TrainingConfig
from synthesis.core.references import referred


def make_optimizer(
    settings: TrainingConfig | JitKey, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformationExtraArgs:
    """The chain clip → optimizer. No weight decay on norm scales and biases.

    Args:
        settings: `b1`, `b2` and `eps` are AdamW's; with Muon, of the parameters that it leaves to AdamW.
        learning_rate: of all parameters; Muon's updates are scaled to AdamW's usual root mean square of 0.2.

    With `settings.optimizer` of the user's own, a function of (settings, learning_rate) that returns an Optax
    optimizer, it is that one behind the clip.

    Raises:
        InputError: there is no such function.
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
        # Not Muon's own Adam, which decays norm scales too.
        optimizer = optax.partition({"muon": matrices, "adamw": optimizer}, _labels)
    if name not in OPTIMIZERS:
        optimizer = referred(name)(settings, learning_rate)
    clipped = _in_float32(optax.chain(_clipped(settings.max_grad_norm), optimizer))
    return moments.in_bfloat16(clipped) if settings.moments == "bfloat16" else clipped


def learning_rate(settings: TrainingConfig | JitKey, steps: int) -> optax.Schedule:
    """Linear warm-up that reaches the peak with its last step, then a cosine down to `final_fraction` of the peak.

    `settings.schedule` may name a function of the user's own, of (settings, steps), that returns an Optax schedule.
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
    """Optax's clip by the global norm, which is given, where not all gradients are."""

    def update(
        gradients: Any, state: Any, params: Any = None, *, norm: jax.Array | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        del params, extra
        found = optax.tree.norm(gradients) if norm is None else norm
        return jax.tree.map(lambda g: jnp.where(found < most, g, g / found * most), gradients), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _in_float32(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """State and updates in float32, whatever the weights are: a bfloat16 cannot hold a running mean of 0.999."""

    def float32(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return optimizer.update(float32(gradients), state, float32(params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: optimizer.init(float32(params)), update)


def apply_updates(params: Any, updates: Any, *, rounding: Literal["nearest", "stochastic"], seed: jax.Array) -> Any:
    """params + updates, added in float32 and rounded to the parameters' type.

    Args:
        updates: float32.
        rounding: to bfloat16: `stochastic` takes one of the sum's two neighbours (`moments.rounded`). Float32 is not
            rounded.
        seed: int32, another one in each step.
    """
    return _added(params, updates, _keys(params, seed), rounding)


def _keys(params: Any, seed: jax.Array) -> Any:
    """Of random numbers, one for each weight."""
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
    """One optimizer step; where a gradient is not finite, weights and state stay as they are, but for the place on the
    schedule of the learning rate: that goes by the run's steps, of which this is one.

    Whether the new weights are finite is known only when they are there, in the place of the old ones: to keep both
    would take a float32 copy of all weights more. So a step from finite gradients that breaks a weight is told, and
    nothing that came of it may be kept; with finite settings it takes a weight beyond its type's range.

    Args:
        gradients: sums over all micro-batches; one NaN among them would reach every weight through the clip.
        total: what they are divided by, here and nowhere else.

    Returns:
        (params, optimizer state, `gradient_norm` before clipping: not finite when nothing was changed, and
        `weights_finite`, whether all of the new weights are).
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
    return params, opt_state, {"gradient_norm": norm, "weights_finite": all_finite(params)}


def all_finite(tree: Any) -> jax.Array:
    """Whether all numbers of a tree of arrays are finite, a scalar; on several hosts the same on each."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


def abstract_state(
    like: Any, optimizer: optax.GradientTransformation, shardings: Any = None, *, memory: OptimizerMemory = "device"
) -> tuple[Any, Any]:
    """Shapes, types and places of the weights and the optimizer's state: statistics lie beside their weights.

    Args:
        like: the weights' shapes and types, see `Model.abstract_params`.
        shardings: a `NamedSharding` for each parameter; None is one device.
        memory: where the statistics of the layers' matrices are; all others, and counters, are on the devices.
    """
    if shardings is None:
        shardings = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), like)
    by_path = {jax.tree_util.keystr(path): one for path, one in jax.tree_util.tree_flatten_with_path(shardings)[0]}
    first, away = next(iter(by_path.values())), moments.may_be_away(like)
    everywhere = NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first

    def placed(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        owner = moments.owner_of(path, x, by_path)
        place = everywhere if owner is None else by_path[owner]
        if memory == "host" and owner in away:
            place = place.with_memory_kind(moments.HOST)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    params = jax.tree.map(lambda x, one: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), like, shardings)
    return params, jax.tree.map_with_path(placed, jax.eval_shape(optimizer.init, params))


def initial_state(
    params: Any, optimizer: optax.GradientTransformation, shardings: Any = None, *, memory: OptimizerMemory = "device"
) -> tuple[Any, Any]:
    """The weights and the optimizer's state, each committed to its devices.

    All of it is committed, counters too: an array that is not, or that comes back from a step or a checkpoint with
    another sharding, would compile the step a second time.

    Args:
        params: taken over: where they lie as they should they are not copied, and a step is given them for good.
        shardings: a `NamedSharding` for each parameter; None is one device.
        memory: as of `abstract_state`.
    """
    like, state = abstract_state(params, optimizer, shardings, memory=memory)
    places = jax.tree.map(lambda x: x.sharding, (like, state))
    params = jax.device_put(params, places[0])
    # Jitted, so that the float32 copies of bfloat16 weights, of which it reads nothing but shapes, are never made.
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
