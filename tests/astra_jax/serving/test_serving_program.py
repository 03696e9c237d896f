"""`astra serve` on a folder: what it prints, refuses, answers, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from programs_world import ended
from rollout_world import decisive
from serving_world import KEY, Drip, model, serving
from sft_world import make_tokenizer

from astra_jax.models.hf_checkpoint import save_hf

ROOT = Path(__file__).parents[3]
IDS = {"return_token_ids": True}


def test_health_tells_when_it_is_ready_and_requests_are_answered_before(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    with serving(lambda: Drip(tokenizer), tokenizer) as server:
        server.service.warming = True
        assert server.client().completions.create(model="tiny", prompt="x", max_tokens=2).choices
        with pytest.raises(urllib.error.HTTPError) as unhealthy:
            urllib.request.urlopen(f"{server.url}/health")
        assert unhealthy.value.code == 503 and b'"warming up"' in unhealthy.value.read()
        server.run(server.service.warm_up())
        server.service.warming, server.service.programs = False, (2, 9)
        with urllib.request.urlopen(f"{server.url}/health") as healthy:
            assert healthy.status == 200 and json.load(healthy)["programs"] == {"compiled": 2, "of": 9}


@pytest.mark.slow
def test_the_program_serves_a_folder_and_drains_on_sigterm(tmp_path):
    tokenizer = make_tokenizer(tmp_path / "served")
    config = model(tokenizer.vocab_size)
    save_hf(decisive(config), config, tmp_path / "served")
    (tmp_path / "key").write_text(f"{KEY}\n")
    # Few programs to warm up.
    flags = [f"--weights={tmp_path / 'served'}", "--port=0", "--slots=2", "--max_length=128"]
    assert "no API key is set" in ended("launch.serve", *flags, "--host=0.0.0.0").line
    command = [sys.executable, "-m", "launch.serve", *flags]
    (tmp_path / "run").mkdir()
    (tmp_path / "served").rename(tmp_path / "run" / "checkpoints")  # --weights takes a run's folder too
    command = [one.replace("/served", "/run") for one in command]
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(
            [*command, f"--key_file={tmp_path / 'key'}", "--served_model_name=served"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("served on http://127.0.0.1:") and "128 tokens, 2 slots" in line
            client = openai.OpenAI(base_url=line.split()[2].rstrip(","), api_key=KEY, max_retries=0, timeout=60)
            stream = client.completions.create(
                model="served", prompt=[3, 4], max_tokens=300, stream=True, extra_body=IDS
            )
            first = next(iter(stream))
            process.send_signal(signal.SIGTERM)
            choices: list[Any] = [chunk.choices[0] for chunk in (first, *stream)]  # with a field of vLLM's
            ids = [id for choice in choices for id in choice.token_ids]
            assert len(ids) == 126 or ids[-1] in (tokenizer.eos_id, tokenizer.pad_id)
            assert process.wait(60) == 0
            assert process.stdout.read().endswith("stopped\n")
            said = (tmp_path / "errors").read_text()
            assert "reading the weights of" in said and "programs compiled in the background" in said
        finally:
            process.kill()
