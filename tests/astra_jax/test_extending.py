"""The examples of `docs/extending.md`: parts of the user's own in the place of the package's."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import pytest
from programs_world import Ended, ended
from rollout_world import ScriptedSampler, call, make_environment
from sft_world import make_dataset, starting, trajectories

from astra_jax.base.errors import InputError
from astra_jax.base.settings import SettingError
from astra_jax.grpo import train as grpo
from astra_jax.grpo.config import GRPOConfig
from astra_jax.mesh import AXES
from astra_jax.models import families, hf_checkpoint
from astra_jax.models.decoder import Decoder
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.run.hooks import Hook, HookError, load_hooks
from astra_jax.run.metrics import read_metrics
from astra_jax.run.trainer import StopReason
from astra_jax.run.weights import read_model
from astra_jax.sft import train as sft
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from astra_jax.tokenizer import ChatTokenizer
from configs import auto
from launch.flags import models
from synthesis.core.datasets import read_card
from synthesis.core.references import referred
from synthesis.pipeline.teacher import load_teacher

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
SFT = SFTConfig(
    data=DataConfig(seq_len=512, packing_bins=4, too_long="cut"),
    batch_size=2,
    steps=3,
    learning_rate=1e-2,
    sample_every=0,
)
GRPO = GRPOConfig(
    steps=3,
    batch_size=2,
    group_size=4,
    concurrent_groups=4,
    episode=EpisodeConfig(max_turns=3, max_prompt_tokens=600, max_response_tokens=200, distractors_per_band=1),
    row_buckets=(800,),
)


@pytest.fixture(scope="module", autouse=True)
def mine(tmp_path_factory):
    """The page's examples as one module."""
    folder = tmp_path_factory.mktemp("mine")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 9
    (folder / "mine.py").write_text("\n".join(blocks))
    sys.path.insert(0, str(folder))
    (folder / "wrapped.py").write_text("class Wrapped:\n    from_hf = dict\n")
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("mine", None)


@pytest.fixture(scope="module")
def model(chat_tokenizer) -> Qwen3Config:
    sizes = {"d_model": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "d_ff": 32}
    return Qwen3Config(vocab_size=chat_tokenizer.vocab_size, tie_embeddings=True, max_positions=1024, **sizes)


@pytest.fixture
def run_sft(model, chat_tokenizer, tmp_path):
    data = make_dataset(tmp_path / "data", trajectories(8, longest=2))

    def run(config=SFT, **options):
        start = starting(model.init(jax.random.key(0)))
        return sft.train(config, model, start, data, chat_tokenizer, tmp_path / "run", progress=False, **options)

    return run


def test_own_optimizer_schedule_and_tracker(run_sft, tmp_path) -> None:
    own = {"optimizer": "mine:lion", "schedule": "mine:inverse_sqrt", "log_to": ("mine:CsvTracker",)}
    result = run_sft(dataclasses.replace(SFT, **own))
    rates = [row["train/learning_rate"] for row in result.history]
    schedule = referred("mine:inverse_sqrt")(SFT, 3)
    assert rates == pytest.approx([float(schedule(step)) for step in range(3)]) and rates[0] < rates[2]
    lines = (tmp_path / "run" / "metrics" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["1", "2", "3"]
    assert float(lines[-1].split(",")[1]) == pytest.approx(result.final_loss)
    assert run_sft(dataclasses.replace(SFT, **own)).steps == 3  # resumes
    with pytest.raises(Exception, match="sft.optimizer is 'mine:lion' there, 'adamw' here"):
        run_sft(dataclasses.replace(SFT, schedule="mine:inverse_sqrt"))


async def test_own_objective_sampler_sandbox_and_hook(model, chat_tokenizer, tmp_path) -> None:
    def by_seed(session: str, turn: int, seed: int) -> str:
        return call("capital_of", country="France") if turn == 0 and seed % 2 else "Paris."

    config = dataclasses.replace(
        GRPO, objective=dataclasses.replace(GRPO.objective, function="mine:reinforce"), max_groups_per_step=4
    )
    [hook] = load_hooks(["mine:StopWhenSolved"])
    rewards = []

    class Solved(type(hook)):
        def after_update(self, run, state, batch, row) -> None:
            rewards.append(row["rollout/reward"])
            super().after_update(run, state, batch, row | {"rollout/reward": 0.95})

    async def run(name, config=config, policy=None, hooks=()):
        start = starting(model.init(jax.random.key(0)))
        arguments = (config, model, start, [make_environment()], chat_tokenizer, pool, tmp_path / name)
        policy = policy or ScriptedSampler(chat_tokenizer, by_seed)
        return await grpo.train(*arguments, policy=policy, progress=False, hooks=hooks)

    async with referred("mine:small_sandbox")() as pool:
        result = await run("own", hooks=[Solved()])
        assert (result.stopped, result.steps) == ("stopped", 1) and len(rewards) == 1
        papers = await run("papers", dataclasses.replace(GRPO, steps=1))
        losses = [one.history[0]["train/loss"] for one in (result, papers)]
        assert abs(losses[0] - losses[1]) > 0.01
        same = referred("mine:MySampler")(config=config, model=model, tokenizer=chat_tokenizer)
        result = await run("sampler", policy=same)
    assert result.stopped == "exhausted", "it says the same thing in every episode"


def test_a_run_that_a_hook_stopped_is_not_started_again(monkeypatch) -> None:
    """Code 75 asks a supervisor of several hosts to start the run again."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    codes = {reason: models.ended(reason) for reason in get_args(StopReason)}
    assert codes == {"finished": 0, "preempted": 75, "stopped": 0, "exhausted": 1}


class Recorder(Hook):
    every = 2

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def before_step(self, run, state) -> None:
        self.calls.append(("before_step", state.step))

    def measure(self, run, state, batch, row):
        self.calls.append(("measure", state.step))
        return {"own/rows": len(batch.tokens_bt)}

    def after_update(self, run, state, batch, row) -> None:
        assert row["own/rows"] == 2 and "train/loss" in row
        self.calls.append(("after_update", state.step))

    def before_save(self, run, state) -> None:
        self.calls.append(("before_save", state.step))

    def after_save(self, run, state, previous) -> None:
        self.calls.append((f"after_save {previous}", state.step))

    def on_stop(self, run, state) -> None:
        self.calls.append(("on_stop", state.step))


def test_hooks_are_called_at_their_points(run_sft, tmp_path) -> None:
    hook = Recorder()
    run_sft(dataclasses.replace(SFT, log_every=100, checkpoint_every=2), hooks=[hook])
    assert hook.calls == [
        ("before_step", 0), ("before_step", 1), ("measure", 2), ("after_update", 2), ("before_save", 2),
        ("before_step", 2), ("measure", 3), ("after_update", 3), ("before_save", 3), ("after_save 2", 3),
        ("on_stop", 3),
    ]  # fmt: skip
    rows = read_metrics(tmp_path / "run" / "metrics")
    assert [(row["step"], row["own/rows"]) for row in rows] == [(2, 2), (3, 2)]


def test_a_hook_that_fails_ends_the_run_or_is_a_warning(run_sft, capsys) -> None:
    class Broken(Hook):
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def after_update(self, run, state, batch, row) -> None:
            raise self.error

    with pytest.raises(RuntimeError, match="my mistake"):
        run_sft(hooks=[Broken(RuntimeError("my mistake"))])
    with pytest.raises(HookError, match="hook Broken.after_update raised SystemExit: 0"):  # it would have exited with 0
        run_sft(hooks=[Broken(SystemExit(0))])
    broken = Broken(SystemExit(0))
    broken.is_fatal = False
    assert run_sft(hooks=[broken]).steps == 3
    said = capsys.readouterr()
    assert (said.out + said.err).count("warning: hook Broken.after_update: SystemExit: 0; training continues") == 1
    assert "warning: hook Broken.after_update failed 3 times in this process" in said.out + said.err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:Nothing", "mine:Nothing: mine has no Nothing"),
        ("mine:lion", "--hooks=mine:lion is function; give a subclass of astra_jax.run.hooks.Hook"),
        ("nowhere:Hook", "nowhere cannot be imported"),
        ("lion", "'lion' names nothing; write my_module:my_name"),
    ],
)
def test_what_is_no_hook_is_refused_by_name(name, message) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load_hooks([name])


@pytest.fixture
def start_sft(mine, chat_tokenizer_dir, tmp_path) -> Callable[..., Ended]:
    """Two steps of `astra sft` with the page's model: from random weights, or from a folder's."""
    folder, data = tmp_path / "hf", make_dataset(tmp_path / "data", trajectories(8, longest=2))
    shutil.copytree(chat_tokenizer_dir, folder)
    kind = referred("mine:MyModel")
    hf_checkpoint.write_config(kind(ChatTokenizer.load(folder).vocab_size), folder)

    def start(name: str, *arguments: str) -> Ended:
        return ended(
            "launch.sft", "--config=sft:auto", f"--model_class={mine}/mine.py:MyModel", f"--weights={folder}",
            f"--data={data}", f"--workdir={tmp_path / name}", "--config.sft.steps=2", *arguments,
        )  # fmt: skip

    return start


@pytest.mark.slow
def test_own_model_trains_from_random_weights_and_from_a_folder(start_sft, tmp_path, monkeypatch) -> None:
    scratch = start_sft("scratch", "--init_seed=3")
    assert scratch.code == 0, scratch.errors
    monkeypatch.setattr(families, "_own", None)
    families.use_class("mine:MyModel")
    model = hf_checkpoint.read_config(tmp_path / "hf")
    assert type(model).__name__ == "MyModel" and not isinstance(model, Decoder)
    assert read_model(tmp_path / "scratch" / "checkpoints") == model
    hf_checkpoint.save_hf(model.init(jax.random.key(3)), model, tmp_path / "hf")
    from_folder = start_sft("from_folder")
    assert from_folder.code == 0, from_folder.errors
    losses = [
        [row["train/loss"] for row in read_metrics(tmp_path / name / "metrics")] for name in ("scratch", "from_folder")
    ]
    # One initialises in a compiled program, the other does not: on some processors, that rounds differently.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) >= 1
    refused = start_sft("adapters", "--init_seed=3", "--config.sft.lora.rank=2")
    assert (refused.code, "which adapters leave as they are" in refused.line) == (2, True)


def test_a_model_without_sizes_gets_the_least_memory(mine) -> None:
    class Unsized(referred("mine:MyModel")):
        def __getattr__(self, name: str) -> Any:
            if name in ("d_model", "n_layers"):
                raise AttributeError(name)
            return super().__getattr__(name)

    place = auto.DeviceSetup(dict.fromkeys(AXES, 1), 2**34, "cpu", "cpu")
    found, choices = auto.choose_for_devices(SFT, Unsized(512), place, (), tokens=512, rows=2)
    assert (found.micro_batch_size, found.remat) == (1, "full")
    assert choices[0].reason == "the least memory: Unsized has no d_model, by which more could be estimated"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:lion", "--model_class=mine:lion is <function lion"),
        ("mine:CsvTracker", "give a class with the classmethod from_hf and the other members of"),
        (
            "wrapped:Wrapped",
            "fields vocab_size, dtype, param_dtype, which a run replaces; it lacks vocab_size",
        ),
    ],
)
def test_what_is_no_model_is_refused_by_name(mine, name, message) -> None:
    with pytest.raises(InputError, match=message):
        families.use_class(name)


@pytest.mark.slow
def test_own_teacher_and_stage_make_environments(mine, tmp_path) -> None:
    run = partial(ended, "launch.environments", f"--workdir={tmp_path}", f"--teacher={mine}/mine.py:MyTeacher")
    stages = {"verify": [f"{mine}/mine.py:short_questions"]}
    made = run("--config.count=8", f"--config.own_stages={json.dumps(stages)}")
    assert made.code == 0, made.errors
    card = read_card(tmp_path / "train")
    assert card["provenance"]["teacher"] == {"name": "MyTeacher", "revision": 1}
    assert f"verify+{mine}/mine.py:short_questions" in card["rejected"]
    refused = run("--config.count=8", "--teacher_url=http://127.0.0.1:1/v1")
    assert refused.line.endswith("takes its place: leave one of them out")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:lion", "--teacher=mine:lion: TypeError: lion() missing 2 required positional arguments"),
        ("mine:StopWhenSolved", "--teacher=mine:StopWhenSolved makes a StopWhenSolved, which has no `async def ask`"),
        ("mine:Nobody", "mine:Nobody: mine has no Nobody"),
    ],
)
def test_what_is_no_teacher_is_refused_by_name(mine, name, message) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load_teacher(name)


def test_an_optimizer_that_is_no_name_and_no_reference_is_refused() -> None:
    with pytest.raises(SettingError, match="optimizer is 'adam'; use one of adamw, muon, or my_module:my_name"):
        dataclasses.replace(SFT, optimizer="adam")
