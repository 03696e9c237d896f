"""Weights in a folder of either kind: Hugging Face's, or Orbax checkpoints as training saves them.

Beside Orbax's weights lies the same `config.json` as beside Hugging Face's, so that a run's `checkpoints/` is a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from astra_jax.models.hf_checkpoint import WeightsError, load_hf, write_config
from astra_jax.models.model import Model, Params
from astra_jax.run.checkpoints import Checkpointer
from synthesis.core.datasets import Folder
from synthesis.core.files import in_bucket, location


def load(directory: Folder, model: Model, *, shardings: Any = None, step: int | None = None) -> Params:
    """From a folder of either kind: Hugging Face's if it holds safetensors, else Orbax checkpoints.

    Args and errors are those of `load_hf` and `load_orbax`.
    """
    if _is_hf(directory):
        return load_hf(Path(directory), model, shardings=shardings)
    return load_orbax(directory, model, shardings=shardings, step=step)


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


def load_orbax(directory: Folder, model: Model, *, shardings: Any = None, step: int | None = None) -> Params:
    """Weights that `save_orbax` or a training run saved.

    Args:
        shardings: as from `Model.param_shardings`; None is the default device.
        step: None is the newest.

    Raises:
        WeightsError: no weights are there.
        CheckpointError: no such step, or it holds another model.
    """
    with _checkpoints(directory) as checkpointer:
        like = model.abstract_params()
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
