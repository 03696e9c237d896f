"""Benchmark of the SFT loop on synthetic data, to compare machines and meshes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from astra_jax.base.files import check_held
from astra_jax.models.model import Model, Params
from astra_jax.run.hosts import allgather_exception, is_first
from astra_jax.run.record import start_of_run
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.train import train
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import write_dataset
from synthesis.core.records import Message, ToolCall, ToolSpec, Trajectory

if TYPE_CHECKING:
    from jax.sharding import Mesh

_WARM_UP = 3
CALLS = (2, 3, 4, 4, 5, 5, 6, 6)
"""Tool calls of a conversation, one a turn. The means are 4.4 calls and 10.8 messages; the paper's dataset has 4.4 and
10.6."""


def run(
    config: SFTConfig,
    model: Model,
    start: Callable[[], Params],
    tokenizer: ChatTokenizer,
    workdir: Path,
    mesh: Mesh | None,
    *,
    steps: int,
) -> str:
    """Train for `steps` steps after a warm-up, without checkpoints (45 GiB for a 4B model).

    Returns:
        a JSON row with the setup, and medians of tokens a second, seconds a step, MFU and memory. It is appended to
            `workdir/bench.jsonl`.
    """
    folder = workdir / "bench"
    failure: Exception | None = None
    try:
        if is_first():
            shutil.rmtree(folder, ignore_errors=True)
            tokens = config.data.seq_len * config.batch_size
            write_dataset(folder / "data", Trajectory, trajectories(tokenizer, 2 * tokens), card={"made_by": "bench"})
    except Exception as error:
        failure = error
    if (failure := allgather_exception(failure)) is not None:  # other hosts wait for the data
        raise failure
    changed = dataclasses.replace(config, steps=steps + _WARM_UP, log_every=1, sample_every=0)
    result = train(
        changed,
        model,
        start,
        folder / "data",
        tokenizer,
        folder,
        mesh=mesh,
        checkpoints=False,
        on_summary=lambda _: None,
    )
    rows = result.history[_WARM_UP:]
    figures = {
        name: statistics.median(row[name] for row in rows)
        for name in ("tokens_per_second", "mfu", "peak_memory_gib", "padding_share", "mask_share")
        if name in rows[0]
    }
    shape: dict[str, Any] = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(result.params)),
        "seq_len": config.data.seq_len,
        "batch_size": config.batch_size,
        "micro_batch_size": config.micro_batch_rows,
        "dtype": model.dtype,
        "param_dtype": model.param_dtype,
        "remat": config.remat,
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1} if mesh is not None else {},
        "steps": steps,
    }
    row = json.dumps(start_of_run() | shape | figures)
    if is_first():
        check_held(workdir)
        with open(workdir / "bench.jsonl", "a", encoding="utf-8") as file:
            file.write(row + "\n")
    return row


def trajectories(tokenizer: ChatTokenizer, tokens: int) -> list[Trajectory]:
    """Return conversations in the tokenizer's vocabulary with at least `tokens` tokens in total."""
    sample = random.Random(0).sample(range(tokenizer.vocab_size), min(500, tokenizer.vocab_size))
    words = [tokenizer.decode([i]) for i in sample]
    words = [word for word in words if word.isprintable() and "<" not in word and "\ufffd" not in word] or ["word"]
    made: list[Trajectory] = []
    total = 0
    for one in conversations(words):
        made.append(one)
        total += sum(len(tokenizer.encode(message.content + message.reasoning)) for message in one.messages)
        if total >= tokens:
            break
    return made


def conversations(words: Sequence[str], *, size: float = 1.0) -> Iterator[Trajectory]:
    """Yield endless conversations of random words with tool calls, always the same ones; `size` scales their texts."""
    rng = random.Random(0)

    def text(count: int) -> str:
        return " ".join(rng.choices(words, k=max(1, round(size * count))))

    spec = ToolSpec("look_up", "Looks a thing up.", {"type": "object", "properties": {"thing": {"type": "string"}}})
    for index in itertools.count():
        messages = [Message("user", text(40))]
        for i in range(rng.choice(CALLS)):
            call = ToolCall(f"call_{i}", "look_up", {"thing": text(3)})
            messages.append(Message("assistant", "", reasoning=text(60), tool_calls=[call]))
            messages.append(Message("tool", text(100), tool_call_id=call.id, name="look_up"))
        messages.append(Message("assistant", text(80)))
        name = f"made_up_{index}"
        yield Trajectory(name, name, "made_up", "none", "en", [spec], messages, 0, {}, 1.0)
