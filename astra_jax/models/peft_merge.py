"""Adapters of `peft` merged into their base weights, tensor by tensor, while those are read.

  * W' = W + scale · B A             a matrix with adapters, and its bias with that of B (`lora_bias`)
  * W' = m · (W + scale · B A) / ‖·‖  the same with DoRA (arXiv 2402.09353): each output's norm is m
  * W' = the adapter's own copy       of `modules_to_save`, trained biases, and a vocabulary that was extended
  * W'[t] = the adapter's row         of `trainable_token_indices`

Sums are made in float32 from the slices that a device needs, and rounded once, to the parameter's type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from astra_jax.models.adapters import at_path
from astra_jax.models.hf_checkpoint import WeightsError, drop_tied_head
from astra_jax.models.model import Model
from astra_jax.models.peft_folder import TENSORS, AdapterSettings, open_adapter, read_settings
from synthesis.core.datasets import Folder

Tensors = dict[str, Any]

_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"

_ROLES = (
    "lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector",
    "token_adapter.trainable_tokens_delta", "base_layer.weight", "base_layer.bias", "weight", "bias",
)  # fmt: skip
"""Suffixes of an adapter's names, after their module."""
_PAIRS = (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B"))


class _Changed:
    """Tensor that is computed when a part of it is read; replaces one of `open_tensors`.

    Args:
        dtype: dtype by its name in safetensors.
        read: returns a part in float32, given a slice for each axis.
    """

    def __init__(self, shape: Sequence[int], dtype: str, read: Callable[[tuple[slice, ...]], np.ndarray]) -> None:
        self._shape, self._dtype, self._read = list(shape), dtype, read

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        return self._read(tuple(slice(*one.indices(size)) for one, size in zip(index, self._shape, strict=True)))


def merged_model(directory: Folder, base: Model) -> Model:
    """Return the model of the merged weights: its vocabulary may be larger, and its head may not be tied any more.

    Args:
        base: the model of the weights under the adapter.

    Raises:
        WeightsError: the adapter cannot be read, has settings or tensors that are not merged here, or does not fit.
    """
    with ExitStack() as stack:
        return _Adapter(directory, stack).model(base)


def merged_tensors(directory: Folder, base: Model, tensors: Tensors, stack: ExitStack) -> Tensors:
    """Return the base weights' tensors with the adapter merged, for `hf_checkpoint.load_hf`.

    Args:
        base: the model of the weights under the adapter.
        tensors: tensors of its checkpoint.
        stack: closes the adapter's file.

    Raises:
        WeightsError: see `merged_model`; also if a tensor of the adapter matches none of the weights, has another shape
            than needed, or is missing.
    """
    return _Adapter(directory, stack).merged(base, tensors)


class _Adapter:
    """Content of an adapter's folder, by module and role. Raises `WeightsError` if a tensor has no role here."""

    def __init__(self, directory: Folder, stack: ExitStack) -> None:
        self.settings: AdapterSettings = read_settings(directory)
        self._where = f"{directory}/{TENSORS}"
        self._modules: dict[str, Tensors] = {}
        for name, tensor in open_adapter(directory, stack).items():
            role = next((role for role in _ROLES if name.endswith(f".{role}")), None)
            if role is None:
                raise WeightsError(f"{self._where}: tensor {name} is of a kind that is not merged here")
            module = name.removesuffix(f".{role}")
            own, role = self._modules.setdefault(module, {}), role.removeprefix("base_layer.")
            if role in own:
                raise WeightsError(f"{self._where} has two tensors {module}.{role}; write the adapter again")
            own[role] = tensor
        for module, own in self._modules.items():
            for pair in _PAIRS:
                if len(given := [role for role in pair if role in own]) == 1:
                    missing = pair[1 - pair.index(given[0])]
                    raise WeightsError(f"{self._where}: {module} has {given[0]}, and {missing} is missing")
        self._tokens = self._token_ids()

    # ------------------------------------------------------------------------------------------------------- the model

    def model(self, base: Model) -> Model:
        """See `merged_model`."""
        embedding, head = (self._modules.get(name, {}) for name in (_EMBEDDING, _HEAD))
        rows = {name: one["weight"].get_shape()[0] for name, one in self._vocabularies() if "weight" in one}
        if len({*rows.values()}) > 1:
            raise WeightsError(f"{self._where}: {_EMBEDDING} has {rows[_EMBEDDING]} rows, {_HEAD} {rows[_HEAD]}")
        size = next(iter(rows.values()), base.vocab_size)
        for name, ids in self._tokens.items():
            size = max(size, max(ids) + 1)
            if lacks := sorted({*range(rows.get(name, base.vocab_size), size)} - {*ids}):
                raise WeightsError(
                    f"{self._where}: token {lacks[0]} has a row neither there nor in the base, which has "
                    f"{base.vocab_size}; give the base that the adapter was trained on"
                )
        tied = base.tie_embeddings
        if tied:
            for name, own in self._vocabularies():
                if any(role.startswith("lora_") for role in own):
                    raise WeightsError(
                        f"{self._where}: {name} has low-rank matrices, and in this model embedding and head are one: "
                        "peft's own merge changes both, its training one of them; train it in modules_to_save"
                    )
            if "token_adapter.trainable_tokens_delta" in head:
                raise WeightsError(
                    f"{self._where}: trainable_token_indices names {_HEAD}, which is the embedding in this model; "
                    "name embed_tokens alone"
                )
            tied = not self._apart(embedding, head, base)
        for name, own in self._vocabularies():
            has_row = "weight" in own or "token_adapter.trainable_tokens_delta" in own
            if size > base.vocab_size and not has_row and not (tied and name == _HEAD):
                raise WeightsError(f"{self._where}: the vocabulary grew to {size} rows, and {name} has none of the new")
        return dataclasses.replace(base, vocab_size=size, tie_embeddings=tied)

    def _apart(self, embedding: Tensors, head: Tensors, base: Model) -> bool:
        """Return whether embedding and head, which the base ties, are separate now."""
        if "weight" in embedding and "weight" in head:
            return not np.array_equal(embedding["weight"][:], head["weight"][:])
        if "weight" in embedding and embedding["weight"].get_shape()[0] != base.vocab_size:
            return False  # no earlier head has as many rows
        return ("weight" in embedding or "weight" in head) and not self.settings.content.get("ensure_weight_tying")

    def _vocabularies(self) -> Iterator[tuple[str, Tensors]]:
        return ((name, self._modules.get(name, {})) for name in (_EMBEDDING, _HEAD))

    def _token_ids(self) -> dict[str, list[int]]:
        """Return the ids of trained rows, by their module. Raises `WeightsError`."""
        given = self.settings.content.get("trainable_token_indices") or {}
        by_name = given if isinstance(given, dict) else {"embed_tokens": given}
        found = {}
        role = "token_adapter.trainable_tokens_delta"
        for name, ids in by_name.items():
            modules = [one for one in (_EMBEDDING, _HEAD) if one == name or one.endswith(f".{name}")]
            if not modules or not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
                raise WeightsError(
                    f"{self._where}: trainable_token_indices is {given!r:.200}; ids of embed_tokens' rows"
                )
            rows = self._modules.get(modules[0], {}).get(role)
            if rows is None and modules[0] == _HEAD and len(by_name) > 1:
                continue  # tied to the embedding, which has the rows
            if rows is None or rows.get_shape()[0] != len(ids) or len({*ids}) < len(ids):
                raise WeightsError(f"{self._where}: {modules[0]}.{role} is not a row for each of {ids!r:.200}")
            found[modules[0]] = ids
        for module, own in self._modules.items():
            if role in own and module not in found:
                raise WeightsError(f"{self._where} has {module}.{role}, which trainable_token_indices does not name")
        return found

    # ----------------------------------------------------------------------------------------------------- the tensors

    def merged(self, base: Model, tensors: Tensors) -> Tensors:
        """See `merged_tensors`."""
        model, made = self.model(base), dict(tensors)
        if base.tie_embeddings:
            drop_tied_head("the weights under the adapter", made)
            if not model.tie_embeddings:
                made[f"{_HEAD}.weight"] = made[f"{_EMBEDDING}.weight"]
            else:  # also where the adapter's folder stores it twice
                self._modules.pop(_HEAD, None)
        self._check_complete(base)
        for module, own in self._modules.items():
            for leaf, roles in (
                ("weight", own.keys() - {"bias", "lora_B.bias"}),
                ("bias", own.keys() & {"bias", "lora_B.bias"}),
            ):
                if not roles:
                    continue
                name = f"{module}.{leaf}"
                if name not in made:
                    raise WeightsError(
                        f"{self._where}: {module} has {min(roles)}, and the weights under the adapter have no tensor "
                        f"{name}; give the base that it was trained on"
                    )
                one = self._bias if leaf == "bias" else self._weight
                made[name] = one(module, own, made[name], model)
        return made

    def _check_complete(self, base: Model) -> None:
        """Check that each matrix of `target_modules` has a tensor in the file. Raises `WeightsError`."""
        content = self.settings.content
        targets = content.get("target_modules")
        if (
            not isinstance(targets, list)
            or content.get("layers_to_transform") is not None
            or content.get("exclude_modules")
        ):
            return
        shapes = base.abstract_params()
        for entry in base.names():
            module = entry.hf_name.removesuffix(".weight")
            if entry.stacked == 1 and module != entry.hf_name and module.rpartition(".")[2] in targets:
                for layer in range(at_path(shapes, entry.path).shape[0]):
                    if "lora_A.weight" not in self._modules.get(name := module.format(layer), {}):
                        raise WeightsError(
                            f"{self._where} has no tensor of {name}, which target_modules of the adapter names; "
                            "write the adapter again"
                        )

    def _shaped(self, name: str, tensor: Any, wanted: Sequence[int]) -> np.ndarray:
        """Read a whole tensor in float32. Raises `WeightsError` if it has another shape."""
        if (found := tuple(tensor.get_shape())) != tuple(wanted):
            raise WeightsError(
                f"{self._where}: tensor {name} has shape {found}, where {tuple(wanted)} fits the weights under the "
                "adapter; give the base that it was trained on"
            )
        return np.asarray(tensor[:], np.float32)

    def _bias(self, module: str, own: Tensors, base: Any, model: Model) -> _Changed:
        del model
        shape = base.get_shape()
        whole = self._shaped(f"{module}.bias", own.get("bias", base), shape)
        if "lora_B.bias" in own:
            more = self._shaped(f"{module}.lora_B.bias", own["lora_B.bias"], shape)
            whole = whole + self.settings.scale_of(module) * more
        return _Changed(shape, base.get_dtype(), lambda index: whole[index])

    def _weight(self, module: str, own: Tensors, base: Any, model: Model) -> _Changed:
        rows, *columns = base.get_shape()
        under = own.get("weight", base)
        if module in (_EMBEDDING, _HEAD):
            rows = model.vocab_size
            if under is not base:
                self._check_shape(f"{module}.weight", under, [under.get_shape()[0], *columns])
        elif under is not base:
            self._check_shape(f"{module}.weight", under, [rows, *columns])
        left, right = self._factors(module, own, [rows, *columns])
        magnitude = None
        if "lora_magnitude_vector" in own:
            magnitude = self._shaped(f"{module}.lora_magnitude_vector", own["lora_magnitude_vector"], [rows])
        ids, trained = self._tokens.get(module, []), None
        if ids:
            role = "token_adapter.trainable_tokens_delta"
            trained = self._shaped(f"{module}.{role}", own[role], [len(ids), *columns])

        def read(index: tuple[slice, ...]) -> np.ndarray:
            of_rows, *rest = index
            inner = (slice(None),) * len(rest) if magnitude is not None else tuple(rest)
            part = _padded(under, of_rows, inner)
            if left is not None:
                part = part + left[of_rows] @ right[(slice(None), *inner)]
            if magnitude is not None:
                norm = np.linalg.norm(part, axis=1, keepdims=True)
                part = (magnitude[of_rows, None] / norm * part)[:, rest[0]]
            for number, token in enumerate(ids):
                if trained is not None and of_rows.start <= token < of_rows.stop:
                    part[token - of_rows.start] = trained[number][tuple(rest)]
            return part

        return _Changed([rows, *columns], base.get_dtype(), read)

    def _check_shape(self, name: str, tensor: Any, wanted: Sequence[int]) -> None:
        if list(tensor.get_shape()) != list(wanted):
            self._shaped(name, tensor, wanted)

    def _factors(self, module: str, own: Tensors, shape: list[int]) -> tuple[np.ndarray | None, Any]:
        """Return (scale · B, A) of a matrix, [rows, r] and [r, columns]; (None, None) if it has none."""
        rank, scale = self.settings.rank_of(module), self.settings.scale_of(module)
        if "lora_magnitude_vector" in own and "lora_A.weight" not in own:
            raise WeightsError(f"{self._where}: {module} has a lora_magnitude_vector, and no lora_A.weight")
        if "lora_A.weight" in own:
            a = self._shaped(f"{module}.lora_A.weight", own["lora_A.weight"], [rank, shape[1]])
            return scale * self._shaped(f"{module}.lora_B.weight", own["lora_B.weight"], [shape[0], rank]), a
        if "lora_embedding_A" in own:
            a = self._shaped(f"{module}.lora_embedding_A", own["lora_embedding_A"], [rank, shape[0]])
            b = self._shaped(f"{module}.lora_embedding_B", own["lora_embedding_B"], [shape[1], rank])
            return scale * a.T, b.T
        return None, None


def _padded(tensor: Any, rows: slice, rest: tuple[slice, ...]) -> np.ndarray:
    """Read a part of a tensor in float32, with zeros for rows that it does not have."""
    stored = tensor.get_shape()[0]
    part = np.asarray(tensor[(slice(min(rows.start, stored), min(rows.stop, stored)), *rest)]).astype(np.float32)
    missing = (rows.stop - rows.start) - len(part)
    return np.pad(part, [(0, missing)] + [(0, 0)] * (part.ndim - 1)) if missing else part
