"""Identity of a run: decides whether it may resume from a workdir's checkpoint."""

from __future__ import annotations

import dataclasses
import json
import secrets
import string
from collections.abc import Mapping
from typing import Any

from astra_jax.base.files import location, write_text
from astra_jax.base.former_settings import todays_name
from astra_jax.models.lora import FULL
from astra_jax.models.model import Model
from astra_jax.run.config import TrainingConfig, resumable_fields
from synthesis.core.datasets import Folder
from synthesis.core.workdir import WorkdirError

_IGNORED = (*resumable_fields(TrainingConfig), "workers", "row_buckets", "concurrent_groups", "deadline_seconds")
"""Settings that may differ, although identities of this or an earlier version have them."""
_LATER = ("trajectories.attempts", "tokenizer", "model.family")
"""Parts that earlier versions did not save. Either the setting's default changes no result, or there was nothing to
compare: only one model family existed, and its weights do not fit another."""

CHANGEABLE_ON_RESUME = (
    *("learning_rate", "schedule", "warmup_fraction", "final_fraction", "weight_decay", "max_grad_norm", "steps"),
    *("group_size", "min_reward_std"),
)
"""Settings that affect results but may still change on resume, since they depend on no earlier result. GRPO's objective
is another one. Each change is recorded with its step."""

_ID_BYTES = 8

_BEFORE = {
    "matmul_quantization": "none",
    "optimizer_state_dtype": "float32",
    "warmup_fraction": 0.0,
    "final_fraction": 1.0,
    "schedule": "cosine",
}
"""Values of settings in runs from before these settings existed."""

_FORMER_VALUES: dict[str, dict[Any, Any]] = {
    "advantage": {"deviation": True, "mean": False},
    "rounds": {"apart": True, "together": False},
}
"""Values of settings that had another name, to today's."""


def settings_of(config: TrainingConfig) -> dict[str, Any]:
    """Return the settings in a run's identity: all but the `Resumable` ones."""
    settings = dataclasses.asdict(config)
    if config.lora.rank is None:  # identities from before adapters have none
        del settings["lora"]
    else:  # older identities have neither trained token rows nor 8-bit weights
        for name in ("tokens", "weight_quantization"):
            if getattr(config.lora, name) == getattr(FULL, name):
                del settings["lora"][name]
    return {name: value for name, value in settings.items() if name not in resumable_fields(type(config))}


def model_settings(model: Model) -> dict[str, Any]:
    """Return a model's part of a run's identity: its sizes, and its family, since families may share sizes."""
    return {"family": model.family, **dataclasses.asdict(model)}


def run_identity(**parts: Any) -> dict[str, Any]:
    """Return nested settings as flat JSON values with dotted names, in the form of a checkpoint."""
    return _flatten(json.loads(json.dumps(parts)))


def run_id(workdir: Folder) -> str:
    """Return a run's unique name for servers that several runs may use. The first host creates it once for a workdir.

    Raises:
        WorkdirError: the file with the name has other contents.
    """
    path = location(workdir) / "run_id"
    if not path.exists():
        write_text(path, f"{secrets.token_hex(_ID_BYTES)}\n")
    found = path.read_text().strip()
    if len(found) != 2 * _ID_BYTES or not set(found) <= set(string.hexdigits):
        raise WorkdirError(f"{path} does not have a run's id; delete it, and a new id is created")
    return found


def check_same_run(
    saved: Mapping[str, Any], ours: Mapping[str, Any], workdir: Folder, *, weights: Folder | None = None
) -> None:
    """Compare a checkpoint's identity with this run's.

    Args:
        weights: checkpoints of that run, from which a new run may start.

    Raises:
        WorkdirError: they differ.
    """
    if not (names := _different(saved, ours)):
        return
    way_on = "use another --workdir"
    if weights is not None and not any(name.partition(".")[0] in ("model", "tokenizer") for name in names):
        way_on = f"start a new run from its weights: --weights={weights} --workdir=NEW"
    raise WorkdirError(f"{workdir} belongs to another run: {differences(saved, ours)}. Use those settings, or {way_on}")


def resume_changes(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the allowed differences from a checkpoint's identity: name to (before, now). The number of steps is
    included only if both have it: a constant learning rate has none."""
    before, now = _comparable(saved), _comparable(ours)
    return {name: (before.get(name), now.get(name)) for name in _different(saved, ours) if _may_change(name)}


def _may_change(name: str) -> bool:
    loop, _, setting = name.partition(".")
    return loop in ("sft", "grpo") and (setting in CHANGEABLE_ON_RESUME or setting.startswith("objective."))


def differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return the differences between a saved identity and this run's as text; "" if there are none."""
    names = _different(saved, ours)
    saved, ours = _comparable(saved), _comparable(ours)
    shown = [f"{name} is {saved.get(name)!r} there, {ours.get(name)!r} here{_flag(name)}" for name in names[:3]]
    return "; ".join(shown) + (f"; and {len(names) - 3} more settings" if len(names) > 3 else "")


_FLAGS = {"dataset": "--data, or the share of --held_out", "rehearsal": "--rehearsal", "tokenizer": "--tokenizer"}
"""Flags that decide a part of the identity that is not a setting."""


def _flag(name: str) -> str:
    """Return the flags that decide a part of the identity, in brackets; "" if it is not one of a loop."""
    flag = f"--config.{name}" if name.startswith(("sft.", "grpo.")) else _FLAGS.get(name)
    return f" ({flag})" if flag else ""


def _different(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    saved, ours = _comparable(saved), _comparable(ours)
    ours = {name: value for name, value in ours.items() if name in saved or not name.endswith(_LATER)}
    names = [name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name)]
    return sorted(names, key=lambda name: (name.count("."), name))  # outer ones first, since they decide the inner ones


def _comparable(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity (of any version) under current names, without settings that change no result."""
    found = _todays_settings(identity)
    free: tuple[str, ...] = _IGNORED
    if not any(name.endswith("param_dtype") and value == "bfloat16" for name, value in found.items()):
        free = (*free, "rounding")
    for name in [name for name in found if name.endswith(("sft.batch_size", "grpo.batch_size"))]:
        for setting, former in _BEFORE.items():
            found.setdefault(name.removesuffix("batch_size") + setting, former)
        if name.endswith("sft.batch_size"):
            # the only way there was
            found.setdefault(name.removesuffix("batch_size") + "data.split_at_user_turns", False)
        if name.endswith("grpo.batch_size"):
            found.setdefault(name.removesuffix("batch_size") + "rounding", "nearest")  # while GRPO had no such setting
            found.setdefault(name.removesuffix("batch_size") + "weight_quantization", "none")
            found.setdefault(f"{name.removesuffix('batch_size')}objective.function", "grpo")
            for term in ("kl_coef", "entropy_coef"):
                found.setdefault(f"{name.removesuffix('batch_size')}objective.{term}", 0.0)
    return {name: value for name, value in found.items() if name.rpartition(".")[2] not in free}


def _todays_settings(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity under current names, with current values."""
    found: dict[str, Any] = {}
    steps_ahead = identity.get("grpo.async_steps")
    if steps_ahead is not None:  # with one of the two bounds
        found["grpo.async_rollouts"] = steps_ahead > 0
        unused = "grpo.surplus_max_age" if steps_ahead else "grpo.async_steps"
        identity = {name: value for name, value in identity.items() if name != unused}
    for name, value in identity.items():
        former = name.rpartition(".")[2]
        found[todays_name(name)] = _FORMER_VALUES[former][value] if former in _FORMER_VALUES else value
    return found


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat |= _flatten(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {prefix + name: item}
    return flat
