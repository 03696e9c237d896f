"""The workers' side: takes each tensor from the memory that the API process has filled, and loads its own part of it.

Loaded into every process of the server as a `vllm.general_plugins` entry point; written for vLLM 0.32's weight transfer
engines (`vllm.distributed.weight_transfer`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from astra_vllm.memory import mapped, tensors
from astra_vllm.seeds import mend

BACKEND = "astra"


@dataclass
class Init(WeightTransferInitInfo):
    """Nothing."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """Where the tensors are.

    Attributes:
        file: on this host.
        places: `memory.Place` of each.
    """

    file: str = ""
    places: list[Any] = field(default_factory=list)


class PolicyEngine(WeightTransferEngine[Init, Update]):
    """Fills the running model from a file of tensors; vLLM's own loaders fuse them and take this rank's slices."""

    init_info_cls = Init
    update_info_cls = Update

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.device.type == "cpu":  # here it is a worker, whose runner is there already
            from vllm.v1.worker.cpu_model_runner import CPUModelRunner

            mend(CPUModelRunner)

    def init_transfer_engine(self, init_info: Init) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Put the layers aside. Nothing may be scheduled from here until the update is finished."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load all tensors."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Load all tensors."""
        self.model.load_weights(tensors(mapped(update_info.file), update_info.places))

    def finish_weight_update(self) -> None:
        """Put the layers in service."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_heads_again(self.model)

    def shutdown(self) -> None:
        """Nothing to free."""


def pack_heads_again(model: torch.nn.Module) -> None:
    """Have the CPU backend take over a tied head.

    It keeps a packed copy of the head's matrix, which a layerwise reload makes anew only where something was loaded
    into the head itself; with tied embeddings nothing is (vLLM 0.32 and 0.33).
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and getattr(module, "cpu_linear", None) is not None:
            module.quant_method.process_weights_after_loading(module)


def ask_for_amx() -> None:
    """Ask Linux for the matrix tiles of Intel's processors, which no process may use that has not asked.

    vLLM's attention for CPUs uses them in bfloat16 wherever the processor has them, and leaves the asking to whatever
    oneDNN happens to run before: where it runs nothing, the first request ends the worker with an illegal instruction
    (vLLM 0.32, a small model).
    """
    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()


def register() -> None:
    """Called by vLLM in each of its processes, more than once in some."""
    ask_for_amx()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, PolicyEngine)
