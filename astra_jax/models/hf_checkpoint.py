"""Hugging Face checkpoints: one table of a model's names serves loading, saving and the sync to a rollout server.

A host reads and stores only what its devices need. Each shard is made from slices of the files, one shard of one
parameter at a time. Saving gathers one layer of one parameter at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from astra_jax import chat_files
from astra_jax.base.errors import InputError, UserError
from astra_jax.base.files import location, write_text
from astra_jax.base.settings import SettingError
from astra_jax.models.families import from_hf
from astra_jax.models.model import Model, Params
from astra_jax.models.names import NamedParam
from synthesis.core.datasets import Folder

MAX_FILE_BYTES = 5 * 10**9
"""Largest safetensors file that is written, in bytes; the same as Hugging Face's."""

ADAPTER = "adapter_config.json"
"""Settings file of an adapter in a folder. If it lies beside weights, transformers adds the adapter to them."""

_INDEX = "model.safetensors.index.json"
_READ = ("F64", "F32", "F16", "BF16")
"""Types of tensors, by safetensors' names, that are cast to a parameter."""


class WeightsError(UserError):
    """Error: a checkpoint does not fit this model. The message has the tensor, the expected and the found value."""


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _set(tree: Params, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_config(directory: Folder, **dtypes: str) -> Model:
    """Return the model of the `config.json` in a directory.

    Raises:
        WeightsError: there is no `config.json`, or `families.from_hf` refuses it.
    """
    content = _config_json(location(directory))
    try:
        return from_hf(content, **dtypes)
    except (InputError, SettingError) as error:
        raise WeightsError(f"{directory}/config.json: {error}") from None
    except (KeyError, TypeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise WeightsError(f"{directory}/config.json is not a model's ({said}); copy the checkpoint again") from error


def _config_json(directory: epath.Path) -> dict[str, Any]:
    try:
        content = json.loads((directory / "config.json").read_bytes())
    except FileNotFoundError:
        if (directory / ADAPTER).exists():
            raise _alone(directory) from None
        raise WeightsError(f"{directory} has no config.json; give the directory of a checkpoint") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise WeightsError(f"{directory}/config.json is not JSON ({error}); copy the checkpoint again") from None
    if not isinstance(content, dict):
        raise WeightsError(f"{directory}/config.json is not a JSON object; copy the checkpoint again")
    return content


def stored_dtype(directory: Folder) -> str:
    """Return the parameters' dtype by `config.json`, else that of the first tensor: `float32` or `bfloat16`.

    Raises:
        WeightsError: there is no `config.json`, or it names another dtype; or the files are refused as by `load_hf`.
    """
    name = _dtype_name(location(directory))
    if name not in ("float32", "bfloat16"):
        raise WeightsError(
            f"{directory}/config.json: dtype is {name!r}, which is not supported; choose another with --dtype "
            "(astra convert: --param_dtype), float32 or bfloat16"
        )
    return name


def _dtype_name(directory: epath.Path) -> str:
    content = _config_json(directory)
    return str(content.get("dtype") or content.get("torch_dtype") or _first_dtype(directory))


def _first_dtype(directory: epath.Path) -> str:
    """Return the dtype of a folder's first tensor; bfloat16, as released, if it has no safetensors."""
    if not any(directory.glob("*.safetensors")):
        return "bfloat16"
    with ExitStack() as stack:
        tensors = open_tensors(_files(Path(directory)), stack)
        kind = tensors[min(tensors)].get_dtype()
    return {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(kind, kind)


def computed_dtype(directory: Folder) -> str:
    """Return the dtype in which a run trains a checkpoint: float32 if it is stored so, bfloat16 for all others.

    Raises:
        WeightsError: there is no `config.json`; or the files are refused as by `load_hf`.
    """
    return "float32" if _dtype_name(location(directory)) == "float32" else "bfloat16"


def load_hf(
    directory: Path | str,
    model: Model,
    *,
    shardings: Any = None,
    change: Callable[[dict[str, Any], ExitStack], dict[str, Any]] = lambda tensors, _: tensors,
) -> Params:
    """Load parameters from the safetensors files of an HF directory, cast to `model.param_dtype`.

    Every tensor's name and shape is checked before the first is read.

    Args:
        shardings: from `Model.param_shardings`; None is the default device.
        change: maps the tensors of `open_tensors` to the tensors to read, for example `peft_merge.merged_tensors`. It
            also receives the stack that closes the files.

    Raises:
        WeightsError: a file is damaged; a tensor is missing, unknown, or of another shape; an adapter lies beside;
            the head is tied to the embedding, and another head is stored.
    """
    directory, abstract = Path(directory), model.abstract_params()
    check_whole(directory)
    with ExitStack() as stack:
        tensors = change(open_tensors(_files(directory), stack), stack)
        if model.tie_embeddings:
            drop_tied_head(directory, tensors)
        # Llama 2's release has them in every layer; they follow from config.json, and transformers ignores them.
        tensors = {name: one for name, one in tensors.items() if not name.endswith(".rotary_emb.inv_freq")}
        remedy = "check tie_word_embeddings, attention_bias, num_hidden_layers and num_experts in config.json"
        check_tensors(directory, model.names(), abstract, tensors, remedy=remedy)
        return read_tensors(model.names(), abstract, tensors, shardings)


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 1 << 12


def drop_tied_head(directory: Folder, tensors: dict[str, Any]) -> None:
    """Keep one matrix of a tied head and its embedding: some checkpoints store both, some the head alone.

    Args:
        directory: directory of the weights, for the message.
        tensors: from `open_tensors`; changed in place.

    Raises:
        WeightsError: two different matrices are stored.
    """
    head = tensors.pop(_HEAD, None)
    if head is None:
        return
    embedding = tensors.setdefault(_EMBEDDING, head)
    shape = list(embedding.get_shape())
    spans = (slice(at, min(at + _COMPARED_ROWS, shape[0])) for at in range(0, shape[0], _COMPARED_ROWS))
    if shape != list(head.get_shape()) or any(np.any(embedding[one] != head[one]) for one in spans):
        raise WeightsError(
            f"{directory}: config.json has tie_word_embeddings true, and {_HEAD} differs from {_EMBEDDING}; "
            f"transformers uses both. Write tie_word_embeddings false to do so, or take {_HEAD} out of the files to "
            "use the embedding as head"
        )


def read_tensors(table: Iterable[NamedParam], abstract: Params, tensors: Mapping[str, Any], shardings: Any) -> Params:
    """Return the parameters of a table, each shard from slices of the tensors, one at a time.

    Args:
        abstract: shapes and dtypes of the parameters.
        tensors: from `open_tensors`, checked by `check_tensors`.
        shardings: by parameter; None is the default device.
    """
    params: Params = {}
    for entry in table:
        leaf = _leaf(abstract, entry.path)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if shardings is not None:
            sharding = _leaf(shardings, entry.path)
        arrays: list[jax.Array] = []
        shard = np.empty(0)
        held: tuple[slice, ...] = ()
        for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
            assert index is not None
            if index != held:  # replicas are consecutive
                shard, held = _read_shard(entry, tensors, leaf, index), index
            arrays.append(jax.device_put(shard, device))
            arrays[-1].block_until_ready()  # so that one shard at a time is on the host
        _set(params, entry.path, jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays))
    return params


def _read_shard(entry: NamedParam, tensors: Mapping[str, Any], leaf: Any, index: tuple[slice, ...]) -> np.ndarray:
    ranges = [range(*one.indices(size)) for one, size in zip(index, leaf.shape, strict=True)]
    shard = np.empty([len(one) for one in ranges], leaf.dtype)
    for place in product(*(range(len(one)) for one in ranges[: entry.stacked])):
        name = entry.hf_name.format(*(one[i] for one, i in zip(ranges, place, strict=False)))
        shard[place] = entry.read(tensors[name], leaf.shape[entry.stacked :], index[entry.stacked :])
    return shard


def open_tensors(files: Mapping[Path, set[str] | None], stack: ExitStack) -> dict[str, Any]:
    """Return the tensors of safetensors files by name, not read yet.

    Args:
        files: files, each with the names of tensors to read; None is all of its tensors.

    Raises:
        WeightsError: a file is missing or damaged, or a tensor occurs twice or not at all.
    """
    tensors: dict[str, Any] = {}
    for file, wanted in files.items():
        try:
            opened = stack.enter_context(safe_open(file, framework="numpy"))
        except FileNotFoundError:
            named = f", {_INDEX} names it" if wanted is not None else ""
            raise WeightsError(f"{file} is missing{named}; copy the checkpoint again") from None
        except SafetensorError as error:
            raise WeightsError(f"{file} is damaged ({error}); copy it again") from None
        names = set(opened.keys())
        if wanted is not None and (absent := wanted - names):
            raise WeightsError(f"{file} lacks {min(absent)}, which {_INDEX} lists for it; copy the checkpoint again")
        if twice := names & tensors.keys() if wanted is None else None:
            raise WeightsError(f"{file} holds {min(twice)}, which another file there has too; remove one of them")
        tensors |= {name: opened.get_slice(name) for name in (names if wanted is None else wanted)}
    return tensors


def check_whole(directory: Folder) -> None:
    """Check that no adapter lies beside a folder's weights: transformers would add it. Raises `WeightsError`."""
    if (location(directory) / ADAPTER).exists():
        if not has_weights(directory):
            raise _alone(directory)
        raise WeightsError(
            f"{directory} has {ADAPTER} beside the weights: transformers applies it, and this program would ignore it. "
            "Merge it (peft's merge_and_unload) and save the folder again, or remove the adapter"
        )


def has_weights(directory: Folder) -> bool:
    """Return whether a folder has safetensors beside those of an adapter."""
    return not all(file.name.startswith("adapter_") for file in location(directory).glob("*.safetensors"))


def other_weights(directory: Folder) -> str | None:
    """Return a description of a folder's weights in another form than safetensors, with the fix; None: it has none."""
    every = (one for ending in chat_files.OTHER_WEIGHTS for one in location(directory).glob(f"*{ending}"))
    found = min((one.name for one in every), default=None)
    if found is None:
        return None
    if found.endswith(".gguf"):
        return f"{found} and no *.safetensors; convert it: astra convert --from_gguf=FILE --to_hf=FOLDER"
    return (
        f"{found} and no *.safetensors, the only form that is read; write them once with transformers: "
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(ANOTHER_FOLDER)"
    )


def _alone(directory: Folder) -> WeightsError:
    return WeightsError(
        f"{directory} is an adapter of peft, without the weights that it is for. Merge it first: astra convert "
        f"--from_peft={directory} --to_hf=DIR"
    )


def _files(directory: Path) -> dict[Path, set[str] | None]:
    """Return the files of a checkpoint, each with the names of tensors to read; None is all of its tensors.

    Files of an earlier save may lie beside them, with the same tensors. Files that the index does not name are not
    read. Without an index, files beside `model.safetensors` are not read.
    """
    index, whole = directory / _INDEX, directory / "model.safetensors"
    if not index.exists():
        files = [whole] if whole.exists() else sorted(directory.glob("*.safetensors"))
        if not files:
            none = "no *.safetensors; give the directory of a Hugging Face checkpoint"
            raise WeightsError(f"{directory} has {other_weights(directory) or none}")
        return dict.fromkeys(files, None)
    try:
        content = json.loads(index.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise WeightsError(f"{index} is not JSON ({error}); copy the checkpoint again") from None
    where = content.get("weight_map") if isinstance(content, dict) else None
    plain = isinstance(where, dict) and all(isinstance(one, str) and Path(one).name == one for one in where.values())
    if not plain or not where:
        raise WeightsError(f"{index} has no weight_map from tensors to files beside it; copy the checkpoint again")
    if whole.exists() and whole.name not in where.values():
        # Programs differ in which of these they read, so it is unclear what was trained.
        raise WeightsError(f"{directory} has both {whole.name} and {_INDEX}, of other files; take one of them away")
    return {
        directory / file: {name for name, one in where.items() if one == file} for file in sorted({*where.values()})
    }


def check_tensors(
    directory: Folder, table: Iterable[NamedParam], abstract: Params, tensors: Mapping[str, Any], *, remedy: str
) -> None:
    """Check that a folder's tensors are those of a table, in the shapes of its parameters.

    Args:
        remedy: the fix if there are other tensors too, for the message.

    Raises:
        WeightsError: names the tensor.
    """
    left = set(tensors)
    for entry in table:
        leaf = _leaf(abstract, entry.path)
        wanted = entry.hf_shape(leaf.shape[entry.stacked :])
        for place in product(*(range(size) for size in leaf.shape[: entry.stacked])):
            name = entry.hf_name.format(*place)
            if name not in tensors:
                raise WeightsError(f"{directory}: tensor {name} is missing; its shape should be {wanted}")
            if (found := tuple(tensors[name].get_shape())) != wanted:
                raise WeightsError(f"{directory}: tensor {name} has shape {found}, the config says {wanted}")
            check_dtype(directory, name, tensors[name])
            left.discard(name)
    if left:
        raise WeightsError(
            f"{directory}: {len(left)} tensors do not belong to this model, for example {min(left)} of shape "
            f"{tuple(tensors[min(left)].get_shape())}; {remedy}"
        )


def check_dtype(directory: Folder, name: str, tensor: Any) -> None:
    """Check a tensor's dtype. Raises `WeightsError` if its numbers have no meaning without others (as scales)."""
    if (kind := tensor.get_dtype()) not in _READ:
        raise WeightsError(
            f"{directory}: tensor {name} is {kind}, which means nothing without its quantisation's scales; "
            f"give the release that is not quantised ({', '.join(_READ)} are read)"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def hf_tensors(params: Params, model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor under its HF name, as contiguous host arrays, on every process of a multi-host run."""
    return tensors_of(params, model.names())


def tensors_of(params: Params, table: Iterable[NamedParam]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a table's parameters; see `hf_tensors`."""
    for entry in table:
        value = _leaf(params, entry.path)
        for layer in range(value.shape[0]) if entry.stacked else (None,):
            one = _on_host(value if layer is None else value[layer])
            if entry.stacked < 2:
                yield entry.hf_name.format(layer), entry.to_hf(one)
                continue
            for expert, matrix in enumerate(one):
                yield entry.hf_name.format(layer, expert), entry.to_hf(matrix)


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def save_hf(params: Params, model: Model, directory: Path | str, *, max_bytes: int = MAX_FILE_BYTES) -> None:
    """Write safetensors files, their index if there are several, and `config.json`, for transformers and vLLM.

    All processes take part, the first one writes. `config.json` is written last: a directory without one is incomplete.

    Args:
        max_bytes: bytes of a file, unless one tensor is larger.
    """
    save_tensors(hf_tensors(params, model), directory, max_bytes=max_bytes, writes=jax.process_index() == 0)
    write_config(model, directory)


def save_tensors(
    tensors: Iterable[tuple[str, np.ndarray]],
    directory: Path | str,
    *,
    max_bytes: int = MAX_FILE_BYTES,
    writes: bool = True,
) -> None:
    """Write safetensors files, and their index if there are several, in place of existing ones.

    The tensors of one file are in memory at a time. An existing `config.json` is deleted first.

    Args:
        max_bytes: bytes of a file, unless one tensor is larger.
        writes: False if another process writes; this one only iterates over the tensors.
    """
    directory = Path(directory)
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        for old in (*directory.glob("*.safetensors"), *directory.glob("*.safetensors.index.json")):
            old.unlink()  # from an earlier save with another number of files
        (directory / "config.json").unlink(missing_ok=True)
    files: list[dict[str, int]] = []
    pending: dict[str, np.ndarray] = {}

    def flush() -> None:
        if writes and pending:
            file = directory / f"part-{len(files):05d}.safetensors"
            try:
                save_file(pending, file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise WeightsError(f"{file} could not be written ({error}); make room there, and try again") from None
        files.append({name: tensor.nbytes for name, tensor in pending.items()})
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(one.nbytes for one in pending.values()) + tensor.nbytes > max_bytes:
            flush()
        pending[name] = tensor
    flush()
    if not writes:
        return
    where: dict[str, str] = {}
    for number, sizes in enumerate(files):
        final = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        (directory / f"part-{number:05d}.safetensors").rename(directory / final)
        where |= dict.fromkeys(sizes, final)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sum(sizes.values()) for sizes in files)}, "weight_map": where}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / _INDEX).write_text(text, encoding="utf-8")


def write_serving_folder(model: Model, tokenizer: Folder, own: Mapping[str, str], target: Path) -> int:
    """Write the folder from which a server starts that receives its weights later, completely or not at all.

    It has `config.json`, the tokenizer, its chat template and `generation_config.json`.

    Args:
        tokenizer: the folder with the tokenizer's files.
        own: files to write in place of some, see `chat_files.save_tokenizer`.
        target: a folder that is missing or empty.

    Returns:
        The number of files.
    """
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        chat_files.save_tokenizer(tokenizer, unfinished, own)
        write_config(model, unfinished)
        count = len(list(unfinished.iterdir()))
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return count


def write_config(model: Model, directory: Folder) -> None:
    """Write `config.json` in HF's form, for `read_config`, transformers and vLLM; only the first process writes.

    The ids of end tokens come from the folder's `generation_config.json`.
    """
    if jax.process_index():
        return
    folder = location(directory)
    content = model.to_hf() | chat_files.token_ids(folder)
    write_text(folder / "config.json", json.dumps(content, indent=2) + "\n")
