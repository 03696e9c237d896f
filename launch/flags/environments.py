"""Environments that a flag names, of any kind.

DIR                     records that synthesis wrote
my_module:my_name       your own objects, or a function that returns them; also FILE.py:my_name
mcp:FILE                tasks over MCP servers
verifiers:ID            tasks of an installed verifiers taskset
openenv:URL             seeds of an OpenEnv server
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from astra_jax.base.settings import Count
from launch.flags import cli
from launch.flags.numbers import number_flag

if TYPE_CHECKING:
    from astra_jax.run.model_card import TrainedOn
    from synthesis.core.environment import AnyEnvironment

_COUNTED = ("verifiers", "openenv")
"""Kinds whose number of environments a flag sets."""
SERVED = ("mcp", *_COUNTED)
"""Kinds that must be opened, with servers."""

COUNT = number_flag(
    "environments_count", 100, Count, "Tasks of a verifiers taskset, or seeds of an OpenEnv server, in --environments."
)  # fmt: skip


class GivenEnvironments:
    """Environments that a flag names: read at once if no server is needed, otherwise by `open`.

    Args:
        name: text of the user.
        flag: name of the flag, for messages.
        count: number of tasks or seeds, if the name does not determine it.
        after: other environments of the run. If they come from the same taskset or server, the tasks after them are
            used.

    Attributes:
        records: records of a dataset; None: the environments are not records.

    Raises:
        UsageError: the name stands for nothing.
        DatasetError, InputError: there is no such dataset, file or module.
    """

    def __init__(self, name: str, flag: str, *, count: int, after: GivenEnvironments | None = None) -> None:
        from synthesis.core.datasets import read_dataset
        from synthesis.core.own_objects import own_environments
        from synthesis.core.records import ToolEnvironment
        from synthesis.core.references import FORM, is_reference, referred
        from synthesis.servers.mcp_environment import read_tasks

        self.name = name
        self.records: Sequence[ToolEnvironment] | None = None
        self._made: Sequence[AnyEnvironment] | None = None
        self._kind, _, self._place = name.partition(":")
        self._count: int = count
        self._first: int = after._first + after._count if after is not None and after.name == name else 0
        self.is_counted = False
        if self._kind in SERVED and not Path(name).exists():
            if not self._place:
                raise cli.UsageError(f"--{flag}={name} names no environments after the colon; see --help")
            self.is_counted = self._kind in _COUNTED
            if self._kind == "mcp":
                read_tasks(Path(self._place))
        elif is_reference(name) and not Path(name).exists():
            self._made = own_environments(referred(name), name)
        elif "://" in name or Path(name).exists():
            self._made = self.records = read_dataset(name, ToolEnvironment)
        else:
            raise cli.UsageError(
                f"--{flag}={name}: there is no dataset at {name}; write environments of your own as {FORM}"
            )

    def known(self) -> Sequence[AnyEnvironment] | None:
        """Return the environments, or None if a server must be asked for them."""
        return self._made

    def open(self) -> AbstractAsyncContextManager[Sequence[AnyEnvironment]]:
        """Return a context that yields the environments and keeps their servers running. Raises `InputError`."""
        from synthesis.servers.mcp_environment import mcp_environments
        from synthesis.servers.openenv_server import openenv_environments
        from synthesis.servers.verifiers_tasks import verifiers_environments

        if self._made is not None:
            return _there(self._made)
        if self._kind == "mcp":
            return mcp_environments(Path(self._place))
        if self._kind == "openenv":
            return openenv_environments(self._place, self._count, first=self._first)
        return verifiers_environments(self._place, self._count, first=self._first)

    def used(self, role: str, environments: Sequence[AnyEnvironment]) -> TrainedOn:
        """Return the model card's entry for these environments and their role in the run."""
        from astra_jax.run.model_card import TrainedOn, trained_on
        from synthesis.core.environment import fingerprint

        if self.records is not None:
            return trained_on(role, self.name)
        digest = hashlib.sha256(b"".join(map(fingerprint, environments))).hexdigest()
        return TrainedOn(role, self.name, len(environments), digest)


def read(name: str, flag: str = "environments") -> GivenEnvironments:
    """Read the environments that one flag names, `--environments_count` of them if the name does not determine the
    number.

    Raises:
        UsageError: `--environments_count` is given and not needed; and as `GivenEnvironments`.
    """
    given = GivenEnvironments(name, flag, count=COUNT.value)
    if COUNT.present and not given.is_counted:
        raise cli.UsageError(f"--{COUNT.name} is for verifiers:ID and openenv:URL")
    return given


@asynccontextmanager
async def _there(made: Sequence[AnyEnvironment]) -> AsyncIterator[Sequence[AnyEnvironment]]:
    yield made
