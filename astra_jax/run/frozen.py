"""The frozen weights under adapters: a run's checkpoints have them by reference, with a digest of each array.

    dir/lora.json       beside the checkpoints: which adapters those are, and the weights under them
    dir/params/<step>/  the adapters

So a run's `checkpoints/` is a model all the same: who reads it (`weights.load`) reads the weights from where the run
had them, sees that they are the same, and adds the adapters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import msgspec

from astra_jax.models.hf_checkpoint import WeightsError
from astra_jax.models.lora import LoRA
from astra_jax.models.model import Params
from astra_jax.run.checkpoints import named
from astra_jax.run.digests import digests_of
from astra_jax.run.hosts import is_first
from sandbox.settings import SettingError
from synthesis.core.datasets import Folder
from synthesis.core.files import location, write_text

FILE = "lora.json"


@dataclass(frozen=True)
class Origin:
    """Where weights were read: see `weights.load`.

    Attributes:
        folder: of either kind.
        step: of Orbax checkpoints; None in Hugging Face's folders.
        rows: how many the embedding has there, where tokens were added to it; None: as many as the model.
        spelled: as of `weights.load`.
    """

    folder: str
    step: int | None = None
    rows: int | None = None
    spelled: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Frozen:
    """What adapters were trained on.

    Attributes:
        lora: their settings.
        origin: of the weights under them; None: whoever trained did not say.
        param_dtype: of those.
        digests: by name.
    """

    lora: LoRA
    origin: Origin | None
    param_dtype: str
    digests: Mapping[str, str]

    def check(self, base: Params, where: object) -> None:
        """See that weights are those.

        Args:
            where: they were read, for the message.

        Raises:
            WeightsError: they are not; names the first that differs.
        """
        self.compare(digests_of(named(base)), where)

    def compare(self, found: Mapping[str, str], where: object) -> None:
        """As `check`, of weights with these digests."""
        if wrong := sorted(
            name for name in found.keys() | self.digests.keys() if found.get(name) != self.digests.get(name)
        ):
            raise WeightsError(
                f"{where}: {wrong[0]} is not what the adapters were trained on ({len(wrong)} of {len(found)} arrays "
                "differ); give the weights that the run began with"
            )


def frozen(base: Params, lora: LoRA, origin: Origin | None) -> Frozen:
    """Of weights that adapters are to be trained on. On several hosts each calls this."""
    return Frozen(lora, origin, jax.tree.leaves(base)[0].dtype.name, digests_of(named(base)))


def write(content: Frozen, directory: Folder) -> None:
    """Write it beside checkpoints; the first process does."""
    if is_first():
        write_text(location(directory) / FILE, json.dumps(msgspec.to_builtins(content), indent=2) + "\n")


def read(directory: Folder) -> Frozen | None:
    """What lies beside checkpoints; None: they hold whole weights.

    Raises:
        WeightsError: it cannot be read.
    """
    file = location(directory) / FILE
    if not file.exists():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Frozen)
    except (msgspec.MsgspecError, SettingError) as error:
        raise WeightsError(
            f"{file} does not say what adapters are there ({error}); copy it from the run again"
        ) from None
