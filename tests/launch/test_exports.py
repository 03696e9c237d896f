"""What a run exports stops after its turn, in transformers and by the files that vLLM reads, with no flag."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from export_world import FAMILIES, LLAMA, base_folder, ending
from programs_world import ended
from selection import by_day
from template_world import template

from astra_jax import chat_files
from astra_jax.models import hf_checkpoint
from astra_jax.run import model_card, weights
from astra_jax.tokenizer import ChatTokenizer
from launch.flags.exports import to_hf

TALK = [{"role": "user", "content": "Hello?"}]


def trained(base: Path, workdir: Path, family: str, *, completed: bool = True) -> Path:
    """A run's checkpoints, as its first step leaves them; `completed=False`: as runs left them before."""
    model, checkpoints = FAMILIES[family][0], workdir / "checkpoints"
    if completed:
        model_card.complete(checkpoints, ChatTokenizer.load(base), base)
    else:
        checkpoints.mkdir(parents=True)
        chat_files.copy_tokenizer(base, checkpoints)
    tokenizer = ChatTokenizer.load(base)
    weights.save_orbax(ending(model, tokenizer.eos_id), model, checkpoints, step=1)
    return checkpoints


def made(folder: Path, family: str, **generation) -> Path:
    name = FAMILIES[family][2]
    return base_folder(folder, family, template=template(name) if name else "", **generation)


@pytest.mark.parametrize(
    ("family", "completed"),
    [
        *by_day([(family, True) for family in FAMILIES], ("qwen2", True)),
        *by_day([(family, False) for family in FAMILIES], ("smollm2", False)),
    ],
)
def test_generate_stops_after_the_turn(tmp_path: Path, family: str, completed: bool, capsys) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    base = made(tmp_path / "base", family, temperature=0.6, top_p=0.9)
    checkpoints = trained(base, tmp_path / "run", family, completed=completed)
    to_hf(checkpoints, tmp_path / "hf")
    assert ("changed to the chat format that the run trained" in capsys.readouterr().out) == (not completed)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ours = ChatTokenizer.load(base)
    prompt = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert prompt["input_ids"][0].tolist() == ours.encode(tokenizer.decode(prompt["input_ids"][0]))
    (said,) = model.generate(**prompt)[:, prompt["input_ids"].shape[1] :].tolist()
    assert said == [ours.eos_id]
    talk = pipeline("text-generation", model=str(tmp_path / "hf"))(TALK)[0]["generated_text"]
    assert talk[-1] == {"role": "assistant", "content": ""}

    # vLLM stops at the tokenizer's end token, and at all of the generation configuration.
    content, config = (
        json.loads((tmp_path / "hf" / name).read_text()) for name in ("generation_config.json", "config.json")
    )
    stored = json.loads((base / "generation_config.json").read_text())
    assert content == stored | {"eos_token_id": [ours.eos_id, stored["eos_token_id"]]}
    assert config["eos_token_id"] == content["eos_token_id"] and tokenizer.eos_token_id == ours.eos_id
    assert tokenizer.pad_token == json.loads((base / "tokenizer_config.json").read_text())["pad_token"]
    assert model.config.eos_token_id == content["eos_token_id"]


def test_a_serving_folder_stops_too(tmp_path: Path) -> None:
    base = made(tmp_path / "base", "qwen2")
    tokenizer = ChatTokenizer.load(base)
    hf_checkpoint.write_serving_folder(FAMILIES["qwen2"][0], base, tokenizer.changed_files, tmp_path / "served")
    for name in ("generation_config.json", "config.json"):
        assert json.loads((tmp_path / "served" / name).read_text())["eos_token_id"] == [tokenizer.eos_id, 0]
    again = ChatTokenizer.load(tmp_path / "served")
    assert again.changed_files == {} and again.end_ids == tokenizer.end_ids


@pytest.mark.parametrize("stored", [None, 0, [0], [5, 0], [2, 0], "no file", "config.json"])
def test_end_tokens_in_every_form_are_kept_beside_the_turns(tmp_path: Path, stored) -> None:
    base = made(tmp_path / "base", "qwen2")
    file = base / "generation_config.json"
    if isinstance(stored, str):
        file.unlink()
        config = json.loads((base / "config.json").read_text()) | {"bos_token_id": 0, "pad_token_id": 4}
        (base / "config.json").write_text(json.dumps(config | ({"eos_token_id": 1} if stored != "no file" else {})))
    else:
        file.write_text(json.dumps({"eos_token_id": stored, "temperature": 0.7}))
    before = file.read_bytes() if file.exists() else None
    tokenizer = ChatTokenizer.load(base)
    assert tokenizer.format.turn_end == "<|im_end|>" and tokenizer.eos_id == 2
    model_card.complete(tmp_path / "run", tokenizer, base)
    content = json.loads((tmp_path / "run" / file.name).read_text())
    wanted = {"no file": [2, 0], "config.json": [2, 1]}.get(str(stored), [2, 0] if stored != [5, 0] else [2, 5, 0])
    assert content["eos_token_id"] == wanted and (before is None or content["temperature"] == 0.7)
    if stored == [2, 0]:
        assert (tmp_path / "run" / file.name).read_bytes() == before, "what has the turn's end stays as it is"
    if before is None:  # transformers takes those of config.json then
        assert (content["bos_token_id"], content["pad_token_id"]) == (0, 4)


@pytest.mark.parametrize("form", ["text", "settings", "null", "no file", "map"])
def test_the_tokenizers_end_token_is_the_turns(tmp_path: Path, form: str) -> None:
    from transformers import AutoTokenizer

    base = made(tmp_path / "base", "smollm2")
    file = base / "tokenizer_config.json"
    config = json.loads(file.read_text())
    if form == "settings":
        file.write_text(json.dumps(config | {"eos_token": {"content": "<|endoftext|>", "lstrip": False}}))
    elif form == "null":
        file.write_text(json.dumps(config | {"eos_token": None}))
    elif form == "no file":
        file.unlink()
    elif form == "map":
        (base / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "sep_token": "x"}))
    tokenizer = ChatTokenizer.load(base)
    model_card.complete(tmp_path / "run", tokenizer, base)
    hf_checkpoint.write_config(FAMILIES["smollm2"][0], tmp_path / "run")
    read = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert read.eos_token == "<|im_end|>"
    text = "<|im_start|>user\nIt's  12 o'clock, 北京.<|im_end|>\n<tool_call>"
    assert read(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    assert ChatTokenizer.load(tmp_path / "run").changed_files == {}


def test_an_instruct_models_files_stay_byte_for_byte_and_what_is_left_is_said(tmp_path: Path) -> None:
    base = made(tmp_path / "base", "qwen3", eos_token_id=[2, 0])
    config = json.loads((base / "tokenizer_config.json").read_text()) | {"eos_token": "<|im_end|>"}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    more = {"tokenizer.model": "?", "added_tokens.json": "{}", "LICENSE": "MIT", "modeling_own.py": "", ".git": ""}
    for name, text in more.items():
        (base / name).write_text(text)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    (said,) = model_card.complete(tmp_path / "run", ChatTokenizer.load(base), base)
    assert said == f"not copied from {base}: LICENSE, modeling_own.py"
    copied = {str(one.relative_to(tmp_path / "run")) for one in (tmp_path / "run").rglob("*") if one.is_file()}
    assert copied == {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "tokenizer.model",
        "added_tokens.json", "additional_chat_templates/rag.jinja",
    }  # fmt: skip
    for name in copied:
        assert (tmp_path / "run" / name).read_bytes() == (base / name).read_bytes()


def test_a_template_with_tools_takes_the_place_of_all_of_a_folder_without(tmp_path: Path) -> None:
    """A `tool_use` that were left would go before it."""
    base = base_folder(tmp_path / "base", "llama3", template=template("llama3"))
    assert ChatTokenizer.load(base).added == ()
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text(template("llama3"))
    tokenizer = ChatTokenizer.load(base)
    model_card.complete(tmp_path / "run", tokenizer, base)
    assert not (tmp_path / "run" / "additional_chat_templates").exists()
    again = ChatTokenizer.load(tmp_path / "run")
    assert again.format == tokenizer.format and again.changed_files == {}


@pytest.mark.slow
def test_a_base_models_run_exported_by_the_programs_stops(tmp_path: Path) -> None:
    """`astra sft`, then `astra convert --to_hf=…`, of a Llama without a template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = made(tmp_path / "base", "llama3")
    (tmp_path / "config.py").write_text(
        "from astra_jax.sft.data import DataConfig\nfrom astra_jax.models.llama.presets import LlamaConfig\n"
        "from astra_jax.sft.config import SFTConfig\nfrom configs.training import SFTRun\n"
        f"MODEL = {FAMILIES['llama3'][0]!r}\n"
        "CONFIG = SFTRun(MODEL, SFTConfig(data=DataConfig(seq_len=512, packing_bins=4), batch_size=2, steps=2,\n"
        "                learning_rate=1e-6, sample_every=0))\n"
    )
    rows = [
        {"messages": [*TALK, {"role": "assistant", "content": ""}]},
        {"messages": [*TALK, {"role": "assistant", "content": "Hi."}]},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(program: str, **named: Path) -> str:
        done = ended(program, *(f"--{name}={value}" for name, value in named.items()))
        assert done.code == 0, done.errors[-3000:]
        return done.out

    data, workdir = tmp_path / "data.jsonl", tmp_path / "run"
    said = run("launch.sft", config=tmp_path / "config.py", weights=base, data=data, workdir=workdir)
    assert "written for the trained format, whose turns end with <|eot_id|> (end tokens: 4 1)" in said
    assert "chat_template.jinja, generation_config.json, tokenizer_config.json" in said
    run("launch.convert", from_orbax=workdir / "checkpoints", to_hf=tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made_by_model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").generate(**prompt)
    assert made_by_model.tolist()[0][prompt["input_ids"].shape[1] :] == [LLAMA.index("<|eot_id|>")]
