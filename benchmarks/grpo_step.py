"""Compare one update of GRPO with TRL's and Tunix's on the CPU: the same weights, episodes and advantages.

The objective is the common one, and the paper's (eq. 32): token-level clip of 0.2 below and 0.28 above, and a sum over
the trained tokens divided by their number ("dapo" in TRL, "token-mean" in Tunix). It has no KL term, no entropy bonus
and no importance sampling; tool outputs are masked. The episodes of a group start with one prompt.

First each side computes loss and gradients once, with old logprobs that differ from the current ones, so that tokens
are clipped. Then they train in turns, strictly on policy, AdamW included. The other two get tensors that are padded
already; ours starts from episodes, as in training. Sampling is not included.

Each side is a process in its own environment. Create those of the other two once:

    python -m venv .venv-trl && .venv-trl/bin/pip install torch==2.13.0 transformers==5.23.0 trl==1.16.0 accelerate
    python -m venv .venv-tunix && .venv-tunix/bin/pip install google-tunix==0.1.7 jax==0.10.2 flax==0.12.8
    python -m benchmarks.grpo_step --trl=.venv-trl/bin/python --tunix=.venv-tunix/bin/python --case=1m,30m,vocabulary

Prints a row for each case; `--save` appends them to the results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from absl import flags

from astra_jax.base.settings import Bound, Count
from astra_jax.cpu.environment import cpu_environment
from benchmarks import rows
from benchmarks.shapes import SHAPES, Shape
from benchmarks.sides import Side, train_in_turns
from launch.flags import cli
from launch.flags.numbers import number_flag

GROUP = 8
"""Episodes of a group."""


@dataclass(frozen=True)
class Case(Shape):
    """One comparison.

    Attributes:
        groups: of `GROUP` episodes each, in an update.
        prompt, completion: the most tokens of each.
        steps: of a turn.
        at_once: by side, rows of one forward and backward pass: as it is fastest. Ours are rows of `row_tokens`, which
            several episodes may share.
        row_tokens: the length of our rows.
    """

    groups: int
    prompt: int
    completion: int
    steps: int
    at_once: dict[str, int]
    row_tokens: int


CASES = {
    "tiny": Case(64, 32, 2, 2, 1, 16, 64, 1, 8, 24, 1, {"jax": 4, "trl": 8, "tunix": 8}, 32),
    "1m": Case(
        **vars(SHAPES["1m"]),
        groups=2,
        prompt=64,
        completion=192,
        steps=5,
        at_once={"jax": 4, "trl": 4, "tunix": 16},
        row_tokens=256,
    ),
    "1m_tools": Case(
        **vars(SHAPES["1m"]),
        groups=2,
        prompt=512,
        completion=192,
        steps=3,
        at_once={"jax": 1, "trl": 4, "tunix": 16},
        row_tokens=2_112,
    ),
    "30m_tools": Case(
        **vars(SHAPES["30m"]),
        groups=1,
        prompt=512,
        completion=192,
        steps=1,
        at_once={"jax": 1, "trl": 4, "tunix": 8},
        row_tokens=2_112,
    ),
    "30m": Case(
        **vars(SHAPES["30m"]),
        groups=1,
        prompt=64,
        completion=192,
        steps=2,
        at_once={"jax": 8, "trl": 8, "tunix": 8},
        row_tokens=256,
    ),
    "vocabulary": Case(
        **vars(SHAPES["vocabulary"]),
        groups=1,
        prompt=64,
        completion=192,
        steps=2,
        at_once={"jax": 8, "trl": 8, "tunix": 8},
        row_tokens=256,
    ),
}

_CASES = flags.DEFINE_list("case", ["1m", "30m", "vocabulary"], f"Of {', '.join(CASES)}.")
_LENGTHS = flags.DEFINE_enum(
    "lengths", "equal", ["equal", "varied"], "Of episodes: all as long as they may be, or from half of it."
)
_TRL = flags.DEFINE_string("trl", None, "Python of an environment with TRL; without, it is left out.")
_TUNIX = flags.DEFINE_string("tunix", None, "Python of an environment with google-tunix; without, it is left out.")
_ROUNDS = number_flag("rounds", 7, Annotated[int, Bound(least=3, most=2**31 - 1)], "Turns of each side.")
_THREADS = number_flag("threads", os.cpu_count(), Count, "Threads of each side.")
_SAVE = flags.DEFINE_bool("save", False, "Append the rows to the kept ones.")


def prepare(case: Case, lengths: str, threads: int, folder: Path) -> None:
    """The work of all sides: weights as Hugging Face has them (`hf`), `work.json`, and `episodes.npz`.

    An episode is its group's prompt and a completion, whose middle fifth is a tool's output. The old logprobs are the
    weights' own and up to 0.4 off, so that some ratios are clipped.
    """
    import jax

    from astra_jax.grpo.losses import batch_advantages
    from astra_jax.grpo.step import trainer_logprobs
    from astra_jax.models.hf_checkpoint import save_hf
    from benchmarks import grpo_step_side as side

    (folder / "work.json").write_text(json.dumps({"case": asdict(case), "threads": threads, "group_size": GROUP}))
    work = side.read_work(folder)
    model = side.qwen3(work)
    params = model.init(jax.random.key(0))
    save_hf(params, model, folder / "hf")

    rng = np.random.default_rng(0)
    count, width = case.groups * GROUP, case.prompt + case.completion
    least = 1.0 if lengths == "equal" else 0.5
    prompts = np.repeat(rng.integers(int(least * case.prompt), case.prompt + 1, case.groups), GROUP)
    completions = rng.integers(int(least * case.completion), case.completion + 1, count)
    prompts[:GROUP], completions[0] = case.prompt, case.completion
    tokens_bt = rng.integers(side.PAD + 1, case.vocab_size, (count, width)).astype(np.int32)
    mask_bt = np.zeros((count, width), np.int32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens_bt[row, :prompt] = tokens_bt[row // GROUP * GROUP, :prompt]
        mask_bt[row, prompt : prompt + completion] = 1
        tool = prompt + completion * 2 // 5
        mask_bt[row, tool : tool + completion // 5] = 0
        tokens_bt[row, prompt + completion :] = side.PAD
    rewards = rng.random((case.groups, GROUP))
    episodes = {
        "tokens_bt": tokens_bt,
        "mask_bt": mask_bt,
        "prompts_b": prompts,
        "lengths_b": prompts + completions,
        "rewards_b": rewards.ravel(),
        "old_logps_bt": np.zeros((count, width), np.float32),
    }
    config = side.grpo_config(work)
    trained = mask_bt.sum(axis=1).reshape(rewards.shape)
    advantages, _ = batch_advantages(rewards.tolist(), trained.tolist(), config.objective)
    episodes["advantages_b"] = np.asarray(advantages, np.float32)
    # One at a time: of a row that may be long, the parent needs no more than one's activations.
    for row, batch in enumerate(side.one_by_one(episodes, width)):
        logps = np.asarray(trainer_logprobs(params, batch, model=model, config=config))[0]
        episodes["old_logps_bt"][row] = np.where(mask_bt[row], logps + rng.uniform(-0.4, 0.4, width), 0.0)
    np.savez(folder / "episodes.npz", **episodes)


def first_gradients(command: list[str], environment: Mapping[str, str], folder: Path, name: str) -> dict[str, Any]:
    """A side's loss and gradients by Hugging Face's names, of the weights and old logprobs that are given.

    Raises:
        RuntimeError: it has failed.
    """
    from safetensors.numpy import load_file

    done = subprocess.run([*command, "gradients"], cwd=rows.ROOT, env=dict(environment), stdout=subprocess.PIPE)
    if done.returncode:
        raise RuntimeError(f"side {name} ended with {done.returncode}; see its output above")
    (file,) = folder.glob(f"gradients-{name}/*.safetensors")
    return {"loss": json.loads(done.stdout)["loss"], "gradients": load_file(file)}


def apart(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """Return the distance of two sides' losses, and of their gradients: the largest of a parameter, relative to our
    norm.

    Raises:
        ValueError: the sides have different parameters.
    """
    mine, other = ours["gradients"], theirs["gradients"]
    if mine.keys() != other.keys():
        raise ValueError(f"gradients of other parameters: {sorted(mine.keys() ^ other.keys())}")
    distances = {name: float(np.linalg.norm(mine[name] - other[name]) / np.linalg.norm(mine[name])) for name in mine}
    return {"loss": abs(ours["loss"] - theirs["loss"]), "gradient": max(distances.values())}


def compare(case: Case, lengths: str, pythons: Mapping[str, str], threads: int, rounds: int) -> dict[str, Any]:
    """A row: how far losses and gradients are apart, medians of seconds a step, and what the sides held."""
    environment = cpu_environment({"JAX_PLATFORMS": "cpu"} | os.environ) | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(case, lengths, threads, folder)
        commands = {
            side: [python, "-m", "benchmarks.grpo_step_side", side, str(folder)] for side, python in pythons.items()
        }
        first = {side: first_gradients(command, environment, folder, side) for side, command in commands.items()}
        got = train_in_turns(
            list(commands), lambda side: Side([*commands[side], "train"], environment), rounds, case.steps
        )
        with np.load(folder / "episodes.npz") as episodes:
            tokens, trained = int(episodes["lengths_b"].sum()), int(episodes["mask_bt"].sum())
    peers = [side for side in commands if side != "jax"]
    return {
        "shapes": {field.name: getattr(case, field.name) for field in fields(case)},
        "lengths": lengths,
        "episodes": case.groups * GROUP,
        "tokens": tokens,
        "trained_tokens": trained,
        "parameters": got.parameters,
        "objective": "token mean, clip 0.2 and 0.28, no KL, no entropy, no importance sampling",
        "dtype": "float32",
        "threads": threads,
        "first_losses": {side: round(one["loss"], 6) for side, one in first.items()},
        "apart": {side: apart(first["jax"], first[side]) for side in peers},
        **{name: value for name, value in got.rounded().items() if name != "losses"},  # on policy they are 0
        "speed_ratio": {side: round(got.seconds[side] / got.seconds["jax"], 3) for side in peers},
        "processor_ratio": {
            side: round(got.processor_seconds[side] / got.processor_seconds["jax"], 3) for side in peers
        },
        "memory_ratio": {side: round(got.peak_bytes["jax"] / got.peak_bytes[side], 3) for side in peers},
    }


def main() -> None:
    pythons = {"jax": sys.executable, "trl": _TRL.value, "tunix": _TUNIX.value}
    present = {name: python for name, python in pythons.items() if python}
    for name in _CASES.value:
        if name not in CASES:
            raise cli.UsageError(f"--case={name}: use one of {', '.join(CASES)}")
        figures = compare(CASES[name], _LENGTHS.value, present, _THREADS.value, _ROUNDS.value)
        rows.report("grpo_step", {"case": name, **figures}, save=_SAVE.value)


if __name__ == "__main__":
    cli.run(main)
