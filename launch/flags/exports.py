"""Weights of a run as a Hugging Face folder: for `launch.convert`, and for `launch.push`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from synthesis.core.datasets import Folder


class Exported(NamedTuple):
    """How many parameters in which dtype, and how many tokenizer files, were written."""

    parameters: int
    dtype: str
    tokenizer_files: int


def to_hf(
    source: Folder, target: Path, *, dtype: str | None = None, step: int | None = None, base: Folder | None = None
) -> Exported:
    """Write a run's weights, tokenizer and model card to a folder, of which the caller knows that it is empty.

    Args:
        source: a run's checkpoints/.
        dtype: by default that of the run.
        step: by default the newest.
        base: where the weights under adapters are now.

    Raises:
        WeightsError, CheckpointError: there are none, or they cannot be read.
        InputError: a base of weights that have no adapters.
        BackendError: JAX cannot start its backend.
    """
    import jax

    from astra_jax.models import hf_checkpoint
    from astra_jax.run import model_card, weights
    from astra_jax.run.backends import start_backend

    start_backend()
    model = hf_checkpoint.read_config(source, param_dtype=dtype or hf_checkpoint.stored_dtype(source))
    params = weights.load_orbax(source, model, step=step, base=base)
    hf_checkpoint.save_hf(params, model, target)
    copied = hf_checkpoint.copy_tokenizer(source, target)
    model_card.copy_card(source, target)
    return Exported(sum(leaf.size for leaf in jax.tree.leaves(params)), model.param_dtype, copied)
