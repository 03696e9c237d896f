"""What `--environments` names: a dataset of records, or environments of anybody's.

--environments=DIR                     records of the synthesis
--environments=my_module:my_name       objects of one's own, or what makes them; also FILE.py:my_name
--environments=mcp:FILE                tasks over MCP servers
--environments=verifiers:ID            tasks of an installed verifiers taskset
--environments=openenv:URL             seeds of an OpenEnv server
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from launch.flags import cli
from launch.flags.numbers import number_flag
from sandbox.settings import Count

if TYPE_CHECKING:
    from astra_jax.grpo.replay import Replay
    from astra_jax.run.model_card import TrainedOn
    from synthesis.core.environment import AnyEnvironment

_KINDS = ("mcp", "verifiers", "openenv")

_ENVIRONMENTS = flags.DEFINE_string(
    "environments",
    None,
    "Dataset of tool environments; or my_module:my_name, mcp:FILE, verifiers:ID or openenv:URL.",
)
_REPLAY = flags.DEFINE_string(
    "replay", None, "Instead of environments: WORKDIR/batches of a run with dump_batches, to train on again."
)
flags.register_validator(
    _ENVIRONMENTS,
    lambda value: value is not None or _REPLAY.value is not None,
    "Flag --environments must have a value other than None.",  # as absl says it of flags that are always needed
)
_COUNT = number_flag("environments_count", 100, Count, "Tasks of a verifiers taskset, or seeds of an OpenEnv server.")


def replayed() -> Replay | None:
    """The batches of --replay, if it is given.

    Raises:
        UsageError: it is given beside environments, or is no folder.
        DatasetError: there are no batches.
    """
    from astra_jax.grpo.replay import Replay

    if _REPLAY.value is None:
        return None
    if _ENVIRONMENTS.value is not None:
        raise cli.UsageError("--replay samples nothing from --environments; give one of the two")
    return Replay(cli.folder(_REPLAY))


class GivenEnvironments:
    """What the flags name: read, where that wants no server; else to be opened.

    Attributes:
        records: of a dataset; None: the environments are no records.

    Raises:
        UsageError: there is no such dataset, file or module; or the flags do not fit.
    """

    def __init__(self) -> None:
        from synthesis.core.datasets import read_dataset
        from synthesis.core.own_objects import own_environments
        from synthesis.core.records import ToolEnvironment
        from synthesis.core.references import is_reference, referred
        from synthesis.servers.mcp_environment import read_tasks

        self.name: str = _ENVIRONMENTS.value or ""
        self.records: Sequence[ToolEnvironment] | None = None
        self._made: Sequence[AnyEnvironment] | None = None
        self._kind, _, self._place = self.name.partition(":")
        if _COUNT.present and self._kind not in ("verifiers", "openenv"):
            raise cli.UsageError("--environments_count is for verifiers:ID and openenv:URL")
        if self._kind in _KINDS and not Path(self.name).exists():
            if not self._place:
                raise cli.UsageError(f"--environments={self.name} names none; see --help")
            if self._kind == "mcp":
                read_tasks(Path(self._place))
        elif is_reference(self.name) and not Path(self.name).exists():
            self._made = own_environments(referred(self.name), self.name)
        else:
            self._made = self.records = read_dataset(self.name, ToolEnvironment)

    def known(self) -> Sequence[AnyEnvironment] | None:
        """All of them, where no server has to be asked."""
        return self._made

    def open(self) -> AbstractAsyncContextManager[Sequence[AnyEnvironment]]:
        """The environments, and the servers behind them, while it is open. Raises `InputError`."""
        from synthesis.servers.mcp_environment import mcp_environments
        from synthesis.servers.openenv_server import openenv_environments
        from synthesis.servers.verifiers_tasks import verifiers_environments

        if self._made is not None:
            return _there(self._made)
        if self._kind == "mcp":
            return mcp_environments(Path(self._place))
        if self._kind == "openenv":
            return openenv_environments(self._place, _COUNT.value)
        return verifiers_environments(self._place, _COUNT.value)

    def trained_on(self, environments: Sequence[AnyEnvironment]) -> TrainedOn:
        """For the model's card."""
        from astra_jax.run.model_card import TrainedOn, trained_on
        from synthesis.core.environment import fingerprint

        if self.records is not None:
            return trained_on("environments", self.name)
        digest = hashlib.sha256(b"".join(map(fingerprint, environments))).hexdigest()
        return TrainedOn("environments", self.name, len(environments), digest)


@asynccontextmanager
async def _there(made: Sequence[AnyEnvironment]) -> AsyncIterator[Sequence[AnyEnvironment]]:
    yield made
