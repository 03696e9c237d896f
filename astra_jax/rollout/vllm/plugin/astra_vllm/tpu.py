"""Worker side on TPUs: `--worker-extension-cls astra_vllm.tpu.PolicyWorker`; written for tpu-inference 0.32.

Its worker accepts vLLM's weight updates and loads nothing. Its models' `load_weights` clears JAX's compilation caches,
so the server would recompile everything, and it keeps the old weights until it is done. This module uses the model's
own loader of each parameter, which reshapes, transposes, pads and shards. The new arrays have the shapes and shardings
of the old ones, so nothing is recompiled.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from tpu_inference.models.jax.utils.weight_utils import JaxAutoWeightsLoader

from astra_vllm.digest import hashed
from astra_vllm.layout import DTYPES
from astra_vllm.memory import Place, mapped, tensors


class PolicyWorker:
    """Mixed into `tpu_inference.worker.tpu_worker.TPUWorker` by vLLM; called through `collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    _kinds: dict[str, tuple[Any, ...]]

    def policy_parameters(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype of each served parameter, by Hugging Face's name.

        Raises:
            ValueError: the weights of this server cannot be replaced; the message says why.
        """
        self._require_plain()
        values = self._values()
        for name, value in values.items():
            if not isinstance(value, jax.Array) or value.dtype.name not in DTYPES:
                raise ValueError(f"parameter {name} is {getattr(value, 'dtype', type(value).__name__)}: quantised?")
            _digest(value)  # compile now
        self._kinds = {name: _kind(value) for name, value in values.items()}
        return {name: (value.shape, value.dtype.name) for name, value in values.items()}

    def load_policy(self, path: str, places: Sequence[Place]) -> dict[str, int]:
        """Replace all parameters. No request may be scheduled meanwhile, and `policy_parameters` must have been called.

        Each array is freed before its replacement is created, so it needs no more chip memory than serving. After a
        failure the model is incomplete until a later call succeeds.

        Args:
            path, places: of the tensors.

        Returns:
            Digest of each parameter, from the arrays that the next step uses.

        Raises:
            ValueError: a new array differs from the old one in form, or a parameter was not loaded.
        """
        runner = self.model_runner
        self._settle()
        JaxAutoWeightsLoader(runner.model)  # sets each parameter's loader after a start with dummy weights
        parameters = dict(runner.model.named_parameters())

        def load(named: tuple[str, torch.Tensor]) -> str | None:
            name, tensor = named
            if name not in parameters:  # a tied head; the API process checked all others
                return None
            parameter, (_, dtype, sharding) = parameters[name], self._kinds[name]
            parameter.get_value().delete()
            # A copy: JAX arrays on CPU devices may share the memory of their source.
            copied = tensor.to(getattr(torch, dtype.name), copy=True)
            with jax.set_mesh(runner.mesh):  # the mesh is per thread
                parameter.weight_loader(parameter, copied)
            # The loader's sharding is equivalent, but would be another key in the compilation cache.
            parameter.set_value(jax.device_put(parameter.get_value(), sharding))
            return name

        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:  # transposes take most of the time
            loaded = set(threads.map(load, tensors(mapped(path), places)))
        if left := sorted(set(parameters) - loaded):
            raise ValueError(f"parameter {left[0]} was not loaded")
        runner.state = nnx.split(runner.model)[1]
        runner.refresh_state_leaves()
        values = self._values()
        if [(name, _kind(value)) for name, value in values.items()] != list(self._kinds.items()):
            raise ValueError("what was loaded has not the order, shapes, dtypes and shardings of what was served")
        return {name: _digest(value) for name, value in values.items()}

    def _settle(self) -> None:
        """Write the last step's tokens where recomputed requests are read.

        With asynchronous scheduling the values there are zero until the next step, and only an empty step makes them
        final. A request that the pause preempts would otherwise be recomputed with zero as its last token
        (tpu-inference 0.32).
        """
        runner = self.model_runner
        if runner._pre_async_results is not None:
            runner._modify_prev_results()
            runner._pre_async_results = None

    def _values(self) -> dict[str, jax.Array]:
        """Return the arrays passed to each step, in order, by the names of the model's parameters.

        Raises:
            ValueError: they are not the model's parameters.
        """
        runner = self.model_runner
        names = {id(parameter.get_value()): name for name, parameter in runner.model.named_parameters()}
        if sorted(names) != sorted(map(id, runner.state_leaves)):
            raise ValueError("the arrays that are served are not those of the model's parameters")
        return {names[id(leaf)]: leaf for leaf in runner.state_leaves}

    def _require_plain(self) -> None:
        config, runner = self.vllm_config, self.model_runner
        if not isinstance(runner.model, nnx.Module):
            raise ValueError(
                "it is served by vLLM's torch model; only tpu-inference's JAX models are synced, such as that of dense "
                "Qwen3 (MODEL_IMPL_TYPE=flax_nnx)"
            )
        parallel = config.parallel_config
        refused = {
            "quantization": config.model_config.quantization or config.additional_config.get("quantization"),
            "LoRA": config.lora_config,
            "speculative decoding": config.speculative_config,
            "continue_decode": config.additional_config.get("enable_continue_decode"),
            "pipeline parallelism": parallel.pipeline_parallel_size > 1,
            "several engines (start a server for each)": parallel.data_parallel_size > 1,
            "several hosts": jax.process_count() > 1,
        }
        for what, found in refused.items():
            if found:
                raise ValueError(f"weights are not synced with {what}")


def _kind(leaf: jax.Array) -> tuple[Any, ...]:
    return leaf.shape, leaf.dtype, leaf.sharding


def _digest(x: jax.Array) -> int:
    """Return an array's `astra_vllm.digest`. One at a time: concurrent reductions can exhaust CPU devices."""
    return int(_sum_of_hashes(x))


@jax.jit
def _sum_of_hashes(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)
    return hashed(bits.astype(jnp.uint32)).sum(dtype=jnp.uint32)
