"""Worker side on CPUs and GPUs: loads its part of each tensor from the memory filled by the API process.

vLLM loads this into every process of the server as a `vllm.general_plugins` entry point. Written for the weight
transfer engines of vLLM 0.32 (`vllm.distributed.weight_transfer`).
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
    """Initialisation data; there is none."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """Location of the tensors.

    Attributes:
        file: path on this host.
        places: `memory.Place` of each tensor.
    """

    file: str = ""
    places: list[Any] = field(default_factory=list)


class PolicyEngine(WeightTransferEngine[Init, Update]):
    """Loads a file of tensors into the running model. vLLM's own loaders fuse them and take this rank's slices."""

    init_info_cls = Init
    update_info_cls = Update

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.device.type == "cpu":  # in a worker, whose runner exists already
            from vllm.v1.worker.cpu_model_runner import CPUModelRunner

            mend(CPUModelRunner)

    def init_transfer_engine(self, init_info: Init) -> None:
        """Do nothing: no preparation is needed."""

    def start_weight_update(self) -> None:
        """Prepare the layers for reloading. No request may be scheduled until the update is finished."""
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
        """Put the reloaded layers in service."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_heads_again(self.model)

    def shutdown(self) -> None:
        """Do nothing: there are no resources to free."""


def pack_heads_again(model: torch.nn.Module) -> None:
    """Update the CPU backend's packed copy of a tied head.

    A layerwise reload repacks the head's matrix only if a tensor was loaded into the head itself. With tied embeddings
    none is (vLLM 0.32 and 0.33).
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and getattr(module, "cpu_linear", None) is not None:
            module.quant_method.process_weights_after_loading(module)


def ask_for_amx() -> None:
    """Request permission from Linux to use the matrix tiles (AMX) of Intel processors.

    vLLM's CPU attention uses them for bfloat16 whenever the processor has them, and relies on oneDNN to request
    permission first. If oneDNN has run nothing, the first request crashes the worker with an illegal instruction (vLLM
    0.32, a small model).
    """
    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()


def register() -> None:
    """Register the engine; vLLM calls this in each process, in some more than once."""
    ask_for_amx()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, PolicyEngine)
