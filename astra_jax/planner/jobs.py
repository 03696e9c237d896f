"""A training job as it would run on a mesh: what its programs are compiled for, and whether it starts at all.

The configuration's own settings are kept: remat, rows of a micro-batch, row lengths. What it leaves open is filled in
as the training programs do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from astra_jax.grpo.config import GRPOConfig
from astra_jax.mesh import WIDTH, check_batch
from astra_jax.models import adapters
from astra_jax.models.adapters import abstract_trained
from astra_jax.models.lora import FULL, LoRA
from astra_jax.models.model import Model
from astra_jax.run.batch import on_mesh
from astra_jax.run.chips import Chip
from astra_jax.sft.config import SFTConfig
from synthesis.core.refusals import InputError

AnyModel = TypeVar("AnyModel", bound=Model)


@dataclass(frozen=True)
class Job:
    """One step of a run on a mesh.

    Attributes:
        model, config: as the run has them.
        kind: `sft` or `grpo`.
        row_tokens: the length of a row; of GRPO's buckets the longest, which any batch may take.
        micro_batch_size: rows of one forward and backward pass.
        micro_batches: of an optimizer step; in GRPO where each episode fills a row.
        steps: of the whole run; None: SFT's, which depend on the data.
    """

    model: Model
    config: SFTConfig | GRPOConfig
    kind: str
    row_tokens: int
    micro_batch_size: int
    micro_batches: int
    steps: int | None

    @property
    def rows(self) -> int:
        """Of a step."""
        return self.micro_batch_size * self.micro_batches


def longest(config: SFTConfig | GRPOConfig) -> int:
    """Tokens of the longest sequence that a configuration takes."""
    if isinstance(config, SFTConfig):
        return config.data.seq_len
    return config.episode.max_prompt_tokens + config.episode.max_response_tokens


def for_tokens(
    model: AnyModel, config: SFTConfig | GRPOConfig, tokens: int, length: int
) -> tuple[AnyModel, SFTConfig | GRPOConfig]:
    """(model, configuration) for sequences of so many tokens, in rows of `length`.

    Longer row buckets are left out, and GRPO's end with it; its episodes keep the proportion of prompt and response.
    """
    buckets = tuple(bucket for bucket in config.row_buckets if bucket < tokens)
    if isinstance(config, SFTConfig):
        data = dataclasses.replace(config.data, seq_len=length)
        return model.stretched(tokens), dataclasses.replace(config, data=data, row_buckets=buckets)
    buckets = (*buckets, length)
    prompt = max(1, tokens * config.episode.max_prompt_tokens // longest(config))
    episode = dataclasses.replace(config.episode, max_prompt_tokens=prompt, max_response_tokens=tokens - prompt)
    return model.stretched(tokens), dataclasses.replace(config, episode=episode, row_buckets=buckets)


def job_on(model: Model, config: SFTConfig | GRPOConfig, mesh: Any, *, blocks: int) -> Job:
    """The job on a mesh, refused with what the run itself would say.

    Args:
        mesh: a mesh, or an abstract one.
        blocks: what attention wants each device's chunks of a row to be multiples of: `splash.BLOCK` on TPUs.

    Raises:
        InputError, SettingError: the mesh does not divide the batch, a row or the model, or the model is too short.
    """
    context = mesh.shape["context"]
    if isinstance(config, SFTConfig):
        model.check_length(config.data.seq_len, "data.seq_len")
        check_batch(mesh, config.batch_size, config.data.seq_len, "data.seq_len")
        config = on_mesh(config, mesh)
        rows, total = config.rows_at_once, config.batch_size
        used, steps = config.data.seq_len, config.steps
    else:
        model.check_length(longest(config), "episode.max_prompt_tokens + max_response_tokens")
        config = on_mesh(config, mesh)
        rows, total = config.micro_batch_size or 1, config.batch_size * config.group_size
        used, steps = max(config.row_buckets), config.steps
    model.param_shardings(mesh)  # refuses a mesh that does not divide a dimension
    adapters.check(model, config.lora)
    for length, field in config.row_lengths.items():
        check_batch(mesh, rows, length, field)
        if context > 1 and length % (2 * context * blocks):
            step = 2 * context * blocks
            raise InputError(
                f"{field} is {length}; attention over a context axis of {context} needs a multiple of {step}: use "
                f"{-(-length // step) * step}"
            )
    return Job(
        model=model,
        config=config,
        kind="sft" if isinstance(config, SFTConfig) else "grpo",
        row_tokens=used,
        micro_batch_size=rows,
        micro_batches=math.ceil(total / rows),
        steps=steps,
    )


def executed_flops_per_token(model: Model, tokens: int, remat: str, chip: Chip, lora: LoRA = FULL) -> float:
    """What accelerators carry out of one document of `tokens`, causal attention: `flops_per_token` and more.

    `remat` computes products of the layers once more, and with `full` attention too. Under adapters no gradient of the
    weights is computed, and the adapters' products are.
    """
    layers, head = model.matmul_parameters()
    attention = (model.flops_per_token(tokens)[0] - 6 * (layers + head)) / 6  # of one matmul
    again = model.recomputed_parameters(remat)
    whole = 6 * (layers + head) + 2 * again + attention * attention_matmuls(remat, chip)
    if lora.rank is None:
        return whole
    thin = jax.tree_util.tree_leaves_with_path(adapters.abstract_adapters(model, lora))
    repeated = sum(leaf.size for path, leaf in thin if again and _is_repeated(path, remat))
    return whole - 2 * (layers + head) + 6 * sum(leaf.size for _, leaf in thin) + 2 * repeated


def _is_repeated(path: tuple[Any, ...], remat: str) -> bool:
    """Whether the backward pass computes an adapter's product again; see `flops.recomputed_parameters`."""
    *_, matrix, part = (step.key.partition("_")[0] for step in path)
    return not (matrix == "down" and part == "b") and not (remat == "heads" and matrix in "qkv")


def least_traffic(model: Model, config: SFTConfig | GRPOConfig, mesh: Mapping[str, int], micro_batches: int) -> float:
    """Bytes that a chip must read and write in a step: weights, their gradients and the optimizer's state.

    Args:
        mesh: sizes by axis.
    """
    layers, head = model.matmul_parameters()
    # Each number's types as they are kept: w, g and the statistics are read, w and the statistics written. Those that
    # are in the host's memory, and Muon's second that there is not, are left out.
    statistics = 0 if config.optimizer_memory == "host" else 1 if config.optimizer == "muon" else 2
    moved = 2 * statistics * jnp.dtype(config.moments).itemsize
    trained = jax.tree.leaves(abstract_trained(model, config.lora))
    state = sum(leaf.size * (3 * leaf.dtype.itemsize + moved) for leaf in trained)
    # Weights are read forward, for the inputs' gradient and, where `remat` computes layers again, once more; what is
    # gathered is written before, and gradients of the weights are written, if there are any.
    own = min(jnp.dtype(kept).itemsize for kept in (model.dtype, model.param_dtype))
    of_layers = 1 if config.matmul != "none" or config.lora.stored != "none" else own
    reads = 2 + any(mesh[axis] > 1 for axis in WIDTH)
    again = model.recomputed_parameters(config.remat)
    written = own if config.lora.rank is None else 0
    weights = layers * (reads * of_layers + written) + again * of_layers + head * (reads * own + written)
    return state / (math.prod(mesh.values()) / mesh["data"]) + micro_batches * weights / mesh["tensor"]


def attention_matmuls(remat: str, chip: Chip) -> int:
    """How many attention does, where 2 are needed forward and 4 backward.

    The backward pass computes the scores again: once on TPUs, in each of its two kernels on GPUs.
    """
    return 2 + (7 if chip.clock is None else 5) + 2 * (remat == "full")


def saved_flops_per_token(model: Model, matmul: str, remat: str, chip: Chip) -> float:
    """By how much less a chip is busy with a token's layers where they are multiplied in 8 bits, in bf16's flops.

    Forward, again where `remat` does, and the activations' gradient; the weights' gradient is as it was.
    """
    layers, _ = model.matmul_parameters()
    again = model.recomputed_parameters(remat)
    return (4 * layers + 2 * again) * (1 - 1 / dict(chip.narrow).get(matmul, 1.0))
