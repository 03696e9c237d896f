"""Hooks of the SFT loop: the loss on held-out data, and samples of the model's turns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from astra_jax.base.files import write_text
from astra_jax.base.progress import log_above_progress
from astra_jax.models.model import Model, Params
from astra_jax.run.batch import PackedBatch, bucket_index, to_device
from astra_jax.run.compiler import Program
from astra_jax.run.hooks import Hook, Run
from astra_jax.run.hosts import is_first
from astra_jax.run.state import TrainState
from astra_jax.run.trackers import LoggedSample
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import BatchIterator, held_out_data
from astra_jax.sft.samples import TurnSampler
from astra_jax.sft.step import loss_sums
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import Folder, each_record
from synthesis.core.records import Trajectory


class HeldOutLoss(Hook):
    """Log the loss on a held-out dataset as `eval/loss`, every `eval_every` steps and after the last.

    Each example counts once. With `eval_batches` the loss is that of the first batches, always the same ones.
    """

    hosts = "all"

    def __init__(
        self, path: Folder, tokenizer: ChatTokenizer, config: SFTConfig, model: Model, mesh: Mesh | None
    ) -> None:
        self.every = config.eval_every
        with BatchIterator(path, tokenizer, held_out_data(config.data), config.batch_size) as batches:
            evaluated = itertools.islice(batches.epoch(), config.eval_batches)
            self._batches = [micro for batch in evaluated for micro in _micro_batches(batch, config)]
        sums = partial(loss_sums, model=model, remat=config.remat, matmul=config.matmul_quantization, mesh=mesh)
        self._sums = Program(sums, own=config.compiler_options)
        self._mesh = mesh

    def measure(self, run: Run, state: TrainState, batch: Any, row: Mapping[str, float]) -> dict[str, float]:
        return {"eval/loss": self.loss(state.inference_params())}

    def loss(self, params: Params) -> float:
        """Return the loss per trained token, in nats."""
        total, count = 0.0, 0.0
        for batch in self._batches:
            loss, (tokens, _) = self._sums(params, to_device(batch, self._mesh))
            total, count = total + float(loss), count + float(tokens)
        return total / count


class Samples(Hook):
    """Write the model's next turns to the openings of a few conversations, every `sample_every` steps and after the
    last, to `workdir/samples`."""

    hosts = "all"

    def __init__(
        self, path: Folder, tokenizer: ChatTokenizer, config: SFTConfig, model: Model, mesh: Mesh | None
    ) -> None:
        self.every = config.sample_every
        limits = {"count": config.samples, "max_tokens": config.sample_tokens}
        self._sampler = TurnSampler(each_record(path, Trajectory), tokenizer, model, config.data, mesh=mesh, **limits)
        if self._sampler.is_empty and is_first():
            log_above_progress(
                f"no samples: no opening has room for sample_tokens ({config.sample_tokens}) more in data.seq_len "
                f"({config.data.seq_len}); lower --config.sft.sample_tokens"
            )

    def after_update(self, run: Run, state: TrainState, batch: Any, row: Mapping[str, float]) -> None:
        samples = self._sampler.draw(state.inference_params())
        text = "\n".join(map(str, samples))
        if run.writer is not None:
            run.writer.write_text(state.step, "samples", text)
            logged = [LoggedSample(one.prompt, one.said, expected=one.wanted) for one in samples]
            run.writer.write_samples(state.step, logged)
            write_text(run.folder / "samples" / f"{state.step:08d}.txt", text)


def own_hooks(
    config: SFTConfig,
    model: Model,
    dataset: Folder,
    held_out: Folder | None,
    tokenizer: ChatTokenizer,
    mesh: Mesh | None,
) -> list[Hook]:
    """Return the hooks that a run's settings ask for."""
    hooks: list[Hook] = [] if held_out is None else [HeldOutLoss(held_out, tokenizer, config, model, mesh)]
    if config.sample_every:
        hooks.append(Samples(held_out or dataset, tokenizer, config, model, mesh))
    return hooks


def _micro_batches(batch: PackedBatch, config: SFTConfig) -> Iterator[PackedBatch]:
    """Yield a batch's micro-batches, their rows cut; without the ones of padding alone."""
    lengths, rows = list(config.row_lengths), config.micro_batch_rows
    for i, which in enumerate(bucket_index(batch, lengths, config.micro_batches)):
        micro = jax.tree.map(lambda x_bt, i=i, n=lengths[which]: x_bt[i * rows : (i + 1) * rows, :n], batch)
        if micro.segment_ids_bt.any():
            yield micro
