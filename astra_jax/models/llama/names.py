"""Llama's names in Hugging Face checkpoints."""

from __future__ import annotations

from astra_jax.models.layers.sizes import Sizes
from astra_jax.models.names import NamedParam, decoder_table, mlp_table


def names_table(model: Sizes) -> list[NamedParam]:
    """Each parameter's HF name."""
    return decoder_table(model) + mlp_table()
