"""Adapter folders of the package `peft`: the settings that are read, and the tensors under the model's names.

A setting that changes the computation is honoured when the adapter is merged (`peft_merge`), or refused by its name.
Unknown settings are refused too. `peft.load` accepts less: only adapters that training can continue.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astra_jax.base.files import in_bucket, location
from astra_jax.models.hf_checkpoint import ADAPTER, WeightsError, check_dtype, has_weights, open_tensors
from synthesis.core.datasets import Folder

CONFIG, TENSORS = ADAPTER, "adapter_model.safetensors"

PREFIX = "base_model.model."
"""Prefix that `peft` puts before the names of the wrapped model."""

_PICKLE = "adapter_model.bin"

_HONOURED = (
    "alpha_pattern", "base_model_name_or_path", "bias", "ensure_weight_tying", "exclude_modules", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_bias", "modules_to_save", "peft_type", "r",
    "rank_pattern", "revision", "target_modules", "trainable_token_indices", "use_dora", "use_rslora",
)  # fmt: skip
"""Settings that are read here, or that only determine which tensors exist."""
_HARMLESS = (
    "auto_mapping", "corda_config", "eva_config", "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "runtime_config", "task_type",
    "velora_config",
)  # fmt: skip
"""Settings of an adapter's training or initialisation, which do not change what its tensors compute."""

_ON_THE_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base unchanged.

The others (PiSSA, OLoRA, CorDA, LoRA-GA, LoftQ) subtract the initial adapter from the base. So their adapters do not
fit the base's original weights.
"""

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that `torch.compile`, FSDP and activation checkpointing add."""
_NAMED = (
    "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "modules_to_save",
    "trainable_tokens_delta",
)  # fmt: skip
"""Parts of names that an adapter's name follows: in `peft`'s memory, and in files of programs that save state dicts."""


@dataclass(frozen=True)
class AdapterSettings:
    """Complete content of an `adapter_config.json`.

    Attributes:
        rank: rank of matrices that `rank_pattern` does not name.
        alpha: alpha of matrices that `alpha_pattern` does not name.
        rank_stabilized: True if the product is multiplied by alpha / √rank.
        content: the whole JSON content.
    """

    rank: int
    alpha: float
    rank_stabilized: bool
    content: Mapping[str, Any]

    @property
    def base(self) -> str:
        """Folder or Hub name of the weights that it was trained on; "" if it is not stated."""
        name, revision = self.content.get("base_model_name_or_path") or "", self.content.get("revision")
        return f"{name}@{revision}" if name and revision else str(name)

    def rank_of(self, module: str) -> int:
        """Return the rank of a matrix, by its name in the model."""
        return int(_by_pattern(self.content.get("rank_pattern"), module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of a matrix's product, by its name in the model."""
        alpha, rank = _by_pattern(self.content.get("alpha_pattern"), module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def is_adapter(directory: Folder) -> bool:
    """Return whether a folder has an adapter of `peft`, and no complete weights beside it.

    Raises:
        WeightsError: it has neither, but its subfolders have adapters.
    """
    folder = location(directory)
    if (folder / CONFIG).exists():
        return not has_weights(folder)
    if not (folder / "config.json").exists() and (
        below := sorted(one.parent.name for one in folder.glob(f"*/{CONFIG}"))
    ):
        raise WeightsError(f"{folder} has no {CONFIG}; its folders {', '.join(below[:8])} have one: give one of those")
    return False


def read_settings(directory: Folder) -> AdapterSettings:
    """Read `adapter_config.json`.

    Raises:
        WeightsError: it is missing or damaged, or it has a setting that is not computed here. The message names it.
    """
    file = location(directory) / CONFIG
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise WeightsError(f"{directory} has no {CONFIG}; give a folder that peft wrote") from None
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file} is not JSON ({error}); copy the adapter again") from None
    if not isinstance(content, dict):
        raise WeightsError(f"{file} is not a JSON object; copy the adapter again")
    if (wrong := _not_computed(content)) is not None:
        raise WeightsError(f"{file}: {wrong}")
    return AdapterSettings(content["r"], float(content["lora_alpha"]), bool(content.get("use_rslora", False)), content)


def _not_computed(content: Mapping[str, Any]) -> str | None:
    """Return the first setting that is not supported, and why; None if all are."""
    if content.get("peft_type") != "LORA":
        return f"peft_type is {content.get('peft_type')!r}; LORA is read, no other kind of adapter"
    for name, value in content.items():
        if value and name not in (*_HONOURED, *_HARMLESS):
            return f"{name} is {value!r:.200}, which is not computed here; train or convert the adapter without it"
    if type(rank := content.get("r")) is not int or rank < 1:
        return f"r is {rank!r}; it is a whole number from 1"
    alpha = content.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        return f"lora_alpha is {alpha!r}; it is a number above 0"
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = content.get(name) or {}
        if not isinstance(patterns, dict) or not all(isinstance(one, int | float) for one in patterns.values()):
            return f"{name} is {patterns!r:.200}; it is an object of names and numbers"
        if other := [key for key in patterns if not key.removeprefix("^").replace(".", "").replace("_", "").isalnum()]:
            return f"{name} has the regular expression {other[0]!r:.200}; write names of matrices there instead"
    if (begun := content.get("init_lora_weights")) not in _ON_THE_WEIGHTS:
        return (
            f"init_lora_weights is {begun!r}, which changes the weights under the adapters: save them with peft's "
            "path_initial_model_for_weight_conversion, to the weights as they were"
        )
    return None


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, other: float) -> float:
    """Return the value of the first pattern that a module's name ends with, as in `peft`."""
    for pattern, value in (patterns or {}).items():
        name = pattern.removeprefix("^")
        if module == name or (name == pattern and module.endswith(f".{name}")):
            return float(value)
    return other


def open_adapter(directory: Folder, stack: ExitStack) -> dict[str, Any]:
    """Return the tensors of an adapter by their names in the model, not read yet.

    An example of a name is `model.layers.0.self_attn.q_proj.lora_A.weight`.

    Raises:
        WeightsError: they are missing, damaged, a pickle, in a bucket, quantised, or two have one name.
    """
    folder = location(directory)
    if in_bucket(directory):
        raise WeightsError(f"{directory} is in a bucket, and adapters of peft are read from disk: copy the folder here")
    if not (folder / TENSORS).exists() and (folder / _PICKLE).exists():
        raise WeightsError(
            f"{folder} has {_PICKLE} and no {TENSORS}: a pickle runs code when it is read, so it is not. Load it with "
            "peft where you trust it, and write it again with save_pretrained"
        )
    tensors: dict[str, Any] = {}
    for stored, tensor in open_tensors({Path(folder / TENSORS): None}, stack).items():
        name = _name_in_model(stored)
        if name in tensors:
            raise WeightsError(f"{folder / TENSORS} has {name} twice, once as {stored}; write the adapter again")
        check_dtype(folder, stored, tensor)
        tensors[name] = tensor
    return tensors


def _name_in_model(stored: str) -> str:
    """Return a tensor's name in a model that no program has wrapped."""
    parts = [part for part in stored.split(".") if part not in _WRAPPERS]
    for wrapper in (["module"], PREFIX.rstrip(".").split(".")):
        if parts[: len(wrapper)] == wrapper:
            parts = parts[len(wrapper) :]
    parts = [part for i, part in enumerate(parts) if i == 0 or part != "default" or parts[i - 1] not in _NAMED]
    if parts[-2:] == ["lora_magnitude_vector", "weight"]:  # between two versions of peft
        del parts[-1]
    return ".".join(part for part in parts if part != "modules_to_save")
