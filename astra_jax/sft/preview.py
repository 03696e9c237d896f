"""`--preview`: prints examples with trained tokens in colour, and the table of the run."""

from __future__ import annotations

import itertools
import os
import sys
from typing import TextIO

import numpy as np

from astra_jax.base.terminal import printable
from astra_jax.run.summary import RunSummary
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig, Example, by_round, held_out_data, of_rehearsal, scan, tokenise
from astra_jax.sft.summary import count_steps, summarise
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import Folder, each_record, read_card
from synthesis.core.records import Trajectory

_TRAINED, _WEIGHED, _CONTEXT, _PLAIN, _TITLE, _END = (
    "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[90m", "\x1b[1m", "\x1b[0m",
)  # fmt: skip


def show(data: Folder, tokenizer: ChatTokenizer, config: DataConfig, count: int, out: TextIO | None = None) -> None:
    """Print the first examples of a dataset.

    Trained text is green, text with a weight other than 1 yellow, assistant turns of weight 0 red, and the rest grey.
    With NO_COLOR (no-color.org) the first three are between guillemets, with a weight other than 1.

    Raises:
        DatasetError: the dataset is missing, corrupt or of another kind.
    """
    out = out or sys.stdout
    colour = not os.environ.get("NO_COLOR")
    every = (one for trajectory in each_record(data, Trajectory) for one in by_round(trajectory, config))
    for trajectory in itertools.islice(every, count):
        example = tokenise(trajectory, tokenizer, config)
        state = f"dropped: {example.dropped} ({example.detail})" if example.dropped else _counts(example)
        title = printable(f"{trajectory.id}: {state}{', cut' if example.cut else ''}", lines=False)
        print(f"{_TITLE}{title}{_END}" if colour else title, file=out)
        every_token = zip(*(x.tolist() for x in (example.tokens, example.loss_mask, example.context)), strict=True)
        for (weight, context), run in itertools.groupby(every_token, key=lambda token: token[1:]):
            text = printable(tokenizer.decode([token for token, *_ in run]))
            if colour:
                shade = _CONTEXT if context else _PLAIN if not weight else _TRAINED if weight == 1 else _WEIGHED
                out.write(f"{shade}{text}{_END}")
            else:
                marked = f"«{text}»" if weight == 1 else f"«weight {weight:.3g}: {text}»"
                out.write(marked if weight or context else text)
        out.write("\n\n")


def summary(
    config: SFTConfig,
    data: Folder,
    tokenizer: ChatTokenizer,
    *,
    rehearsal: Folder | None = None,
    held_out: Folder | None = None,
) -> RunSummary:
    """Count what a run would read and do, without a device or a workdir.

    Raises:
        DatasetError: a dataset is missing, corrupt or of another kind, or nothing in it can be trained on.
    """
    stats = scan(data, tokenizer, config.data)
    rehearsed = None if rehearsal is None else scan(rehearsal, tokenizer, of_rehearsal(config.data))
    held = None if held_out is None else scan(held_out, tokenizer, held_out_data(config.data))
    steps = count_steps(config, data, tokenizer, stats, rehearsal=rehearsal, rehearsed=rehearsed)
    return summarise(config, steps, stats, read_card(data), dataset=data, rehearsed=rehearsed, held_out=held)


def _counts(example: Example) -> str:
    trained, context = np.count_nonzero(example.loss_mask), np.count_nonzero(example.context)
    other = np.count_nonzero((example.loss_mask != 0) & (example.loss_mask != 1))
    said = f"{trained} of {len(example.tokens)} tokens are trained on"
    said += f", {other} of them with another weight than 1" if other else ""
    return said + (f"; {context} are of turns of weight 0" if context else "")
