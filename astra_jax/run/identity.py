"""Whether a workdir's checkpoint belongs to the run that wants to resume from it."""

from __future__ import annotations

import dataclasses
import json
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from astra_jax.models.lora import FULL
from astra_jax.models.model import Model
from astra_jax.run.config import FREE, TrainingConfig, todays_name
from synthesis.core.datasets import Folder
from synthesis.core.files import location, write_text
from synthesis.core.workdir import WorkdirError

_FORMERLY_KEPT = ("row_buckets", "concurrent_groups", "deadline_seconds")
"""Parts of identities that earlier versions saved; runs may change them now."""
_LATER = ("trajectories.attempts", "tokenizer", "model.family")
"""Parts that earlier versions did not save: settings whose default changes nothing that was finished, and what could
not be compared then (there was one family, whose weights no other one can restore)."""

_ID_BYTES = 8

_BEFORE = {"matmul": "none", "moments": "float32", "warmup_fraction": 0.0, "final_fraction": 1.0}
"""What every run had before there were these settings."""


def settings_of(config: TrainingConfig, *, free: Sequence[str] = ()) -> dict[str, Any]:
    """The settings that a run's identity has: all but those that may change when it goes on."""
    settings = dataclasses.asdict(config)
    if config.lora.rank is None:  # as runs were before there were adapters
        del settings["lora"]
    else:  # as runs were before rows of tokens were trained beside them, and before weights lay under them in 8 bits
        for name in ("tokens", "stored"):
            if getattr(config.lora, name) == getattr(FULL, name):
                del settings["lora"][name]
    return {name: value for name, value in settings.items() if name not in (*FREE, *free)}


def model_settings(model: Model) -> dict[str, Any]:
    """A model's part of a run's identity: its sizes, and its family, since two may have the same sizes."""
    return {"family": model.family, **dataclasses.asdict(model)}


def run_identity(**parts: Any) -> dict[str, Any]:
    """Nested settings as flat JSON values with dotted names, as they come back from a checkpoint."""
    return _flatten(json.loads(json.dumps(parts)))


def run_id(workdir: Folder) -> str:
    """What a run is called beside others, by servers that several may come to: drawn once for a workdir, by the first
    host.

    Raises:
        WorkdirError: the file that has it holds something else.
    """
    path = location(workdir) / "run_id"
    if not path.exists():
        write_text(path, f"{secrets.token_hex(_ID_BYTES)}\n")
    found = path.read_text().strip()
    if len(found) != 2 * _ID_BYTES or not set(found) <= set(string.hexdigits):
        raise WorkdirError(f"{path} does not hold a run's id; delete it, a new one is drawn")
    return found


def check_same_run(saved: Mapping[str, Any], ours: Mapping[str, Any], workdir: Folder) -> None:
    """Compare a checkpoint's identity with this run's.

    Raises:
        WorkdirError: they differ.
    """
    if said := differences(saved, ours):
        raise WorkdirError(f"{workdir} belongs to another run: {said}. Use those settings, or another --workdir")


def differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """In what an identity that was saved differs from this run's, for people; "" where in nothing."""
    saved, ours = _comparable(saved), _comparable(ours)
    ours = {name: value for name, value in ours.items() if name in saved or not name.endswith(_LATER)}
    names = [name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name)]
    names.sort(key=lambda name: (name.count("."), name))  # the outer ones, which decide the inner ones, first
    shown = [f"{name} is {saved.get(name)!r} there, {ours.get(name)!r} here" for name in names[:3]]
    return "; ".join(shown) + (f"; and {len(names) - 3} more settings" if len(names) > 3 else "")


def _comparable(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity under today's names, also one that an earlier version saved, without what changes no result."""
    found = {todays_name(name): value for name, value in identity.items()}
    free: tuple[str, ...] = (*FREE, *_FORMERLY_KEPT)
    if not any(name.endswith("param_dtype") and value == "bfloat16" for name, value in found.items()):
        free = (*free, "rounding")
    for name in [name for name in found if name.endswith(("sft.batch_size", "grpo.batch_size"))]:
        for setting, former in _BEFORE.items():
            found.setdefault(name.removesuffix("batch_size") + setting, former)
        if name.endswith("sft.batch_size"):
            found.setdefault(name.removesuffix("batch_size") + "data.rounds", "together")  # the only way there was
        if name.endswith("grpo.batch_size"):
            found.setdefault(name.removesuffix("batch_size") + "rounding", "nearest")  # while GRPO had no such setting
            found.setdefault(name.removesuffix("batch_size") + "stored", "none")
    return {name: value for name, value in found.items() if name.rpartition(".")[2] not in free}


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat |= _flatten(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {prefix + name: item}
    return flat
