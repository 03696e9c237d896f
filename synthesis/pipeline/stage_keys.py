"""Keys of finished work: a stage declares the settings that it reads, and its fingerprint derives from their values.

    JUDGE = StageSpec("judge", out=Trajectory, key=task_of, reads=("reward_threshold", "attempts"))

The fingerprint of a stage has the values of these settings, the seed and the teacher. The key of an input has a digest
of the input. So a run with another value of a setting repeats the stages that read it, and later stages only for
inputs that changed. A stage gets its declared settings alone (`DeclaredSettings`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.settings import declared
from synthesis.core.compat import encode_for_fingerprint, former_setting

In = TypeVar("In")
Out = TypeVar("Out", bound=msgspec.Struct)
_T = TypeVar("_T")

_FREE, _GROWS = object(), object()
Free = Annotated[_T, _FREE]
"""Annotation of a setting that changes no record. Any stage may read it without `reads`, where it must not stand, and a
finished run may have another value."""
Grows = Annotated[_T, _GROWS]
"""Annotation of a number of records: a finished run may be continued with a larger value."""


@dataclass(frozen=True)
class Before:
    """Annotation of a setting with the value that runs had before the setting existed, if that is not the default."""

    value: Any


def marks(kind: type) -> dict[str, tuple[Any, ...]]:
    """Return the annotations of each setting of a configuration class."""
    return {name: getattr(one, "__metadata__", ()) for name, one in declared(kind).items()}


def free_settings(kind: type) -> set[str]:
    """Return the names of the settings that are annotated with `Free`."""
    return {name for name, found in marks(kind).items() if _FREE in found}


def growing_settings(kind: type) -> set[str]:
    """Return the names of the settings that are annotated with `Grows`."""
    return {name for name, found in marks(kind).items() if _GROWS in found}


def earlier_values(kind: type) -> dict[str, Any]:
    """Return the values of settings that are annotated with `Before`."""
    return {name: one.value for name, found in marks(kind).items() for one in found if isinstance(one, Before)}


@dataclass(frozen=True)
class StageSpec(Generic[In, Out]):
    """Declaration of a stage.

    Attributes:
        name: in the journal, on cards and in forecasts.
        out: type of its records.
        key: returns the unique name of an input, the same in every run.
        reads: names of the settings that decide its records.
        id: returns the unique name of an output; None: no stage of the user's own can follow.
        label: label of the progress bar; the name if empty.
        undeclared: values of settings in `reads` with which the fingerprint omits them: earlier versions had these
            values and did not declare the settings.
        code: digest of the source, for a stage of the user's own.
        stops_run: whether the run stops if the stage accepts nearly nothing; see `run_stage`.
    """

    name: str
    out: type[Out]
    key: Callable[[In], str]
    reads: tuple[str, ...] = ()
    id: Callable[[Out], str] | None = None
    label: str = ""
    undeclared: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    stops_run: bool = True

    def fingerprint(
        self, settings: Mapping[str, Any], seed: int, teacher: Mapping[str, Any], *, earlier: Mapping[str, Any] = {}
    ) -> str:
        """Return the digest of what decides the stage's records, except for its inputs.

        Args:
            settings: the resolved configuration.
            teacher: the part of its description that decides its answers.
            earlier: `earlier_values` of the configuration; with these the fingerprint omits a setting too.
        """
        earlier = {**earlier, **self.undeclared}
        read = {
            former_setting(one): settings[one]
            for one in self.reads
            if one not in earlier or settings[one] != earlier[one]
        }
        return digest_of([read, seed, teacher, *([self.code] if self.code else [])])


class DeclaredSettings:
    """The settings of a run that one stage may read. Others raise `InputError`.

    Properties and methods of the configuration may read the same settings.
    """

    def __init__(self, config: Any, stage: StageSpec[Any, Any], free: Collection[str]) -> None:
        self._config, self._stage, self._free = config, stage, free

    def __getattr__(self, name: str) -> Any:
        """Return a declared setting, or the result of a property.

        Raises:
            InputError: the stage does not declare a setting.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._stage.reads or name in self._free:
            return getattr(self._config, name)
        if any(name == one.name for one in dataclasses.fields(self._config)):
            raise InputError(
                f"stage {self._stage.name} reads the setting {name}, which it does not declare, so its records would "
                f"stay when {name} changes; add it to the stage's `reads`"
            )
        return getattr(type(self._config), name).__get__(self)  # a property, or a method


def digest_of(value: Any) -> str:
    """Return a short digest of a struct, a list of structs or plain JSON, for fingerprints."""
    return hashlib.sha256(encode_for_fingerprint(value)).hexdigest()[:16]
