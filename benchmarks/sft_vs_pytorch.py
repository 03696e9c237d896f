"""Compare a whole SFT run with TRL's `SFTTrainer`, from the same Hugging Face checkpoint, on the same trajectories.

Both pack, train on the assistant's tokens alone, and follow the same schedule. Each shuffles and packs in its own way,
so their curves agree as two seeds of one side do. Each side runs with two seeds; --seeds=1 saves their memory. They
take turns, a few steps each.

TRL runs with its own packing (a batch is one long row) and with one row at a time, accumulated; the ratio is to the
faster one. On a GPU all sides share it and multiply in bfloat16, with weights in float32 (TRL: bf16=True, attention of
torch). Needs `pip install astra-jax[bench]`. Prints a row; `--save` appends it.

    python -m benchmarks.sft_vs_pytorch --steps=100
    python -m benchmarks.sft_vs_pytorch --steps=60 --texts=0.3     # of 0.6 of a row each: rows are three quarters full
    python -m benchmarks.sft_vs_pytorch --device=gpu --shape=0.6b --rows=4 --seeds=1
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

from absl import flags

from astra_jax.base.settings import Bound, Count, Length
from astra_jax.cpu.environment import cpu_environment
from benchmarks import rows
from benchmarks.shapes import SHAPES
from benchmarks.sides import Side
from benchmarks.texts import conversations, words
from launch.flags import cli
from launch.flags.numbers import number_flag

WINDOW = 10
"""Steps over which losses are averaged before curves are compared."""

_DATA = flags.DEFINE_string("data", None, "Dataset of trajectories; by default one that is made up.")
_DEVICE = flags.DEFINE_enum("device", "cpu", ["cpu", "gpu"], "What all sides train on.")
_SHAPE = flags.DEFINE_enum("shape", "1m", list(SHAPES), "Size of the model, random weights.")
_SEQ_LEN = number_flag("seq_len", 2048, Length, "Tokens of a row.")
_ROWS = number_flag("rows", 2, Count, "Rows of a step.")
_TEXTS = number_flag(
    "texts", 0.05, Annotated[float, Bound(above=0, most=10)], "Scale of made-up conversations' texts; 1: the paper's."
)
_STEPS = number_flag("steps", 100, Annotated[int, Bound(least=2 * WINDOW, most=2**31 - 1)], "Steps of each side.")
_TURN = number_flag("turn", 5, Count, "Steps of a turn.")
_SEEDS = number_flag("seeds", 2, Annotated[int, Bound(least=1, most=2)], "Seeds of each side.")
_THREADS = number_flag("threads", os.cpu_count(), Count, "Threads of each side.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to benchmarks/results/sft_vs_pytorch.jsonl.")


def prepare(folder: Path) -> dict[str, Any]:
    """The work of all sides: a Hugging Face folder with tokenizer and random weights, and the trajectories."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # a GPU's memory is for the sides
    from astra_jax.models.hf_checkpoint import save_hf
    from astra_jax.models.qwen3.presets import Qwen3Config
    from astra_jax.tokenizer import ChatTokenizer
    from synthesis.core.chatml import QWEN3
    from synthesis.core.datasets import read_dataset, write_dataset
    from synthesis.core.records import Trajectory

    shape = SHAPES[_SHAPE.value]
    if _DATA.value:
        trajectories = read_dataset(_DATA.value, Trajectory)
    else:
        trajectories = list(itertools.islice(conversations(words(), size=_TEXTS.value), 500))
        write_dataset(folder / "data", Trajectory, trajectories, card={"made_by": "benchmarks.sft_vs_pytorch"})
    texts = ["".join(segment.text for segment in QWEN3.render(one.messages, one.tools)) for one in trajectories]
    ChatTokenizer.train(texts, shape.vocab_size, folder / "hf")
    model = Qwen3Config(**vars(shape), tie_embeddings=True)
    save_hf(model.init(jax.random.key(0)), model, folder / "hf")
    return {
        "data": _DATA.value or str(folder / "data"),
        "hf": str(folder / "hf"),
        "model": vars(shape) | {"tie_embeddings": True},
        "seq_len": _SEQ_LEN.value,
        # A GPU multiplies several rows together faster than one by one.
        "row_buckets": [eighths * _SEQ_LEN.value // 8 for eighths in range(3, 8)] if _DEVICE.value == "cpu" else [],
        "rows": _ROWS.value,
        "steps": _STEPS.value,
        "threads": _THREADS.value,
        "device": _DEVICE.value,
        "dtype": "float32" if _DEVICE.value == "cpu" else "bfloat16",
        "learning_rate": 1e-3,
        "warmup_fraction": 0.05,
        "final_fraction": 0.1,
        "b1": 0.9,
        "b2": 0.95,
        "eps": 1e-8,
        "max_grad_norm": 1.0,
    }


def compare(work: dict[str, Any]) -> dict[str, Any]:
    """Both sides' steps in turns; medians of tokens a second, the curves, and how far they are apart."""
    environment = os.environ | {"OMP_NUM_THREADS": str(work["threads"])}
    if work["device"] == "cpu":
        environment = cpu_environment({"JAX_PLATFORMS": "cpu"} | environment)
    else:  # JAX's sides take of its memory what they need, no more
        environment |= {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    sides: dict[str, Side] = {}
    seeds = range(_SEEDS.value)
    named = {f"{side}_{seed}": seed for side in ("jax", "trl") for seed in seeds} | {"trl_flat_0": 0}
    done: dict[str, list[dict[str, Any]]] = {name: [] for name in named}
    device = work["device"]
    try:
        for name, seed in named.items():
            command = [sys.executable, "-m", "benchmarks.sft_vs_pytorch_side", name, json.dumps(work | {"seed": seed})]
            sides[name] = Side(command, environment)
        for _ in range(0, work["steps"], _TURN.value):
            for name, side in sides.items():
                answer = side.ask(f"train {_TURN.value}")
                done[name] += answer["steps"]
                device = answer.get("device", device)
    finally:
        for side in sides.values():
            side.kill()
    # The first turn compiles and warms up.
    speeds = {
        name: statistics.median(one["tokens"] / one["seconds"] for one in steps[_TURN.value :])
        for name, steps in done.items()
    }
    curves = {name: _smooth([one["loss"] for one in steps]) for name, steps in done.items()}
    between = [_apart(curves[f"jax_{i}"], curves[f"trl_{j}"]) for i in seeds for j in seeds]
    apart = {side: round(_apart(curves[f"{side}_0"], curves[f"{side}_{seeds[-1]}"]), 4) for side in ("jax", "trl")}
    return {
        "model": work["model"],
        "seq_len": work["seq_len"],
        "texts": _TEXTS.value,
        "row_buckets": work["row_buckets"],
        "rows": work["rows"],
        "steps": work["steps"],
        "device": device,
        "dtype": work["dtype"],
        "threads": work["threads"],
        "tokens_per_second": {name: round(speed) for name, speed in speeds.items()},
        "fill": {
            name: round(statistics.mean(one["tokens"] for one in steps) / (work["rows"] * work["seq_len"]), 3)
            for name, steps in done.items()
        },
        "speed_ratio": round(speeds["jax_0"] / max(speeds["trl_0"], speeds["trl_flat_0"]), 2),
        "losses": {name: [round(value, 4) for value in curve] for name, curve in curves.items()},
        "apart_jax_trl": round(statistics.mean(between), 4),
    } | ({"apart_seeds": apart} if len(seeds) > 1 else {})


def _smooth(losses: list[float]) -> list[float]:
    return [statistics.mean(losses[i : i + WINDOW]) for i in range(0, len(losses) - WINDOW + 1, WINDOW)]


def _apart(one: list[float], other: list[float]) -> float:
    """Mean distance of two curves."""
    return statistics.mean(abs(a - b) for a, b in zip(one, other, strict=True))


def main() -> None:
    if _STEPS.value % _TURN.value:
        raise cli.UsageError(f"--steps={_STEPS.value} is not a multiple of --turn={_TURN.value}")
    with tempfile.TemporaryDirectory() as folder:
        rows.report("sft_vs_pytorch", compare(prepare(Path(folder))), save=_SAVE.value)


if __name__ == "__main__":
    cli.run(main)
