"""`--config=sft:auto` and `grpo:auto`: models of strangers, and settings that follow from data, model and devices."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from grpo_world import make_grpo_world
from programs_world import Programs, programs
from selection import by_day
from sft_world import make_tokenizer
from template_world import template
from tpu_world import needs_libtpu

from astra_jax.mesh import AXES
from astra_jax.models.lora import LoRA
from astra_jax.run.chips import CHIPS
from astra_jax.sft.data import DataStats
from configs import auto
from configs.training import MODELS, PRESETS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ODD: dict[str, Any] = dict(vocab_size=413, num_hidden_layers=2, hidden_size=72, intermediate_size=152)
STRANGERS = {
    "qwen3": ("qwen3", dict(num_attention_heads=6, num_key_value_heads=3, head_dim=20, tie_word_embeddings=True)),
    "qwen2": ("qwen2_5", dict(num_attention_heads=6, num_key_value_heads=1)),
    "llama": ("llama3_1", dict(num_attention_heads=4, num_key_value_heads=2, attention_bias=True, rope_parameters={
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256})),
}  # fmt: skip
"""By `model_type`: the chat template, and what beside `ODD` its configuration has."""
PLACE = auto.DeviceSetup(dict.fromkeys(AXES, 1), 16 * 2**30, "cpu", "cpu")


def stranger(folder: Path, kind: str, **more: Any) -> Path:
    """A tiny random model as transformers saves it, of sizes that no preset has."""
    named, sizes = STRANGERS[kind]
    make_tokenizer(folder)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    if kind != "llama":  # whose template wants special tokens that this tokenizer lacks
        (folder / "chat_template.jinja").write_text(template(named))
    config = transformers.AutoConfig.for_model(kind, **ODD, max_position_embeddings=1_000, **sizes, **more)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def chats(file: Path, count: int) -> Path:
    """Conversations of other lengths, a tenth of them much longer."""
    rng = random.Random(0)

    def words(most: int) -> str:
        return " ".join(
            rng.choice(["France", "北京", "capital", "of", "look", "up"]) for _ in range(rng.randint(1, most))
        )

    rows = [
        [{"role": "user", "content": words(6)}, {"role": "assistant", "content": words(200 if i % 20 == 0 else 12)}]
        for i in range(count)
    ]
    file.write_text("".join(json.dumps({"messages": row}, ensure_ascii=False) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Programs]:
    with programs("launch.sft", tmp_path_factory.mktemp("said")) as made:
        yield made


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def stats(lengths: list[int], *, cut: int = 0, longest: int = 40_960) -> DataStats:
    return DataStats(tuple(min(length, longest) for length in lengths), sum(lengths) // 2, {}, cut)


def chosen(lengths: list[int], *given: tuple[str, Any], **mesh: int) -> tuple[Any, dict[str, auto.ChosenSetting]]:
    model = MODELS["0.6b"]
    micro = {"batch_size": dict(given).get("micro_batch_size", 1)}  # as `launch.flags.auto.provisional`
    config = auto.replaced(auto.provisional_sft(model), micro | dict(given))

    def count(data: Any) -> DataStats:
        return stats(lengths, longest=data.seq_len, cut=sum(length > data.seq_len for length in lengths))

    sizes = dict.fromkeys(AXES, 1) | mesh
    config, choices = auto.choose_for_data(config, model, count, {name for name, _ in given}, mesh=sizes)
    place = dataclasses.replace(PLACE, mesh=sizes)
    names = {name for name, _ in given}
    config, more = auto.choose_for_devices(
        config, model, place, names, tokens=config.data.seq_len, rows=config.batch_size
    )
    return config, {one.setting: one for one in [*choices, *more]}


def draw(count: int, median: float, spread: float) -> list[int]:
    rng = random.Random(0)
    return [max(8, int(rng.lognormvariate(0, spread) * median)) for _ in range(count)]


@pytest.mark.parametrize("lengths", [draw(1_000, 90, 0.6), draw(1_000, 900, 1.0), draw(1_000, 4_000, 0.3)])
def test_a_thousand_conversations_give_a_hundred_steps(lengths: list[int]) -> None:
    """They gave 2 with the paper's rows and batch."""
    config, choices = chosen(lengths)
    data = config.data
    fitting = sum(length <= data.seq_len for length in lengths)
    assert fitting / 1_000 >= 0.95 and data.seq_len <= 2 * sorted(lengths)[950]
    reason = choices["data.seq_len"].reason
    assert reason.startswith(f"{fitting:,} of 1,000 examples")
    assert fitting == 1_000 or f"{1_000 - fitting} are cut" in reason
    rows = auto.steps_for_epochs(stats(lengths, longest=data.seq_len), data, 1, 1.0)
    steps = -(-rows // config.batch_size)
    assert steps * config.epochs >= 100
    assert 8 <= 1_000 / steps <= 32
    assert config.eval_every <= steps and config.checkpoint_every <= steps


def test_few_and_many_examples_have_8_to_32_in_a_step() -> None:
    for count, least, most in ((40, 4, 12), (20_000, 16, 40)):
        lengths = [1_000] * count
        config, _ = chosen(lengths)
        assert least <= config.batch_size * 1.0 <= most


def test_the_command_line_goes_first() -> None:
    given = (("data.seq_len", 640), ("batch_size", 12), ("micro_batch_size", 3), ("remat", "heads"))
    config, choices = chosen([700] * 500, *given, ("learning_rate", 1e-3), ("eval_every", 7))
    for name, value in (*given, ("learning_rate", 1e-3), ("eval_every", 7)):
        assert attrgetter(name)(config) == value == choices[name].value and choices[name].reason == "given"
    config, _ = chosen([700] * 500, ("micro_batch_size", 3))
    assert config.micro_batch_size == 3 and config.batch_size % 3 == 0


HOST = auto.Accelerators(8, 1, 1, int(75.7 * 2**30), "NVIDIA H100 80GB HBM3", "gpu")
CLUSTER = dataclasses.replace(HOST, count=32, hosts=4)
SLICE = auto.Accelerators(16, 4, 1, int(31.25 * 2**30), "TPU v6 lite", "tpu")


@pytest.mark.parametrize(
    ("size", "devices", "tokens", "batch", "mesh", "why"),
    [
        ("0.6b", HOST, 2_048, None, {"data": 8}, "each device has a copy of the weights: about 20"),
        ("4b", HOST, 2_048, None, {"fsdp": 8}, "so they are spread$"),
        ("4b", HOST, 20_480, 32, {"data": 2, "context": 4}, "4 devices together .*rows of 20,480 tokens are"),
        ("4b", HOST, 2_048, 2, {"data": 2, "context": 4}, "rows of 2,048 tokens are spread over 4"),
        ("8b", CLUSTER, 2_048, None, {"data": 4, "fsdp": 8}, "a copy on each host"),
        ("32b", CLUSTER, 2_048, None, {"fsdp": 32}, "so they are spread$"),
        ("4b", SLICE, 4_096, 32, {"fsdp": 16}, "so they are spread$"),
        ("4b", dataclasses.replace(SLICE, count=32, hosts=8, slices=2), 4_096, None, {"data": 2, "fsdp": 16}, "spread"),
        ("0.6b", dataclasses.replace(HOST, count=6), 512, None, {"data": 6}, "copy"),
        ("32b", dataclasses.replace(HOST, count=1), 512, None, {}, "spread"),
    ],
)  # fmt: skip
def test_the_default_mesh_follows_from_devices_and_model(
    size: str, devices: auto.Accelerators, tokens: int, batch: int | None, mesh: dict[str, int], why: str
) -> None:
    config = auto.provisional_sft(MODELS[size])
    found, reason = auto.choose_mesh(MODELS[size], config, devices, tokens=tokens, batch=batch)
    assert {axis: number for axis, number in found.items() if number > 1} == mesh
    assert list(found) == list(AXES) and re.search(why, reason), reason


def test_adapters_of_a_large_model_need_no_spreading() -> None:
    config = dataclasses.replace(auto.provisional_sft(MODELS["4b"]), lora=LoRA(rank=16))
    model = dataclasses.replace(MODELS["4b"], param_dtype="bfloat16")
    assert auto.choose_mesh(model, config, HOST, tokens=2_048, batch=None)[0]["data"] == 8


def test_a_mesh_gets_a_row_for_each_device() -> None:
    config, _ = chosen([3_000] * 900, fsdp=16)
    assert config.batch_size == config.micro_batch_size == 16
    config, _ = chosen([3_001] * 900, context=2, fsdp=2)
    assert config.data.seq_len % (2 * 2 * 128) == 0


def test_less_memory_computes_more_again_and_fewer_rows() -> None:
    model = MODELS["0.6b"]
    config = auto.replaced(auto.provisional_sft(model), {"data.seq_len": 2_048, "batch_size": 16})
    found = []
    for gib in (80, 24, 14, 4):
        place = dataclasses.replace(PLACE, memory=gib * 2**30)
        one, choices = auto.choose_for_devices(config, model, place, (), tokens=2_048, rows=16)
        found.append((one.micro_batch_size, one.remat))
        assert ("it may not fit" in choices[0].reason) == (gib == 4)
        assert ("--config.sft.optimizer_offload=true" in choices[0].reason) == (gib == 4)
    assert found[0] == (4, "none") and found[-1] == (1, "full")
    remats = ["none", "dots", "heads", "attention", "full"]
    assert [remats.index(remat) for _, remat in found] == sorted(remats.index(remat) for _, remat in found)


@pytest.mark.parametrize(
    ("size", "chip", "given", "chosen"),
    [
        ("0.6b", "4090", {}, (None, "none")),
        ("4b", "h100", {}, (None, "none")),
        ("8b", "h100", {}, (16, "none")),
        ("4b", "4090", {}, (16, "none")),
        ("8b", "4090", {}, (16, "int8")),
        ("8b", "4090", {"lora.rank": 64}, (64, "int8")),
        ("8b", "4090", {"lora.rank": None}, (None, "none")),
        ("8b", "4090", {"lora.rank": 8, "lora.weight_quantization": "none"}, (8, "none")),
        ("30b-a3b", "4090", {}, (16, "none")),
    ],
)
def test_adapters_and_8_bits_are_chosen_as_far_as_memory_needs_them(
    size: str, chip: str, given: dict[str, Any], chosen: tuple[int | None, str]
) -> None:
    place = dataclasses.replace(PLACE, memory=CHIPS[chip].hbm_bytes, kind=chip, platform="gpu")
    model = MODELS[size].in_training_precision()
    config = auto.replaced(auto.provisional_sft(model), given)
    found, choices = auto.choose_adapters(config, model, place, given.keys())
    assert (found.lora.rank, found.lora.weight_quantization) == chosen
    assert all("GiB" in one.reason for one in choices)
    if found.lora.rank == 16:
        assert "--config.sft.lora.rank=None trains all" in choices[0].reason


def test_rates_are_the_papers_and_those_of_adapters_are_larger() -> None:
    for size, rate in {"smollm2-135m": 1e-4, "0.6b": 1e-5, "14b": 5e-6, "32b": 2e-6, "30b-a3b": 5e-6}.items():
        assert auto.sft_rate(MODELS[size], LoRA()) == rate == PRESETS[f"sft:{size}"]().sft.learning_rate
        assert auto.sft_rate(MODELS[size], LoRA(rank=8)) >= 1e-4


def test_episodes_follow_from_prompts_and_the_models_context() -> None:
    model = MODELS["smollm2-135m"]  # 8,192 positions
    for prompts, prompt, response in ((None, 4_096, 4_096), ([700, 1_210], 1_280, 6_912), ([8_000], 8_000, 192)):
        config, choices = auto.choose_for_episodes(auto.provisional_grpo(), model, (), prompts=prompts)
        episode = config.episode
        assert (episode.max_prompt_tokens, episode.max_response_tokens) == (prompt, response)
        assert max(config.row_buckets) >= prompt + response
        assert choices[-1].value == 2e-6
    config, _, needed = auto.choose_concurrency(config, model, PLACE, (), None)
    assert config.concurrent_groups >= 1 and needed < PLACE.memory
    with pytest.raises(ValueError, match="the longest prompt of the environments has 9,000 tokens, and the model tak"):
        auto.choose_for_episodes(auto.provisional_grpo(), model, (), prompts=[9_000])


# ---------------------------------------------------------------------------------------------------------------------
# Programs


@pytest.mark.slow
@pytest.mark.parametrize("kind", by_day(STRANGERS, *[*STRANGERS][:1]))
def test_a_model_without_a_preset_is_trained_on_ones_own_chats(tmp_path, start, kind: str) -> None:
    model = stranger(tmp_path / "model", kind)
    data, workdir = chats(tmp_path / "chats.jsonl", 200), tmp_path / "run"
    flags = [f"--weights={model}", f"--data={data}", f"--workdir={workdir}", "--config.sft.sample_every=0"]
    home = {"XDG_CACHE_HOME": str(tmp_path / "home")}
    auto_flags = ["--config=sft:auto", *flags, "--config.sft.steps=2"]
    ended = start.begin(*auto_flags, **home).wait()
    assert ended.code == 0, ended.errors[-3000:]
    assert "--config=sft:auto chooses" in ended.out
    assert re.search(r"\n  data.seq_len \d+: 1?\d\d of 200 examples \(\d+%\) fit", ended.out)
    kept = {one["setting"]: one["value"] for one in json.loads((workdir / auto_file()).read_text())["choices"]}
    run = json.loads((workdir / "run.json").read_text())["config"]
    assert run["model"]["d_model"] == 72 and run["model"]["n_layers"] == 2
    assert run["sft"]["data"]["seq_len"] == kept["data.seq_len"] and run["sft"]["batch_size"] == kept["batch_size"]
    written = json.loads((workdir / "checkpoints" / "config.json").read_text())
    saved = json.loads((model / "config.json").read_text())
    for name in ("hidden_size", "num_key_value_heads", "intermediate_size", "tie_word_embeddings"):
        assert written[name] == saved.get(name, written[name])
    if kind != "llama":
        return
    # The run resumes with the choices that it began with, also with other settings of the devices.
    ended = start.begin("--config=sft:auto", *flags, "--config.sft.steps=3").wait()
    assert ended.code == 0, ended.errors[-3000:]
    assert "3 steps, finished" in ended.out
    again = {one["setting"]: one["value"] for one in json.loads((workdir / auto_file()).read_text())["choices"]}
    assert again == kept
    # Data that has grown is another run, and nothing else is said to differ.
    grown = chats(tmp_path / "grown.jsonl", 900)
    line = start("--config=sft:auto", *flags, "--config.sft.steps=4", f"--data={grown}").line
    assert "belongs to another run: dataset is" in line and "more settings" not in line
    # And a run's checkpoints are a model like any other.
    other = [f"--weights={workdir / 'checkpoints'}", f"--workdir={tmp_path / 'other'}", "--config.sft.batch_size=3"]
    ended = start.begin(*auto_flags, *other, "--config.lora.rank=2", **home).wait()
    assert ended.code == 0, ended.errors[-3000:]
    assert "batch_size 3: given" in ended.out and "learning_rate 0.0002" in ended.out


def auto_file() -> str:
    return "auto.json"


def test_all_that_is_not_computed_is_named_at_once(tmp_path, start) -> None:
    model = stranger(tmp_path / "model", "llama")
    content = json.loads((model / "config.json").read_text())
    content |= {"architectures": ["LlamaForSequenceClassification"], "hidden_act": "gelu", "mlp_bias": True}
    content |= {"rope_parameters": {"rope_type": "longrope"}, "layer_types": ["sliding_attention"] * 2}
    (model / "config.json").write_text(json.dumps(content))
    data = chats(tmp_path / "chats.jsonl", 3)
    line = start("--config=sft:auto", f"--weights={model}", f"--data={data}", f"--workdir={tmp_path / 'run'}").line
    for part in ("architectures is", "hidden_act is 'gelu'", "mlp_bias is True", "'longrope'", "sliding_attention"):
        assert part in line, part
    content = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_act": "gelu"}
    (model / "config.json").write_text(json.dumps(content))
    line = start("--config=sft:auto", f"--weights={model}", f"--data={data}", f"--workdir={tmp_path / 'run'}").line
    assert "model_type is 'mistral'; this port reads 'llama'" in line and "hidden_act is 'gelu'" in line


def test_a_preset_of_other_sizes_is_refused_with_all_of_them_and_the_fix(tmp_path, start) -> None:
    model = stranger(tmp_path / "model", "qwen3")
    flags = [f"--weights={model}", f"--workdir={tmp_path / 'run'}", f"--data={chats(tmp_path / 'chats.jsonl', 3)}"]
    line = start("--config=sft:0.6b", *flags).line
    for part in ("d_model is 72 there, 1024 here", "n_layers is 2 there, 28 here", "vocab_size is 413 there"):
        assert part in line, part
    assert line.endswith("use --config=sft:auto, which takes the model from --weights")
    line = start("--config=sft:auto", *flags, "--config.model.n_layers=3").line
    assert "n_layers is 2 there, 3 here; leave out --config.model.n_layers" in line


def test_settings_are_listed_without_weights(start) -> None:
    ended = start.begin("--config=sft:auto", "--help_config").wait()
    assert ended.code == 0 and "--config.sft.data.seq_len=" in ended.out


@pytest.mark.slow
def test_a_grpo_run_takes_its_lengths_from_the_environments(tmp_path, start) -> None:
    make_grpo_world(tmp_path)
    flags = [f"--weights={tmp_path / 'serve'}", f"--environments={tmp_path / 'environments'}"]
    flags += [f"--workdir={tmp_path / 'run'}", "--config=grpo:auto", "--config.grpo.steps=1"]
    short = ["--config.grpo.episode.max_response_tokens=60", "--config.grpo.batch_size=1", "--config.grpo.group_size=4"]
    run = start.begin(*flags, *short, module="launch.grpo")
    while not (tmp_path / "run" / "run.json").exists():  # all is printed, and the run is set up
        assert run.poll() is None, run.errors()[-3000:]
        time.sleep(0.05)
    run.kill()
    assert re.search(r"episode.max_prompt_tokens \d+: the longest prompt has \d+ tokens", run.said())
    assert "max_response_tokens 60: given" in run.said() and "micro_batch_size" in run.said()


@needs_libtpu
@pytest.mark.nightly
def test_a_plan_is_of_the_weights_model(tmp_path, start) -> None:
    model = stranger(tmp_path / "model", "qwen3")
    flags = ["--config=sft:auto", "--topology=v6e:2x2", "--tokens=512", "--json"]
    line = start(*flags, module="launch.plan").line
    assert "takes the model from --weights" in line
    ended = start.begin(*flags, f"--weights={model}", module="launch.plan").wait()
    assert ended.code == 0, ended.errors[-3000:]
    assert "data.seq_len 512: --tokens=512" in ended.out
    assert json.loads(ended.out.splitlines()[-1])["fits"]
