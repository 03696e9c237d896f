"""`launch.difficulty` as users run it: a tiny random model over a small dataset; whole, killed and again, refused."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import msgspec
import pytest
from programs_world import Ended, Programs, in_journal, programs
from rollout_world import make_environment, tiny_model

from astra_jax.models.hf_checkpoint import copy_tokenizer, save_hf
from astra_jax.run.weights import save_orbax
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chatml import QWEN3
from synthesis.core.datasets import read_card, read_dataset, write_dataset
from synthesis.core.records import Difficulty, Message, ToolEnvironment

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow
COUNT = 24


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with a model, as Hugging Face's files and as a run's checkpoints, and a dataset of environments."""
    folder = tmp_path_factory.mktemp("difficulty")
    environments = [make_environment(f"e{i}", "Japan" if i % 2 else "France") for i in range(COUNT)]
    environments[0] = msgspec.structs.replace(environments[0], difficulty=Difficulty(9, 0.5, 0.25))
    write_dataset(folder / "train", ToolEnvironment, environments, card={"split": "train", "seed": 5})
    tools = [*environments[0].tools, *(tool for band in environments[0].distractors.values() for tool in band)]
    segments = QWEN3.render([Message("user", environments[0].question)], [tool.spec for tool in tools])
    tokenizer = ChatTokenizer.train(["".join(segment.text for segment in segments)] * 4, 512, folder / "hf")
    model = tiny_model(tokenizer.vocab_size, 640)
    params = model.init(jax.random.key(0))
    save_hf(params, model, folder / "hf")
    for step in (20, 40):
        save_orbax(params, model, folder / "run" / "checkpoints", step=step)
    copy_tokenizer(folder / "hf", folder / "run" / "checkpoints")
    return folder


def command(world: Path, to: Path, *more: str) -> list[str]:
    flags = {
        "environments": world / "train",
        "to": to,
        "weights": world / "hf",
        "episodes": 2,
        "slots": 2,
        "max_prompt_tokens": 600,
        "distractors_per_band": 1,
    }
    return [sys.executable, "-m", "launch.difficulty", *(f"--{name}={value}" for name, value in flags.items()), *more]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Programs]:
    with programs("launch.difficulty", tmp_path_factory.mktemp("said")) as made:
        yield made


@pytest.fixture(scope="module")
def run(world, start) -> Callable[..., Ended]:
    """The program, to its end."""

    def whole(to: Path, *more: str, code: int = 0) -> Ended:
        ended = start(*command(world, to, *more)[3:])
        assert ended.code == code, ended.errors[-3000:]
        return ended

    return whole


@pytest.fixture(scope="module")
def measured(run, tmp_path_factory) -> Path:
    to = tmp_path_factory.mktemp("measured") / "train"
    assert "24 environments, mean solve rate 0.000 of hf; 24 never solved, 0 always, 0 voided" in run(to).out
    return to


def test_a_dataset_is_the_same_but_for_its_solve_rates(world, measured) -> None:
    before, after = (read_dataset(path, ToolEnvironment) for path in (world / "train", measured))
    assert [msgspec.structs.replace(one, difficulty=None) for one in after] == [
        msgspec.structs.replace(one, difficulty=None) for one in before
    ]
    assert after[0].difficulty == Difficulty(9, 0.5, 0.25, 0.0, "hf")
    assert {one.difficulty for one in after[1:]} == {Difficulty(2, 0.0, 0.0, 0.0, "hf")}
    source, card = read_card(world / "train"), read_card(measured)
    assert (card["split"], card["seed"], card["count"]) == ("train", 5, COUNT)
    rates = card["solve_rates"]
    assert (rates["policy"], rates["episodes"], rates["temperature"], rates["mean"]) == ("hf", 2, 1.0, 0.0)
    assert rates["histogram"] == [COUNT, *[0] * 9] and rates["environments"] == source["digest"] != card["digest"]
    assert (rates["never_solved"], rates["always_solved"], rates["voided"]) == (COUNT, 0, 0)
    assert rates["settings"]["episode"]["max_response_tokens"] == 40, "what the model's context leaves"


def test_a_killed_run_goes_on_where_it_was(world, measured, start, run, tmp_path) -> None:
    to = tmp_path / "train"
    killed = start.begin(*command(world, to)[3:])
    until = time.monotonic() + 100
    while not in_journal(to):
        assert killed.poll() is None and time.monotonic() < until
        time.sleep(0.005)
    killed.kill()
    done = in_journal(to)
    assert 0 < done < COUNT and not to.exists()
    assert f"/{2 * (COUNT - done)} " in run(to).errors, "only the others' episodes"
    assert read_card(to) == read_card(measured)
    os.utime(world / "hf" / "config.json")  # as a new save would; nothing in the journal is of these weights
    assert f"/{2 * COUNT} " in run(to, "--policy_name=mine").errors
    assert read_card(to)["solve_rates"]["policy"] == "mine"


def test_a_run_s_checkpoints_are_named_with_their_step(world, run, tmp_path) -> None:
    short = ("--max_turns=1", "--max_response_tokens=8", "--temperature=0", f"--weights={world / 'run/checkpoints'}")
    for more, name in (((), "run/checkpoints@40"), (("--step=20",), "run/checkpoints@20")):
        assert f" of {name}; " in run(tmp_path / "train", *short, *more).out
    assert {one.difficulty.policy for one in read_dataset(tmp_path / "train", ToolEnvironment)} == {name}


def test_what_is_wrong_is_said_in_one_line(world, run, tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letters.txt").write_text("dear")
    for flag, words in (
        (f"--to={world / 'train'}", "is --environments, which stays as it is"),
        (f"--to={tmp_path / 'mine'}", "holds something else than a dataset"),
        ("--step=3", "--step=3: --weights="),
        ("--max_response_tokens=41", "the model's max_positions is 640"),
        ("--max_prompt_tokens=100", "max_prompt_tokens is 100; raise it"),
    ):
        assert words in run(tmp_path / "to", flag, code=2).line, flag
    assert (tmp_path / "mine" / "letters.txt").exists() and not (tmp_path / "to").exists()


def test_grpo_refuses_what_was_not_measured_and_points_here(world, start, tmp_path) -> None:
    (tmp_path / "config.py").write_text(
        "from astra_jax.grpo.config import GRPOConfig\n"
        "from astra_jax.models.hf_checkpoint import read_config\n"
        "from astra_jax.rollout.episode import EpisodeConfig\n"
        "from configs.training import GRPORun\n"
        "EPISODE = EpisodeConfig(max_prompt_tokens=600, max_response_tokens=40)\n"
        f"CONFIG = GRPORun(read_config({str(world / 'hf')!r}), GRPOConfig(episode=EPISODE))\n"
    )
    flags = {"config": tmp_path / "config.py", "weights": world / "hf", "workdir": tmp_path / "run"}
    more = [f"--environments={world / 'train'}", "--config.grpo.solve_rates=[0.1, 0.9]"]
    said = start(*(f"--{name}={value}" for name, value in flags.items()), *more, module="launch.grpo").line
    assert "solve_rates is (0.1, 0.9), but environment e0 has no recorded solve rate (24 of 24 have none)" in said
    assert "`python -m launch.difficulty`" in said and not (tmp_path / "run").exists()
