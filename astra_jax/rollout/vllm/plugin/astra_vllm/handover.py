"""Transfer of weights from the API process to the workers: one method for CPUs and GPUs, one for TPUs."""

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
    """A transfer method."""

    def prepare(self, memory: SharedMemory, places: Sequence[Place]) -> None:
        """Do the part of a transfer that can overlap with generation."""
        ...

    async def load(self, memory: SharedMemory, places: Sequence[Place], version: str) -> None:
        """Put the prepared weights in service under this version, while generation is paused.

        Raises:
            Exception: they are not in service, or only partly.
        """
        ...


class WeightTransfer:
    """vLLM's own update by a weight transfer engine: `engine.py`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def prepare(self, memory: SharedMemory, places: Sequence[Place]) -> None:
        """Do nothing: no preparation is needed."""

    async def load(self, memory: SharedMemory, places: Sequence[Place], version: str) -> None:
        """See `Handover.load`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine.start_weight_update()
        update = WeightTransferUpdateRequest(update_info={"file": memory.path, "places": places})
        await self._engine.update_weights(update)
        await self._engine.finish_weight_update(version)


class WorkerExtension:
    """Transfer by `tpu.py` in each worker. If the served digests differ from those read, the version is unchanged."""

    def __init__(self, engine: Any, parameters: dict[str, tuple[tuple[int, ...], str]]) -> None:
        self._engine, self._parameters = engine, parameters
        self._digests: dict[str, int] = {}

    @classmethod
    async def of(cls, engine: Any, expected: Shapes) -> WorkerExtension:
        """Create it for a server that has just started.

        Args:
            expected: tensors in a checkpoint of its model.

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
            # Vocabularies are padded to the number of chips. Heads are padded too, for which tpu-inference has no
            # loader.
            vocabulary = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            if math.prod(shape) != math.prod(expected[name]) and not vocabulary:
                raise RuntimeError(
                    f"astra_sync: {name} is served as {list(shape)}, checkpoints have {list(expected[name])}: heads "
                    "are filled up, which tpu-inference cannot load. Use a --tensor-parallel-size of at most the "
                    "number of key-value heads, and a head dimension of 64 or a multiple of 128"
                )
        return cls(engine, {name: (tuple(shape), dtype) for name, (shape, dtype) in parameters.items()})

    def prepare(self, memory: SharedMemory, places: Sequence[Place]) -> None:
        """Compute the digests of the tensors read, in the served dtypes."""

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
