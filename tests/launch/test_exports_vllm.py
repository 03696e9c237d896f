"""Exports of a base model's run stop after their turn in a real vLLM, with no flag."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from export_world import FAMILIES, base_folder, ending
from template_world import template
from vllm_world import QUIET, VLLM, require_vllm

from astra_jax.run import model_card, weights
from astra_jax.tokenizer import ChatTokenizer
from launch.flags.exports import to_hf

require_vllm()
pytestmark = pytest.mark.slow

ASKED = """
import json, sys
from vllm import LLM

model = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=1 << 26)
(said,) = model.chat([{"role": "user", "content": "Hello?"}])
print(json.dumps({"ids": list(said.outputs[0].token_ids), "reason": said.outputs[0].finish_reason}))
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_stops_after_the_turn(tmp_path: Path, family: str) -> None:
    model, _, name = FAMILIES[family]
    base = base_folder(tmp_path / "base", family, template=template(name) if name else "")
    tokenizer, checkpoints = ChatTokenizer.load(base), tmp_path / "run" / "checkpoints"
    model_card.complete(checkpoints, tokenizer, base)
    weights.save_orbax(ending(model, tokenizer.eos_id), model, checkpoints, step=1)
    to_hf(checkpoints, tmp_path / "hf")
    done = subprocess.run(
        [VLLM.with_name("python"), "-c", ASKED, tmp_path / "hf"],
        env=os.environ | QUIET | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"ids": [tokenizer.eos_id], "reason": "stop"}
