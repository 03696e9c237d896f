"""Programs that start from an adapter of peft: merged, continued, or refused with what to type instead."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from parity_world import hf_model, logits_of, tokens_of
from programs_world import programs
from sft_world import make_dataset, make_tokenizer, trajectories

from astra_jax.models import adapters, hf_checkpoint
from astra_jax.models import peft as own
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run import frozen, weights

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow

MODEL = Qwen3Config(
    vocab_size=400, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=64, tie_embeddings=True,
    max_positions=512,
)  # fmt: skip
CONFIG = """
from astra_jax.sft.data import DataConfig
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.sft.config import SFTConfig
from configs.training import SFTRun

MODEL = Qwen3Config(vocab_size=400, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=64,
                    tie_embeddings=True, max_positions=512)
DATA = DataConfig(seq_len=512, packing_bins=4)
CONFIG = SFTRun(MODEL, SFTConfig(data=DATA, batch_size=4, steps=1, learning_rate=0.0, weight_decay=0.0, sample_every=0))
"""
SETTINGS = ("--config.lora.rank=4", "--config.lora.alpha=8", '--config.lora.targets=["v_proj", "q_proj"]')


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(folder with `base`, `adapter`, `data` and `config.py`, peft's model)."""
    folder = tmp_path_factory.mktemp("peft")
    tokenizer = make_tokenizer(folder / "base")
    hf_model(MODEL).save_pretrained(folder / "base")
    (folder / "base" / "generation_config.json").write_text(tokenizer.generation_config())
    under = copy.deepcopy(hf_model(MODEL))
    under.name_or_path = under.config._name_or_path = str(folder / "base")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(under, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    theirs.save_pretrained(folder / "adapter")
    make_dataset(folder / "data", trajectories(24, longest=2))
    (folder / "config.py").write_text(CONFIG)
    return folder, theirs.eval()


def expected(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.tensor(tokens)).logits.numpy()


def test_convert_merges_and_copies_what_lies_beside_adapter_and_base(world, tmp_path) -> None:
    folder, theirs = world
    tokens = tokens_of(MODEL, length=40)
    adapter = tmp_path / "adapter"
    shutil.copytree(folder / "adapter", adapter)
    with programs("launch.convert", tmp_path) as convert:
        plain = convert(f"--from_peft={adapter}", f"--to_hf={tmp_path / 'plain'}")
        assert plain.code == 0, plain.errors
        merged = type(hf_model(MODEL)).from_pretrained(tmp_path / "plain")
        np.testing.assert_allclose(expected(merged, tokens), expected(theirs, tokens), atol=1e-5, rtol=0)
        for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
            assert (tmp_path / "plain" / name).read_bytes() == (folder / "base" / name).read_bytes()

        # The adapter's own tokenizer goes before, as one; what ends a turn is still the base's to say.
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / "base" / name, adapter)
        (adapter / "chat_template.jinja").write_text("{{ messages }}")
        files = convert(f"--from_peft={adapter}", f"--to_hf={tmp_path / 'files'}", f"--base={folder / 'base'}")
        assert files.code == 0, files.errors
        assert (tmp_path / "files" / "chat_template.jinja").read_text() == "{{ messages }}"
        written = tmp_path / "files" / "generation_config.json"
        assert written.read_bytes() == (folder / "base" / "generation_config.json").read_bytes()

        vocabulary = json.loads((adapter / "tokenizer.json").read_text())
        last = vocabulary["added_tokens"][-1]
        vocabulary["added_tokens"].append(last | {"id": 400, "content": "<new>"})
        (adapter / "tokenizer.json").write_text(json.dumps(vocabulary))
        grown = convert(f"--from_peft={adapter}", f"--to_hf={tmp_path / 'grown'}")
        assert grown.code == 2 and "has 401 tokens, but the embedding with the adapter has 400 rows" in grown.line

        content = json.loads((adapter / "adapter_config.json").read_text())
        for name, said in (
            (None, "does not name the weights that it was trained on; give them with --base"),
            ("/there/is/none", "base_model_name_or_path=/there/is/none of .* is not a folder on this machine"),
            (str(adapter), "is an adapter of peft too"),
        ):
            (adapter / "adapter_config.json").write_text(json.dumps(content | {"base_model_name_or_path": name}))
            ended = convert(f"--from_peft={adapter}", f"--to_hf={tmp_path / 'none'}")
            assert ended.code == 2
            assert said.partition(" of .*")[0] in ended.line and said.rpartition(".* ")[2] in ended.line
        ended = convert(f"--from_peft={folder / 'base'}", f"--to_hf={tmp_path / 'none'}")
        assert ended.code == 2 and "is not an adapter of peft" in ended.line
        ended = convert(f"--from_hf={adapter}", f"--to_orbax={tmp_path / 'none'}")
        assert ended.code == 2 and f"astra convert --from_peft={adapter} --to_hf=DIR" in ended.line


def test_sft_continues_an_adapter_merges_it_or_says_what_to_type(world, tmp_path) -> None:
    folder, theirs = world
    tokens = tokens_of(MODEL, length=40)
    start = (f"--config={folder / 'config.py'}", f"--weights={folder / 'adapter'}", f"--data={folder / 'data'}")
    with programs("launch.sft", tmp_path) as sft:
        whole = sft(*start, f"--workdir={tmp_path / 'whole'}")
        assert whole.code == 0 and "with an adapter merged" in whole.out, whole.errors
        found = weights.load(tmp_path / "whole" / "checkpoints", MODEL)
        np.testing.assert_allclose(logits_of(found, MODEL, tokens), expected(theirs, tokens), atol=2e-4, rtol=0)

        going = sft(*start, f"--workdir={tmp_path / 'lora'}", *SETTINGS)
        assert going.code == 0 and "the base of an adapter that the run continues" in going.out, going.errors
        checkpoints = tmp_path / "lora" / "checkpoints"
        lora, loaded = own.load(folder / "adapter", MODEL)
        trained = weights.load_adapters(checkpoints, MODEL)
        jax.tree.map(np.testing.assert_array_equal, trained, loaded)
        kept = frozen.read(checkpoints).lora
        assert dataclasses.replace(kept, targets=lora.targets) == lora and {*kept.targets} == {*lora.targets}
        base = hf_checkpoint.load_hf(folder / "base", MODEL)
        joined = adapters.attach_lora(trained, base, lora)
        np.testing.assert_allclose(logits_of(joined, MODEL, tokens), expected(theirs, tokens), atol=2e-4, rtol=0)

        other = sft(*start, f"--workdir={tmp_path / 'other'}", "--config.lora.rank=8")
        assert other.code == 2 and "astra convert --from_peft --to_hf" in other.line
        assert (
            """--config.lora.rank=4 --config.lora.alpha=8.0 --config.lora.targets='["q_proj", "v_proj"]'"""
            in other.line
        )
        base_flag = f"--base={folder / 'base'}"
        needless = sft(*start, f"--workdir={tmp_path / 'n'}", f"--weights={folder / 'base'}", base_flag)
        assert needless.code == 2 and "is not an adapter of peft; leave out --base" in needless.line
