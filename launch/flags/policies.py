"""Inputs of a program that only samples from a model: flags, and the weights and tokenizer that they name."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any

from absl import flags

from astra_jax.base.terminal import say
from launch.flags import cli, hub, meshes, shared, sources

if TYPE_CHECKING:
    from etils import epath
    from jax.sharding import Mesh

    from astra_jax.models.model import Model, Params
    from astra_jax.tokenizer import ChatTokenizer

WEIGHTS = shared.weights(required=False)
_MODEL_CLASS = shared.model_class()
_BASE = shared.base()
_STEP = shared.step()
TOKENIZER = shared.tokenizer()
_MESH = shared.mesh()
DTYPE = flags.DEFINE_enum("dtype", None, shared.DTYPES, "Dtype of weights and computation; by default as stored.")
FLAGS: tuple[flags.FlagHolder[Any], ...] = (WEIGHTS, _MODEL_CLASS, _BASE, _STEP, TOKENIZER, _MESH, DTYPE)


def require_weights() -> None:
    """Make --weights a flag that must be given; for programs that have no other model."""
    flags.mark_flag_as_required(WEIGHTS.name)


def source() -> epath.Path:
    """Return the folder of --weights, on disk or in a bucket. Raises `UsageError`: it is neither."""
    return _source().named


def _source() -> sources.NamedWeights:
    """Return the folder of --weights, and the adapter if it is one. Raises as `sources.source`."""
    return sources.source(WEIGHTS, _BASE)


@cache  # a run that is still training may save a newer one meanwhile
def step() -> int | None:
    """Return the step that `load` reads; None for a Hugging Face folder.

    Raises:
        UsageError: --step with a Hugging Face folder.
        WeightsError: there are no weights.
    """
    from astra_jax.run import weights

    found = weights.stored_step(_source().folder, _STEP.value)
    if found is None and _STEP.value is not None:
        raise cli.UsageError(f"--step={_STEP.value}: --weights={source()} is a Hugging Face folder, which has no steps")
    return found


def _tokenizer_folder() -> epath.Path:
    """Return the folder of the tokenizer. Raises `UsageError`: --tokenizer is not a folder."""
    return hub.model_folder(TOKENIZER) if TOKENIZER.value else _source().tokenizer


def read() -> tuple[Model, ChatTokenizer]:
    """Return the model without its weights, with rows for tokens that the tokenizer adds, and the tokenizer.

    Raises:
        UsageError: the tokenizer has more tokens than the model.
        WeightsError, TokenizerError, ValueError: they cannot be read.
    """
    from astra_jax.models import hf_checkpoint

    found = _source()
    if found.adapter is not None:
        say(f"{found.folder}: with an adapter merged, {found.adapter}")
    dtype = DTYPE.value or hf_checkpoint.stored_dtype(found.folder)
    model = found.model(dtype=dtype, param_dtype=dtype)
    tokenizer = found.load_tokenizer(_tokenizer_folder())
    model = dataclasses.replace(model, vocab_size=tokenizer.rows(model.vocab_size))
    if tokenizer.vocab_size > model.vocab_size:
        raise cli.UsageError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model has {model.vocab_size} rows; give the "
            "model's own tokenizer with --tokenizer"
        )
    return model, tokenizer


@cache
def mesh() -> Mesh | None:
    """Return the mesh of --mesh; None is one device. Raises as `models.mesh`."""
    return meshes.made(_MESH)


def load(model: Model) -> Params:
    """Load the weights to the devices of --mesh; compiled programs are cached in the user's cache.

    Raises:
        UsageError: as `step`.
        InputError: the mesh does not divide the model.
        WeightsError, CheckpointError: they cannot be read.
    """
    from astra_jax.run import compilation_cache, weights

    shardings = None if (devices := mesh()) is None else model.param_shardings(devices)
    compilation_cache.keep_programs()
    found = _source()
    rows = found.model().vocab_size
    tokenizer, is_own = found.load_tokenizer(_tokenizer_folder()), _tokenizer_folder() == found.tokenizer
    new_token_pieces = tokenizer.new_token_pieces(rows, own=is_own)
    how: dict[str, Any] = {"step": step(), "rows": rows, "new_token_pieces": new_token_pieces, "adapter": found.adapter}
    return weights.load(found.folder, model, shardings=shardings, **how)


def name() -> str:
    """Return the name of the model in records: its folder's name, with the step of a run's checkpoint."""
    # Every training run's is called checkpoints.
    folder = f"{source().parent.name}/{source().name}" if source().name == "checkpoints" else source().name
    return folder if step() is None else f"{folder}@{step()}"


def digest() -> str | None:
    """Return a sha256 that identifies the values of the weights; None for checkpoints of versions without digests.

    Of a Hugging Face folder and of an adapter it covers their safetensors files; of a checkpoint the digests that are
    stored with it. Raises as `step`.
    """
    import hashlib
    from pathlib import Path

    from astra_jax.run import weights

    found = _source()
    if (chosen := step()) is not None:
        return weights.stored_digest(found.folder, chosen)
    total = hashlib.sha256()
    for folder in filter(None, (found.folder, found.adapter)):
        for file in sorted(Path(folder).glob("*.safetensors")):
            with file.open("rb") as stream:
                total.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def run_name(kind: str, *depends_on: object) -> str:
    """Return a name for a run in a journal, which changes with its inputs.

    Weights count by the sizes and times of their files, as with `make`; in a bucket by the time when they were saved.

    Args:
        depends_on: other inputs of the results, as JSON values.
    """
    import hashlib
    import json
    from pathlib import Path

    from astra_jax.base.files import in_bucket
    from astra_jax.run.checkpoints import SAVED

    weights: list[object]
    found = _source()
    if in_bucket(found.folder):
        saved = found.folder / "params" / str(step()) / SAVED
        weights = [file.read_text(encoding="utf-8") for file in (found.folder / "config.json", saved)]
    else:
        folder = Path(found.folder)
        files = sorted(folder.glob("*.safetensors") if step() is None else (folder / "params" / str(step())).rglob("*"))
        stats = [(str(file.relative_to(folder)), file.stat()) for file in [folder / "config.json", *files]]
        if found.adapter is not None:
            added = sorted(Path(found.adapter).glob("adapter_*"))
            stats += [(str(file), file.stat()) for file in added]
        weights = [(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats]
    text = json.dumps([*depends_on, weights], sort_keys=True)
    return f"{kind} {hashlib.sha256(text.encode()).hexdigest()}"
