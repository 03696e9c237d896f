"""An SFT job: checks and counts before its first step, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from astra_jax.mesh import check_batch
from astra_jax.models import adapters
from astra_jax.models.model import Model, Params
from astra_jax.run.batch import on_mesh
from astra_jax.run.compiler import check_options
from astra_jax.run.identity import model_settings, run_identity, settings_of
from astra_jax.run.matmuls import check_matmul
from astra_jax.run.state import TrainState
from astra_jax.run.summary import RunSummary
from astra_jax.run.trainer import RunContext, StopReason
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataStats, held_out_data, of_rehearsal
from astra_jax.sft.statistics import kept_statistics
from astra_jax.sft.step import abstract_arguments, abstract_bucket_ids, train_step
from astra_jax.sft.summary import count_steps, summarise
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import Folder, read_card


@dataclass(frozen=True)
class SFTJob:
    """An SFT run that can start.

    Attributes:
        config: as given, with the mesh's micro-batch size.
        steps: optimizer steps of the whole run.
        stats: counts of the dataset.
        summary: the table to print before the first step.
        identity: what checkpoints must share with the run.
    """

    config: SFTConfig
    steps: int
    stats: DataStats
    summary: RunSummary
    identity: dict[str, Any]


@dataclass(frozen=True)
class SFTResult:
    """Result of an SFT run.

    Attributes:
        params: the trained arrays, weights or adapters, after `steps` steps.
        base: frozen weights under adapters.
        stopped: `finished`; `preempted`: the run received SIGTERM; `stopped`: a hook stopped it. After the last two
            the same call resumes it.
        final_loss: loss of the last step.
        stats: counts of the dataset.
        summary: the table that was printed before the first step.
        history: this process's rows of metrics.
        skipped: steps that changed nothing, because their loss or gradient was not finite.
    """

    params: Params
    base: Params | None
    steps: int
    stopped: StopReason
    final_loss: float
    stats: DataStats
    summary: RunSummary
    history: list[dict[str, float]]
    skipped: int

    @classmethod
    def of(cls, run: RunContext, state: TrainState, job: SFTJob) -> SFTResult:
        """Return the result of a run whose loop is over."""
        return cls(
            params=state.params,
            base=state.base,
            steps=state.step,
            stopped=run.stopped or "finished",
            final_loss=run.finite.loss,
            stats=job.stats,
            summary=job.summary,
            history=run.history,
            skipped=run.finite.skipped.count,
        )


def prepare(
    config: SFTConfig,
    model: Model,
    dataset: Folder,
    tokenizer: ChatTokenizer,
    workdir: Folder,
    *,
    held_out: Folder | None = None,
    rehearsal: Folder | None = None,
    mesh: Mesh | None = None,
) -> SFTJob:
    """Check that a run's parts fit together, and count what it trains on. Arguments and errors as in `train.train`."""
    tokenizer.check_fits(model.vocab_size)
    model.check_length(config.data.seq_len, "data.seq_len")
    check_options(config.compiler_options, mesh)
    check_matmul(config.matmul_quantization, model, mesh)
    adapters.check(model, config.lora)
    if mesh is not None:
        check_batch(mesh, config.batch_size, config.data.seq_len, "data.seq_len")
        config = on_mesh(config, mesh)
        for length, field in config.row_lengths.items():
            check_batch(mesh, config.micro_batch_rows, length, field)
    stats = kept_statistics(dataset, tokenizer, config.data, workdir)
    rehearsed = None if rehearsal is None else kept_statistics(rehearsal, tokenizer, of_rehearsal(config.data), workdir)
    held = None if held_out is None else kept_statistics(held_out, tokenizer, held_out_data(config.data), workdir)
    both = count_steps(config, dataset, tokenizer, stats, rehearsal=rehearsal, rehearsed=rehearsed)
    card = read_card(dataset)
    summary = summarise(config, both, stats, card, dataset=dataset, rehearsed=rehearsed, held_out=held)
    settings = settings_of(config) | {"steps": both[0]}
    read = [(stats, card)]
    more: dict[str, Any] = {}
    if rehearsal is not None and rehearsed is not None:
        rehearsal_card = read_card(rehearsal)
        read.append((rehearsed, rehearsal_card))
        more["rehearsal"] = rehearsal_card["digest"]
    else:  # the identity of runs from before there was rehearsal
        settings["data"] = {name: value for name, value in settings["data"].items() if name != "self_generated_ratio"}
    if all(one.count == of["count"] for one, of in read):
        # No user speaks twice, so that both values of `split_at_user_turns` mean the same, and runs from before it
        # resume.
        settings["data"] = {**settings["data"], "split_at_user_turns": False}
    identity = run_identity(
        model=model_settings(model),
        sft=settings,
        dataset=card["digest"],
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.digest,
        **more,
    )
    return SFTJob(config, both[0], stats, summary, identity)


def compile_step(model: Model, config: SFTConfig, steps: int, mesh: Mesh | None) -> None:
    """Compile the training step for a run's shapes."""
    arguments = abstract_arguments(model, config, steps, mesh)
    base = adapters.abstract_base(model, config.lora, mesh)
    options: dict[str, Any] = {"base": base, "bucket_ids_a": abstract_bucket_ids(config, mesh)}
    train_step.compile(*arguments, model=model, config=config, steps=steps, mesh=mesh, **options)
