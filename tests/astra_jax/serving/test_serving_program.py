"""`python -m launch.serve` on a folder: what it prints, refuses, answers, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from serving_world import KEY, decisive, model
from sft_world import make_tokenizer

from astra_jax.models.hf_checkpoint import save_hf

ROOT = Path(__file__).parents[3]
IDS = {"return_token_ids": True}


@pytest.mark.slow
def test_the_program_serves_a_folder_and_drains_on_sigterm(tmp_path):
    tokenizer = make_tokenizer(tmp_path / "served")
    config = model(tokenizer.vocab_size)
    save_hf(decisive(config), config, tmp_path / "served")
    (tmp_path / "key").write_text(f"{KEY}\n")
    command = [sys.executable, "-m", "launch.serve", f"--weights={tmp_path / 'served'}", "--port=0", "--slots=2"]
    refused = subprocess.run([*command, "--host=0.0.0.0"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2 and "no API key is set" in refused.stderr
    with subprocess.Popen(
        [*command, f"--api_key_file={tmp_path / 'key'}"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("served on http://127.0.0.1:") and "512 tokens, 2 slots" in line
            client = openai.OpenAI(base_url=line.split()[2].rstrip(","), api_key=KEY, max_retries=0, timeout=60)
            stream = client.completions.create(
                model="served", prompt=[3, 4], max_tokens=300, stream=True, extra_body=IDS
            )
            first = next(iter(stream))
            process.send_signal(signal.SIGTERM)
            ids = [*first.choices[0].token_ids, *(i for chunk in stream for i in chunk.choices[0].token_ids)]
            assert len(ids) == 300 or ids[-1] in (tokenizer.eos_id, tokenizer.pad_id)
            assert process.wait(60) == 0
            assert process.stdout.read().endswith("stopped\n")
        finally:
            process.kill()
