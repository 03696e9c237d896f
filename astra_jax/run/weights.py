"""Weights in a folder of either kind: Hugging Face's, or Orbax checkpoints as training saves them.

Beside Orbax's weights lies the same `config.json` as beside Hugging Face's, so that a run's `checkpoints/` is a model.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from astra_jax import axes
from astra_jax.models import adapters
from astra_jax.models.hf_checkpoint import WeightsError, load_hf, read_config, write_config
from astra_jax.models.model import Model, Params
from astra_jax.run import frozen
from astra_jax.run.checkpoints import Checkpointer
from synthesis.core.datasets import Folder
from synthesis.core.files import in_bucket, location
from synthesis.core.refusals import InputError, Refusal

Spelled = Mapping[int, tuple[int, ...]]
"""Token ids by the id of a token that they spell."""


def load(
    directory: Folder,
    model: Model,
    *,
    shardings: Any = None,
    step: int | None = None,
    rows: int | None = None,
    spelled: Spelled = MappingProxyType({}),
) -> Params:
    """From a folder of either kind: Hugging Face's if it holds safetensors, else Orbax checkpoints.

    Args and errors are those of `load_hf` and `load_orbax`.

    Args:
        rows: how many the stored embedding has, where the model has more: new rows are made of those (`_with_rows`).
        spelled: of new rows, by number, the rows whose tokens spell its own (`ChatTokenizer.spelled`).
    """
    if rows is not None and rows < model.vocab_size:
        stored = dataclasses.replace(model, vocab_size=rows)
        spread = None if shardings is None else jax.tree_util.tree_map_with_path(_whole_vocabulary, shardings)
        params = load(directory, stored, shardings=spread, step=step)
        return _with_rows(params, model, shardings, spelled)
    if _is_hf(directory):
        return load_hf(Path(directory), model, shardings=shardings)
    return load_orbax(directory, model, shardings=shardings, step=step)


def _whole_vocabulary(path: tuple[Any, ...], sharding: NamedSharding) -> NamedSharding:
    """The same, but not over the vocabulary, of which a mesh axis may divide only the later size."""
    at = _vocabulary_axis(path)
    if at is None or len(sharding.spec) <= at:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:at], None, *sharding.spec[at + 1 :]))


def _vocabulary_axis(path: tuple[Any, ...]) -> int | None:
    letters = axes.letters(path[-1].key)
    return letters.index("v") if "v" in letters else None


def _with_rows(params: Params, model: Model, shardings: Any, spelled: Spelled) -> Params:
    """The parameters with as many rows for tokens as a model has: in the embedding, and in a head of its own.

    A new row is the mean of the rows of the tokens that spell it, as is usual for words that a vocabulary gains (Gee et
    al. 2022, "Fast vocabulary transfer", arXiv 2402.09977): the model knows something of it, and it is as likely as
    they are in the mean. Rows that nothing spells, which fill up, are the mean of all (Hewitt 2021, "Initializing new
    word embeddings for pretrained language models").
    """

    def one(path: tuple[Any, ...], leaf: jax.Array, like: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        at = _vocabulary_axis(path)
        if at is None:
            return leaf
        stored = leaf.shape[at]
        means = _means(spelled, range(stored, like.shape[at]))

        def grown(x: jax.Array) -> jax.Array:
            rows = jnp.moveaxis(x, at, 0)
            every = jnp.mean(rows.astype(jnp.float32), axis=0)
            added = [
                every if mean is None else mean[1] * jnp.mean(rows[jnp.array(mean[0])].astype(jnp.float32), axis=0)
                for mean in means
            ]
            return jnp.moveaxis(jnp.concatenate([rows, jnp.stack(added).astype(x.dtype)]), 0, at)

        return jax.jit(grown, out_shardings=sharding)(leaf)

    abstract = model.abstract_params()
    if shardings is None:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    return jax.tree_util.tree_map_with_path(one, params, abstract, shardings)


def _means(spelled: Spelled, added: range) -> list[tuple[tuple[int, ...], float] | None]:
    """Of each added row the rows that it is the mean of, and what that is multiplied by; None: it is that of all.

    Rows of the same pieces would be one and the same, and stay so in training as long as neither is met: each is a
    hundredth shorter than the one before it.

    Raises:
        ValueError: a piece is no row that is stored.
    """
    met = Counter[tuple[int, ...]]()
    made: list[tuple[tuple[int, ...], float] | None] = []
    for number in added:
        pieces = spelled.get(number, ())
        if any(not 0 <= piece < added.start for piece in pieces):
            raise ValueError(f"token {number} is spelled {pieces}, and there are {added.start} rows")
        same = tuple(sorted(pieces))
        made.append((pieces, 0.99 ** met[same]) if pieces else None)
        met[same] += 1
    return made


def stored_step(directory: Folder, step: int | None = None) -> int | None:
    """The step that `load` reads from a folder when it is asked for `step`; None for Hugging Face's, which has none.

    Raises:
        WeightsError: no weights are there.
    """
    if _is_hf(directory):
        return None
    with _checkpoints(directory) as checkpointer:
        return checkpointer.params_steps()[-1] if step is None else step


def check_stored(directory: Folder) -> None:
    """See that a folder of either kind has weights, without reading them or waking a device.

    Raises:
        WeightsError: it has none.
    """
    if not _is_hf(directory) and not any(_steps(directory)):
        raise _missing(directory)


def _is_hf(directory: Folder) -> bool:
    """Whether a folder is Hugging Face's. Raises `WeightsError`: it is, and in a bucket."""
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
    """Weights that `save_orbax` or a training run saved; a run's adapters merged into those that they were trained on.

    Args:
        shardings: as from `Model.param_shardings`; None is the default device.
        step: None is the newest.
        base: where the weights under adapters are now; None: where the run had them.

    Raises:
        WeightsError: no weights are there, or not those that adapters were trained on.
        CheckpointError: no such step, or it holds another model.
    """
    if (under := frozen.read(directory)) is None:
        return _restored(directory, model.abstract_params(), shardings, step)
    found = _under(directory, under, dataclasses.replace(model, param_dtype=under.param_dtype), shardings, base)
    adapters.store(found, under.lora)  # what was trained is of those
    trained = load_adapters(directory, model, shardings=shardings, step=step)
    whole = adapters.without_adapters(adapters.joined(trained, found, under.lora))
    return jax.tree.map(lambda x: x.astype(model.param_dtype), whole)


def load_adapters(directory: Folder, model: Model, *, shardings: Any = None, step: int | None = None) -> Params:
    """The adapters that a training run saved.

    Args and errors are those of `load_orbax`.

    Raises:
        InputError: the run trained whole weights.
    """
    if (under := frozen.read(directory)) is None:
        raise InputError(f"{directory} has no {frozen.FILE}: that run trained all weights, and has no adapters")
    mesh = None if shardings is None else jax.tree.leaves(shardings)[0].mesh
    like = adapters.abstract_adapters(model, under.lora)
    return _restored(directory, like, adapters.trained_shardings(model, under.lora, mesh), step)


def _under(directory: Folder, under: frozen.Frozen, model: Model, shardings: Any, base: Folder | None) -> Params:
    """The weights that a run's adapters were trained on."""
    origin = under.origin
    if base is not None:  # the same weights elsewhere: with rows for the tokens that were added, or still without
        stored = read_config(base).vocab_size
        origin = frozen.Origin(str(base), rows=stored, spelled={} if origin is None else origin.spelled)
    if origin is None:
        raise WeightsError(f"{directory} has adapters, and does not say to which weights; say it with --base")
    try:
        how: dict[str, Any] = {"step": origin.step, "rows": origin.rows, "spelled": origin.spelled}
        found = load(origin.folder, model, shardings=shardings, **how)
    except Refusal as error:
        raise WeightsError(
            f"{directory} has adapters to the weights of {origin.folder}, which cannot be read: {error}. If they are "
            "elsewhere now, say where with --base"
        ) from None
    under.check(found, origin.folder)
    return found


def _restored(directory: Folder, like: Params, shardings: Any, step: int | None) -> Params:
    with _checkpoints(directory) as checkpointer:
        if shardings is None:
            shardings = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), like)
        like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), like, shardings)
        return checkpointer.restore_params(checkpointer.params_steps()[-1] if step is None else step, like)


@contextmanager
def _checkpoints(directory: Folder) -> Iterator[Checkpointer]:
    """A folder of Orbax checkpoints with at least one step of weights. Raises `WeightsError`."""
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
    """The names of the steps in a folder of Orbax checkpoints, those that are being saved left out."""
    folder = location(directory) / "params"
    return (entry.name for entry in (folder.iterdir() if folder.is_dir() else ()) if entry.name.isdecimal())


def _missing(directory: Folder) -> WeightsError:
    return WeightsError(f"{directory} has no weights; give a training run's checkpoints/ folder")
