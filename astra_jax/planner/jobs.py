"""Training job on a mesh: the settings that its programs are compiled for, and the checks at its start.

The configuration's own settings are kept: remat, rows of a micro-batch, row lengths. Open settings are chosen as in
the training programs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from astra_jax.base.errors import InputError
from astra_jax.grpo.config import GRPOConfig
from astra_jax.mesh import WIDTH, check_batch
from astra_jax.models import adapters
from astra_jax.models.adapters import abstract_trained
from astra_jax.models.lora import FULL, LoRA
from astra_jax.models.model import Model
from astra_jax.run.batch import on_mesh
from astra_jax.run.chips import Chip
from astra_jax.sft.config import SFTConfig

AnyModel = TypeVar("AnyModel", bound=Model)


@dataclass(frozen=True)
class Job:
    """One step of a run on a mesh.

    Attributes:
        model, config: of the run.
        kind: `sft` or `grpo`.
        row_tokens: length of a row; of GRPO's buckets the longest, which any batch may use.
        micro_batch_size: rows of one forward and backward pass.
        micro_batches: micro-batches of an optimizer step; in GRPO if each episode fills a row.
        steps: steps of the whole run; None for SFT, where they depend on the data.
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
        """Rows of a step."""
        return self.micro_batch_size * self.micro_batches


def longest(config: SFTConfig | GRPOConfig) -> int:
    """Return the tokens of the longest sequence that a configuration accepts."""
    if isinstance(config, SFTConfig):
        return config.data.seq_len
    return config.episode.max_prompt_tokens + config.episode.max_response_tokens


def for_tokens(
    model: AnyModel, config: SFTConfig | GRPOConfig, tokens: int, length: int
) -> tuple[AnyModel, SFTConfig | GRPOConfig]:
    """Return (model, configuration) for sequences of this many tokens, in rows of `length`.

    Longer row buckets are removed, and GRPO's last one is `length`. Its episodes keep the proportion of prompt and
    response.
    """
    buckets = tuple(bucket for bucket in config.row_buckets if bucket < tokens)
    if isinstance(config, SFTConfig):
        data = dataclasses.replace(config.data, seq_len=length)
        return model.with_context_length(tokens), dataclasses.replace(config, data=data, row_buckets=buckets)
    buckets = (*buckets, length)
    prompt = max(1, tokens * config.episode.max_prompt_tokens // longest(config))
    episode = dataclasses.replace(config.episode, max_prompt_tokens=prompt, max_response_tokens=tokens - prompt)
    return model.with_context_length(tokens), dataclasses.replace(config, episode=episode, row_buckets=buckets)


def job_on(model: Model, config: SFTConfig | GRPOConfig, mesh: Any, *, blocks: int) -> Job:
    """Return the job on a mesh. It is refused with the same errors as the run itself.

    Args:
        mesh: a mesh, or an abstract one.
        blocks: each device's chunks of a row must be multiples of this for attention: `splash.BLOCK` on TPUs.

    Raises:
        InputError, SettingError: the mesh does not divide the batch, a row or the model, or the model is too short.
    """
    context = mesh.shape["context"]
    if isinstance(config, SFTConfig):
        model.check_length(config.data.seq_len, "data.seq_len")
        check_batch(mesh, config.batch_size, config.data.seq_len, "data.seq_len")
        config = on_mesh(config, mesh)
        rows, total = config.micro_batch_rows, config.batch_size
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
    """Return the flops per token that accelerators execute for one document of `tokens`, with causal attention.

    This is more than `flops_per_token`: `remat` recomputes products of the layers, and `full` attention too. With
    adapters the gradients of the weights are not computed, but the adapters' products are.
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
    """Return whether the backward pass recomputes an adapter's product; see `flops.recomputed_parameters`."""
    *_, matrix, part = (step.key.partition("_")[0] for step in path)
    return not (matrix == "down" and part == "b") and not (remat == "heads" and matrix in "qkv")


def least_traffic(model: Model, config: SFTConfig | GRPOConfig, mesh: Mapping[str, int], micro_batches: int) -> float:
    """Return the bytes that a chip must read and write in a step: weights, their gradients and the optimizer's state.

    Args:
        mesh: sizes by axis.
    """
    layers, head = model.matmul_parameters()
    # Each number in its stored dtype: w, g and the statistics are read, w and the statistics written. Statistics in the
    # host's memory, and Muon's missing second one, are left out.
    statistics = 0 if config.optimizer_memory == "host" else 1 if config.optimizer == "muon" else 2
    moved = 2 * statistics * jnp.dtype(config.moments).itemsize
    trained = jax.tree.leaves(abstract_trained(model, config.lora))
    state = sum(leaf.size * (3 * leaf.dtype.itemsize + moved) for leaf in trained)
    # Weights are read forward, for the inputs' gradient and, if `remat` recomputes layers, once more. Gathered weights
    # are written before, and gradients of the weights are written, if there are any.
    own = min(jnp.dtype(kept).itemsize for kept in (model.dtype, model.param_dtype))
    of_layers = 1 if config.matmul != "none" or config.lora.stored != "none" else own
    reads = 2 + any(mesh[axis] > 1 for axis in WIDTH)
    again = model.recomputed_parameters(config.remat)
    written = own if config.lora.rank is None else 0
    weights = layers * (reads * of_layers + written) + again * of_layers + head * (reads * own + written)
    return state / (math.prod(mesh.values()) / mesh["data"]) + micro_batches * weights / mesh["tensor"]


def attention_matmuls(remat: str, chip: Chip) -> int:
    """Return the number of attention matmuls, where 2 are needed forward and 4 backward.

    The backward pass recomputes the scores: once on TPUs, in each of its two kernels on GPUs.
    """
    return 2 + (7 if chip.clock is None else 5) + 2 * (remat == "full")


def saved_flops_per_token(model: Model, matmul: str, remat: str, chip: Chip) -> float:
    """Return the bf16 flops per token that 8-bit matmuls of the layers save.

    They apply forward, again if `remat` recomputes, and to the activations' gradient. The weights' gradient is not
    faster.
    """
    layers, _ = model.matmul_parameters()
    again = model.recomputed_parameters(remat)
    return (4 * layers + 2 * again) * (1 - 1 / dict(chip.narrow).get(matmul, 1.0))
