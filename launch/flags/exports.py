"""Export of a run's weights as a Hugging Face folder, for `astra convert` and `astra push`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from astra_jax.base.errors import UserError
from astra_jax.base.terminal import say

if TYPE_CHECKING:
    from pathlib import Path

    from synthesis.core.datasets import Folder


class Exported(NamedTuple):
    """Summary of an export: number of parameters, their dtype, and number of tokenizer files."""

    parameters: int
    dtype: str
    tokenizer_files: int


def to_hf(
    source: Folder, target: Path, *, dtype: str | None = None, step: int | None = None, base: Folder | None = None
) -> Exported:
    """Write a run's weights, tokenizer and model card to an empty folder.

    Args:
        source: checkpoints/ of a run.
        dtype: dtype of the weights; None: that of the run.
        step: step of the run; None: the newest.
        base: current folder of the weights under adapters.

    Raises:
        WeightsError, CheckpointError: there are no weights, or they cannot be read.
        InputError: `base` is given and the weights have no adapters.
        BackendError: JAX cannot start its backend.
    """
    import jax

    from astra_jax.models import hf_checkpoint
    from astra_jax.run import model_card, weights
    from astra_jax.run.backends import start_backend

    start_backend()
    model = hf_checkpoint.read_config(source, param_dtype=dtype or hf_checkpoint.stored_dtype(source))
    params = weights.load_orbax(source, model, step=step, base=base)
    copied = copy_tokenizer(source, target, weights.stored_step(source, step))  # config.json repeats its end tokens
    hf_checkpoint.save_hf(params, model, target)
    model_card.copy_card(source, target)
    return Exported(sum(leaf.size for leaf in jax.tree.leaves(params)), model.param_dtype, copied)


def copy_tokenizer(source: Folder, target: Path, step: int | None) -> int:
    """Copy the tokenizer's files of a run; those of a run before 0.2 get the end tokens of the trained format.

    Converted weights that were not trained, at step 0, keep their files.

    Returns:
        Number of files.
    """
    from astra_jax import chat_files
    from astra_jax.base.files import location
    from astra_jax.tokenizer import ChatTokenizer

    changed: Mapping[str, str] = {}
    if step and (location(source) / "tokenizer.json").exists():
        try:
            changed = ChatTokenizer.load(source).changed_files
        except UserError as error:
            say(f"{target}: the tokenizer's files are copied unchanged, since their format is not supported: {error}")
    if changed:
        say(f"{target}: {', '.join(sorted(changed))}: changed to the chat format that the run trained")
    target.mkdir(parents=True, exist_ok=True)
    return chat_files.save_tokenizer(source, target, changed)
