"""Supervised fine-tuning on agent trajectories (paper §2.1): predict the assistant's tokens, nothing else.

One step:
  1. Take a batch of packed rows (`astra_jax.data`): several conversations a row, told apart by segment ids.
  2. For each of `accumulation` micro-batches add up the negative logprob of every assistant token (thinking, calls and
     answers; never tool output, user or system), and its gradient.
  3. Divide once by the batch's number of assistant tokens, clip, take an AdamW step. The learning rate warms up
     linearly and then follows a cosine.
  4. Log; every `checkpoint_every` steps save weights, optimizer and the position in the data, so that a run that was
     killed goes on by itself, and to the bit as if it had not been.

Run it with `python -m launch.sft --config=configs/sft_qwen3_14b.py --data=DATASET --workdir=DIR`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from astra_jax.checkpoints import Checkpointer
from astra_jax.data import Batch, BatchIterator, DataConfig, DataStats, scan, steps_for_epochs
from astra_jax.head import summed_loss
from astra_jax.mesh import BATCH, check_batch, zigzag
from astra_jax.metrics import MetricWriter
from astra_jax.models.qwen3.modules import Params, forward, head_kernel
from astra_jax.models.qwen3.moe import RouterSums, router_metrics
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.models.qwen3.sharding import param_shardings
from astra_jax.models.qwen3.weights import write_config
from astra_jax.optimizers import OptimizerName, initial_state, make_optimizer
from astra_jax.run_identity import check_same_run, run_identity
from astra_jax.tokenizer import ChatTokenizer
from synthesis.datasets import read_card


@dataclass(frozen=True)
class SFTConfig:
    """Defaults are the paper's for 14B where it gives one; the others are ours, with the reason.

    Attributes:
        data: rows of 20k tokens, 32 of them a batch (paper).
        epochs: passes over the data (paper: 2); not used when `steps` is given.
        steps: optimizer steps; None takes them from `epochs`.
        accumulation: micro-batches of a batch; divides `data.rows`. The step's result does not depend on it.
        optimizer: `adamw` (paper), or `muon` for small models from scratch.
        learning_rate: the peak (paper: 5e-6 for 14B, 2e-6 for 32B).
        warmup_fraction: of all steps (paper: 0.05).
        final_fraction: of the peak, where the cosine ends. Ours: 0.1, so that the last steps still teach.
        b1, b2, eps: AdamW's. Ours: b2 0.95, as usual for language models; it forgets the warm-up's statistics.
        weight_decay: on matrices only. Ours: 0; two epochs at 5e-6 hardly move the weights.
        max_grad_norm: gradients are scaled down to this norm. Ours: 1.
        remat: what the backward pass recomputes; a policy of the model's `forward`.
        checkpoint_every: steps between checkpoints; the last step is always saved.
        keep_states: full training states that are kept (paper: the last one or two).
        keep_params: weights that are kept; None keeps all (paper: weights at high frequency).
        log_every: steps between rows of metrics; fetching them waits for the device.
    """

    data: DataConfig = DataConfig(seq_len=20_480, rows=32)
    epochs: float = 2.0
    steps: int | None = None
    accumulation: int = 1
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 5e-6
    warmup_fraction: float = 0.05
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    remat: str = "none"
    checkpoint_every: int = 100
    keep_states: int = 2
    keep_params: int | None = None
    log_every: int = 1

    def __post_init__(self) -> None:
        for name in ("accumulation", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.data.rows % self.accumulation:
            raise ValueError(
                f"accumulation is {self.accumulation}, which does not divide data.rows ({self.data.rows}); "
                "choose a divisor"
            )
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1, or None to use epochs")


@dataclass(frozen=True)
class SFTResult:
    """`params` after `steps` steps, the last one's loss, the dataset's statistics, and this run's metric rows."""

    params: Params
    steps: int
    final_loss: float
    stats: DataStats
    history: list[dict[str, float]]


# ---------------------------------------------------------------------------------------------------------------------
# The step


def loss_sums(
    params: Params, batch: Batch, *, model: Qwen3Config, remat: str = "none", mesh: Mesh | None = None
) -> tuple[jax.Array, tuple[jax.Array, RouterSums | None]]:
    """Sum of negative logprobs over the trained tokens; their number, and the router's statistics (None if dense).

    The token at t is predicted at t-1, so a document's first token is never a target, nor is padding.
    """
    context = 1 if mesh is None else mesh.shape["context"]
    places = (batch.tokens_bt, batch.positions_bt, batch.segment_ids_bt, shift(batch.tokens_bt), target_mask(batch))
    tokens_bt, positions_bt, segment_ids_bt, targets_bt, mask_bt = (zigzag(x, context) for x in places)
    x_btd, router = forward(params, model, tokens_bt, positions_bt, segment_ids_bt, remat=remat, mesh=mesh)
    loss, count = summed_loss(_objective, x_btd, head_kernel(params, model), targets_bt, mask_bt, mesh=mesh)
    return loss, (count, router)


def _objective(logps: jax.Array, entropies: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    del entropies
    return -jnp.sum(logps * mask), jnp.sum(mask)


def target_mask(batch: Batch) -> jax.Array:
    """[B, T], float32: 1 at t where the *next* token is trained on and belongs to the same document."""
    same_document_bt = (shift(batch.segment_ids_bt) == batch.segment_ids_bt) & (batch.segment_ids_bt > 0)
    return (shift(batch.loss_mask_bt) * same_document_bt).astype(jnp.float32)


def shift(x_bt: jax.Array) -> jax.Array:
    """Each position's successor; 0 at the end of a row."""
    return jnp.pad(x_bt[:, 1:], ((0, 0), (0, 1)))


def learning_rate(config: SFTConfig, steps: int) -> optax.Schedule:
    """Linear warm-up that reaches the peak with its last step, then a cosine down to `final_fraction` of the peak."""
    warmup = max(1, round(config.warmup_fraction * steps))

    def schedule(count: jax.Array) -> jax.Array:
        ramp = (count + 1) / warmup
        progress = jnp.clip((count + 1 - warmup) / max(1, steps - warmup), 0.0, 1.0)
        cosine = config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return config.learning_rate * jnp.where(count < warmup, ramp, cosine)

    return schedule


def sft_optimizer(config: SFTConfig, steps: int) -> optax.GradientTransformation:
    """The configured optimizer on the schedule of a run of `steps` steps."""
    return make_optimizer(
        config.optimizer,
        learning_rate(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


@partial(jax.jit, static_argnames=("model", "config", "steps", "mesh"), donate_argnames=("params", "opt_state"))
def train_step(
    params: Params,
    opt_state: Any,
    batch: Batch,
    *,
    model: Qwen3Config,
    config: SFTConfig,
    steps: int,
    mesh: Mesh | None = None,
) -> tuple[Params, Any, dict[str, jax.Array]]:
    """One optimizer step on a batch whose arrays are [accumulation, rows / accumulation, T].

    Returns:
        (params, optimizer state, metrics on the device).
    """
    grad_fn = jax.value_and_grad(partial(loss_sums, model=model, remat=config.remat, mesh=mesh), has_aux=True)

    def micro_batch(micro: Batch) -> Any:
        (loss, sums), gradients = grad_fn(params, micro)
        return gradients, loss, sums

    if config.accumulation == 1:  # no second copy of the gradients
        gradients, loss, (count, router) = micro_batch(jax.tree.map(lambda x: x[0], batch))
    else:
        shapes = jax.eval_shape(micro_batch, jax.tree.map(lambda x: x[0], batch))
        zeros = jax.tree.map(jnp.zeros_like, params), *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1:])

        def add(carry: Any, micro: Batch) -> tuple[Any, None]:
            # The barrier keeps the gradients' reduce-scatter in the loop: XLA would move it behind, where each device
            # holds whole gradients (and its TPU compiler fails while it tries).
            new = jax.lax.optimization_barrier(micro_batch(micro))
            return jax.tree.map(jnp.add, carry, new), None

        (gradients, loss, (count, router)), _ = jax.lax.scan(add, zeros, batch)
    gradients = jax.tree.map(lambda g: g / count.astype(g.dtype), gradients)
    updates, opt_state = sft_optimizer(config, steps).update(gradients, opt_state, params)
    metrics = {"loss": loss / count, "trained_tokens": count, "gradient_norm": optax.tree.norm(gradients)}
    if router is not None:
        metrics |= router_metrics(router)
    return optax.apply_updates(params, updates), opt_state, metrics


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def train(
    config: SFTConfig,
    model_config: Qwen3Config,
    params: Params,
    dataset_path: Path | str,
    tokenizer: ChatTokenizer,
    workdir: Path | str,
    *,
    mesh: Mesh | None = None,
    progress: bool = True,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> SFTResult:
    """Train from `params`, or go on from the latest checkpoint in `workdir`.

    Args:
        params: the starting weights; copied, so the caller's arrays stay valid.
        dataset_path: a dataset of `Trajectory` records.
        workdir: gets `checkpoints/` and `metrics/`.
        mesh: devices to train on; None is one device.
        on_step: called with the step and its metrics after each logged step, before its checkpoint.

    Raises:
        DatasetError: the dataset is missing, corrupt, or has nothing to train on.
        WorkdirError: `workdir` has a checkpoint of another run.
        ValueError: the loss mask of a batch is empty or full, the model's vocabulary is too small or its context too
            short, or the mesh does not divide the batch.
    """
    if model_config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the model's vocab_size is {model_config.vocab_size}, the tokenizer has {tokenizer.vocab_size} tokens; "
            "make the model's at least as large"
        )
    model_config.check_length(config.data.seq_len, "data.seq_len")
    if mesh is not None:
        check_batch(mesh, config.data.rows // config.accumulation, config.data.seq_len, "data.seq_len")
    stats = scan(dataset_path, tokenizer, config.data)
    steps = config.steps or steps_for_epochs(stats, config.data, config.epochs)
    identity = _identity(config, model_config, dataset_path, tokenizer, steps)
    workdir = Path(workdir)
    checkpointer = Checkpointer(workdir / "checkpoints", keep_states=config.keep_states, keep_params=config.keep_params)
    batches = BatchIterator(dataset_path, tokenizer, config.data, process=(jax.process_index(), jax.process_count()))

    shardings = None if mesh is None else param_shardings(model_config, mesh)
    params, opt_state = initial_state(params, sft_optimizer(config, steps), shardings)
    start, loss = 0, float("nan")
    if (latest := checkpointer.latest()) is not None:
        check_same_run(checkpointer.read_extra(latest)["identity"], identity, workdir)
        params, opt_state, extra = checkpointer.restore(latest, (params, opt_state))
        batches.set_state(extra["batches"])
        start, loss = latest, extra["loss"]

    writer = MetricWriter(workdir / "metrics")
    writer.truncate(start)
    write_config(model_config, workdir / "checkpoints")  # so that launch.convert can read them
    history: list[dict[str, float]] = []
    tokens, clock = 0, time.perf_counter()
    bar = tqdm(total=steps, initial=start, desc="SFT", disable=not progress, unit="step")
    try:
        for step in range(start + 1, steps + 1):
            batch = next(batches)
            shares = _shares(batch, step)
            tokens += int((batch.segment_ids_bt > 0).sum()) * jax.process_count()
            batch = _to_device(batch, config.accumulation, mesh)
            params, opt_state, metrics = train_step(
                params, opt_state, batch, model=model_config, config=config, steps=steps, mesh=mesh
            )
            bar.update()
            save = step % config.checkpoint_every == 0 or step == steps
            if step % config.log_every == 0 or save:
                row = {name: float(value) for name, value in jax.device_get(metrics).items()} | shares
                loss = row["loss"]
                row["learning_rate"] = float(learning_rate(config, steps)(step - 1))
                row["tokens_per_second"] = tokens / (time.perf_counter() - clock)
                writer.write(step, row)
                history.append({"step": step, **row})
                bar.set_postfix(loss=f"{loss:.4f}", tokens_per_second=f"{row['tokens_per_second']:.0f}")
                if on_step is not None:
                    on_step(step, row)
            if save:
                extra = {"identity": identity, "batches": batches.get_state(), "loss": loss}
                checkpointer.save(step, params=params, state=opt_state, extra=extra)
            if step % config.log_every == 0 or save:
                tokens, clock = 0, time.perf_counter()
    finally:
        bar.close()
        writer.close()
        checkpointer.close()
    return SFTResult(params=params, steps=steps, final_loss=loss, stats=stats, history=history)


def _shares(batch: Batch, step: int) -> dict[str, float]:
    """Mask share (of the real tokens) and padding share (of all places).

    Raises:
        ValueError: no token is trained on, or every one is: the renderer and the tokenizer disagree.
    """
    real = batch.segment_ids_bt > 0
    mask_share = float(batch.loss_mask_bt[real].mean())
    if mask_share in (0.0, 1.0):
        raise ValueError(
            f"step {step}: the loss mask covers {mask_share:.0%} of the batch's tokens; assistant tokens must be some, "
            "and not all: check the dataset's messages and the tokenizer"
        )
    return {"mask_share": mask_share, "padding_share": float(1 - real.mean())}


def _to_device(batch: Batch, accumulation: int, mesh: Mesh | None) -> Batch:
    """Split rows into micro-batches, [accumulation, rows / accumulation, T], and put them where they are needed."""

    def put(x_bt: np.ndarray) -> jax.Array:
        x_abt = x_bt.reshape(accumulation, -1, x_bt.shape[1])
        if mesh is None:
            return jnp.asarray(x_abt)
        sharding = NamedSharding(mesh, PartitionSpec(None, BATCH, "context"))
        return jax.make_array_from_process_local_data(sharding, x_abt)

    return jax.tree.map(put, batch)


def _identity(
    config: SFTConfig, model_config: Qwen3Config, dataset_path: Path | str, tokenizer: ChatTokenizer, steps: int
) -> dict[str, Any]:
    """What a run must share with its checkpoint: all that changes what is computed. JSON, flat, dotted names."""
    sft = dataclasses.asdict(config)
    for name in ("checkpoint_every", "keep_states", "keep_params", "log_every", "epochs"):
        del sft[name]  # `steps` below holds what epochs came to
    return run_identity(
        sft=sft | {"steps": steps},
        model=dataclasses.asdict(model_config),
        dataset=read_card(dataset_path)["digest"],
        vocab_size=tokenizer.vocab_size,
    )
