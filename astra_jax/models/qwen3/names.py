"""Qwen3's names in Hugging Face checkpoints."""

from __future__ import annotations

from astra_jax.models.layers.sizes import Sizes
from astra_jax.models.names import NamedParam, as_stored, linear_bias, linear_weight


def names_table(model: Sizes) -> list[NamedParam]:
    """Each parameter's HF name."""

    layer = "model.layers.{}."
    attention, mlp = layer + "self_attn.", layer + "mlp."
    names = [
        as_stored(("embed_vd",), "model.embed_tokens.weight"),
        as_stored(("final_norm_d",), "model.norm.weight"),
        as_stored(("layers", "attention_norm_d"), layer + "input_layernorm.weight"),
        as_stored(("layers", "mlp_norm_d"), layer + "post_attention_layernorm.weight"),
        linear_weight(("layers", "attention", "q_dnh"), attention + "q_proj.weight"),
        linear_weight(("layers", "attention", "k_dkh"), attention + "k_proj.weight"),
        linear_weight(("layers", "attention", "v_dkh"), attention + "v_proj.weight"),
        linear_weight(("layers", "attention", "o_nhd"), attention + "o_proj.weight"),
        as_stored(("layers", "attention", "q_norm_h"), attention + "q_norm.weight"),
        as_stored(("layers", "attention", "k_norm_h"), attention + "k_norm.weight"),
    ]
    if model.n_experts:
        experts = mlp + "experts.{}."
        names += [
            linear_weight(("layers", "mlp", "router_de"), mlp + "gate.weight"),
            linear_weight(("layers", "mlp", "gate_edf"), experts + "gate_proj.weight"),
            linear_weight(("layers", "mlp", "up_edf"), experts + "up_proj.weight"),
            linear_weight(("layers", "mlp", "down_efd"), experts + "down_proj.weight"),
        ]
    else:
        names += [
            linear_weight(("layers", "mlp", "gate_df"), mlp + "gate_proj.weight"),
            linear_weight(("layers", "mlp", "up_df"), mlp + "up_proj.weight"),
            linear_weight(("layers", "mlp", "down_fd"), mlp + "down_proj.weight"),
        ]
    if model.attention_bias:
        names += [
            linear_bias(("layers", "attention", "q_bias_nh"), attention + "q_proj.bias"),
            linear_bias(("layers", "attention", "k_bias_kh"), attention + "k_proj.bias"),
            linear_bias(("layers", "attention", "v_bias_kh"), attention + "v_proj.bias"),
            linear_bias(("layers", "attention", "o_bias_d"), attention + "o_proj.bias"),
        ]
    if not model.tie_embeddings:
        names.append(linear_weight(("head_dv",), "lm_head.weight"))
    return names
