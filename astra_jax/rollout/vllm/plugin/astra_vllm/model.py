"""Tensors that the served model expects, and its description, by which a trainer recognises the right server."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Shapes = dict[str, tuple[int, ...]]

HEAD = "lm_head.weight"
_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)$")


def expected_tensors(config: Any) -> tuple[Shapes, Shapes]:
    """Return names and shapes of a model's tensors as Hugging Face stores them: the required and the optional ones.

    Args:
        config: transformers' config of the served model.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes: Shapes = {}
    for name, tensor in model.state_dict().items():
        if match := _FUSED_EXPERTS.match(name):
            shapes |= _single_experts(match[1], match[2], tuple(tensor.shape))
        else:
            shapes[name] = tuple(tensor.shape)
    tied = [HEAD] if config.tie_word_embeddings and HEAD in shapes else []
    return shapes, {name: shapes.pop(name) for name in tied}


def _single_experts(prefix: str, part: str, shape: tuple[int, ...]) -> Shapes:
    """Return one tensor per expert, as in released checkpoints; transformers has all experts of a layer in one."""
    experts, rows, columns = shape
    names = {"gate_proj": (rows // 2, columns), "up_proj": (rows // 2, columns)}
    names = names if part == "gate_up_proj" else {"down_proj": (rows, columns)}
    return {f"{prefix}{i}.{name}.weight": size for i in range(experts) for name, size in names.items()}


def described(config: Any) -> dict[str, Any]:
    """Return the served model's `config.json` as JSON values, including overrides given at startup."""
    text = json.dumps(config.to_dict(), default=str)
    found: dict[str, Any] = json.loads(text, parse_constant=str)  # NaN is not valid JSON
    return found


def vocabulary_digest(vocabulary: dict[str, int]) -> str:
    """Return a digest that identifies a tokenizer's vocabulary."""
    lines = (f"{number} {token}\n" for token, number in sorted(vocabulary.items(), key=lambda item: item[1]))
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]
