"""Qwen3's names in Hugging Face checkpoints."""

from __future__ import annotations

from astra_jax.models.layers.sizes import Sizes
from astra_jax.models.names import LAYER, NamedParam, as_stored, decoder_table, linear_weight, mlp_table


def names_table(model: Sizes) -> list[NamedParam]:
    """Each parameter's HF name."""
    attention, mlp = LAYER + "self_attn.", LAYER + "mlp."
    names = decoder_table(model) + [
        as_stored(("layers", "attention", "q_norm_h"), attention + "q_norm.weight"),
        as_stored(("layers", "attention", "k_norm_h"), attention + "k_norm.weight"),
    ]
    if not model.n_experts:
        return names + mlp_table()
    experts = mlp + "experts.{}."
    return names + [
        linear_weight(("layers", "mlp", "router_de"), mlp + "gate.weight"),
        linear_weight(("layers", "mlp", "gate_edf"), experts + "gate_proj.weight"),
        linear_weight(("layers", "mlp", "up_edf"), experts + "up_proj.weight"),
        linear_weight(("layers", "mlp", "down_efd"), experts + "down_proj.weight"),
    ]
