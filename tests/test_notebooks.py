"""Notebooks: what runs their cells, what is stored of them, and the one that starts from a file of weights.

Those that need a finished quickstart are run in `tests/launch/test_quickstart.py`.
"""

from __future__ import annotations

from pathlib import Path

import gguf_world
import pytest
from notebooks_world import run_notebook
from programs_world import programs
from template_world import PLAIN_CHATML
from tokenizers import pre_tokenizers

from astra_jax.base.errors import InputError
from docs.notebooks import cells
from synthesis.core.chatml import QWEN3
from synthesis.core.records import Message, ToolSpec


def notebook(*sources: str) -> cells.Notebook:
    """Of cells of code, the first of parameters."""
    made = [{"cell_type": "code", "metadata": {}, "source": source.splitlines(keepends=True)} for source in sources]
    made[0]["metadata"] = {"tags": [cells.PARAMETERS]}
    return {"cells": made, "nbformat": 4}


def test_cells_are_run_in_order_as_jupyter_runs_them() -> None:
    asked = []

    def shell(command: str) -> str:
        asked.append(command)
        return "said\n"

    made = notebook(
        "NAME = 'a'\nCOUNT = 3",
        "import asyncio\nawait asyncio.sleep(0, NAME * COUNT)",
        "if COUNT > 1:\n    !astra push --name={NAME} \\\n        --count={COUNT}\n'end'",
        "print(1)\nprint(2)",
    )
    names = cells.run(made, shell, {"COUNT": 2})
    assert names["COUNT"] == 2 and asked == ["astra push --name=a         --count=2"]
    assert [len(cell["outputs"]) for cell in cells.code(made)] == [0, 1, 2, 1]
    page = cells.page(made)
    assert "```python\nNAME = 'a'\nCOUNT = 3\n```" in page and "```text\n'aa'\n```" in page
    assert "```text\nsaid\n'end'\n```" in page and page.endswith("```text\n1\n2\n```\n")


def test_parameters_that_there_are_not_and_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the notebook has no COUNTS"):
        cells.run(notebook("COUNT = 3"), str, {"COUNTS": 2})
    untagged = notebook("COUNT = 3")
    untagged["cells"][0]["metadata"] = {}
    with pytest.raises(InputError, match="no cell is tagged 'parameters', and COUNT are given"):
        cells.run(untagged, str, {"COUNT": 2})
    (tmp_path / "old.ipynb").write_text('{"nbformat": 3, "worksheets": []}')
    with pytest.raises(InputError, match="nbformat 3; store it as version 4"):
        cells.read(tmp_path / "old.ipynb")


@pytest.mark.parametrize("file", cells.files(), ids=lambda file: file.stem)
def test_what_is_stored_was_run_once_in_order_and_names_no_machine(file: Path) -> None:
    stored = cells.read(file)
    code = list(cells.code(stored))
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert sum(cells.PARAMETERS in cell["metadata"].get("tags", ()) for cell in code) == 1
    text = file.read_text(encoding="utf-8")
    assert len(text) < 20_000 and "error" not in {output["output_type"] for cell in code for output in cell["outputs"]}
    assert not any(folder in text for folder in ("/home", "/root", "/tmp", "/work"))


SHOP = ToolSpec("order_status", "Where an order is.", {"type": "object", "properties": {"order": {"type": "string"}}})


@pytest.mark.nightly
def test_ones_own_conversations_on_a_file_of_weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With a tiny random Llama in place of SmolLM2; its tokenizer knows the shop's words, so that rows are short."""
    folder = tmp_path_factory.mktemp("own")
    said = [Message("user", f"Where is {question} what is with it?") for question in ("A12", "B907", "F345")]
    rendered = "".join(one.text for message in said for one in QWEN3.render([message], [SHOP]))
    words = [rendered, "order_status is packed on its way delivered waiting for payment", str(SHOP)]
    vocabulary = gguf_world.trained(pre_tokenizers.ByteLevel(add_prefix_space=False), 800, words * 4)
    template = PLAIN_CHATML.replace("SYSTEM", "'You are a tiny model.'")
    keys = {"tokenizer.chat_template": template, "llama.context_length": 1_024}
    gguf_world.write(folder / "tiny.gguf", kind="Q4_1", vocabulary=vocabulary, keys=keys)
    (folder / "config.py").write_text(CONFIG.format(**gguf_world.SIZES, rows=len(vocabulary[0]) + 3))
    with programs("launch.sft", folder) as start:
        tiny = {"GGUF": f"{folder}/tiny.gguf", "CONFIG": f"{folder}/config.py", "STEPS": 2}
        shown, _ = run_notebook("own_data", start, WORKDIR=f"{folder}/run", **tiny)
    assert "train.jsonl: 200 of 200 rows" in shown and "2 steps" in shown and "held out" in shown
    assert "parameters of adapters" in shown
    assert (folder / "run" / "adapters" / "adapter_config.json").exists()


CONFIG = """
from astra_jax.models.llama.presets import LlamaConfig
from astra_jax.sft.config import SFTConfig
from configs.training import SFTRun

MODEL = LlamaConfig(vocab_size={rows}, d_model={hidden_size}, n_layers={num_hidden_layers}, d_ff={intermediate_size},
                    n_heads={num_attention_heads}, n_kv_heads={num_key_value_heads}, head_dim={head_dim},
                    tie_embeddings=True, rope_theta={rope_theta}, rms_eps={rms_norm_eps}, max_positions=1_024)
CONFIG = SFTRun(MODEL, SFTConfig(sample_every=0))
"""
