"""The frozen weights under adapters: a run's checkpoints have them by reference, with a digest of each array.

    dir/lora.json       beside the checkpoints: which adapters those are, and the weights under them
    dir/params/<step>/  the adapters

So a run's `checkpoints/` is a model all the same: who reads it (`weights.load`) reads the weights from where the run
had them, sees that they are the same, and adds the adapters. Rows that were made for added tokens are part of no
digest: they are means, whose last bits are others on another mesh or chip.
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
from astra_jax.models.hf_checkpoint import WeightsError
from astra_jax.models.lora import LoRA
from astra_jax.models.model import Params
from astra_jax.run.checkpoints import named
from astra_jax.run.digests import digests_of
from astra_jax.run.hosts import is_first
from sandbox.settings import SettingError
from synthesis.core.datasets import Folder
from synthesis.core.files import location, write_text
from synthesis.core.typed import decode_json

FILE = "lora.json"


@dataclass(frozen=True)
class Origin:
    """Where weights were read: see `weights.load`.

    Attributes:
        folder: of either kind.
        step: of Orbax checkpoints; None in Hugging Face's folders.
        rows: how many the embedding has there, where tokens were added to it; None: as many as the model.
        spelled: as of `weights.load`.
        adapter: the folder of `peft` whose adapter the run's own continue; None: theirs are new.
    """

    folder: str
    step: int | None = None
    rows: int | None = None
    spelled: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    adapter: str | None = None

    def made(self, rows: int) -> np.ndarray:
        """Of an embedding of so many rows, which were not read but made: [rows], bool."""
        made = np.arange(rows) >= (rows if self.rows is None else self.rows)
        made[[number for number in self.spelled if number < rows]] = True
        return made


@dataclass(frozen=True)
class Frozen:
    """What adapters were trained on.

    Attributes:
        lora: their settings.
        origin: of the weights under them; None: whoever trained did not say.
        param_dtype: of those.
        digests: by name; made rows count as zeros.
        whole: of arrays with made rows, digests with those, which are `digests` in files of before. Not written.
    """

    lora: LoRA
    origin: Origin | None
    param_dtype: str
    digests: Mapping[str, str]
    whole: Mapping[str, str] = field(default_factory=dict)

    def check(self, base: Params, where: object) -> None:
        """See that weights are those.

        Args:
            where: they were read, for the message.

        Raises:
            WeightsError: they are not; names the first that differs.
        """
        self.compare(frozen(base, self.lora, self.origin), where)

    def compare(self, found: Frozen, where: object) -> None:
        """As `check`, of weights of which this is known."""
        if wrong := sorted(
            name
            for name in found.digests.keys() | self.digests.keys()
            if self.digests.get(name, "") not in (found.digests.get(name), found.whole.get(name))
        ):
            count = len(found.digests)
            raise WeightsError(
                f"{where}: {wrong[0]} is not what the adapters were trained on ({len(wrong)} of {count} arrays "
                "differ); give the weights that the run began with"
            )


def frozen(base: Params, lora: LoRA, origin: Origin | None) -> Frozen:
    """Of weights that adapters are to be trained on. On several hosts each calls this."""
    arrays = named(base)
    made = {} if origin is None else _made(arrays, origin)
    whole = digests_of({name: arrays[name] for name in made})
    return Frozen(lora, origin, jax.tree.leaves(base)[0].dtype.name, digests_of(arrays, made), whole)


def _made(arrays: Mapping[str, Any], origin: Origin) -> dict[str, np.ndarray]:
    """Where arrays have rows that were made: of those that have some, booleans that broadcast to them."""
    found = {}
    for name, array in arrays.items():
        if (at := axes.vocabulary(name)) is not None and (made := origin.made(array.shape[at])).any():
            found[name] = np.expand_dims(made, tuple(axis for axis in range(array.ndim) if axis != at))
    return found


def write(content: Frozen, directory: Folder) -> None:
    """Write it beside checkpoints; the first process does."""
    if is_first():
        written = msgspec.to_builtins(content)
        del written["whole"]
        write_text(location(directory) / FILE, json.dumps(written, indent=2) + "\n")


def read(directory: Folder) -> Frozen | None:
    """What lies beside checkpoints; None: they hold whole weights.

    Raises:
        WeightsError: it cannot be read.
    """
    file = location(directory) / FILE
    if not file.exists():
        return None
    try:
        return decode_json(file.read_bytes(), Frozen)
    except (msgspec.MsgspecError, SettingError) as error:
        raise WeightsError(
            f"{file} does not say what adapters are there ({error}); copy it from the run again"
        ) from None
