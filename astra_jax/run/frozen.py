"""Frozen weights under adapters. A run's checkpoints refer to them, with a digest of each array.

    dir/lora.json       beside the checkpoints: settings of the adapters, and the weights under them
    dir/params/<step>/  the adapters

So a run's `checkpoints/` is still a model. A reader (`weights.load`) reads the weights from their original location,
checks that they are the same, and adds the adapters. Rows created for added tokens are in no digest: they are means,
whose last bits depend on the mesh and chip.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import msgspec
import numpy as np

from astra_jax import axes
from astra_jax.base.files import location, write_text
from astra_jax.base.settings import SettingError
from astra_jax.base.typed import decode_json
from astra_jax.models.hf_checkpoint import WeightsError
from astra_jax.models.lora import LoRA
from astra_jax.models.model import Params
from astra_jax.run.checkpoints import named
from astra_jax.run.digests import digests_of
from astra_jax.run.hosts import is_first
from synthesis.core.datasets import Folder

FILE = "lora.json"
_FORMER_KEYS = {"stored": "weight_quantization", "spelled": "new_token_pieces"}
"""Names in files of earlier versions."""


@dataclass(frozen=True)
class WeightsSource:
    """Source of weights, see `weights.load`.

    Attributes:
        folder: Hugging Face's or Orbax's.
        step: of Orbax checkpoints; None in Hugging Face folders.
        rows: of the stored embedding, if tokens were added; None if it has as many as the model.
        new_token_pieces: as in `weights.load`.
        adapter: the folder of `peft` whose adapter the run continues; None for new adapters.
    """

    folder: str
    step: int | None = None
    rows: int | None = None
    new_token_pieces: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    adapter: str | None = None

    def new_row_mask(self, rows: int) -> np.ndarray:
        """Return a mask of the embedding rows that were created rather than read: [rows], bool."""
        made = np.arange(rows) >= (rows if self.rows is None else self.rows)
        made[[number for number in self.new_token_pieces if number < rows]] = True
        return made


@dataclass(frozen=True)
class BaseWeightsRef:
    """Identity of the weights that adapters were trained on.

    Attributes:
        lora: settings of the adapters.
        origin: of the weights; None if unknown.
        param_dtype: of the weights.
        digests: by name; created rows count as zeros.
        whole: digests that include created rows, for arrays that have some. Earlier files have these as `digests`. Not
            written.
    """

    lora: LoRA
    origin: WeightsSource | None
    param_dtype: str
    digests: Mapping[str, str]
    whole: Mapping[str, str] = field(default_factory=dict)

    def check(self, base: Params, where: object) -> None:
        """Check that weights are the ones recorded here.

        Args:
            where: their source, for the message.

        Raises:
            WeightsError: they differ; names the first difference.
        """
        self.compare(frozen(base, self.lora, self.origin), where)

    def compare(self, found: BaseWeightsRef, where: object) -> None:
        """Compare like `check`, with the recorded identity of other weights."""
        if wrong := sorted(
            name
            for name in found.digests.keys() | self.digests.keys()
            if self.digests.get(name, "") not in (found.digests.get(name), found.whole.get(name))
        ):
            count = len(found.digests)
            raise WeightsError(
                f"{where}: {wrong[0]} is not what the adapters were trained on ({len(wrong)} of {count} arrays "
                "differ); give the weights that the run started from"
            )


def frozen(base: Params, lora: LoRA, origin: WeightsSource | None) -> BaseWeightsRef:
    """Return the identity of weights for adapters to train on. On several hosts each calls this."""
    arrays = named(base)
    made = {} if origin is None else _new_row_masks(arrays, origin)
    whole = digests_of({name: arrays[name] for name in made})
    return BaseWeightsRef(lora, origin, jax.tree.leaves(base)[0].dtype.name, digests_of(arrays, made), whole)


def _new_row_masks(arrays: Mapping[str, Any], origin: WeightsSource) -> dict[str, np.ndarray]:
    """Return masks of created rows, by name, for arrays that have some; they broadcast to the arrays."""
    found = {}
    for name, array in arrays.items():
        if (at := axes.vocabulary(name)) is not None and (made := origin.new_row_mask(array.shape[at])).any():
            found[name] = np.expand_dims(made, tuple(axis for axis in range(array.ndim) if axis != at))
    return found


def write(content: BaseWeightsRef, directory: Folder) -> None:
    """Write it beside checkpoints, on the first process."""
    if is_first():
        written = msgspec.to_builtins(content)
        del written["whole"]
        write_text(location(directory) / FILE, json.dumps(written, indent=2) + "\n")


def read(directory: Folder) -> BaseWeightsRef | None:
    """Read the file beside checkpoints; None if they contain all weights.

    Raises:
        WeightsError: it cannot be read.
    """
    file = location(directory) / FILE
    if not file.exists():
        return None
    try:
        found = decode_json(file.read_bytes(), dict[str, Any])
        for part in ("lora", "origin"):
            if isinstance(found.get(part), dict):
                found[part] = {_FORMER_KEYS.get(name, name): value for name, value in found[part].items()}
        return decode_json(json.dumps(found).encode(), BaseWeightsRef)
    except (msgspec.MsgspecError, SettingError) as error:
        raise WeightsError(
            f"{file} does not describe the run's adapters ({error}); copy it from the run again"
        ) from None
