"""Adapters as folders of the package `peft`: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
from safetensors import SafetensorError
from safetensors.numpy import save_file

from astra_jax import axes
from astra_jax.base.errors import InputError
from astra_jax.base.files import location
from astra_jax.base.settings import SettingError
from astra_jax.models import adapters
from astra_jax.models.hf_checkpoint import WeightsError, check_tensors, read_tensors, tensors_of
from astra_jax.models.lora import LoRA
from astra_jax.models.model import Model, Params
from astra_jax.models.names import NamedParam, linear_weight
from astra_jax.models.peft_folder import CONFIG, PREFIX, TENSORS, AdapterSettings, open_adapter, read_settings
from synthesis.core.datasets import Folder

_PLAIN = {"bias": "none", "use_dora": False, "fan_in_fan_out": False}
"""Settings of adapters that training supports; others are merged, see `peft_merge`."""

MERGE_FIRST = "merge it (astra convert --from_peft --to_hf), and start from the folder that this makes"
"""Fix for adapters that training cannot continue."""

_NOTHING = ("modules_to_save", "layers_to_transform", "rank_pattern", "alpha_pattern", "lora_bias")
"""Settings that must be empty or missing."""


def names_table(model: Model, lora: LoRA) -> list[NamedParam]:
    """Return each adapter's name in such a folder."""
    made = []
    for entry in adapters.targeted(model, lora).values():
        a, b = adapters.leaf_names(entry.path[-1])
        of_matrix = PREFIX + entry.hf_name.removesuffix("weight")
        made.append(linear_weight((*entry.path, a), of_matrix + "lora_A.weight"))
        made.append(linear_weight((*entry.path, b), of_matrix + "lora_B.weight"))
    for entry in adapters.vocabularies(model) if lora.tokens else ():
        # Named deltas, but they are the rows themselves.
        name = PREFIX + entry.hf_name.removesuffix("weight") + "token_adapter.trainable_tokens_delta"
        made.append(dataclasses.replace(entry, path=(*entry.path, adapters.rows_name(entry.path[-1])), hf_name=name))
    return made


def save(params: Params, model: Model, lora: LoRA, directory: Folder, *, base: str = "") -> int:
    """Write a folder that `peft.PeftModel.from_pretrained` reads. All processes take part, the first one writes.

    Args:
        params: the adapters.
        base: the name or folder of their base model.

    Returns:
        The number of stored parameters.
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
    """Load the adapters of a folder from `peft` or `save`, and their settings.

    Args:
        shardings: from `adapters.trained_shardings`; None is the default device.

    Raises:
        WeightsError: the folder has no adapter, is damaged, or its adapters are of another kind or for another model.
    """
    with ExitStack() as stack:
        lora, like, tensors = _opened(directory, model, stack)
        return lora, read_tensors(names_table(model, lora), like, tensors, shardings)


def read_lora(directory: Folder, model: Model) -> LoRA:
    """Return the settings for `load`. Every tensor's name and shape is checked, none is read. Raises as `load`."""
    with ExitStack() as stack:
        return _opened(directory, model, stack)[0]


def _opened(directory: Folder, model: Model, stack: ExitStack) -> tuple[LoRA, Params, dict[str, Any]]:
    """Return (settings, the adapters' shapes, the tensors under the names of `names_table`). Raises as `load`."""
    found = read_settings(directory)
    tensors = {PREFIX + name: tensor for name, tensor in open_adapter(directory, stack).items()}
    try:
        lora = _settings(found, model, tensors)
        like = adapters.abstract_adapters(model, lora)
    except (ValueError, KeyError, TypeError, InputError) as error:
        raise WeightsError(f"{location(directory) / CONFIG}: {error}; {MERGE_FIRST}") from None
    remedy = f"check r and target_modules in {CONFIG}; or {MERGE_FIRST}"
    check_tensors(directory, names_table(model, lora), like, tensors, remedy=remedy)
    return lora, like, tensors


def continued(begun: Params, loaded: Params, lora: LoRA, tokens: tuple[int, ...]) -> Params:
    """Return the initial adapters of a run with its own settings that continues a folder's adapters.

    Args:
        begun: `adapters.initial_adapters` of the run.
        loaded: the folder's adapters.
        lora: the run's settings.
        tokens: the run's tokens whose rows the folder has; the run's other rows keep their initial values.
    """
    at = jnp.array([lora.tokens.index(token) for token in tokens], jnp.int32)

    def one(path: Any, own: jax.Array) -> jax.Array:
        name = path[-1].key
        if not name.startswith("rows_"):
            return adapters.at_path(loaded, tuple(step.key for step in path))
        if not tokens:
            return own
        theirs, axis = adapters.at_path(loaded, tuple(step.key for step in path)), axes.letters(name).index("i")
        return jnp.moveaxis(jnp.moveaxis(own, axis, 0).at[at].set(jnp.moveaxis(theirs, axis, 0)), 0, axis)

    return jax.tree_util.tree_map_with_path(one, begun)


def _module(entry: NamedParam) -> str:
    """Return a parameter's name without its path: `embed_tokens`."""
    return entry.hf_name.split(".")[-2]


def _tokens(trained: Any, model: Model) -> tuple[int, ...]:
    """Return the tokens of trained rows. A list applies to the embedding and a tied head. Raises `SettingError`."""
    modules = {_module(entry) for entry in adapters.vocabularies(model)}
    by_module = trained if isinstance(trained, dict) else {"embed_tokens": trained}
    if by_module.keys() != modules or len(set(map(tuple, by_module.values()))) > 1:
        raise SettingError(
            f"trainable_token_indices is {trained!r}, and computed here are the same tokens of {' and '.join(modules)}"
        )
    return tuple(next(iter(by_module.values())))


def _settings(found: AdapterSettings, model: Model, tensors: Iterable[str]) -> LoRA:
    """Return the adapter's settings. Raises `SettingError` if they are not supported."""
    content = found.content
    for name, wanted in _PLAIN.items():
        if content.get(name, wanted) != wanted:
            raise SettingError(f"{name} is {content[name]!r}, which no adapter that is trained here has")
    for name in _NOTHING:
        if content.get(name):
            raise SettingError(f"{name} is {content[name]!r}, which no adapter that is trained here has")
    targets = content.get("target_modules")
    if not isinstance(targets, list) or content.get("exclude_modules"):  # a pattern: the file has the matching names
        targets = {name.split(".")[-3] for name in tensors if name.endswith(".lora_A.weight")}
    trained = content.get("trainable_token_indices")
    return LoRA(
        found.rank,
        found.alpha,
        tuple(sorted({name.rpartition(".")[2] for name in targets})),
        _tokens(trained, model) if trained else (),
        found.rank_stabilized,
    )
