"""A family is a folder: another one, made here in a few lines, is read, computed and exported by the same machinery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity_world import hf_model, logits_of, tokens_of
from sft_world import make_dataset, starting, trajectories

from astra_jax.axes import is_small, sides, stacked_matrices
from astra_jax.base.errors import InputError
from astra_jax.base.settings import SettingError
from astra_jax.models import families, hf_checkpoint, hf_config
from astra_jax.models.decoder import Decoder
from astra_jax.models.model import Model, parameters
from astra_jax.models.names import NamedParam, decoder_table, mlp_table
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.sft import train as sft
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from configs.training import SFTRun

torch = pytest.importorskip("torch")


@dataclass(frozen=True)
class Mistral(Decoder):
    """Without windows it is what a Llama is, under another name."""

    family: ClassVar[str] = "mistral"

    def names(self) -> list[NamedParam]:
        return decoder_table(self) + mlp_table()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32", param_dtype: str = "float32") -> Self:
        if config.get("sliding_window") is not None:
            raise InputError(f"sliding_window is {config['sliding_window']}")
        fields = hf_config.read_fields(
            config, released="Mistral", architectures=["MistralForCausalLM"], max_positions=131_072
        )
        return cls(**fields, dtype=dtype, param_dtype=param_dtype)

    def to_hf(self) -> dict[str, Any]:
        content = hf_config.content(self, model_type="mistral", architecture="MistralForCausalLM")
        return content | {"sliding_window": None}


SIZES: dict[str, Any] = dict(vocab_size=131, d_model=48, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=12, d_ff=80)


def test_a_family_of_a_few_lines_computes_what_hugging_faces_does_and_is_exported(monkeypatch, tmp_path) -> None:
    """Known to `families` as a folder of its own would be."""
    monkeypatch.setitem(families.FAMILIES, "mistral", (__name__, "Mistral"))
    model: Model = Mistral(**SIZES, tie_embeddings=False, rope_theta=1e4)
    reference = hf_model(model)
    reference.save_pretrained(tmp_path / "hf")

    loaded = hf_checkpoint.read_config(tmp_path / "hf")
    assert type(loaded) is type(model) and loaded == replace(model, max_positions=loaded.max_positions)
    params = hf_checkpoint.load_hf(tmp_path / "hf", loaded)
    assert parameters(loaded) == sum(one.numel() for one in reference.parameters())
    tokens = tokens_of(model, length=40)
    places = jnp.broadcast_to(jnp.arange(40), tokens.shape)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(params, loaded, tokens), expected, atol=2e-4, rtol=0)
    x_btd, _ = loaded.forward_cached(params, jnp.asarray(tokens), places, loaded.cache(2, 64))
    np.testing.assert_allclose(x_btd @ loaded.head_kernel(params), expected, atol=2e-4, rtol=0)

    hf_checkpoint.save_hf(params, loaded, tmp_path / "ours")
    again = hf_checkpoint.load_hf(tmp_path / "ours", hf_checkpoint.read_config(tmp_path / "ours"))
    jax.tree.map(np.testing.assert_array_equal, again, params)


@dataclass(frozen=True)
class Wrapped:
    """A model that is no `Decoder`: it has all members of `Model`, here by asking another one."""

    family: ClassVar[str] = "wrapped"
    inner: Qwen3Config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_whatever_has_the_members_of_model_trains(chat_tokenizer, tmp_path) -> None:
    inner = Qwen3Config(**SIZES | {"vocab_size": chat_tokenizer.vocab_size}, tie_embeddings=True, max_positions=1024)
    data = make_dataset(tmp_path / "data", trajectories(8, longest=2))
    config = SFTConfig(data=DataConfig(seq_len=512, too_long="cut"), batch_size=2, steps=2, sample_every=1)
    results = []
    for name, model in {"ours": inner, "wrapped": Wrapped(inner)}.items():
        job = SFTRun(model, config)
        start = starting(inner.init(jax.random.key(0)))
        results.append(sft.train(job.sft, job.model, start, data, chat_tokenizer, tmp_path / name, progress=False))
    jax.tree.map(np.testing.assert_array_equal, *(one.params for one in results))


def test_what_is_no_model_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(SettingError, match="SFTRun.model is dict, which lacks family, vocab_size, .*forward_cached"):
        SFTRun({}, SFTConfig())  # type: ignore[arg-type]


def test_an_unknown_family_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ValueError, match="model_type is 'gpt2'; this port reads 'llama', 'qwen2', 'qwen3', 'qwen3_moe'"
    ):
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
