"""Low-rank adapters as trees: the matrices that get one, the trained parameters, and the joined tree for the model.

Adapters are a tree next to the frozen weights of a model, its base, with the same paths. Each adapted matrix has two
leaves there: `a_dr` and `b_rnh` for `q_dnh`. Their names end in their axes, with `r` for the rank, so sharding,
optimizers and checkpoints handle them by their axes (`astra_jax/axes.py`). If rows of single tokens are trained too,
embedding and head have one more leaf each: `rows_id` for `embed_vd`. `attach_lora` makes one tree of both, which the
model's layers read as weights.
"""

from __future__ import annotations

import difflib
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from astra_jax import axes
from astra_jax.base.errors import InputError
from astra_jax.models import sharding
from astra_jax.models.layers import quantized
from astra_jax.models.layers.adapted import LoRAWeight, is_wrapped, materialize
from astra_jax.models.lora import ALL, LoRA
from astra_jax.models.model import Model, Params
from astra_jax.models.names import NamedParam

Array = jax.Array


def adaptable(model: Model) -> dict[str, NamedParam]:
    """Return the matrices that can have an adapter, by the last part of their names in checkpoints (`q_proj`)."""
    return {
        entry.hf_name.split(".")[-2]: entry
        for entry in model.names()
        if entry.stacked == 1 and axes.stacked_matrices([jax.tree_util.DictKey(key) for key in entry.path]) is not None
    }


def targeted(model: Model, lora: LoRA) -> dict[str, NamedParam]:
    """Return the matrices that get an adapter.

    Raises:
        InputError: a target is unknown; the message names it and all possible targets.
    """
    every = adaptable(model)
    if ALL in lora.targets:
        return every
    for name in lora.targets:
        if name not in every:
            near = difflib.get_close_matches(name, [*every, ALL], n=1)
            raise InputError(
                f"lora.targets has {name!r}, and this model no such matrix that could have an adapter; use some of "
                f"{', '.join(every)}, or {ALL}{f' (the nearest is {near[0]})' if near else ''}"
            )
    return {name: entry for name, entry in every.items() if name in lora.targets}


def check(model: Model, lora: LoRA) -> None:
    """Check that a model can have these adapters.

    Raises:
        InputError: a target is not a matrix of the model, or its matrices cannot be stored this way.
        UserError: the library for storing them is not installed.
    """
    targeted(model, lora)
    model.check_matmul(lora.weight_quantization, "lora.weight_quantization")


def leaf_names(name: str) -> tuple[str, str]:
    """Return the names of A and B for a matrix: (`a_dr`, `b_rnh`) for `q_dnh`."""
    letters, (inputs, outputs) = axes.letters(name), axes.sides(name)
    return f"a_{''.join(letters[i] for i in inputs)}r", f"b_r{''.join(letters[i] for i in outputs)}"


def vocabularies(model: Model) -> list[NamedParam]:
    """Return the embedding, and the head if it is separate: the parameters with a row or column for each token."""
    return [entry for entry in model.names() if "v" in axes.letters(entry.path[-1])]


def rows_name(name: str) -> str:
    """Return the name of the trained rows of a leaf with an axis of tokens: `rows_id` for `embed_vd`."""
    return f"rows_{axes.letters(name).replace('v', 'i')}"


def abstract_adapters(model: Model, lora: LoRA) -> Params:
    """Return the shapes of adapters and trained rows; always float32, since updates are small.

    Raises:
        InputError: a token whose row is to be trained is not in the model's vocabulary.
    """
    if lora.rank is None:
        raise ValueError("there are no adapters without a rank")
    base: Params = model.abstract_params()
    made: Params = {}
    for entry in targeted(model, lora).values():
        *outer, name = entry.path
        layers, *shape = at_path(base, entry.path).shape
        inputs, outputs = axes.sides(name)
        a, b = leaf_names(name)
        place: Params = made
        for key in outer:
            place = place.setdefault(key, {})
        place[name] = {
            a: jax.ShapeDtypeStruct((layers, *(shape[i] for i in inputs), lora.rank), jnp.float32),
            b: jax.ShapeDtypeStruct((layers, lora.rank, *(shape[i] for i in outputs)), jnp.float32),
        }
    for entry in vocabularies(model) if lora.tokens else ():
        *outer, name = entry.path
        shape, at = at_path(base, entry.path).shape, axes.letters(name).index("v")
        if (last := max(lora.tokens)) >= shape[at]:
            raise InputError(f"lora.tokens has {last}, the model {shape[at]} rows for tokens; give ids below that")
        place = made
        for key in outer:
            place = place.setdefault(key, {})
        rows = (*shape[:at], len(lora.tokens), *shape[at + 1 :])
        place[name] = {rows_name(name): jax.ShapeDtypeStruct(rows, jnp.float32)}
    return made


def initial_adapters(model: Model, lora: LoRA, key: Array, base: Params) -> Params:
    """Return initial adapters, with which the model's outputs do not change yet.

    A is sampled as in `peft`, uniform within 1 / √in (He et al.'s, with a slope of √5). B is zero, and trained rows are
    the base's.
    """

    def one(path: Any, x: jax.ShapeDtypeStruct) -> Array:
        name = path[-1].key
        if name.startswith("rows_"):
            stored = at_path(base, tuple(step.key for step in path[:-1]))
            return jnp.take(stored, jnp.array(lora.tokens), axis=axes.letters(name).index("i")).astype(x.dtype)
        if not name.startswith("a_"):
            return jnp.zeros(x.shape, x.dtype)
        bound = math.prod(x.shape[1:-1]) ** -0.5
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return jax.random.uniform(own, x.shape, x.dtype, -bound, bound)

    return jax.tree_util.tree_map_with_path(one, abstract_adapters(model, lora))


def abstract_trained(model: Model, lora: LoRA) -> Params:
    """Return the shapes and dtypes of the trained parameters: the adapters, or all weights."""
    return model.abstract_params() if lora.rank is None else abstract_adapters(model, lora)


def trained_shardings(model: Model, lora: LoRA, mesh: Mesh | None) -> Any:
    """Return a `NamedSharding` for each leaf of `abstract_trained`; None is one device.

    An adapter's side is sharded like its matrix, its rank is not.
    """
    if mesh is None:
        return None
    if lora.rank is None:
        return model.param_shardings(mesh)
    return sharding.param_shardings(abstract_adapters(model, lora), mesh)


def abstract_base(model: Model, lora: LoRA, mesh: Mesh | None) -> Params | None:
    """Return shapes, dtypes and shardings of the frozen weights; None if all are trained."""
    if lora.rank is None:
        return None
    like = model.abstract_params()
    if mesh is None:
        alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        places = jax.tree.map(lambda _: alone, like)
    else:
        places = model.param_shardings(mesh)

    def one(path: Any, x: jax.ShapeDtypeStruct, place: jax.sharding.Sharding) -> Any:
        if (outputs := _stored_outputs(path, lora)) is None:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        return quantized.quantized_shapes(jax.eval_shape(lambda x: quantized.quantize(x, outputs), x), place)

    return jax.tree_util.tree_map_with_path(one, like, places)


def _stored_outputs(path: Any, lora: LoRA) -> tuple[int, ...] | None:
    """Return the axes with scales (layers and outputs) of a matrix stored in 8 bits under adapters; None for others."""
    return None if lora.weight_quantization == "none" else quantized.quantized_axes(path)


def store(base: Params, lora: LoRA, path: tuple[Any, ...] = ()) -> None:
    """Convert the frozen weights in place to their form under adapters, one matrix after the other to save memory."""
    for name in base:
        here = (*path, jax.tree_util.DictKey(name))
        if isinstance(base[name], dict):
            store(base[name], lora, here)
        elif (outputs := _stored_outputs(here, lora)) is not None:
            base[name] = quantized.quantize(base[name], outputs)


def attach_lora(params: Params, base: Params | None, lora: LoRA, *, dtype: Any = None) -> Params:
    """Return the weights for the model's layers: the base with adapters at their matrices, and trained rows in place.

    Only leaves with trained rows are copied.

    Args:
        params: the trained parameters.
        base: the frozen weights; None: `params` are all weights.
        dtype: dtype of leaves with trained rows; by default the base's.
    """
    if base is None:
        return params

    def put(adapters: Params, weights: Any) -> Any:
        if not isinstance(weights, dict):
            if len(adapters) == 1:
                ((name, rows),) = adapters.items()
                own = weights if dtype is None else weights.astype(dtype)
                return _with_rows(own, rows, lora.tokens, axes.letters(name).index("i"))
            a, b = sorted(adapters)
            return LoRAWeight(weights, adapters[a], adapters[b], lora.scale)
        return {name: put(adapters[name], one) if name in adapters else one for name, one in weights.items()}

    return put(params, base)


def _with_rows(weights: Array, rows: Array, tokens: tuple[int, ...], at: int) -> Array:
    """Replace rows of weights, by a product with zeros and ones, which is sharded as the weights are."""
    ids = jnp.array(tokens)
    of_each = jax.nn.one_hot(ids, weights.shape[at], dtype=jnp.float32)
    own = jnp.tensordot(rows, of_each, ((at,), (0,)), precision=jax.lax.Precision.HIGHEST)
    own = jnp.moveaxis(own, -1, at).astype(weights.dtype)
    replaced = jnp.expand_dims(of_each.sum(0) > 0, tuple(i for i in range(weights.ndim) if i != at))
    return jnp.where(replaced, own, weights)


def without_adapters(params: Params, dtype: Any = None) -> Params:
    """Return plain weights that compute the same as `attach_lora` ones; plain arrays are not copied.

    Args:
        dtype: merged matrices are rounded to it, once; by default the dtype of the matrix under the adapter.
    """
    return jax.tree.map(lambda w: materialize(w, dtype), params, is_leaf=is_wrapped)


def at_path(tree: Any, path: tuple[str, ...]) -> Any:
    """Return the subtree at the end of these keys."""
    for key in path:
        tree = tree[key]
    return tree
