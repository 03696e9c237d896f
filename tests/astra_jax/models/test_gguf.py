"""GGUF files against transformers' reading of them, and those that are damaged or foreign."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gguf_world import CONTROL, SIZES, add_sizes, add_tokenizer, alphabet, blocks, gguf, smollm2, tensors, write
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from selection import by_day

from astra_jax.models import hf_checkpoint
from astra_jax.models.gguf.convert import convert
from astra_jax.models.gguf.file import READ, GGUFError, GGUFFile
from astra_jax.models.gguf.tokenizer import HFTokenizer
from astra_jax.models.gguf.weights import HFModel
from astra_jax.models.model import Model, Params
from astra_jax.run import weights
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.records import Message

ROOT = Path(__file__).parents[3]

# ---------------------------------------------------------------------------------------------------------------------
# What is right


def logits(model: Model, params: Params, ids: Any) -> np.ndarray:
    """Of one row of tokens."""
    tokens = jnp.asarray(ids.numpy())
    hidden, _ = model.forward(params, tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))
    return np.asarray(hidden @ model.head_weights(params))


def unpaired(values: np.ndarray, heads: int) -> np.ndarray:
    """Row by row: of a head's rows the even ones, then the odd ones."""
    size = len(values) // heads
    rows = [h * size + r for h in range(heads) for r in (*range(0, size, 2), *range(1, size, 2))]
    return values[rows]


@pytest.mark.parametrize("kind", READ)
def test_each_kind_becomes_what_its_blocks_stand_for(tmp_path: Path, kind: str) -> None:
    stored = write(tmp_path / "a.gguf", kind=kind)
    made = convert(tmp_path / "a.gguf", tmp_path / "hf", file_bytes=400_000)
    assert made.dtype == ("bfloat16" if kind == "BF16" else "float32")
    read = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        read |= load_file(file)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read.keys()
    quantisation = gguf.GGMLQuantizationType[kind]

    def meant(name: str) -> np.ndarray:
        return gguf.dequantize(stored[name], quantisation if stored[name].ndim > 1 else gguf.GGMLQuantizationType.F32)

    def equal(hf: str, wanted: np.ndarray) -> None:
        assert np.array_equal(read.pop(hf), wanted.astype(read_dtype))

    read_dtype = read["model.norm.weight"].dtype
    equal("model.embed_tokens.weight", meant("token_embd.weight"))
    equal("model.norm.weight", meant("output_norm.weight"))
    hf_names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for i in range(SIZES["num_hidden_layers"]):
        for ours, hf in hf_names.items():
            equal(f"model.layers.{i}.{hf}.weight", meant(f"blk.{i}.{ours}.weight"))
        for one, heads in (("q", 4), ("k", 2)):
            wanted = unpaired(meant(f"blk.{i}.attn_{one}.weight"), heads)
            equal(f"model.layers.{i}.self_attn.{one}_proj.weight", wanted)
    assert not read


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_what_was_quantised_is_near_what_it_was(kind: str) -> None:
    """Of the largest number in a block of 32; a type's name says its bits."""
    values = tensors(32)["blk.0.ffn_up.weight"]
    stored = gguf.dequantize(blocks(values, kind), gguf.GGMLQuantizationType[kind])
    bits = {"F16": 11, "BF16": 8}.get(kind) or int(kind[1])
    step = np.repeat(abs(values.reshape(512, -1, 32)).max(-1), 32, axis=1) * 2.0 ** (1 - bits)
    assert (abs(values - stored) <= step * 1.01).all()


PLAIN: list[tuple[str, bool, dict[str, Any]]] = [
    ("llama", True, {}), ("qwen2", True, {}), ("qwen3", True, {}), ("qwen3", False, {}),
    ("llama", False, {"attention_bias": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "tied", "more"),
    [
        *by_day(PLAIN),
        ("llama", True, {"rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                                          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
        ("qwen2", False, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                           "original_max_position_embeddings": 32}}),
    ],
)  # fmt: skip
def test_a_model_of_transformers_comes_back(tmp_path: Path, family: str, tied: bool, more: dict) -> None:
    """Written as llama.cpp's converter does, read here: transformers computes the same of it, bit for bit."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens, _ = alphabet()
    rows = len(tokens) + len(CONTROL)
    config = AutoConfig.for_model(family, vocab_size=rows, tie_word_embeddings=tied, **SIZES, **more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", family)
    add_tokenizer(writer, alphabet(), pre="qwen2")
    add_sizes(writer, SIZES)
    scaling = more.get("rope_scaling", {})
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if scaling.get("rope_type") == "llama3":
        scaled = model.model.rotary_emb.inv_freq.double().numpy()
        plain = SIZES["rope_theta"] ** -(np.arange(0, 64, 2) / 64)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], SIZES["num_hidden_layers"])
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if family == "llama" and ".q_proj." in name or family == "llama" and ".k_proj." in name:
            heads = 4 if ".q_proj." in name else 2
            values = np.ascontiguousarray(
                values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:]).swapaxes(1, 2)
            ).reshape(values.shape)
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    convert(tmp_path / "a.gguf", tmp_path / "hf")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert type(back) is type(model)
    ids = torch.arange(90)[None] % rows
    with torch.no_grad():
        assert torch.equal(back(ids).logits, model(ids).logits)
    for name in ("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "head_dim"):
        assert getattr(back.config, name) == getattr(model.config, name), name
    assert (back.config.bos_token_id, back.config.eos_token_id, back.config.pad_token_id) == (1, [2], 0)
    ours = hf_checkpoint.read_config(tmp_path / "hf")
    assert (
        np.abs(
            logits(ours, hf_checkpoint.load_hf(tmp_path / "hf", ours), ids) - back(ids).logits.detach().numpy()
        ).max()
        < 2e-4
    )


@pytest.mark.nightly
def test_smollm2_is_what_transformers_reads_and_knows_the_capital_of_france(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    made = convert(smollm2(), tmp_path / "hf")
    assert (made.parameters, made.dtype) == (134_515_008, "float32")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    read = load_gguf_checkpoint(str(smollm2()), return_tensors=True, model_to_load=ours)["tensors"]
    stored = ours.state_dict()
    assert read.keys() | {"lm_head.weight"} == stored.keys()  # which is tied
    assert all(torch.equal(stored[name], tensor) for name, tensor in read.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        wanted = ours(**ids).logits
        said = ours.generate(**ids, max_new_tokens=12, do_sample=False)[0][ids["input_ids"].shape[1] :]
    assert tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"
    # And so do our own layers, of an embedding with rows for the tokens of calls.
    model, chat = hf_checkpoint.read_config(tmp_path / "hf"), ChatTokenizer.load(tmp_path / "hf")
    grown = dataclasses.replace(model, vocab_size=chat.rows(model.vocab_size))
    assert (chat.vocab_size, grown.vocab_size) == (49_156, 49_280)
    prompt = chat.format.render([Message("user", asked[0]["content"])], [], add_generation_prompt=True)
    assert chat.encode_segments(prompt)[0] == ids["input_ids"][0].tolist()
    new_token_pieces = chat.new_token_pieces(model.vocab_size)
    params = weights.load(tmp_path / "hf", grown, rows=model.vocab_size, new_token_pieces=new_token_pieces)
    drawn = logits(grown, params, ids["input_ids"])
    assert np.abs(drawn[..., : model.vocab_size] - wanted.numpy()).max() < 5e-4


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong


def without(name: str):
    return lambda made: {one: values for one, values in made.items() if one != name}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architecture": "gemma3"}, "general.architecture is 'gemma3'; read are 'llama', 'qwen2', 'qwen3'"),
        ({"keys": {"split.count": 3}}, "key split.count: it is one of 3 files"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'; read are .*'smollm'"),
        ({"without": ["tokenizer.ggml.pre"]}, "key tokenizer.ggml.pre is missing"),
        ({"keys": {"tokenizer.ggml.model": "llama"}}, "tokenizer.ggml.model is 'llama'; read is 'gpt2'"),
        ({"keys": {"tokenizer.ggml.merges": ["t h", "x zq"]}}, "merges number 1 makes 'zq', which is not a token"),
        ({"keys": {"tokenizer.ggml.eos_token_id": 999}}, "eos_token_id is 999, of 260 tokens"),
        ({"keys": {"tokenizer.ggml.token_type": [1, 1]}}, "tokenizer.ggml.tokens has 260 tokens, .* and 2 kinds"),
        ({"keys": {"llama.logit_scale": 0.5}}, "key llama.logit_scale is not understood"),
        ({"keys": {"llama.expert_count": 8}}, "llama.expert_count: models with experts are not read"),
        ({"keys": {"llama.rope.dimension_count": 32}}, "rope.dimension_count is 32, and a head has 64"),
        ({"keys": {"llama.rope.scaling.type": "longrope"}}, "rope.scaling.type is 'longrope'; read are"),
        ({"keys": {"llama.block_count": 2_000_000_000}}, "llama.block_count is 2000000000, and there are 20 tensors"),
        ({"keys": {"llama.block_count": 3}}, "tensor blk.2.attn_norm.weight is missing"),
        ({"keys": {"llama.block_count": 1}}, "tensor blk.1.attn_k.weight is none of a llama's"),
        ({"keys": {"llama.embedding_length": "wide"}}, "key llama.embedding_length is 'wide'"),
        ({"keys": {"llama.attention.layer_norm_rms_epsilon": float("nan")}}, "layer_norm_rms_epsilon is nan"),
        ({"without": ["llama.context_length"]}, "key llama.context_length is missing"),
        ({"tensors": without("blk.1.ffn_up.weight")}, r"blk.1.ffn_up.weight is missing; its shape .* \[512, 256\]"),
        ({"tensors": lambda made: made | {"blk.0.attn_q.weight": made["blk.0.attn_k.weight"]}},
         r"tensor blk.0.attn_q.weight has shape \[128, 256\], not \[256, 256\]"),
        ({"tensors": lambda made: made | {"blk.0.attn_q_norm.weight": np.ones(64, np.float32)}},
         "tensor blk.0.attn_q_norm.weight is none of a llama's"),
        ({"tensors": lambda made: made | {"rope_freqs.weight": np.linspace(1, 9, 32, dtype=np.float32)}},
         "tensor rope_freqs.weight is not a scaling of Llama 3's kind"),
        ({"tensors": lambda made: made | {"output_norm.weight": np.full(256, np.nan, np.float32)}},
         "tensor output_norm.weight has a number that is not finite"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name_and_leaves_nothing(tmp_path: Path, changed: dict, message: str) -> None:
    write(tmp_path / "a.gguf", **changed)
    with pytest.raises(GGUFError, match=message):
        convert(tmp_path / "a.gguf", tmp_path / "hf")
    assert [one.name for one in tmp_path.iterdir()] == ["a.gguf"]


def test_a_type_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 136), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ4_XS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(GGUFError, match="tensor token_embd.weight is of type IQ4_XS; read are F32, F16, BF16"):
        GGUFFile(tmp_path / "a.gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    write(path, kind="Q4_0")
    return path.read_bytes()


def test_a_file_that_is_cut_off_names_what_it_ends_in(tmp_path: Path, whole: bytes) -> None:
    path, seen = tmp_path / "a.gguf", set()
    for size in [*range(4, 400, 7), *range(400, len(whole) - 32, len(whole) // 97)]:
        path.write_bytes(whole[:size])
        with pytest.raises(GGUFError, match=r"the file ends at byte|and the file at|its beginning") as raised:
            convert(path, tmp_path / "hf")
        seen |= {part for part in ("key tokenizer.ggml.tokens", "tensor blk.1.ffn_down.weight") if part in str(raised)}
        assert not (tmp_path / "hf").exists()
    assert {one.name for one in tmp_path.iterdir()} == {"a.gguf"} and len(seen) == 2


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\3\4" * 100, b"GGUF\0\0\0\3" + bytes(100)])
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(GGUFError, match=r"not a GGUF file|of version|little-endian"):
        GGUFFile(tmp_path / "a.gguf")


@given(changes=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4))
def test_a_damaged_header_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, changes: list
) -> None:
    """Whatever bytes stand in it: nothing else is raised, nothing is believed that would take memory."""
    data, header = bytearray(whole), whole.index(b"blk.1.ffn_down.weight") + 60
    for place, written in changes:
        at = int(place * header)
        data[at : at + len(written)] = written
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    try:
        file = GGUFFile(path)
        HFTokenizer(file, HFModel(file).config["vocab_size"])
    except GGUFError as error:
        assert str(path) in str(error)


# ---------------------------------------------------------------------------------------------------------------------
# The program


def program(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.convert", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_command_converts_into_a_new_folder_alone(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", kind="Q8_0", tied=False)
    done = program(f"--from_gguf={tmp_path / 'a.gguf'}", f"--to_hf={tmp_path / 'hf'}", "--param_dtype=bfloat16")
    assert done.returncode == 0 and "parameters in bfloat16, 4 tokenizer files" in done.stdout, done.stderr
    files = {one.name for one in (tmp_path / "hf").iterdir()}
    assert files == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "generation_config.json",
    }  # fmt: skip
    assert {one.name for one in tmp_path.iterdir()} == {"a.gguf", "hf"}
    (tmp_path / ".third.partial-x").mkdir()  # of one that was killed
    convert(tmp_path / "a.gguf", tmp_path / "third")
    assert {one.name for one in tmp_path.iterdir()} == {"a.gguf", "hf", "third"}
    again = program(f"--from_gguf={tmp_path / 'a.gguf'}", f"--to_hf={tmp_path / 'hf'}")
    assert again.returncode == 2 and "is not empty" in again.stderr
    (tmp_path / "b.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:100_000])
    cut = program(f"--from_gguf={tmp_path / 'b.gguf'}", f"--to_hf={tmp_path / 'other'}")
    assert cut.returncode == 2 and len(cut.stderr.splitlines()) == 1 and "tensor " in cut.stderr
    assert not (tmp_path / "other").exists()
