"""Folders of base models of five families, as their makers publish them, with weights that end every turn at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from plain_world import make_folder

from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.models.llama.presets import LlamaConfig
from astra_jax.models.qwen2.presets import Qwen2Config
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chatml import QWEN3
from synthesis.core.llama3_chat import LLAMA3

SIZES: dict[str, Any] = dict(
    vocab_size=512, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=48, tie_embeddings=False
)
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = (*LLAMA3.frame, "<|eom_id|>", "<|python_tag|>")
FAMILIES: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "qwen2": (Qwen2Config(**SIZES), (*CHATML, "<tool_call>", "</tool_call>"), "qwen2_5"),
    "qwen3": (Qwen3Config(**SIZES), (*CHATML, *QWEN3.text_tokens), "qwen3"),
    "qwen3_moe": (Qwen3Config(**SIZES, n_experts=4, experts_per_token=2), (*CHATML, *QWEN3.text_tokens), "qwen3"),
    "smollm2": (LlamaConfig(**SIZES), CHATML, ""),
    "llama3": (LlamaConfig(**SIZES), LLAMA, ""),
}
"""Sizes, special tokens, and TRL's name of the chat template; the bases of the Llamas have none."""


def base_folder(folder: Path, family: str, *, template: str = "", **generation: Any) -> Path:
    """A base model's folder: its configuration and tokenizer end documents, not turns."""
    model, special, _ = FAMILIES[family]
    make_folder(folder, special=special, chat_template=template or "-")
    if not template:
        (folder / "chat_template.jinja").unlink()
    end = "<|end_of_text|>" if family == "llama3" else CHATML[0]
    begin = "<|begin_of_text|>" if family == "llama3" else None
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": begin, "pad_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    content = {"do_sample": False, "eos_token_id": special.index(end), "max_new_tokens": 24, **generation}
    (folder / "generation_config.json").write_text(json.dumps(content))
    turn_end = ChatTokenizer.load(folder).format.turn_end
    save_hf(ending(model, special.index(turn_end)), model, folder)
    return folder


def ending(model: Any, token: int) -> Any:
    """Weights that say the token after every text: layers add nothing, and the head reads a mark of all embeddings."""
    params = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))
    embed_vd = params["embed_vd"].at[:, 0].set(1.0)
    head_dv = params["head_dv"].at[0, token].set(9.0)
    return {**params, "embed_vd": embed_vd, "head_dv": head_dv, "final_norm_d": jnp.ones_like(params["final_norm_d"])}
