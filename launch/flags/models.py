"""What a training program starts from and runs on: flags, and the weights, tokenizer, mesh and hosts that they name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from absl import flags

from launch.flags import cli, meshes
from launch.flags.numbers import number_flag
from sandbox.settings import Count, CountOrZero, Seconds

if TYPE_CHECKING:
    from etils import epath
    from jax.sharding import Mesh

    from astra_jax.models.model import Model, Params
    from astra_jax.tokenizer import ChatTokenizer

CONFIG = flags.DEFINE_string("config", None, "A preset, such as sft:14b, or a file that defines CONFIG.", required=True)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run, or gs://BUCKET/FOLDER; made if it is not there.", required=True
)
_WEIGHTS = flags.DEFINE_string(
    "weights", None, "The model to start from: a Hugging Face folder, or one of Orbax checkpoints.", required=True
)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder of the tokenizer; by default that of --weights.")
_PROFILE = flags.DEFINE_string("profile_steps", None, "FIRST:LAST step of a trace, in WORKDIR/profile.")
_MESH = flags.DEFINE_list("mesh", [], "Sizes of mesh axes, such as fsdp=8,context=2; by default one device.")
_MULTIHOST = flags.DEFINE_bool("multihost", False, "Several hosts that find each other: on TPU slices and clusters.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "Several hosts: address of the first one, host:port.")
_HOSTS = number_flag("hosts", None, Count, "How many; with --coordinator.")
_HOST = number_flag("host", None, CountOrZero, "This one's number, from 0; with --coordinator.")
_DEADLINE = number_flag("host_deadline", 60.0, Seconds, "Seconds without a sign of life after which a host is gone.")

_LATER = 60.0
"""Seconds by which JAX's own heartbeat, whose error names no host, is behind ours."""


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """Find the other hosts, before anything else of JAX is used; what is done inside ends when one of them is gone.

    So what can be checked is checked inside: the others learn of it. One host wakes no device here.

    Raises:
        UsageError: some of the flags are missing, or there are several hosts without a mesh.
    """
    import jax

    from astra_jax.run.hosts import HostWatch

    given = [flag for flag in (_COORDINATOR, _HOSTS, _HOST) if flag.value is not None]
    if given and len(given) < 3:
        raise cli.UsageError(f"--{given[0].name} goes with all of --coordinator, --hosts and --host")
    if given and _HOST.value >= _HOSTS.value:
        raise cli.UsageError(f"--host={_HOST.value} of --hosts={_HOSTS.value}: write a number from 0 to one below")
    if given or _MULTIHOST.value:
        jax.distributed.initialize(
            _COORDINATOR.value,
            _HOSTS.value,
            _HOST.value,
            heartbeat_timeout_seconds=max(100, int(_DEADLINE.value + _LATER)),
        )
    else:
        yield
        return
    with HostWatch(_DEADLINE.value):
        if jax.process_count() > 1 and not _MESH.value:
            raise cli.UsageError("several hosts want a --mesh of all their devices")
        yield


def config(kind: str, *, example: str | None = None) -> Any:
    """The configuration of --config, before --config.NAME=VALUE.

    Args:
        kind: see `cli.load_config`.
        example: the preset to take where there is no --config.

    Raises:
        UsageError: there is no such configuration, or it is of another kind.
    """
    return cli.load_config(CONFIG.value if CONFIG.present or example is None else example, kind)


def workdir() -> epath.Path:
    """The folder of --workdir. Raises `UsageError`: it cannot be used."""
    return cli.folder(WORKDIR, written=True)


def tokenizer_folder() -> epath.Path:
    """The folder of --tokenizer, or --weights."""
    return cli.folder(_TOKENIZER if _TOKENIZER.value else _WEIGHTS)


def mesh() -> Mesh | None:
    """The mesh of --mesh, or None: one device. Raises as `meshes.made`."""
    return meshes.made(_MESH)


def profiled_steps() -> tuple[int, int] | None:
    """First and last step of --profile_steps. Raises `UsageError`: it names none."""
    text = _PROFILE.value
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise cli.UsageError(f"--profile_steps={text}: write FIRST:LAST, for example 10:12")
    return int(first), int(last)


@contextlib.contextmanager
def held(folder: epath.Path) -> Iterator[None]:
    """The workdir, held by the first host for all of them.

    Raises:
        WorkdirError: another process works in it.
    """
    from astra_jax.run.hosts import is_first
    from synthesis.core.workdir import locked

    with locked(folder) if is_first() else contextlib.nullcontext():
        yield


def checked(model: Model) -> ChatTokenizer:
    """The tokenizer; all that can be known without reading the weights is looked at, before a device is.

    Raises:
        UsageError: the weights are of another model than the configuration's.
        WeightsError, TokenizerError: there are none, or they cannot be read.
        InputError: the tokenizer has more tokens than the model.
    """
    from astra_jax.models import hf_checkpoint
    from astra_jax.run import weights
    from astra_jax.tokenizer import ChatTokenizer

    source = cli.folder(_WEIGHTS)
    stored = hf_checkpoint.read_config(source)
    # Training may stretch the context and choose dtypes; all else is the model, and so is a context that is stretched.
    free = {"max_positions", "dtype", "param_dtype"} | (set() if vars(stored).get("yarn") else {"yarn"})
    for name, found in vars(stored).items():
        wanted = getattr(model, name)
        if found != wanted and name not in free:
            raise cli.UsageError(f"--weights={source} has {name} {found}, --config={CONFIG.value} says {wanted}")
    weights.check_stored(source)
    tokenizer = ChatTokenizer.load(tokenizer_folder())
    tokenizer.check_fits(model.vocab_size)
    return tokenizer


def load(model: Model, mesh: Mesh | None) -> Params:
    """The weights of --weights on their devices; ask `checked` before.

    Raises:
        WeightsError, CheckpointError: they cannot be read.
    """
    from astra_jax.run import weights

    shardings = None if mesh is None else model.param_shardings(mesh)
    return weights.load(cli.folder(_WEIGHTS), model, shardings=shardings)
