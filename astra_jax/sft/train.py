"""Supervised fine-tuning on agent trajectories (paper §2.1): predict the assistant's tokens, nothing else.

One step:
  1. Take a batch of packed rows (`data.py`): several conversations a row, told apart by segment ids. Padding that all
     rows of a micro-batch end with is cut off, as far as `row_buckets` allow.
  2. Over its micro-batches add up the negative logprob of every assistant token (thinking, calls and answers; never
     tool output, user or system), and its gradient (`step.py`).
  3. Divide once by the batch's number of assistant tokens, clip, take an AdamW step. The learning rate warms up
     linearly and then follows a cosine.
  4. Log; every `checkpoint_every` steps save weights, optimizer and the position in the data, so that a run that was
     killed goes on by itself, and to the bit as if it had not been. A run that is asked to stop saves first.

On several hosts each runs this program. They make the same batches and train on their parts of them.

Run it with `python -m launch.sft --config=sft:14b --data=DATASET --workdir=DIR`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from astra_jax.mesh import check_batch
from astra_jax.models import adapters
from astra_jax.models.model import Model, Params
from astra_jax.run.batch import PackedBatch, least_lengths, on_mesh, to_device, to_each_device
from astra_jax.run.compiler import CompiledAhead, Program, check_options
from astra_jax.run.frozen import Origin
from astra_jax.run.hosts import is_first
from astra_jax.run.identity import model_settings, run_identity, settings_of
from astra_jax.run.matmuls import check_matmul
from astra_jax.run.optimizers import learning_rate
from astra_jax.run.shell import Stopped, TrainingRun
from astra_jax.run.summary import RunSummary, TimeLeft
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import BatchIterator, DataStats, held_out_data, of_rehearsal
from astra_jax.sft.samples import Sampler
from astra_jax.sft.statistics import kept_statistics
from astra_jax.sft.step import abstract_arguments, abstract_which, loss_sums, sft_optimizer, train_step
from astra_jax.sft.summary import count_steps, summarise
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import Folder, each_record, read_card
from synthesis.core.files import write_text
from synthesis.core.progress import say_beside_bars
from synthesis.core.records import Trajectory
from synthesis.core.refusals import InputError
from synthesis.core.terminal import say

_FREE = (
    *("row_buckets", "log_every", "epochs", "eval_every", "eval_batches"),
    *("sample_every", "samples", "sample_tokens"),
)
"""May change when a run goes on, beside what may in every loop. (What `epochs` came to is in `steps`.)"""


@dataclass(frozen=True)
class SFTResult:
    """What a run came to.

    Attributes:
        params: what was trained, the weights or the adapters, after `steps` steps.
        base: the frozen weights under adapters.
        stopped: `finished`, or `preempted`: asked to stop; the same call goes on from there.
        final_loss: of the last step.
        stats: the dataset's.
        summary: the table that was printed before the first step.
        history: this run's metric rows.
        skipped: steps that changed nothing, since their loss or gradient was not finite.
    """

    params: Params
    base: Params | None
    steps: int
    stopped: Stopped
    final_loss: float
    stats: DataStats
    summary: RunSummary
    history: list[dict[str, float]]
    skipped: int


def train(
    config: SFTConfig,
    model: Model,
    start: Callable[[], Params],
    dataset_path: Folder,
    tokenizer: ChatTokenizer,
    workdir: Folder,
    *,
    held_out: Folder | None = None,
    rehearsal: Folder | None = None,
    origin: Origin | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
    checkpoints: bool = True,
    profile: tuple[int, int] | None = None,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
    on_summary: Callable[[RunSummary], None] = say,
) -> SFTResult:
    """Train from what `start` gives, or go on from the latest checkpoint in `workdir`.

    SIGTERM ends it after a step, saved.

    Args:
        start: gives the starting weights; called where there is no checkpoint. They are taken over: a step donates
            them, and nothing of them stays on the devices. With adapters it is called always, and they stay.
        dataset_path: a dataset of `Trajectory` records.
        workdir: on disk or in a bucket; gets `checkpoints/`, `metrics/`, `samples/`, `statistics/` and `profile/`. All
            hosts share it.
        held_out: a dataset whose loss is logged every `eval_every` steps (`held_out_loss`), and whose conversations are
            what samples answer.
        rehearsal: a dataset of conversations without tools, such as the model's own (`rehearsal.rehearse`), that come
            between the others against unlearning to talk; their share is `config.data.rehearsed`.
        origin: where `start` reads the weights; with adapters, whose checkpoints do not have them, it is kept there.
        mesh: devices to train on; None is one device.
        checkpoints: write them; without, nothing is left of what was trained but the result.
        profile: first and last step of a trace for TensorBoard or Perfetto.
        on_step: called with the step and its metrics after each logged step, before its checkpoint.
        on_summary: called on the first host before anything is compiled, with what the run reads and does.

    Raises:
        DatasetError: a dataset is missing, corrupt, or has nothing to train on.
        NonFiniteError: a loss or gradient was not finite.
        ValueError: the loss mask of a batch is empty or full, the model's vocabulary is too small or its context too
            short, it has none of the adapters' targets, or the mesh does not divide the batch.
        Exception: what `TrainingRun` raises.
    """
    tokenizer.check_fits(model.vocab_size)
    model.check_length(config.data.seq_len, "data.seq_len")
    check_options(config.compiler_options, mesh)
    check_matmul(config.matmul, model, mesh)
    adapters.check(model, config.lora)
    if mesh is not None:
        check_batch(mesh, config.batch_size, config.data.seq_len, "data.seq_len")
        config = on_mesh(config, mesh)
        for length, field in config.row_lengths.items():
            check_batch(mesh, config.rows_at_once, length, field)
    stats = kept_statistics(dataset_path, tokenizer, config.data, workdir)
    rehearsed = None if rehearsal is None else kept_statistics(rehearsal, tokenizer, of_rehearsal(config.data), workdir)
    held = None if held_out is None else kept_statistics(held_out, tokenizer, held_out_data(config.data), workdir)
    both = steps, _ = count_steps(config, dataset_path, tokenizer, stats, rehearsal=rehearsal, rehearsed=rehearsed)
    settings = settings_of(config, free=_FREE) | {"steps": steps}
    card = read_card(dataset_path)
    summary = summarise(config, both, stats, card, dataset=dataset_path, rehearsed=rehearsed, held_out=held)
    if is_first():
        on_summary(summary)
    digest = card["digest"]
    read = [(stats, card)]
    if rehearsal is not None and rehearsed is not None:
        read.append((rehearsed, read_card(rehearsal)))
    if all(one.count == of["count"] for one, of in read):
        # No user speaks twice: rounds apart are rounds together, and runs of before there was a choice go on.
        settings["data"] = {**settings["data"], "rounds": "together"}
    anchor = {}
    if rehearsal is None:  # as runs were before there was any
        settings["data"] = {name: value for name, value in settings["data"].items() if name != "rehearsed"}
    else:
        anchor["rehearsal"] = read_card(rehearsal)["digest"]
    identity = run_identity(
        model=model_settings(model),
        sft=settings,
        dataset=digest,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.digest,
        **anchor,
    )
    batches = BatchIterator(dataset_path, tokenizer, config.data, config.batch_size, rehearsal=rehearsal)
    evaluation = None if held_out is None else _Evaluation(held_out, tokenizer, config, model, mesh)
    sampler = _sampler(held_out or dataset_path, tokenizer, config, model, mesh)
    if sampler is not None and sampler.is_empty and is_first():
        say_beside_bars(
            f"no samples: no opening has room for sample_tokens ({config.sample_tokens}) more in data.seq_len "
            f"({config.data.seq_len}); lower --config.sft.sample_tokens"
        )

    def compile_step() -> None:
        arguments = abstract_arguments(model, config, steps, mesh)
        base = adapters.abstract_base(model, config.lora, mesh)
        options: dict[str, Any] = {"base": base, "which_a": abstract_which(config, mesh)}
        train_step.compile(*arguments, model=model, config=config, steps=steps, mesh=mesh, **options)

    with (
        batches,
        CompiledAhead({"train_step": compile_step}) as ahead,
        TrainingRun(
            "SFT",
            config,
            model,
            workdir,
            steps=steps,
            identity=identity,
            origin=origin,
            profile=profile,
            progress=progress,
        ) as run,
    ):
        step, params, opt_state, extra = run.begin(start, sft_optimizer(config, steps), mesh)
        loss = float("nan")
        if extra is not None:
            batches.set_state(extra["batches"])
            loss = extra["loss"]
        ahead.wait("train_step")
        time_left = TimeLeft(steps)
        while step < steps and run.stopped is None:
            step += 1
            started = time.perf_counter()
            with run.traced(step):
                batch = next(batches)
                run.meter.add(batch.segment_ids_bt)
                lengths = list(config.row_lengths)
                which_a = least_lengths(batch, lengths, config.micro_batches)
                shares = _shares(batch, step, np.take(lengths, which_a))
                on_device = to_device(batch, mesh, micro_batches=config.micro_batches)
                options: dict[str, Any] = {"model": model, "config": config, "steps": steps, "mesh": mesh}
                options |= {"base": run.base, "which_a": to_each_device(which_a, mesh) if config.row_buckets else None}
                params, opt_state, metrics = train_step(params, opt_state, on_device, **options)
            run.check(step, metrics)
            if time_left.is_due:
                run.settle()
                time_left.add(step, time.perf_counter() - started)
            run.bar.update()
            run.notice(step)
            evaluated = evaluation is not None and (step % config.eval_every == 0 or step == steps)
            sampled = sampler is not None and (step % config.sample_every == 0 or step == steps)
            logged = step % config.log_every == 0 or evaluated or run.due(step)
            if logged:
                run.settle()
                row = {name: float(value) for name, value in jax.device_get(metrics).items()} | shares
                loss = row["loss"]
                row["learning_rate"] = float(learning_rate(config, steps)(step - 1))
                row |= run.meter.read()
                if evaluation is not None and evaluated:
                    row["held_out_loss"] = evaluation.loss(adapters.joined(params, run.base, config.lora))
                row = run.log(step, row)
                run.bar.set_postfix(loss=f"{loss:.4f}", tokens_per_second=f"{row['tokens_per_second']:.0f}")
                if on_step is not None:
                    on_step(step, row)
            if sampler is not None and sampled:
                text = "\n".join(map(str, sampler.draw(adapters.joined(params, run.base, config.lora))))
                if run.writer is not None:
                    run.writer.write_text(step, "samples", text)
                    write_text(run.folder / "samples" / f"{step:08d}.txt", text)
            if checkpoints and run.due(step):
                run.save(step, params, opt_state, {"batches": batches.get_state(), "loss": loss})
            if logged or sampled:
                run.meter.start()
    stopped, skipped = run.stopped or "finished", run.skipped.count
    return SFTResult(params, run.base, step, stopped, loss, stats, summary, run.history, skipped)


def _micro_batches(batch: PackedBatch, config: SFTConfig) -> Iterator[PackedBatch]:
    """A batch's, each with its rows cut; without those that are padding alone."""
    lengths, rows = list(config.row_lengths), config.rows_at_once
    for i, which in enumerate(least_lengths(batch, lengths, config.micro_batches)):
        micro = jax.tree.map(lambda x_bt, i=i, n=lengths[which]: x_bt[i * rows : (i + 1) * rows, :n], batch)
        if micro.segment_ids_bt.any():
            yield micro


class _Evaluation:
    """The loss on a held-out dataset, each example once; with `eval_batches` on its first batches, always the same."""

    def __init__(
        self, path: Folder, tokenizer: ChatTokenizer, config: SFTConfig, model: Model, mesh: Mesh | None
    ) -> None:
        with BatchIterator(path, tokenizer, held_out_data(config.data), config.batch_size) as batches:
            evaluated = itertools.islice(batches.epoch(), config.eval_batches)
            self._batches = [micro for batch in evaluated for micro in _micro_batches(batch, config)]
        sums = partial(loss_sums, model=model, remat=config.remat, matmul=config.matmul, mesh=mesh)
        self._sums = Program(sums, own=config.compiler_options)
        self._mesh = mesh

    def loss(self, params: Params) -> float:
        """Return the loss per trained token, in nats."""
        total, count = 0.0, 0.0
        for batch in self._batches:
            loss, (tokens, _) = self._sums(params, to_device(batch, self._mesh))
            total, count = total + float(loss), count + float(tokens)
        return total / count


def _sampler(
    path: Folder, tokenizer: ChatTokenizer, config: SFTConfig, model: Model, mesh: Mesh | None
) -> Sampler | None:
    if not config.sample_every:
        return None
    limits = {"count": config.samples, "max_tokens": config.sample_tokens}
    return Sampler(each_record(path, Trajectory), tokenizer, model, config.data, mesh=mesh, **limits)


def _shares(batch: PackedBatch, step: int, lengths_a: np.ndarray) -> dict[str, Any]:
    """Mask share (of the real tokens), padding share (of all places that are computed), and tokens of a row.

    Raises:
        ValueError: no token is trained on, or every one is: the renderer and the tokenizer disagree.
    """
    real = batch.segment_ids_bt > 0
    mask_share = float(np.count_nonzero(batch.loss_mask_bt[real]) / real.sum())
    if mask_share in (0.0, 1.0):
        raise InputError(
            f"step {step}: the loss mask covers {mask_share:.0%} of the batch's tokens; assistant tokens must be some, "
            "and not all: check the dataset's messages and the tokenizer"
        )
    row_tokens = float(lengths_a.mean())
    padding_share = 1 - float(real.sum()) / (len(real) * row_tokens)
    return {"mask_share": mask_share, "padding_share": padding_share, "row_tokens": row_tokens}
