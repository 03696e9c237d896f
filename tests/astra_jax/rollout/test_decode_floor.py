"""The benchmark that accelerators run: here on a CPU whose bandwidth is made up."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import jax
import pytest
from programs_world import programs

from astra_jax.models.flops import decoding_bytes
from benchmarks.rows import ROOT
from configs.training import MODELS


def decode_floor(*arguments: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.decode_floor", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["tiny", "0.6b", "8b", "smollm2-135m", "qwen2.5-7b"])
def test_a_step_reads_each_matrix_once_and_what_is_cached(name: str) -> None:
    """An embedding is a matrix that is read where it is the head too; else a few of its rows are. With its biases."""
    model = MODELS[name]
    params = model.abstract_params()
    matrices = [leaf for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim > 2]  # with a leading L
    head = params["embed_vd"] if model.tie_embeddings else params["head_dv"]
    weights = sum(leaf.size for leaf in [*matrices, head])
    of_a_position = 2 * model.n_layers * model.n_kv_heads * model.head_dim
    width = {"float32": 4, "bfloat16": 2}[model.dtype]
    assert decoding_bytes(model, 3, 100.5) == width * (weights + 3 * 100.5 * of_a_position)


def test_the_row_says_what_was_measured() -> None:
    shape = ["--model=tiny", "--batches=2", "--prompt_tokens=20", "--new_tokens=10", "--rounds=1"]
    done = decode_floor(*shape, "--bandwidth=1e9")
    row = json.loads(done.stdout)
    assert (row["device"], row["dtype"], row["batch"]) == ("cpu", "bfloat16", 2)
    assert row["floor_ms"] == pytest.approx(decoding_bytes(MODELS["tiny"], 2, 25) / 2 / 1e9 * 1e3, abs=1e-3)
    assert row["share"] == pytest.approx(row["floor_ms"] / row["step_ms"], rel=0.02)
    assert row["tokens_per_second"] == pytest.approx(2e3 / row["step_ms"], rel=0.02)


def test_bad_flags_end_in_one_line(tmp_path) -> None:
    cases = {
        "--model=30b-a3b": "--model is '30b-a3b'; use one of tiny, 0.6b",
        "--batches=1,x": "--batches=1,x: 'x' is not allowed; use a whole number from 1 to",
        "--model=tiny": "the memory bandwidth of 'cpu' is not known; give --bandwidth",
    }
    with programs("benchmarks.decode_floor", tmp_path) as start:
        for flag, words in cases.items():
            assert words in start(flag).line
