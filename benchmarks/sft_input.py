"""Compare how fast SFT's batches are made with how fast they are trained on, and measure how full they are.

Conversations of the paper's shape (on average 4.4 calls and 10.8 messages) are rendered, tokenised, shuffled and
packed. The training step is that of the quickstart's model, the smallest in this project, which needs the most batches
per second. Both take turns. Prints a row; `--save` appends it.

    python -m benchmarks.sft_input --workers=0,2
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

from absl import flags

from astra_jax.base.settings import Bound, CountOrZero
from astra_jax.sft.data import DataConfig
from benchmarks import rows
from benchmarks.shapes import SHAPES
from benchmarks.texts import CALLS, conversations, words
from launch.flags import cli
from launch.flags.cli import with_cpu_environment
from launch.flags.numbers import number_flag, numbers_of

_WORKERS = flags.DEFINE_list("workers", ["0", "2"], "Processes that make batches ahead; one measurement for each.")
_ROUNDS = number_flag("rounds", 5, Annotated[int, Bound(least=3, most=2**31 - 1)], "Turns.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to benchmarks/results/sft_input.jsonl.")

_LONG = 32_768
_TRAINED = 4_096
_ROWS = 2
_BURST = DataConfig(seq_len=1).packing_bins // _ROWS
"""Batches that first-fit packing gives at once, when no open row has room for the next conversation."""


def measure(folder: Path, workers: list[int], rounds: int) -> dict[str, Any]:
    import jax

    from astra_jax.models.qwen3.presets import Qwen3Config
    from astra_jax.run.batch import to_device
    from astra_jax.run.optimizers import initial_state
    from astra_jax.sft.config import SFTConfig
    from astra_jax.sft.data import BatchIterator, scan
    from astra_jax.sft.step import sft_optimizer, train_step
    from astra_jax.tokenizer import ChatTokenizer
    from synthesis.core.chatml import QWEN3
    from synthesis.core.datasets import write_dataset
    from synthesis.core.records import Trajectory

    made = list(itertools.islice(conversations(words()), 1_500))
    write_dataset(folder / "data", Trajectory, made, card={"made_by": "benchmarks.sft_input"})
    texts = ["".join(segment.text for segment in QWEN3.render(one.messages, one.tools)) for one in made[:200]]
    shape = SHAPES["1m"]
    tokenizer = ChatTokenizer.train(texts, shape.vocab_size, folder / "tokenizer")

    long = DataConfig(seq_len=_LONG)
    stats = scan(folder / "data", tokenizer, long)
    batches = BatchIterator(folder / "data", tokenizer, long, batch_size=1)
    fills = [float((next(batches).segment_ids_bt > 0).mean()) for _ in range(2 * stats.tokens // _LONG)]
    batches.close()

    config = SFTConfig(data=DataConfig(seq_len=_TRAINED), batch_size=_ROWS)
    model = Qwen3Config(**vars(shape) | {"vocab_size": tokenizer.vocab_size}, tie_embeddings=True)
    state = list(initial_state(model.init(jax.random.key(0)), sft_optimizer(config, 1000)))
    source = BatchIterator(folder / "data", tokenizer, config.data, _ROWS)

    def train(count: int) -> float:
        """Real tokens a second."""
        tokens, seconds = 0, 0.0
        for batch in itertools.islice(source, count):
            on_device = to_device(batch, None, micro_batches=1)
            started = time.perf_counter()
            state[0], state[1], metrics = train_step(*state, on_device, model=model, config=config, steps=1000)
            jax.block_until_ready(metrics)
            seconds += time.perf_counter() - started
            tokens += int((batch.segment_ids_bt > 0).sum())
        return tokens / seconds

    pipelines = {
        count: BatchIterator(folder / "data", tokenizer, dataclasses.replace(config.data, workers=count), _ROWS)
        for count in workers
    }

    def make(iterator: BatchIterator, count: int) -> float:
        started = time.perf_counter()
        tokens = sum(int((batch.segment_ids_bt > 0).sum()) for batch in itertools.islice(iterator, count))
        return tokens / (time.perf_counter() - started)

    trained: list[float] = []
    input_speeds: dict[int, list[float]] = {count: [] for count in workers}
    train(2)  # compiles
    for _ in range(rounds):
        trained.append(train(3))
        for count, iterator in pipelines.items():
            make(iterator, (1 + count) * _BURST)  # what was made ahead while others had their turn does not count
            input_speeds[count].append(make(iterator, 3 * _BURST))
    source.close()
    for iterator in pipelines.values():
        iterator.close()
    step = statistics.median(trained)
    speeds = {count: statistics.median(values) for count, values in input_speeds.items()}
    return {
        "conversations": len(stats.lengths),
        "mean_calls": statistics.mean(CALLS),
        "mean_tokens": round(stats.tokens / len(stats.lengths)),
        "fill_32k": {"mean": round(statistics.mean(fills), 4), "least": round(min(fills), 4), "rows": len(fills)},
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state[0])),
        "step_tokens_per_second": round(step),
        "input_tokens_per_second": {count: round(speed) for count, speed in speeds.items()},
        "ratio": {count: round(speed / step, 1) for count, speed in speeds.items()},
    }


def main() -> None:
    workers = numbers_of(_WORKERS, CountOrZero)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), workers, _ROUNDS.value)
    rows.report("sft_input", figures, save=_SAVE.value)


if __name__ == "__main__":
    with_cpu_environment("benchmarks.sft_input")
    cli.run(main)
