"""`astra difficulty` as users run it: a tiny random model over a small dataset; whole, killed and again, refused."""

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

from astra_jax.chat_files import copy_tokenizer
from astra_jax.evaluation.solve_rates import SolveRate
from astra_jax.models.hf_checkpoint import save_hf
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
    assert (
        "24 environments, mean solve rate 0.000 of hf; 24 never solved, 0 always, 0 without a scored episode"
        in run(to).out
    )
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
    assert (rates["never_solved"], rates["always_solved"], rates["unscored"]) == (COUNT, 0, 0)
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
        (f"--to={world / 'train'}", "is the folder of --environments, which is never overwritten"),
        (f"--to={tmp_path / 'mine'}", "has files that are not a dataset's"),
        ("--step=3", "--step=3: --weights="),
        ("--max_response_tokens=41", "the model's max_positions is 640"),
        ("--max_prompt_tokens=100", "max_prompt_tokens is 100; raise it"),
    ):
        assert words in run(tmp_path / "to", flag, code=2).line, flag
    assert (tmp_path / "mine" / "letters.txt").exists() and not (tmp_path / "to").exists()


LEVELS = """
class Level:
    def __init__(self, id, worth, said="Which level is this?"):
        self.id, self.worth, self.question = id, worth, said

    def look(self) -> str:
        \"\"\"Look around.\"\"\"
        return self.id

    def score(self, episode) -> float:
        if self.id == "broken" or self.worth is None:
            raise ArithmeticError("no score today")
        return self.worth


levels = [Level("never", 0.0), Level("half", 0.5), Level("always", 1.0)]
broken = [Level("broken", 1.0)]
partly = [*levels, Level("unscored", None)]
"""


def grpo_config(world: Path, folder: Path, reward: str = "f1") -> Path:
    (folder / "config.py").write_text(
        "from astra_jax.grpo.config import GRPOConfig\n"
        "from astra_jax.models.hf_checkpoint import read_config\n"
        "from astra_jax.rollout.episode import EpisodeConfig\n"
        "from configs.training import GRPORun\n"
        f"EPISODE = EpisodeConfig(max_prompt_tokens=600, max_response_tokens=40, reward={reward!r})\n"
        "GRPO = GRPOConfig(episode=EPISODE, batch_size=1, group_size=2, max_groups_per_step=2, row_buckets=(640,),\n"
        "                  concurrent_groups=1, steps=1)\n"
        f"CONFIG = GRPORun(read_config({str(world / 'hf')!r}), GRPO)\n"
    )
    return folder / "config.py"


def test_environments_of_ones_own(world, run, start, tmp_path) -> None:
    """Their rates are by their ids; GRPO filters and orders by them, and refuses those of what has changed."""
    module, to = tmp_path / "levels.py", tmp_path / "rates"
    module.write_text(LEVELS)
    own = f"--environments={module}:levels"
    said = run(to, own, "--max_response_tokens=8").out
    assert "3 environments, mean solve rate 0.500 of hf; 1 never solved, 1 always, 0 without a scored episode" in said
    rates = read_dataset(to, SolveRate)
    assert [(one.id, one.solve_rate, one.rewards) for one in rates] == [
        ("never", 0.0, [0.0, 0.0]), ("half", 0.5, [0.5, 0.5]), ("always", 1.0, [1.0, 1.0])
    ]  # fmt: skip
    card = read_card(to)
    assert card["solve_rates"]["settings"]["episode"]["reward"] == "score" and card["source"] == f"{module}:levels"
    assert "/6 " not in run(to, own, "--max_response_tokens=8").errors, "nothing is played twice"
    flags = {"config": grpo_config(world, tmp_path, "score"), "weights": world / "hf", "workdir": tmp_path / "run"}
    given = [*(f"--{name}={value}" for name, value in flags.items()), own]
    filtered = "--config.grpo.solve_rates=[0.1,0.9]"
    unmeasured = start(*given, filtered, module="launch.grpo").line
    assert "environment never has no recorded solve rate (3 of 3 have none)" in unmeasured
    assert "`astra difficulty`, and give the folder that it writes as --difficulty" in unmeasured
    ended = start(*given, filtered, f"--difficulty={to}", module="launch.grpo")
    assert ended.code == 1 and "2 of 3 tasks are dropped: 2 have a solve rate outside" in ended.out
    ordered = start(*given, "--config.grpo.order=easy_first", f"--difficulty={to}", f"--workdir={tmp_path / 'ordered'}",
                    module="launch.grpo")  # fmt: skip
    assert ordered.code == 1, ordered.errors  # its two groups are of equal rewards
    unused = start(*given, f"--difficulty={to}", module="launch.grpo").line
    assert (
        "--difficulty is for --config.grpo.solve_rates and --config.grpo.order=easy_first; give one of them" in unused
    )
    record = start(
        *given[:3], f"--environments={world / 'train'}", filtered, f"--difficulty={to}", module="launch.grpo"
    )
    assert "is for environments that are no dataset, and e0 is a record of one; leave the flag out" in record.line
    module.write_text(LEVELS.replace("Which level", "What level"))
    changed = start(*given, filtered, f"--difficulty={to}", module="launch.grpo").line
    assert "3 of 3 environments have changed since they were measured, such as 'never' (prompt or tools)" in changed


def test_environments_that_cannot_be_measured(run, tmp_path) -> None:
    module = tmp_path / "levels.py"
    module.write_text(LEVELS)
    short, to = "--max_response_tokens=8", tmp_path / "to"
    for more, words in (
        ([f"--environments={module}:broken"], "environment broken: reward score raised ArithmeticError: no score "
                                              "today, of an episode without calls"),
        ([f"--environments={module}:levels", "--reward=f1"], "reward f1 counts sub-tasks"),
        ([f"--environments={module}:levels", "--reward=score,format"], "give positive weights that sum to 1"),
        ([f"--environments={module}:levels", "--environments_count=3"], "--environments_count is for verifiers:ID"),
        ([f"--environments={module}:nothing"], "has no nothing; it has Level, levels, broken, partly"),
    ):  # fmt: skip
        assert words in run(to, short, *more, code=2).line, more
    partly = run(to, short, f"--environments={module}:partly").out
    assert (
        "1 without a scored episode; 2 episodes masked (2 times reward score raised ArithmeticError: no score today)"
        in partly
    )
    assert [one.solve_rate for one in read_dataset(to, SolveRate)] == [0.0, 0.5, 1.0, None]


def test_grpo_refuses_what_was_not_measured_and_points_here(world, start, tmp_path) -> None:
    flags = {"config": grpo_config(world, tmp_path), "weights": world / "hf", "workdir": tmp_path / "run"}
    more = [f"--environments={world / 'train'}", "--config.grpo.solve_rates=[0.1, 0.9]"]
    said = start(*(f"--{name}={value}" for name, value in flags.items()), *more, module="launch.grpo").line
    assert "solve_rates is (0.1, 0.9), but environment e0 has no recorded solve rate (24 of 24 have none)" in said
    assert "`astra difficulty`" in said and not (tmp_path / "run").exists()
