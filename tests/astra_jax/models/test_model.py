"""A family is a folder: others, made here in a few lines, load, compute, decode and export by the same machinery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astra_jax.axes import is_small, sides, stacked_matrices
from astra_jax.models import families, hf_checkpoint
from astra_jax.models.decoder import Decoder
from astra_jax.models.model import Model, parameters
from astra_jax.models.names import NamedParam
from astra_jax.models.qwen3.names import names_table
from astra_jax.models.qwen3.presets import Qwen3Config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@dataclass(frozen=True)
class Llama(Decoder):
    """No norm on queries and keys, no biases."""

    qk_norm: ClassVar[bool] = False
    kind: ClassVar[str] = "Llama"

    def names(self) -> list[NamedParam]:
        absent = () if self.qk_norm else ("q_norm_h", "k_norm_h")
        absent += () if self.output_bias else ("o_bias_d",)
        return [name for name in names_table(self) if name.path[-1] not in absent]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32", param_dtype: str = "float32") -> Self:
        fields = vars(Qwen3Config.from_hf(config, dtype=dtype, param_dtype=param_dtype))
        return replace(cls(**fields), attention_bias=not cls.output_bias)

    def to_hf(self) -> dict[str, Any]:
        content = Qwen3Config(**vars(self)).to_hf()
        return content | {"model_type": self.kind.lower(), "architectures": [f"{self.kind}ForCausalLM"]}


@dataclass(frozen=True)
class Qwen2(Llama):
    """With biases on queries, keys and values, and none on the output."""

    output_bias: ClassVar[bool] = False
    kind: ClassVar[str] = "Qwen2"


SIZES: dict[str, Any] = dict(vocab_size=131, d_model=48, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=12, d_ff=80)
FAMILIES = {"llama": Llama, "qwen2": Qwen2}


@pytest.fixture(params=FAMILIES)
def model(request, monkeypatch) -> Model:
    """Known to `families` as a folder of its own would be."""
    family = FAMILIES[request.param]
    monkeypatch.setitem(families.FAMILIES, request.param, (__name__, family.__name__))
    return family(**SIZES, tie_embeddings=False, attention_bias=not family.output_bias, rope_theta=1e4)


def test_a_family_of_a_few_lines_computes_what_hugging_faces_does_and_is_exported(model, tmp_path) -> None:
    torch.manual_seed(0)
    values = {k: v for k, v in model.to_hf().items() if k not in ("architectures", "model_type")}
    hf = getattr(transformers, f"{model.kind}Config")(**values)
    reference = getattr(transformers, f"{model.kind}ForCausalLM")(hf).float().eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 + ("norm" in name))
    reference.save_pretrained(tmp_path / "hf")

    loaded = hf_checkpoint.read_config(tmp_path / "hf")
    assert type(loaded) is type(model) and loaded == replace(model, max_positions=loaded.max_positions)
    params = hf_checkpoint.load_hf(tmp_path / "hf", loaded)
    assert parameters(loaded) == sum(one.numel() for one in reference.parameters())
    tokens = np.random.default_rng(1).integers(0, 131, (2, 40))
    places = jnp.broadcast_to(jnp.arange(40), tokens.shape)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    x_btd, _ = loaded.forward(params, jnp.asarray(tokens), places, jnp.ones_like(places))
    np.testing.assert_allclose(x_btd @ loaded.head_kernel(params), expected, atol=2e-4, rtol=0)
    x_btd, _ = loaded.forward_cached(params, jnp.asarray(tokens), places, loaded.cache(2, 64))
    np.testing.assert_allclose(x_btd @ loaded.head_kernel(params), expected, atol=2e-4, rtol=0)

    hf_checkpoint.save_hf(params, loaded, tmp_path / "ours")
    again = hf_checkpoint.load_hf(tmp_path / "ours", hf_checkpoint.read_config(tmp_path / "ours"))
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_an_unknown_family_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="model_type is 'gpt2'; this port reads 'qwen3', 'qwen3_moe'"):
        families.from_hf({"model_type": "gpt2"})


def test_names_say_which_leaves_are_matrices_and_where_their_sides_are() -> None:
    dense = Qwen3Config(**SIZES, tie_embeddings=False, attention_bias=True)
    experts = replace(dense, n_experts=4, experts_per_token=2)
    found = {
        path[-1].key: stacked_matrices(path)
        for one in (dense, experts)
        for path, _ in jax.tree.leaves_with_path(one.abstract_params())
    }
    matrices = {name: axes for name, axes in found.items() if axes is not None}
    assert matrices == {
        **dict.fromkeys(("q_dnh", "k_dkh", "v_dkh"), ((1,), (2, 3))),
        "o_nhd": ((1, 2), (3,)),
        **dict.fromkeys(("gate_df", "up_df", "down_fd"), ((1,), (2,))),
        **dict.fromkeys(("gate_edf", "up_edf", "down_efd"), ((2,), (3,))),
    }
    assert sides("head_dv") == sides("router_de") == ((0,), (1,))
    assert is_small("router_de") and is_small("q_bias_nh") and is_small("final_norm_d") and not is_small("embed_vd")
