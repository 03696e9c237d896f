"""Hugging Face's model of a configuration, on random weights, and both sides' logits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astra_jax.models.model import Model, Params

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@functools.cache
def hf_model(config: Model) -> Any:
    """In float32, every weight random: also the norms, which HF starts at 1, and biases, at 0."""
    torch.manual_seed(0)
    values = {k: v for k, v in config.to_hf().items() if k != "architectures"}
    hf = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def tokens_of(config: Model, batch: int = 2, length: int = 150) -> np.ndarray:
    return np.random.default_rng(1).integers(0, config.vocab_size, (batch, length))


def logits_of(params: Params, config: Model, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(_logits(params, config, tokens))


@functools.partial(jax.jit, static_argnames="config")
def _logits(params: Params, config: Model, tokens: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, _ = config.forward(params, tokens, positions, jnp.ones(tokens.shape, jnp.int32))
    return jnp.einsum("btd,dv->btv", x, config.head_kernel(params))
