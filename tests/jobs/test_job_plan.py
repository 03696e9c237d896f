"""Job 7: train adapters of a model on one 24 GB GPU, with settings that the planner chose and checked."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4_096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12_288,
    "tie_word_embeddings": False,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
}
"""config.json of Qwen/Qwen3-8B."""
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL |= {"intermediate_size": 128, "max_position_embeddings": 2_048}
HAS_CUDA_COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None


def write_inputs(folder: Path) -> None:
    """Write the config.json of an 8B model, a small model of the same family with random weights, and conversations."""
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (folder / "qwen3-8b").mkdir()
    (folder / "qwen3-8b" / "config.json").write_text(json.dumps(QWEN3_8B))
    model = folder / "small"
    model.mkdir()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: index for index, token in enumerate([*alphabet, *special])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    config: dict[str, Any] = QWEN3_8B | SMALL | {"vocab_size": len(words)}
    (model / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> Any:
        return random.normal(0, 0.02, shape).astype(np.float32)

    d, h, n, k, ff = 64, 16, 4, 2, 128
    weights = {"model.embed_tokens.weight": matrix(len(words), d), "lm_head.weight": matrix(len(words), d)}
    weights["model.norm.weight"] = np.ones(d, np.float32)
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes = {"q_proj": (n * h, d), "k_proj": (k * h, d), "v_proj": (k * h, d), "o_proj": (d, n * h)}
        weights |= {f"{at}.self_attn.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        shapes = {"gate_proj": (ff, d), "up_proj": (ff, d), "down_proj": (d, ff)}
        weights |= {f"{at}.mlp.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{name}.weight"] = np.ones(d, np.float32)
        for name in ("q_norm", "k_norm"):
            weights[f"{at}.self_attn.{name}.weight"] = np.ones(h, np.float32)
    save_file(weights, str(model / "model.safetensors"))
    turns = [
        [{"role": "user", "content": f"What is {i} + {i}?"}, {"role": "assistant", "content": f"{2 * i}."}]
        for i in range(40)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))


@pytest.mark.slow
def test_adapters_are_trained_on_one_24_gb_gpu_as_planned(installed_astra, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    planned = installed_astra(
        *("plan", "--config=sft:auto", "--weights=qwen3-8b", "--topology=4090", "--tokens=4096"),
        *("--steps=100", "--price_per_chip_hour=0.4", "--json"),
        cwd=tmp_path,
        timeout=1200,
    )
    assert re.search(r"lora.rank 16: adapters, because training all weights needs 1\d\d GiB or more", planned.output)
    assert "lora.weight_quantization int8: with weights in 16 bits a step needs" in planned.output
    settings = ["--config.sft.lora.rank=16", "--config.sft.lora.weight_quantization=int8"]
    if HAS_CUDA_COMPILER:
        assert planned.code == 0, planned.output
        plan = json.loads(planned.output.splitlines()[-1])
        assert plan["fits"] and plan["peak_bytes_per_chip"] < 20 * 2**30 < plan["hbm_bytes_per_chip"] < 24 * 2**30
        assert plan["hours"] == pytest.approx(100 * plan["step_seconds"] / 3600) and plan["dollars"] > 0
        memory, *command = shlex.split(plan["command"])
        assert memory == "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" and plan["command"] in planned.output
    else:
        assert planned.code == 2 and "pip install --no-deps jax-cuda13-plugin==" in planned.output, planned.output
        command = ["astra", "sft", "--config=sft:auto", "--weights=qwen3-8b", "--data=train.jsonl"]
        command += [
            "--workdir=runs/sft",
            "--config.sft.micro_batch_size=1",
            "--config.sft.batch_size=8",
            "--config.sft.data.seq_len=4096",
        ]
        command += settings
    assert command[:2] == ["astra", "sft"] and set(settings) <= set(command)

    # The planned command, with a model and rows that a CPU trains in seconds.
    smaller = {"--weights": "small", "--config.sft.data.seq_len": "128", "--config.sft.micro_batch_size": "8"}
    pasted = [f"{name}={smaller.get(name, value)}" for name, _, value in (one.partition("=") for one in command[2:])]
    trained = installed_astra("sft", *pasted, "--config.sft.steps=2", cwd=tmp_path, env={"JAX_PLATFORMS": "cpu"})
    assert trained.code == 0 and "runs/sft/checkpoints: 2 steps" in trained.output, trained.output[-3000:]
    exported = installed_astra("convert", "--from_orbax=runs/sft/checkpoints", "--to_peft=adapter", cwd=tmp_path)
    assert exported.code == 0, exported.output[-3000:]
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert adapter["r"] == 16 and (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 10_000
