"""Hugging Face checkpoints: sharded loading, byte-equal export, conversion to Orbax and back, and bad files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from astra_jax.mesh import make_mesh
from astra_jax.models import hf_checkpoint
from astra_jax.models.qwen3.presets import Qwen3Config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
DENSE = Qwen3Config(
    vocab_size=64,
    d_model=32,
    n_layers=3,
    n_heads=8,
    n_kv_heads=4,
    head_dim=6,
    d_ff=40,
    tie_embeddings=False,
    attention_bias=True,
    param_dtype="bfloat16",
)
EXPERTS = dataclasses.replace(
    DENSE, n_experts=4, experts_per_token=2, d_ff=16, attention_bias=False, tie_embeddings=True
)
CONFIGS = {"dense": DENSE, "experts": EXPERTS}


def tensors_of(directory: Path) -> dict[str, bytes]:
    """(dtype, shape, bytes) of every tensor, as torch reads them."""
    tensors = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                one = opened.get_tensor(name)
                tensors[name] = (one.dtype, tuple(one.shape), one.contiguous().view(torch.uint8).numpy().tobytes())
    return tensors


@pytest.fixture(scope="module", params=CONFIGS)
def hf(request, tmp_path_factory):
    """A checkpoint that transformers wrote in several bfloat16 files, and its config."""
    config = CONFIGS[request.param]
    kind = "Qwen3Moe" if config.n_experts else "Qwen3"
    values = {k: v for k, v in config.to_hf().items() if k not in ("architectures", "model_type", "torch_dtype")}
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**values))
    directory = tmp_path_factory.mktemp("hf")
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory, hf_checkpoint.read_config(directory, param_dtype="bfloat16")


@pytest.mark.parametrize(
    "axes", [{"fsdp": 8}, {"tensor": 4, "context": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"expert": 2, "fsdp": 4}]
)
def test_sharded_loading_equals_loading_whole(hf, axes) -> None:
    directory, config = hf
    shardings = config.param_shardings(make_mesh(**axes))
    sharded, whole = (
        hf_checkpoint.load_hf(directory, config, shardings=shardings),
        hf_checkpoint.load_hf(directory, config),
    )
    for ours, one, sharding in zip(*map(jax.tree.leaves, (sharded, whole, shardings)), strict=True):
        assert ours.sharding == sharding and ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(one, np.float32))


def test_a_host_holds_one_shard_at_a_time(hf, monkeypatch) -> None:
    directory, config = hf
    largest = []

    def spy(entry, tensors, leaf, index, *, real=hf_checkpoint._read_shard):
        largest.append(real(entry, tensors, leaf, index))
        return largest[-1]

    monkeypatch.setattr(hf_checkpoint, "_read_shard", spy)
    hf_checkpoint.load_hf(directory, config, shardings=config.param_shardings(make_mesh(fsdp=8)))
    whole = max(leaf.size for leaf in jax.tree.leaves(config.abstract_params()))
    assert max(shard.size for shard in largest) == whole // 8


def test_bfloat16_comes_back_byte_for_byte(hf, tmp_path) -> None:
    directory, config = hf
    shardings = config.param_shardings(make_mesh(fsdp=2, context=2, tensor=2))
    hf_checkpoint.save_hf(
        hf_checkpoint.load_hf(directory, config, shardings=shardings), config, tmp_path, max_bytes=9_000
    )
    assert tensors_of(tmp_path) == tensors_of(directory)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(directory).keys()
    assert all((tmp_path / file).is_file() for file in index["weight_map"].values())
    hf_checkpoint.save_hf(hf_checkpoint.load_hf(tmp_path, config), config, tmp_path / "one")
    assert [one.name for one in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]


def test_float32_is_cast_as_it_is_read(tmp_path) -> None:
    config = dataclasses.replace(DENSE, param_dtype="float32")
    params = config.init(jax.random.key(0))
    hf_checkpoint.save_hf(params, config, tmp_path)
    same = hf_checkpoint.load_hf(tmp_path, config)
    jax.tree.map(np.testing.assert_array_equal, params, same)
    halved = hf_checkpoint.load_hf(tmp_path, DENSE)
    jax.tree.map(lambda ours, one: np.testing.assert_array_equal(ours, one.astype(jnp.bfloat16)), halved, params)


def convert(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.convert", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_command_converts_there_and_back(hf, tmp_path) -> None:
    directory, _ = hf
    (directory / "tokenizer.json").write_text("{}")
    there = convert(f"--from_hf={directory}", f"--to_orbax={tmp_path / 'orbax'}")
    assert there.returncode == 0, there.stderr
    back = convert(f"--from_orbax={tmp_path / 'orbax'}", f"--to_hf={tmp_path / 'hf'}")
    assert back.returncode == 0, back.stderr
    assert "parameters in bfloat16, 2 tokenizer files" in back.stdout
    assert tensors_of(tmp_path / "hf") == tensors_of(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.dtype == torch.bfloat16
    again = convert(f"--from_hf={directory}", f"--to_orbax={tmp_path / 'orbax'}")
    assert again.returncode == 2 and "is not empty; give a new folder" in again.stderr
    half = convert(f"--from_hf={directory}")
    assert half.returncode == 2 and "give --from_hf and --to_orbax" in half.stderr


def test_damaged_files_are_named(hf, tmp_path) -> None:
    directory, config = hf
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    cut = sorted(tmp_path.glob("*.safetensors"))[1]
    cut.write_bytes(cut.read_bytes()[:1000])
    with pytest.raises(hf_checkpoint.WeightsError, match=rf"{cut.name} is damaged .*; copy it again"):
        hf_checkpoint.load_hf(tmp_path, config)
    cut.unlink()
    with pytest.raises(hf_checkpoint.WeightsError, match=rf"{cut.name} is missing, .*index.json names it; copy the"):
        hf_checkpoint.load_hf(tmp_path, config)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(hf_checkpoint.WeightsError, match=r"config.json is not JSON"):
        hf_checkpoint.read_config(tmp_path)
