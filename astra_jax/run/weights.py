"""Weights in a folder of either kind: Hugging Face's, or Orbax checkpoints as training saves them.

Orbax's weights have the same `config.json` beside them as Hugging Face's, so a run's `checkpoints/` is a model.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from astra_jax import axes
from astra_jax.base.errors import InputError, UserError
from astra_jax.base.files import in_bucket, location
from astra_jax.models import adapters
from astra_jax.models.hf_checkpoint import (
    WeightsError,
    check_whole,
    load_hf,
    other_weights,
    read_config,
    write_config,
)
from astra_jax.models.model import Model, Params
from astra_jax.models.peft_merge import merged_model, merged_tensors
from astra_jax.run import frozen
from astra_jax.run.checkpoints import Checkpointer, named
from synthesis.core.datasets import Folder

TokenPieces = Mapping[int, tuple[int, ...]]
"""Token ids that spell a token, by its id."""


def load(
    directory: Folder,
    model: Model,
    *,
    shardings: Any = None,
    step: int | None = None,
    rows: int | None = None,
    new_token_pieces: TokenPieces = MappingProxyType({}),
    adapter: Folder | None = None,
) -> Params:
    """Load weights from a Hugging Face folder if it has safetensors, otherwise from Orbax checkpoints.

    Other arguments and errors are those of `load_hf` and `load_orbax`.

    Args:
        rows: of the stored embedding, if the model has more: new rows are derived from the stored ones (`_with_rows`).
        new_token_pieces: for each new row, the rows of tokens that spell its own (`ChatTokenizer.new_token_pieces`). A
            listed row that the stored embedding has is replaced.
        adapter: a folder of `peft` whose adapter is merged into the weights, which must be Hugging Face's.
    """
    stored = model.vocab_size if rows is None else rows
    if stored < model.vocab_size or any(number < stored for number in new_token_pieces):
        spread = shardings
        if shardings is not None and stored < model.vocab_size:
            spread = jax.tree_util.tree_map_with_path(_whole_vocabulary, shardings)
        fewer = dataclasses.replace(model, vocab_size=stored)
        params = load(directory, fewer, shardings=spread, step=step, adapter=adapter)
        return _with_rows(params, model, shardings, new_token_pieces)
    if adapter is not None:
        change = partial(merged_tensors, adapter, _base_of(adapter, directory))
        return load_hf(Path(directory), model, shardings=shardings, change=change)
    if _is_hf(directory):
        return load_hf(Path(directory), model, shardings=shardings)
    return load_orbax(directory, model, shardings=shardings, step=step)


def read_model(directory: Folder, adapter: Folder | None = None, **dtypes: str) -> Model:
    """Return the config of the model that `load` reads from a folder.

    Raises:
        WeightsError: as `hf_checkpoint.read_config` and `peft_merge.merged_model` do.
    """
    if adapter is None:
        return read_config(directory, **dtypes)
    return merged_model(adapter, _base_of(adapter, directory, **dtypes))


def _base_of(adapter: Folder, directory: Folder, **dtypes: str) -> Model:
    """Return the model of the weights under an adapter. Raises `WeightsError` if they are not Hugging Face's."""
    if not _is_hf(directory):
        raise WeightsError(
            f"{adapter} is an adapter to {directory}, which is not a folder of safetensors: convert a run's "
            "checkpoints with astra convert --from_orbax --to_hf, and name it with --base"
        )
    return read_config(directory, **dtypes)


def _whole_vocabulary(path: tuple[Any, ...], sharding: NamedSharding) -> NamedSharding:
    """Return the sharding without the vocabulary axis, since a mesh axis may divide only the final size."""
    at = axes.vocabulary(path[-1].key)
    if at is None or len(sharding.spec) <= at:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:at], None, *sharding.spec[at + 1 :]))


def _with_rows(params: Params, model: Model, shardings: Any, new_token_pieces: TokenPieces) -> Params:
    """Return the parameters with the model's number of token rows, in the embedding and in a separate head.

    A new row is the mean of the rows of the tokens that spell it, as is usual for added tokens (Gee et al. 2022, "Fast
    vocabulary transfer", arXiv 2402.09977). So the model has some knowledge of it, and it is about as likely as they
    are. Padding rows, which nothing spells, are the mean of all rows (Hewitt 2021, "Initializing new word embeddings
    for pretrained language models").
    """

    def one(path: tuple[Any, ...], leaf: jax.Array, like: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        at = axes.vocabulary(path[-1].key)
        if at is None:
            return leaf
        stored = leaf.shape[at]
        anew = sorted(number for number in new_token_pieces if number < stored)
        means = _means(new_token_pieces, [*anew, *range(stored, like.shape[at])], stored)

        def grown(x: jax.Array) -> jax.Array:
            rows = jnp.moveaxis(x, at, 0)
            every = jnp.mean(rows.astype(jnp.float32), axis=0)
            made = [
                every if mean is None else mean[1] * jnp.mean(rows[jnp.array(mean[0])].astype(jnp.float32), axis=0)
                for mean in means
            ]
            kept, added = rows, jnp.stack(made).astype(x.dtype)
            if anew:
                kept = rows.at[jnp.array(anew)].set(added[: len(anew)])
            return jnp.moveaxis(jnp.concatenate([kept, added[len(anew) :]]), 0, at)

        return jax.jit(grown, out_shardings=sharding)(leaf)

    abstract = model.abstract_params()
    if shardings is None:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    return jax.tree_util.tree_map_with_path(one, params, abstract, shardings)


def _means(
    new_token_pieces: TokenPieces, made: Iterable[int], stored: int
) -> list[tuple[tuple[int, ...], float] | None]:
    """Return, for each new row, the rows to average and a factor; None for the mean of all rows.

    Rows of the same pieces would be equal, and stay so in training until one occurs. So each is a hundredth shorter
    than the one before.

    Raises:
        ValueError: a piece is not a stored row, or is itself a new row.
    """
    met = Counter[tuple[int, ...]]()
    means: list[tuple[tuple[int, ...], float] | None] = []
    for number in made:
        pieces = new_token_pieces.get(number, ())
        if any(not 0 <= piece < stored for piece in pieces):
            raise ValueError(f"token {number} is spelled {pieces}, and there are {stored} rows")
        if own := [piece for piece in pieces if piece in new_token_pieces]:
            raise ValueError(f"token {number} is spelled {pieces}, and the row of {own[0]} is made too")
        same = tuple(sorted(pieces))
        means.append((pieces, 0.99 ** met[same]) if pieces else None)
        met[same] += 1
    return means


def stored_step(directory: Folder, step: int | None = None) -> int | None:
    """Return the step that `load` reads for `step`; None for Hugging Face folders, which have no steps.

    Raises:
        WeightsError: there are no weights.
    """
    if _is_hf(directory):
        return None
    with _checkpoints(directory) as checkpointer:
        return checkpointer.params_steps()[-1] if step is None else step


def stored_digest(directory: Folder, step: int) -> str | None:
    """Return a sha256 over the digests of the arrays of a checkpoint's weights; None if it was saved without them.

    Raises:
        CheckpointError: the step does not exist or cannot be read.
    """
    with _checkpoints(directory) as checkpointer:
        return checkpointer.params_digest(step)


def check_stored(directory: Folder) -> None:
    """Check that a folder of either kind has weights, without reading them or starting a device.

    Raises:
        WeightsError: it has none, or only an adapter.
    """
    if _is_hf(directory):
        check_whole(directory)
    elif not any(_steps(directory)):
        raise _missing(directory)


def _is_hf(directory: Folder) -> bool:
    """Return whether a folder is Hugging Face's. Raises `WeightsError` if it is one in a bucket."""
    found = any(location(directory).glob("*.safetensors"))
    if found and in_bucket(directory):
        raise WeightsError(
            f"{directory} holds Hugging Face's safetensors, which are read from disk: copy that folder here, or give a "
            "run's checkpoints/, which may be in a bucket"
        )
    return found


def save_orbax(params: Params, model: Model, directory: Folder, *, step: int = 0) -> None:
    """Save weights in the layout of a training run's `checkpoints/`, as its step `step`."""
    write_config(model, directory)
    checkpointer = Checkpointer(directory)
    try:
        checkpointer.save(step, params=params)
        checkpointer.wait()
    finally:
        checkpointer.close()


def load_orbax(
    directory: Folder, model: Model, *, shardings: Any = None, step: int | None = None, base: Folder | None = None
) -> Params:
    """Load weights that `save_orbax` or a training run saved. A run's adapters are merged into their base weights.

    The result is cast to `model.param_dtype` once; with adapters the sums are cast.

    Args:
        shardings: as from `Model.param_shardings`; None is the default device.
        step: None is the newest.
        base: current location of the weights under adapters; None for the original location.

    Raises:
        WeightsError: there are no weights, or not the original base of the adapters.
        CheckpointError: the step does not exist, or is of another model.
        InputError: `base` is given for a run that trained all weights.
    """
    if (under := frozen.read(directory)) is None:
        if base is not None:
            raise InputError(
                f"{directory} has no {frozen.FILE}: that run trained all weights, and none are under them; leave "
                f"--base={base} out"
            )
        return _restored(directory, model.abstract_params(), shardings, step)
    found = _under(directory, under, dataclasses.replace(model, param_dtype=under.param_dtype), shardings, base)
    adapters.store(found, under.lora)  # what was trained is of those
    trained = load_adapters(directory, model, shardings=shardings, step=step)
    attach_lora = adapters.attach_lora(trained, found, under.lora, dtype=model.param_dtype)
    whole = adapters.without_adapters(attach_lora, model.param_dtype)
    return jax.tree.map(lambda x: x.astype(model.param_dtype), whole)


def load_adapters(directory: Folder, model: Model, *, shardings: Any = None, step: int | None = None) -> Params:
    """Load the adapters that a training run saved.

    Arguments and other errors are those of `load_orbax`.

    Raises:
        InputError: the run trained all weights.
    """
    if (under := frozen.read(directory)) is None:
        raise InputError(f"{directory} has no {frozen.FILE}: that run trained all weights, and has no adapters")
    mesh = None if shardings is None else jax.tree.leaves(shardings)[0].mesh
    like = adapters.abstract_adapters(model, under.lora)
    return _restored(directory, like, adapters.trained_shardings(model, under.lora, mesh), step)


def _under(
    directory: Folder, under: frozen.BaseWeightsRef, model: Model, shardings: Any, base: Folder | None
) -> Params:
    """Load the weights that a run's adapters were trained on."""
    origin = under.origin
    if base is not None:  # the same weights elsewhere, with or without rows for added tokens
        stored = read_config(base).vocab_size
        origin = frozen.WeightsSource("") if origin is None else origin
        step = origin.step if str(origin.step) in _steps(base) else None  # a copy may have another number
        origin = frozen.WeightsSource(str(base), step, stored, origin.new_token_pieces)
    if origin is None:
        raise WeightsError(f"{directory} has adapters, and does not name their base weights; give them with --base")
    try:
        how: dict[str, Any] = {"step": origin.step, "rows": origin.rows, "new_token_pieces": origin.new_token_pieces}
        found = load(origin.folder, model, shardings=shardings, **how)
    except UserError as error:
        raise WeightsError(
            f"{directory} has adapters to the weights of {origin.folder}, which cannot be read: {error}. If they were "
            "moved, give their folder with --base"
        ) from None
    under.check(found, origin.folder)
    return found


def _restored(directory: Folder, like: Params, shardings: Any, step: int | None) -> Params:
    """Return the arrays of a step in the wanted dtypes: read as saved, so that digests match, and then cast."""
    if shardings is None:
        shardings = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), like)
    with _checkpoints(directory) as checkpointer:
        step = checkpointer.params_steps()[-1] if step is None else step
        dtypes = checkpointer.params_dtypes(step)
        names = jax.tree.unflatten(jax.tree.structure(like), list(named(like)))

        def saved(name: str, x: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
            dtype = jnp.dtype(dtypes.get(name, x.dtype))
            castable = all(jnp.issubdtype(one, jnp.floating) for one in (dtype, x.dtype))
            return jax.ShapeDtypeStruct(x.shape, dtype if castable else x.dtype, sharding=sharding)

        arrays, structure = jax.tree.flatten(
            checkpointer.restore_params(step, jax.tree.map(saved, names, like, shardings))
        )
    for i, wanted in enumerate(jax.tree.leaves(like)):  # only one array at a time exists twice
        arrays[i] = arrays[i].astype(wanted.dtype)
    return jax.tree.unflatten(structure, arrays)


@contextmanager
def _checkpoints(directory: Folder) -> Iterator[Checkpointer]:
    """Open a folder of Orbax checkpoints with at least one step of weights. Raises `WeightsError`."""
    if not (location(directory) / "params").is_dir():
        raise _missing(directory)
    checkpointer = Checkpointer(directory, reading=True)
    try:
        if not checkpointer.params_steps():
            raise _missing(directory)
        yield checkpointer
    finally:
        checkpointer.close()


def _steps(directory: Folder) -> Iterator[str]:
    """Return the names of the steps in a folder of Orbax checkpoints, without unfinished saves."""
    folder = location(directory) / "params"
    return (entry.name for entry in (folder.iterdir() if folder.is_dir() else ()) if entry.name.isdecimal())


def _missing(directory: Folder) -> WeightsError:
    none = "no weights; give a training run's checkpoints/ folder"
    return WeightsError(f"{directory} has {other_weights(directory) or none}")
