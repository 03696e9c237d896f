"""What SFT sees: examples on the terminal, the tokens that are trained on in colour."""

from __future__ import annotations

import itertools
import os
import sys
from typing import TextIO

from astra_jax.sft.data import DataConfig, by_round, tokenise
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import Folder, each_record
from synthesis.core.records import Trajectory
from synthesis.core.terminal import printable

_TRAINED, _PLAIN, _TITLE, _END = "\x1b[32m", "\x1b[90m", "\x1b[1m", "\x1b[0m"


def show(data: Folder, tokenizer: ChatTokenizer, config: DataConfig, count: int, out: TextIO | None = None) -> None:
    """Print the first examples of a dataset: trained text green, the rest grey; with NO_COLOR (no-color.org) trained
    text is between guillemets.

    Raises:
        DatasetError: the dataset is missing, corrupt or of another kind.
    """
    out = out or sys.stdout
    colour = not os.environ.get("NO_COLOR")
    every = (one for trajectory in each_record(data, Trajectory) for one in by_round(trajectory, config))
    for trajectory in itertools.islice(every, count):
        example = tokenise(trajectory, tokenizer, config)
        trained, total = int(example.loss_mask.sum()), len(example.tokens)
        state = f"dropped: {example.dropped}" if example.dropped else f"{trained} of {total} tokens are trained on"
        title = printable(f"{trajectory.id}: {state}{', cut' if example.cut else ''}", lines=False)
        print(f"{_TITLE}{title}{_END}" if colour else title, file=out)
        pairs = zip(example.tokens.tolist(), example.loss_mask.tolist(), strict=True)
        for mask, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
            text = printable(tokenizer.decode([token for token, _ in run]))
            if colour:
                out.write(f"{_TRAINED if mask else _PLAIN}{text}{_END}")
            else:
                out.write(f"«{text}»" if mask else text)
        out.write("\n\n")
