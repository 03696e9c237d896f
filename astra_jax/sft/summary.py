"""Table of an SFT run's data, steps and outputs, printed before the first step and by `--preview`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from astra_jax.base.files import location
from astra_jax.base.terminal import printable
from astra_jax.run.summary import FEWEST_STEPS, RunSummary, interval_warnings, times
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import BatchIterator, DataStats, batches_of_epochs, steps_for_epochs
from astra_jax.sft.packing import steps_in
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import Folder

_SHORTEST_ROW = 128


def count_steps(
    config: SFTConfig,
    dataset: Folder,
    tokenizer: ChatTokenizer,
    stats: DataStats,
    *,
    rehearsal: Folder | None = None,
    rehearsed: DataStats | None = None,
) -> tuple[int, int]:
    """Count the steps of a run, and those of its first epoch.

    If lengths change between epochs, all epochs are tokenised. Raises as `BatchIterator`.
    """
    passes = 1 if config.steps is not None or config.data.is_random else config.epochs
    counts = batches_of_epochs(stats, config.data, config.batch_size, passes, rehearsal=rehearsed)
    one_epoch = max(1, counts[0])
    if config.steps is not None:
        return config.steps, one_epoch
    if config.data.is_random:
        with BatchIterator(dataset, tokenizer, config.data, config.batch_size, rehearsal=rehearsal) as batches:
            return batches.steps_for_epochs(config.epochs), one_epoch
    return steps_in(counts, config.epochs), one_epoch


def summarise(
    config: SFTConfig,
    steps: tuple[int, int],
    stats: DataStats,
    card: Mapping[str, Any],
    *,
    dataset: Folder,
    rehearsed: DataStats | None = None,
    held_out: DataStats | None = None,
) -> RunSummary:
    """Make the table of a run.

    Args:
        steps: of the run, and of an epoch (`count_steps`).
        stats: of the data; `rehearsed` and `held_out` are of these datasets.
        card: of the data.
    """
    run_steps, epoch_steps = steps
    examples, tokens = float(len(stats.lengths)), float(stats.tokens)
    rows = [*_data_rows(config, stats, card, location(dataset).name)]
    if rehearsed is not None:
        share = config.data.self_generated_ratio / (1 - config.data.self_generated_ratio)
        more = examples * share
        examples, tokens = examples + more, tokens + more * statistics.fmean(rehearsed.lengths)
        rows.append(("rehearsal", f"{_read(rehearsed)}; {more:,.0f} more examples an epoch"))
    epochs = f"{run_steps / epoch_steps:.3g}" if config.steps is not None else f"{config.epochs:g}"
    rows += [
        ("steps", f"{run_steps:,}: {epoch_steps:,} an epoch, {epochs} epochs"),
        (
            "a step",
            f"{_mean(examples / epoch_steps)} examples and {tokens / epoch_steps:,.0f} tokens on average, in at most "
            f"{config.batch_size} rows of {config.data.seq_len:,} tokens",
        ),
    ]
    intervals = {"eval_every": config.eval_every} if held_out is not None else {}
    if held_out is None:
        rows.append(("evaluations", "none: there is no held-out data"))
    else:
        rows.append(("evaluations", f"{times(run_steps, config.eval_every):,}, each of {_evaluated(config, held_out)}"))
    if config.sample_every:
        intervals["sample_every"] = config.sample_every
        rows.append(
            ("samples", f"{times(run_steps, config.sample_every):,}, each of at most {config.samples} openings")
        )
    else:
        rows.append(("samples", "none: sample_every is 0"))
    intervals["checkpoint_every"] = config.checkpoint_every
    rows.append(("checkpoints", f"{times(run_steps, config.checkpoint_every):,}"))
    warnings = [_few_steps(config, stats, run_steps, epoch_steps)] if run_steps < FEWEST_STEPS else []
    warnings += interval_warnings("sft", run_steps, intervals)
    for kind, others in {"rehearsed ": rehearsed, "held-out ": held_out}.items():
        if others is not None and (alarm := _alarm(kind, others)):
            warnings.append(alarm)
    return RunSummary(tuple(rows), _alarm("", stats), tuple(warnings))


def _data_rows(config: SFTConfig, stats: DataStats, card: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    source = printable(card.get("source") or name, lines=False)
    left_out = card.get("skipped") or {}
    was_read = f"; {sum(left_out.values()):,} other rows were left out when they were read" if left_out else ""
    rows = [("data", f"{source}: {card['count']:,} conversations{was_read}"), ("examples", _read(stats))]
    if stats.dropped:
        rows.append(("dropped", printable(stats.reasons, lines=False)))
    if stats.refused:
        rows.append(
            ("refused calls", f"{stats.refused:,} turns with a call that the tools' schema refused: context only")
        )
    median, longest = statistics.median(stats.lengths), max(stats.lengths)
    return [
        *rows,
        ("cut", f"{stats.cut:,} examples of more than {config.data.seq_len:,} tokens (data.seq_len)"),
        (
            "tokens",
            f"{stats.tokens:,} an epoch, {stats.trainable:,} of them are trained on; the median example has "
            f"{median:,.0f}, the longest {longest:,}",
        ),
    ]


def _read(stats: DataStats) -> str:
    return f"{stats.count:,} read, {stats.count - len(stats.lengths):,} dropped, {len(stats.lengths):,} used"


def _evaluated(config: SFTConfig, held_out: DataStats) -> str:
    whole = f"all {len(held_out.lengths):,} held-out examples ({_read(held_out)})"
    if config.eval_batches is None:
        return whole
    if config.eval_batches >= (batches := steps_for_epochs(held_out, config.data, config.batch_size, 1)):
        return whole
    return f"{config.eval_batches} of the {batches} batches of {whole}: eval_batches is {config.eval_batches}"


def _mean(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"


def _alarm(kind: str, stats: DataStats) -> str:
    dropped = stats.count - len(stats.lengths)
    if dropped * 2 <= stats.count:
        return ""
    return f"{dropped:,} of {stats.count:,} {kind}examples are dropped: {printable(stats.reasons, lines=False)}"


def _few_steps(config: SFTConfig, stats: DataStats, steps: int, epoch_steps: int) -> str:
    """Suggest settings for `FEWEST_STEPS` steps: rows for two of the longest examples, and fewer rows a step."""
    few = f"{steps} steps are fewer than {FEWEST_STEPS}"
    if config.steps is not None:
        return f"{few}: raise --config.sft.steps, or leave it out and set --config.sft.epochs"
    length, rows = config.data.seq_len, config.batch_size
    if not stats.cut and not config.row_buckets:
        length = min(length, max(_SHORTEST_ROW, 1 << (2 * max(stats.lengths) - 1).bit_length()))
    filled = stats.tokens * steps / epoch_steps / length
    unit = config.micro_batch_size or 1
    rows = min(rows, unit << (max(1, int(filled / FEWEST_STEPS / unit)).bit_length() - 1))
    changes = [f"--config.sft.data.seq_len={length}"] if length < config.data.seq_len else []
    changes += [f"--config.sft.batch_size={rows}"] if rows < config.batch_size else []
    about = round(filled / rows)
    remedy = f"set {' '.join(changes)} (about {about} steps), or " if about > steps else ""
    return f"{few}: {remedy}raise --config.sft.epochs (it is {config.epochs:g})"
