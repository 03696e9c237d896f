"""Qwen3's names in Hugging Face checkpoints."""

from __future__ import annotations

from astra_jax.models.layers.sizes import Sizes
from astra_jax.models.names import NamedParam, bias, linear, same


def table(model: Sizes) -> list[NamedParam]:
    """Each parameter's HF name."""

    layer = "model.layers.{}."
    attention, mlp = layer + "self_attn.", layer + "mlp."
    names = [
        same(("embed_vd",), "model.embed_tokens.weight"),
        same(("final_norm_d",), "model.norm.weight"),
        same(("layers", "attention_norm_d"), layer + "input_layernorm.weight"),
        same(("layers", "mlp_norm_d"), layer + "post_attention_layernorm.weight"),
        linear(("layers", "attention", "q_dnh"), attention + "q_proj.weight"),
        linear(("layers", "attention", "k_dkh"), attention + "k_proj.weight"),
        linear(("layers", "attention", "v_dkh"), attention + "v_proj.weight"),
        linear(("layers", "attention", "o_nhd"), attention + "o_proj.weight"),
        same(("layers", "attention", "q_norm_h"), attention + "q_norm.weight"),
        same(("layers", "attention", "k_norm_h"), attention + "k_norm.weight"),
    ]
    if model.n_experts:
        experts = mlp + "experts.{}."
        names += [
            linear(("layers", "mlp", "router_de"), mlp + "gate.weight"),
            linear(("layers", "mlp", "gate_edf"), experts + "gate_proj.weight"),
            linear(("layers", "mlp", "up_edf"), experts + "up_proj.weight"),
            linear(("layers", "mlp", "down_efd"), experts + "down_proj.weight"),
        ]
    else:
        names += [
            linear(("layers", "mlp", "gate_df"), mlp + "gate_proj.weight"),
            linear(("layers", "mlp", "up_df"), mlp + "up_proj.weight"),
            linear(("layers", "mlp", "down_fd"), mlp + "down_proj.weight"),
        ]
    if model.attention_bias:
        names += [
            bias(("layers", "attention", "q_bias_nh"), attention + "q_proj.bias"),
            bias(("layers", "attention", "k_bias_kh"), attention + "k_proj.bias"),
            bias(("layers", "attention", "v_bias_kh"), attention + "v_proj.bias"),
            bias(("layers", "attention", "o_bias_d"), attention + "o_proj.bias"),
        ]
    if not model.tie_embeddings:
        names.append(linear(("head_dv",), "lm_head.weight"))
    return names
