"""What a program that only samples from a model starts from: flags, and the weights and tokenizer that they name."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING

from absl import flags

from launch.flags import cli, hub, meshes, shared

if TYPE_CHECKING:
    from etils import epath
    from jax.sharding import Mesh

    from astra_jax.models.model import Model, Params
    from astra_jax.tokenizer import ChatTokenizer

_WEIGHTS = shared.weights()
_STEP = shared.step()
_TOKENIZER = shared.tokenizer()
_MESH = shared.mesh()
_DTYPE = flags.DEFINE_enum("dtype", None, shared.DTYPES, "Of the weights and the arithmetic; by default as stored.")


def source() -> epath.Path:
    """The folder of --weights, on disk or in a bucket. Raises `UsageError`: it is neither."""
    return hub.model_folder(_WEIGHTS)


@cache  # a run that is still training may save a newer one meanwhile
def step() -> int | None:
    """The step that `load` reads; None for a Hugging Face folder.

    Raises:
        UsageError: --step with a Hugging Face folder.
        WeightsError: there are no weights.
    """
    from astra_jax.run import weights

    found = weights.stored_step(source(), _STEP.value)
    if found is None and _STEP.value is not None:
        raise cli.UsageError(f"--step={_STEP.value}: --weights={source()} is a Hugging Face folder, which has no steps")
    return found


def _tokenizer_folder() -> epath.Path:
    """Where the tokenizer is. Raises `UsageError`: --tokenizer is no folder."""
    return hub.model_folder(_TOKENIZER) if _TOKENIZER.value else source()


def read() -> tuple[Model, ChatTokenizer]:
    """The model, without its weights, with rows for tokens that the tokenizer adds, and the tokenizer.

    Raises:
        UsageError: the tokenizer has more tokens than the model.
        WeightsError, TokenizerError, ValueError: they cannot be read.
    """
    from astra_jax.models import hf_checkpoint
    from astra_jax.tokenizer import ChatTokenizer

    dtype = _DTYPE.value or hf_checkpoint.stored_dtype(source())
    model = hf_checkpoint.read_config(source(), dtype=dtype, param_dtype=dtype)
    tokenizer = ChatTokenizer.load(_tokenizer_folder())
    model = dataclasses.replace(model, vocab_size=tokenizer.rows(model.vocab_size))
    if tokenizer.vocab_size > model.vocab_size:
        raise cli.UsageError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.vocab_size}; give the model's own with "
            "--tokenizer"
        )
    return model, tokenizer


@cache
def mesh() -> Mesh | None:
    """The mesh of --mesh, or None: one device. Raises as `models.mesh`."""
    return meshes.made(_MESH)


def load(model: Model) -> Params:
    """The weights, on the devices of --mesh; what is compiled for them is kept in the user's cache.

    Raises:
        UsageError: as `step`.
        InputError: the mesh does not divide the model.
        WeightsError, CheckpointError: they cannot be read.
    """
    from astra_jax.models import hf_checkpoint
    from astra_jax.run import compilation_cache, weights
    from astra_jax.tokenizer import ChatTokenizer

    shardings = None if (devices := mesh()) is None else model.param_shardings(devices)
    compilation_cache.keep_programs()
    rows = hf_checkpoint.read_config(source()).vocab_size
    spelled = ChatTokenizer.load(_tokenizer_folder()).spelled(rows, own=_tokenizer_folder() == source())
    return weights.load(source(), model, shardings=shardings, step=step(), rows=rows, spelled=spelled)


def name() -> str:
    """What records call the model: its folder's name, with the step of a run's checkpoints."""
    # Every training run's is called checkpoints.
    folder = f"{source().parent.name}/{source().name}" if source().name == "checkpoints" else source().name
    return folder if step() is None else f"{folder}@{step()}"


def run_name(kind: str, *depends_on: object) -> str:
    """Names in a journal what results depend on, JSON; the weights by their files' sizes and times, as `make` does, or,
    in a bucket, by when they were saved."""
    import hashlib
    import json
    from pathlib import Path

    from astra_jax.run.checkpoints import SAVED
    from synthesis.core.files import in_bucket

    weights: list[object]
    if in_bucket(source()):
        saved = source() / "params" / str(step()) / SAVED
        weights = [file.read_text(encoding="utf-8") for file in (source() / "config.json", saved)]
    else:
        folder = Path(source())
        files = sorted(folder.glob("*.safetensors") if step() is None else (folder / "params" / str(step())).rglob("*"))
        stats = [(str(file.relative_to(folder)), file.stat()) for file in [folder / "config.json", *files]]
        weights = [(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats]
    text = json.dumps([*depends_on, weights], sort_keys=True)
    return f"{kind} {hashlib.sha256(text.encode()).hexdigest()}"
