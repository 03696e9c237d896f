"""What a run prints before its first step: what is read and dropped, how many steps that gives, and what helps."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import jax
import msgspec
import pytest
from plain_world import make_folder
from sft_world import AfterUpdate, make_dataset, make_tokenizer, starting, trajectories, trajectory
from template_world import template

from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.summary import summarise as summarise_grpo
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run.summary import duration
from astra_jax.sft import preview
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig, scan, steps_for_epochs
from astra_jax.sft.train import train
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import DatasetError
from synthesis.core.llama3_chat import LLAMA3
from synthesis.core.records import Message, Trajectory

PAPER = SFTConfig(data=DataConfig(seq_len=20_480))
FEW_CALLS = "Llama 3's format has one call a turn, not 2"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ChatTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("llama")
    return ChatTokenizer.load(make_folder(folder, special=LLAMA3.frame, chat_template=template("llama3_1")))


def with_two_calls(index: int) -> Trajectory:
    record = trajectory(index, ["France"])
    asked, called, result, answered = record.messages
    two = [called.tool_calls[0], msgspec.structs.replace(called.tool_calls[0], id="call_1")]
    messages = [asked, msgspec.structs.replace(called, tool_calls=two), result, result, answered]
    return msgspec.structs.replace(record, messages=messages)


@pytest.fixture(scope="module")
def parallel(tmp_path_factory) -> Path:
    """Of 20 conversations 19 have two calls in a turn, which Llama 3.1's template cannot express."""
    records = [trajectory(0, ["France"]), *map(with_two_calls, range(1, 20))]
    return make_dataset(tmp_path_factory.mktemp("data") / "parallel", records)


def line(text: str, name: str) -> str:
    (found,) = [one for one in text.splitlines() if one.startswith(f"{name} ")]
    return found.removeprefix(name).strip()


def test_what_a_template_cannot_express_is_printed_first_with_the_reason(parallel, llama) -> None:
    text = str(preview.summary(PAPER, parallel, llama))
    first = text.splitlines()[0]
    assert first.startswith("warning: 19 of 20 examples are dropped: 19 not_in_format")
    assert "first in trajectory_1: " in first and FEW_CALLS in first
    assert line(text, "examples") == "20 read, 19 dropped, 1 used"


def test_a_dropped_example_has_its_reason_in_the_preview(parallel, llama) -> None:
    out = io.StringIO()
    preview.show(parallel, llama, PAPER.data, 2, out)
    assert f"trajectory_1: dropped: not_in_format ({FEW_CALLS})" in out.getvalue()


def test_where_nothing_is_left_the_error_has_the_reason(llama, tmp_path) -> None:
    data = make_dataset(tmp_path / "data", [with_two_calls(i) for i in range(3)])
    with pytest.raises(DatasetError, match=r"3 not_in_format \(first in trajectory_0: Llama 3's format") as error:
        scan(data, llama, PAPER.data)
    assert "seq_len" not in str(error.value), "which would not help"
    with pytest.raises(DatasetError, match="3 too_long .*data.seq_len is 16.*; raise data.seq_len"):
        scan(make_dataset(tmp_path / "long", trajectories(3, longest=1)), llama, DataConfig(seq_len=16))


def test_a_thousand_conversations_give_few_steps_and_flags_that_give_more(tokenizer, tmp_path) -> None:
    """The paper's batch is 655,360 tokens."""
    data = make_dataset(tmp_path / "data", trajectories(1_000, longest=1))
    summary = preview.summary(PAPER, data, tokenizer)
    text = str(summary)
    stats = scan(data, tokenizer, PAPER.data)
    assert line(text, "data") == "data: 1,000 conversations"
    assert line(text, "tokens").startswith(f"{stats.tokens:,} an epoch, {stats.trainable:,} of them are trained on")
    assert line(text, "steps") == "2: 1 an epoch, 2 epochs"
    assert line(text, "a step").startswith(f"1,000 examples and {stats.tokens:,} tokens on average")
    few, intervals = summary.warnings
    flags = dict(re.findall(r"--config\.sft\.([\w.]+)=(\d+)", few))
    assert few.startswith("2 steps are fewer than 50: set") and {*flags} == {"data.seq_len", "batch_size"}
    better = replace(PAPER.data, seq_len=int(flags["data.seq_len"]))
    assert steps_for_epochs(stats, better, int(flags["batch_size"]), 2) >= 50
    assert intervals.startswith("2 steps are fewer than sample_every (100), checkpoint_every (100)")
    assert intervals.endswith("Set --config.sft.sample_every=1 --config.sft.checkpoint_every=1")


def test_enough_steps_are_no_warning(tokenizer, tmp_path) -> None:
    data, held_out = (make_dataset(tmp_path / name, trajectories(12)) for name in ("data", "held_out"))
    config = SFTConfig(
        data=DataConfig(seq_len=1_024), steps=60, eval_every=25, sample_every=60, checkpoint_every=20, batch_size=2
    )
    summary = preview.summary(config, data, tokenizer, held_out=held_out)
    assert not summary.warnings and not summary.alarm
    text = str(summary)
    assert line(text, "evaluations").startswith("3, each of all ")
    assert line(text, "samples").startswith("1, ") and line(text, "checkpoints") == "3"


@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_a_suggested_batch_can_be_divided(tokenizer, tmp_path, micro_batch_size) -> None:
    data = make_dataset(tmp_path / "data", trajectories(100))
    config = replace(PAPER, micro_batch_size=micro_batch_size)
    warning = preview.summary(config, data, tokenizer).warnings[0]
    (size,) = [int(one.partition("=")[2]) for one in warning.split() if "batch_size" in one]
    replace(config, batch_size=size)  # no SettingError


def test_examples_of_others_that_are_dropped_are_a_warning(tokenizer, tmp_path) -> None:
    asked = [msgspec.structs.replace(one, messages=[Message("user", "Hi")]) for one in trajectories(5)]
    held_out = make_dataset(tmp_path / "held_out", [*asked, *trajectories(1)])
    data = make_dataset(tmp_path / "data", trajectories(5))
    warnings = preview.summary(PAPER, data, tokenizer, held_out=held_out).warnings
    assert any("held-out examples are dropped: 5 no_assistant_turn" in one for one in warnings)


def test_a_run_prints_the_table_before_its_first_step_and_the_time_left_after_its_third(
    tokenizer, tmp_path, capsys
) -> None:
    model = Qwen3Config(
        vocab_size=tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=32,
        tie_embeddings=True, max_positions=512,
    )  # fmt: skip
    config = SFTConfig(data=DataConfig(seq_len=512), batch_size=2, steps=4, sample_every=0, log_every=4)
    seen: list[tuple[str, str]] = []
    hooks = [AfterUpdate(lambda step, row: seen.append(capsys.readouterr()))]
    result = train(
        config, model, starting(model.init(jax.random.key(0))), make_dataset(tmp_path / "data", trajectories(5)),
        tokenizer, tmp_path / "run", progress=False, hooks=hooks,
    )  # fmt: skip
    assert f"{result.summary}\n" == seen[0][0], "printed before the first step was logged"
    assert "step 3 of 4: " in seen[0][1] and "s a step, about 1 s left" in seen[0][1]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "1 s"), (61, "61 s"), (720, "12 min"), (4_800, "80 min"), (4_800 * 4, "5 h 20 min"),
                          (400_000, "4 d 15 h")],
)  # fmt: skip
def test_a_time_is_printed_in_its_two_largest_units(seconds, said) -> None:
    assert duration(seconds) == said


def test_grpo_has_the_same_table() -> None:
    config = GRPOConfig(steps=20, batch_size=8, group_size=4, solve_rates=(0.1, 0.9), eval_every=30)
    summary = summarise_grpo(config, 100, 40, 7)
    text = str(summary)
    assert text.splitlines()[0].startswith("warning: 60 of 100 tasks are dropped: 60 have a solve rate outside")
    assert line(text, "tasks") == "100 read, 60 dropped, 40 used"
    assert line(text, "steps") == "20: at least 4 passes over the tasks"
    assert line(text, "a step").endswith("of 4 episodes each: 32 episodes")
    assert line(text, "evaluations") == "2, each of 7 held-out tasks" and line(text, "checkpoints") == "2"
    few, intervals = summary.warnings
    assert few == "20 steps are fewer than 50: raise --config.grpo.steps"
    assert "eval_every (30)" in intervals and intervals.endswith("Set --config.grpo.eval_every=2")
