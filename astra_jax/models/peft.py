"""Adapters as folders of the package `peft`: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from typing import Any

import jax
from safetensors import SafetensorError
from safetensors.numpy import save_file

from astra_jax.models import adapters
from astra_jax.models.hf_checkpoint import WeightsError, check_tensors, open_tensors, read_tensors, tensors_of
from astra_jax.models.lora import LoRA
from astra_jax.models.model import Model, Params
from astra_jax.models.names import NamedParam, linear_weight
from sandbox.settings import SettingError
from synthesis.core.datasets import Folder
from synthesis.core.files import location
from synthesis.core.refusals import InputError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
"""What `peft` puts before the names of the model that it is wrapped around."""

_PLAIN = {"bias": "none", "use_dora": False, "fan_in_fan_out": False}
"""What adapters are here; those of other settings compute something else."""

_NOTHING = (
    "modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "exclude_modules",
    "target_parameters", "layer_replication", "lora_bias", "use_qalora", "use_bdlora",
    "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
"""Settings that are to be empty, or not there."""


_ON_THE_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Of `init_lora_weights`, those that leave the base as it is. The others (PiSSA, OLoRA, CorDA, LoRA-GA, LoftQ) take out
of it what they begin with: such adapters are to other weights than the base's."""


def names_table(model: Model, lora: LoRA) -> list[NamedParam]:
    """Each adapter's name in such a folder."""
    made = []
    for entry in adapters.targeted(model, lora).values():
        a, b = adapters.leaf_names(entry.path[-1])
        of_matrix = _PREFIX + entry.hf_name.removesuffix("weight")
        made.append(linear_weight((*entry.path, a), of_matrix + "lora_A.weight"))
        made.append(linear_weight((*entry.path, b), of_matrix + "lora_B.weight"))
    for entry in adapters.vocabularies(model) if lora.tokens else ():
        # Called deltas, they are the rows themselves.
        name = _PREFIX + entry.hf_name.removesuffix("weight") + "token_adapter.trainable_tokens_delta"
        made.append(dataclasses.replace(entry, path=(*entry.path, adapters.rows_name(entry.path[-1])), hf_name=name))
    return made


def save(params: Params, model: Model, lora: LoRA, directory: Folder, *, base: str = "") -> int:
    """Write a folder that `peft.PeftModel.from_pretrained` reads; the first process does, all take part.

    Args:
        params: the adapters.
        base: the name or folder of the model that they are for.

    Returns:
        How many numbers it holds.
    """
    table = names_table(model, lora)
    tensors = dict(tensors_of(params, table))
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(adapters.targeted(model, lora)),
        "use_rslora": lora.rank_stabilized,
        "inference_mode": True,
        "init_lora_weights": True,
        **_PLAIN,
    }
    if lora.tokens:
        ids = list(lora.tokens)
        content["trainable_token_indices"] = {_module(entry): ids for entry in adapters.vocabularies(model)}
    folder = location(directory)
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, str(folder / TENSORS), metadata={"format": "pt"})
        except SafetensorError as error:
            raise WeightsError(f"{folder / TENSORS} could not be written ({error}); make room there") from None
        (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return sum(tensor.size for tensor in tensors.values())


def load(directory: Folder, model: Model, *, shardings: Any = None) -> tuple[LoRA, Params]:
    """The adapters of such a folder, and their settings, wherever `peft` or `save` wrote it.

    Args:
        shardings: as of `adapters.trained_shardings`; None is the default device.

    Raises:
        WeightsError: it is no such folder, is damaged, or its adapters are of another kind or for another model.
    """
    folder = location(directory)
    try:
        content = json.loads((folder / CONFIG).read_bytes())
        lora = _settings(content, model)
        like = adapters.abstract_adapters(model, lora)
    except FileNotFoundError:
        raise WeightsError(f"{folder} has no {CONFIG}; give a folder that peft wrote") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, InputError) as error:
        raise WeightsError(f"{folder / CONFIG}: {error}; only plain LoRA is read") from None
    table = names_table(model, lora)
    with ExitStack() as stack:
        tensors = open_tensors({folder / TENSORS: None}, stack)
        check_tensors(folder, table, like, tensors, remedy="check r and target_modules in adapter_config.json")
        return lora, read_tensors(table, like, tensors, shardings)


def _module(entry: NamedParam) -> str:
    """Its name in a model, without where it is: `embed_tokens`."""
    return entry.hf_name.split(".")[-2]


def _tokens(trained: Any, model: Model) -> tuple[int, ...]:
    """Whose rows are trained: a list is of the embedding, and of a head that is tied to it. Raises `SettingError`."""
    modules = {_module(entry) for entry in adapters.vocabularies(model)}
    by_module = trained if isinstance(trained, dict) else {"embed_tokens": trained}
    if by_module.keys() != modules or len(set(map(tuple, by_module.values()))) > 1:
        raise SettingError(
            f"trainable_token_indices is {trained!r}, and computed here are the same tokens of {' and '.join(modules)}"
        )
    return tuple(next(iter(by_module.values())))


def _settings(content: dict[str, Any], model: Model) -> LoRA:
    """Raises `SettingError`: they are none of ours."""
    if content.get("peft_type") != "LORA":
        raise SettingError(f"peft_type is {content.get('peft_type')!r}")
    for name, wanted in _PLAIN.items():
        if content.get(name, wanted) != wanted:
            raise SettingError(f"{name} is {content[name]!r}, which is not computed here")
    for name in _NOTHING:
        if content.get(name):
            raise SettingError(f"{name} is {content[name]!r}, which is not computed here")
    if (begun := content.get("init_lora_weights")) not in _ON_THE_WEIGHTS:
        raise SettingError(
            f"init_lora_weights is {begun!r}, which changes the weights under the adapters: save them with peft's "
            "path_initial_model_for_weight_conversion, to the weights as they were"
        )
    targets = content["target_modules"]
    if isinstance(targets, str):
        if targets != "all-linear":
            raise SettingError(f"target_modules is the pattern {targets!r}; write the list of names")
        targets = [targets]
    trained = content.get("trainable_token_indices")
    return LoRA(
        content["r"],
        float(content["lora_alpha"]),
        tuple(sorted(targets)),
        _tokens(trained, model) if trained else (),
        bool(content.get("use_rslora", False)),
    )
