"""Hugging Face checkpoints: sharded loading, byte-equal export, conversion to Orbax and back, and bad files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs_world import programs
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from selection import by_day

from astra_jax import chat_files
from astra_jax.mesh import make_mesh
from astra_jax.models import hf_checkpoint
from astra_jax.models.decoder import Decoder
from astra_jax.models.layers.sizes import Llama3Scaling
from astra_jax.models.llama.presets import LlamaConfig
from astra_jax.models.qwen2.presets import Qwen2Config
from astra_jax.models.qwen3.presets import PRESETS, Qwen3Config
from astra_jax.run.checkpoints import CheckpointError
from astra_jax.run.weights import check_stored, load_orbax, save_orbax

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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
EXPERTS = replace(DENSE, n_experts=4, experts_per_token=2, d_ff=16, attention_bias=False, tie_embeddings=True)
LLAMA = LlamaConfig(
    **{**vars(DENSE), "attention_bias": False, "tie_embeddings": True, "llama3": Llama3Scaling(8.0, 64)}
)
QWEN2 = Qwen2Config(**vars(DENSE))
CONFIGS: dict[str, Decoder] = {"dense": DENSE, "experts": EXPERTS, "llama": LLAMA, "qwen2": QWEN2}


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
    values = {k: v for k, v in config.to_hf().items() if k not in ("architectures", "torch_dtype")}
    torch.manual_seed(0)
    theirs = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # which begin at 0
                parameter.copy_(torch.randn_like(parameter))
    directory = tmp_path_factory.mktemp("hf")
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory, hf_checkpoint.read_config(directory, param_dtype="bfloat16")


MESHES = [{"fsdp": 8}, {"tensor": 4, "context": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"expert": 2, "fsdp": 4}]


@pytest.mark.parametrize("axes", by_day(MESHES, *MESHES[-2:]))
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
    assert hf_checkpoint.read_config(tmp_path, param_dtype="bfloat16") == config
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(directory).keys()
    assert all((tmp_path / file).is_file() for file in index["weight_map"].values())
    hf_checkpoint.save_hf(hf_checkpoint.load_hf(tmp_path, config), config, tmp_path / "one")
    assert [one.name for one in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]


def test_float32_is_cast_as_it_is_read(tmp_path) -> None:
    config = replace(DENSE, param_dtype="float32")
    params = config.init(jax.random.key(0))
    hf_checkpoint.save_hf(params, config, tmp_path)
    same = hf_checkpoint.load_hf(tmp_path, config)
    jax.tree.map(np.testing.assert_array_equal, params, same)
    halved = hf_checkpoint.load_hf(tmp_path, DENSE)
    jax.tree.map(lambda ours, one: np.testing.assert_array_equal(ours, one.astype(jnp.bfloat16)), halved, params)


@pytest.mark.parametrize("axes", [None, {"fsdp": 4, "tensor": 2}])
@pytest.mark.parametrize(("stored", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_checkpoints_are_cast_once_they_are_read(stored, wanted, axes, tmp_path) -> None:
    """As a run's weights are served with --dtype, and trained with a preset of another type."""
    saved, config = replace(DENSE, param_dtype=stored), replace(DENSE, param_dtype=wanted)
    params = jax.tree.map(lambda x: x.astype(stored), saved.init(jax.random.key(0)))
    save_orbax(params, saved, tmp_path)
    shardings = None if axes is None else config.param_shardings(make_mesh(**axes))
    read = load_orbax(tmp_path, config, shardings=shardings)
    jax.tree.map(lambda ours, one: np.testing.assert_array_equal(ours, one.astype(wanted)), read, params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(read)} == {wanted}
    if shardings is not None:
        assert jax.tree.map(lambda leaf: leaf.sharding, read) == shardings
    with pytest.raises(CheckpointError, match="another model or optimizer config"):
        load_orbax(tmp_path, replace(config, d_ff=2 * config.d_ff))


def test_an_adapter_beside_whole_weights_is_refused_as_transformers_would_add_it(tmp_path) -> None:
    config = replace(DENSE, param_dtype="float32")
    hf_checkpoint.save_hf(config.init(jax.random.key(0)), config, tmp_path)
    check_stored(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    for read in (check_stored, lambda folder: hf_checkpoint.load_hf(folder, config)):
        with pytest.raises(hf_checkpoint.WeightsError, match="has adapter_config.json beside .* Merge it"):
            read(tmp_path)


@pytest.mark.slow
def test_the_command_converts_there_and_back(hf, tmp_path) -> None:
    directory, config = hf
    (directory / "tokenizer.json").write_text("{}")
    with programs("launch.convert", tmp_path) as convert:
        there = convert(f"--from_hf={directory}", f"--to_orbax={tmp_path / 'orbax'}")
        assert there.code == 0, there.errors
        back = convert(f"--from_orbax={tmp_path / 'orbax'}", f"--to_hf={tmp_path / 'hf'}")
        assert back.code == 0, back.errors
        assert "parameters in bfloat16, 2 tokenizer files" in back.out
        assert tensors_of(tmp_path / "hf") == tensors_of(directory)
        assert hf_checkpoint.read_config(tmp_path / "hf", param_dtype="bfloat16") == config
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        assert model.dtype == torch.bfloat16
        again = convert(f"--from_hf={directory}", f"--to_orbax={tmp_path / 'orbax'}")
        assert "is not empty; give a new folder" in again.line
        assert "--from_hf and --to_orbax" in convert(f"--from_hf={directory}").line
        run, new, file = tmp_path / "orbax", tmp_path / "new", tmp_path / "a.gguf"
        for flags, said in (
            ((f"--from_hf={directory}", f"--to_orbax={new}", "--step=0"), "--step is for --from_orbax with --to_hf"),
            ((f"--from_gguf={file}", f"--to_hf={new}", "--step=0"), "and for --from_orbax with --to_peft; leave it"),
            ((f"--from_gguf={file}", f"--to_hf={new}", "--base=x"), "--base is for --from_orbax with --to_hf and"),
            ((f"--from_orbax={run}", f"--to_peft={new}", "--param_dtype=float32"), "--param_dtype is for --from_hf"),
            ((f"--from_orbax={run}", f"--to_hf={new}", f"--base={run}"), "none are under them; leave --base="),
        ):
            refused = convert(*flags)
            assert refused.code == 2 and said in refused.line, refused.errors


@pytest.mark.slow
def test_a_release_as_llama_2s_is_read(tmp_path) -> None:
    """In float16, with each layer's rotary frequencies beside the weights, and without the newer fields."""
    config = replace(
        LLAMA, n_kv_heads=LLAMA.n_heads, head_dim=4, llama3=None, tie_embeddings=False, param_dtype="float32"
    )
    params = config.init(jax.random.key(0))
    hf_checkpoint.save_hf(params, config, tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = {name: one.astype(np.float16) for name, one in load_file(file).items()}
    for layer in range(config.n_layers):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float16)
    save_file(tensors, file)
    content = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"torch_dtype": "float16"}
    for later in ("head_dim", "attention_bias", "mlp_bias", "rope_parameters", "num_key_value_heads"):
        del content[later]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(content))
    with programs("launch.convert", tmp_path) as convert:
        flags = [f"--from_hf={tmp_path / 'hf'}", f"--to_orbax={tmp_path / 'orbax'}"]
        assert "dtype is 'float16', which is not supported; choose another" in convert(*flags).line
        there = convert(*flags, "--param_dtype=float32")
        assert there.code == 0, there.errors
    found = hf_checkpoint.read_config(tmp_path / "orbax")
    assert found == replace(config, dtype="float32")
    read = load_orbax(tmp_path / "orbax", found)
    jax.tree.map(lambda ours, one: np.testing.assert_array_equal(ours, one.astype(np.float16)), read, params)


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


def test_a_serving_folder_is_whole_or_not_there(chat_tokenizer_dir, tmp_path, monkeypatch) -> None:
    """Of the model as it is trained, with a stretched context; what an earlier try left goes."""
    model = PRESETS["14b"].with_context_length(74_752)
    left = tmp_path / ".served.unfinished"
    left.mkdir()
    (left / "merges.txt").write_text("of another tokenizer")
    with monkeypatch.context() as broken, pytest.raises(OSError, match="full"):
        broken.setattr(hf_checkpoint, "write_config", _full)
        hf_checkpoint.write_serving_folder(model, chat_tokenizer_dir, {}, tmp_path / "served")
    assert not list(tmp_path.iterdir())
    own = {"chat_template.jinja": "{{ messages }}"}
    count = hf_checkpoint.write_serving_folder(model, chat_tokenizer_dir, own, tmp_path / "served")
    chat_files.save_tokenizer(chat_tokenizer_dir, tmp_path / "saved", own)
    hf_checkpoint.write_config(model, tmp_path / "saved")
    served, saved = (
        {file.name: file.read_bytes() for file in (tmp_path / one).iterdir()} for one in ("served", "saved")
    )
    assert served == saved and len(served) == count and {"config.json", "generation_config.json"} <= served.keys()
    assert list(tmp_path.glob(".*")) == []
    assert hf_checkpoint.read_config(tmp_path / "served", dtype="bfloat16", param_dtype="bfloat16") == model


def _full(*_: object) -> str:
    raise OSError("the disk is full")
