"""How the workers of a server take over what the API process has read: one way for CPUs and GPUs, one for TPUs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from astra_vllm.digest import digest
from astra_vllm.memory import Place, SharedMemory, tensors
from astra_vllm.model import Shapes

WORKER = "astra_vllm.tpu.PolicyWorker"


class Handover(Protocol):
    """One way."""

    def prepare(self, memory: SharedMemory, places: Sequence[Place]) -> None:
        """Do what can be done while generation goes on."""
        ...

    async def load(self, memory: SharedMemory, places: Sequence[Place], version: str) -> None:
        """Put what was prepared in service, under this version. Generation is paused.

        Raises:
            Exception: it is not in service, or not whole.
        """
        ...


class WeightTransfer:
    """vLLM's own update, through a weight transfer engine: `engine.py`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def prepare(self, memory: SharedMemory, places: Sequence[Place]) -> None:
        """Nothing."""

    async def load(self, memory: SharedMemory, places: Sequence[Place], version: str) -> None:
        """See `Handover.load`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine.start_weight_update()
        update = WeightTransferUpdateRequest(update_info={"file": memory.path, "places": places})
        await self._engine.update_weights(update)
        await self._engine.finish_weight_update(version)


class WorkerExtension:
    """`tpu.py` in each worker. What it then serves must have the digests of what was read, or the version stays."""

    def __init__(self, engine: Any, parameters: dict[str, tuple[tuple[int, ...], str]]) -> None:
        self._engine, self._parameters = engine, parameters
        self._digests: dict[str, int] = {}

    @classmethod
    async def of(cls, engine: Any, expected: Shapes) -> WorkerExtension:
        """For a server that has just started.

        Args:
            expected: tensors of a checkpoint of its model.

        Raises:
            RuntimeError: its weights cannot be replaced; the message says why.
        """
        if (found := engine.vllm_config.parallel_config.worker_extension_cls) != WORKER:
            raise RuntimeError(
                "astra_sync: vLLM's workers on TPUs (tpu-inference 0.32) accept a weight update and load nothing; "
                f"start the server with --worker-extension-cls {WORKER} (it has {found or 'none'})"
            )
        try:
            (parameters, *_) = await engine.collective_rpc("policy_parameters")
        except Exception as error:
            raise RuntimeError(f"astra_sync: this server's weights cannot be synced: {error}") from error
        if other := sorted(set(parameters) ^ set(expected)):
            raise RuntimeError(f"astra_sync: {other[0]} is not both in checkpoints and in the served model")
        for name, (shape, _) in sorted(parameters.items()):
            # A vocabulary is filled up to the number of chips. So are heads, for which tpu-inference has no loader.
            vocabulary = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            if math.prod(shape) != math.prod(expected[name]) and not vocabulary:
                raise RuntimeError(
                    f"astra_sync: {name} is served as {list(shape)}, checkpoints have {list(expected[name])}: heads "
                    "are filled up, which tpu-inference cannot load. Use a --tensor-parallel-size of at most the "
                    "number of key-value heads, and a head dimension of 64 or a multiple of 128"
                )
        return cls(engine, {name: (tuple(shape), dtype) for name, (shape, dtype) in parameters.items()})

    def prepare(self, memory: SharedMemory, places: Sequence[Place]) -> None:
        """Compute the digests of what was read, in the dtypes that are served."""

        def of(named: tuple[str, torch.Tensor]) -> int:
            name, tensor = named
            return digest(tensor.to(getattr(torch, self._parameters[name][1])))

        served = [place for place in places if place[0] in self._parameters]
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            digests = threads.map(of, tensors(memory.view, served))
            self._digests = {place[0]: one for place, one in zip(served, digests, strict=True)}

    async def load(self, memory: SharedMemory, places: Sequence[Place], version: str) -> None:
        """See `Handover.load`."""
        answers = await self._engine.collective_rpc("load_policy", args=(memory.path, places))
        for rank, answer in enumerate(answers):
            if answer != self._digests:
                wrong = sorted(name for name, one in self._digests.items() if (answer or {}).get(name) != one)
                raise RuntimeError(f"worker {rank} does not serve what was read: {(wrong or ['too much'])[0]} differs")
        await self._engine.update_weight_version(version)
