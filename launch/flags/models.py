"""Inputs of a training program: flags, and the weights, tokenizer, mesh and hosts that they name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from absl import flags

from astra_jax.base.settings import Count, CountOrZero, Seconds, Seed
from astra_jax.base.terminal import make_output_optional, say
from launch.flags import auto, cli, endings, hub, meshes, shared
from launch.flags.numbers import number_flag
from launch.flags.sources import NamedWeights, source

if TYPE_CHECKING:
    from etils import epath
    from jax.sharding import Mesh

    from astra_jax.grpo.config import GRPOConfig
    from astra_jax.models.lora import LoRA
    from astra_jax.models.model import Model, Params
    from astra_jax.run.config import TrainingConfig
    from astra_jax.run.frozen import WeightsSource
    from astra_jax.run.hooks import Hook
    from astra_jax.run.model_card import TrainedOn
    from astra_jax.run.summary import RunSummary
    from astra_jax.run.trainer import StopReason
    from astra_jax.tokenizer import ChatTokenizer

Config = TypeVar("Config", bound="TrainingConfig")

CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Preset, or a file that defines CONFIG; for example sft:14b. sft:auto and grpo:auto take the model from --weights, "
    "and choose settings for your data and devices.",
)
WORKDIR = shared.workdir("created if it does not exist. Or gs://BUCKET/FOLDER.")
_WEIGHTS = shared.weights()
_MODEL_CLASS = shared.model_class()
_BASE = shared.base()
_INIT_SEED = number_flag(
    "init_seed",
    None,
    Seed,
    "Start from random weights of this seed. Then --weights needs only a config.json and a tokenizer.",
)
_TOKENIZER = shared.tokenizer()
_HOOKS = flags.DEFINE_list(
    "hooks",
    [],
    "Your own hooks, called during training: my_module:MyHook, separated by commas; docs/extending.md.",
)
PROFILE = flags.DEFINE_string(
    "profile_steps", None, "Profile the steps FIRST:LAST; the trace is written to WORKDIR/profile."
)
_MESH = shared.mesh(
    "With several TPU slices, data must be a multiple of their number. By default SFT uses all devices, and prints the "
    "chosen sizes; GRPO uses one."
)
_MULTIHOST = flags.DEFINE_bool(
    "multihost", False, "Train on several hosts that find each other, as on TPU slices and clusters."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "Train on several hosts: address of the first, HOST:PORT. Needs --hosts and --host_index."
)
_HOSTS = number_flag("hosts", None, Count, "Number of hosts; with --coordinator.")
_HOST = number_flag("host_index", None, CountOrZero, "Index of this host, from 0; with --coordinator.")
OF_HOSTS = (_MULTIHOST, _COORDINATOR, _HOSTS, _HOST)
_DEADLINE = number_flag(
    "host_deadline", 60.0, Seconds, "Seconds without a heartbeat after which a host counts as lost."
)
_STEP_DEADLINE = number_flag(
    "host_step_deadline", 1800.0, Seconds, "Seconds that a host may be behind the others before it counts as hung."
)
_RENDEZVOUS_DEADLINE = number_flag(
    "rendezvous_deadline", 300.0, Seconds, "Seconds in which all hosts must connect at the start."
)

_LATER = 60.0
"""Seconds by which JAX's own heartbeat, whose error names no host, waits longer than ours."""


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """Connect to the other hosts before JAX is used otherwise; the body ends when one of them is lost.

    Checks belong inside, so that the other hosts notice a failure. A single host starts no device here.

    Raises:
        UsageError: some of the flags are missing.
        RendezvousError: some hosts did not connect.
        BackendError: JAX cannot start its backend, on several hosts.
    """
    import jax

    from astra_jax.run.backends import start_backend
    from astra_jax.run.hosts import HostWatch
    from astra_jax.run.rendezvous import RendezvousDeadline, rendezvous

    make_output_optional()  # also on the hosts that hold no lock
    given = [flag for flag in (_COORDINATOR, _HOSTS, _HOST) if flag.value is not None]
    if given and len(given) < 3:
        raise cli.UsageError(f"--{given[0].name} is not enough: give all of --coordinator, --hosts and --host_index")
    if given and _HOST.value >= _HOSTS.value:
        raise cli.UsageError(
            f"--host_index={_HOST.value} is not below --hosts={_HOSTS.value}; write a number from 0 to "
            f"{_HOSTS.value - 1}"
        )
    if not given and not _MULTIHOST.value:
        yield
        return
    if _COORDINATOR.value is not None:
        rendezvous(
            _COORDINATOR.value,
            _HOSTS.value,
            _HOST.value,
            _RENDEZVOUS_DEADLINE.value,
            lambda line: say(f"host {_HOST.value} {line}"),
        )
    with RendezvousDeadline(_RENDEZVOUS_DEADLINE.value):
        jax.distributed.initialize(
            _COORDINATOR.value,
            _HOSTS.value,
            _HOST.value,
            initialization_timeout=int(_RENDEZVOUS_DEADLINE.value + _LATER),
            heartbeat_timeout_seconds=max(100, int(_DEADLINE.value + _LATER)),
        )
    with HostWatch(_DEADLINE.value, _STEP_DEADLINE.value):
        start_backend()
        yield


def config(kind: str, *, example: str | None = None) -> Any:
    """Return the configuration of --config, without --config.NAME=VALUE.

    Args:
        kind: see `cli.load_config`.
        example: preset to use without --config, for a list of settings, which reads no weights.

    Raises:
        UsageError: there is no such configuration, or it is of another kind.
    """
    name = CONFIG.value if CONFIG.present or example is None else example
    assert name is not None, "programs set a default"
    return cli.load_config(name, kind, model=_model_of_weights if example is None else _any_model)


def hooks() -> list[Hook]:
    """Return the hooks of --hooks. Raises InputError: one cannot be loaded."""
    from astra_jax.run.hooks import load_hooks

    return load_hooks(_HOOKS.value)


def settings(kind: str) -> Any:
    """Return the configuration of --config with --config.NAME=VALUE; with `auto` before its choices are made.

    Raises:
        UsageError: as `config` and `cli.overridden`.
        WeightsError: with `auto`, the model of --weights is not supported.
    """
    found = config(kind)
    return auto.provisional(found) if is_auto() else cli.overridden(found)


def is_auto() -> bool:
    """Return whether --config leaves the model and other settings to be chosen."""
    return auto.is_auto(CONFIG.value)


def _model_of_weights() -> Model:
    return auto.read_model(_source())


def _any_model() -> Model:
    """Return a model for the list of settings, which reads no weights."""
    from configs.training import MODELS

    return MODELS["0.6b"]


def context_size() -> int:
    """Return the number of devices that share a row by --mesh, without making the mesh. Raises `UsageError`: it names
    no axis."""
    from astra_jax.mesh import AXES

    return max(1, meshes.axis_sizes(_MESH, AXES).get("context", 1))


def workdir() -> epath.Path:
    """Return the folder of --workdir. Raises `UsageError`: it cannot be used."""
    return cli.folder(WORKDIR, written=True)


def tokenizer_folder() -> epath.Path:
    """Return the folder of --tokenizer, or of --weights."""
    return hub.model_folder(_TOKENIZER) if _TOKENIZER.value else _source().tokenizer


def _source() -> NamedWeights:
    """Return the folder of --weights, and the adapter if it is one. Raises as `sources.source`."""
    return source(_WEIGHTS, _BASE)


def load_tokenizer() -> ChatTokenizer:
    """Return the tokenizer of `tokenizer_folder`. Raises as `ChatTokenizer.load`."""
    return _source().load_tokenizer(tokenizer_folder())


def mesh() -> Mesh | None:
    """Return the mesh of --mesh; None is one device.

    Raises:
        UsageError: there are several hosts and no --mesh; and as `meshes.made`.
    """
    import jax

    if (found := meshes.made(_MESH)) is None and jax.process_count() > 1:
        raise cli.UsageError("training on several hosts needs a --mesh over all their devices")
    return found


def mesh_or_default(model: Model, config: TrainingConfig, row: Callable[[], tuple[int, int | None]]) -> Mesh | None:
    """Return the mesh of --mesh, or one over all devices of all hosts, and print its sizes; None is one device.

    Args:
        row: returns the tokens of a row, and the rows of a batch or None for any number.

    Raises:
        UsageError, BackendError, InputError: as `meshes.made`.
    """
    from astra_jax.mesh import make_mesh
    from astra_jax.run.hosts import broadcast_from_host0, is_first
    from configs.auto import Accelerators, choose_mesh

    if (found := meshes.made(_MESH)) is not None:
        return found
    devices = Accelerators.all()
    if devices.count == 1:
        say(f"device: one {devices.kind} ({devices.platform})")
        return None
    # The first host's memory, so that all hosts make the same choice.
    devices = dataclasses.replace(devices, memory=int(broadcast_from_host0(str(devices.memory).encode())))
    tokens, batch = row()
    sizes, reason = choose_mesh(model, config, devices, tokens=tokens, batch=batch)
    if is_first():
        shown = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        hosts = f" on {devices.hosts} hosts" * (devices.hosts > 1)
        say(f"--mesh={shown} is chosen for {devices.count} devices of {devices.kind}{hosts}: {reason}")
    return make_mesh(*sizes.values())


def profiled_steps() -> tuple[int, int] | None:
    """Return the first and last step of --profile_steps. Raises `UsageError`: it names none."""
    text = PROFILE.value
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise cli.UsageError(f"--profile_steps={text}: write FIRST:LAST, for example 10:12")
    return int(first), int(last)


@contextlib.contextmanager
def held(folder: epath.Path) -> Iterator[None]:
    """Lock the workdir; the first host does it for all hosts.

    Raises:
        BackendError: JAX cannot start its backend.
        WorkdirError: another process uses the workdir.
    """
    from synthesis.core.workdir import locked

    with locked(folder) if is_first_host() else contextlib.nullcontext():
        yield


def is_first_host() -> bool:
    """Start JAX's backend, and return whether this is the first of the run's hosts. Raises `BackendError`."""
    from astra_jax.run.backends import start_backend
    from astra_jax.run.hosts import is_first

    start_backend()
    return is_first()


def checked(model: Model) -> tuple[ChatTokenizer, Model]:
    """Return the tokenizer and the model, with rows added for tokens that the weights have no rows for.

    Everything that does not need the weights' values is checked here, before a device is started.

    Raises:
        UsageError: the weights are of another model than the configuration's.
        WeightsError, TokenizerError: a file is missing or cannot be read.
        InputError: the tokenizer has more tokens than the model.
    """
    from astra_jax.run import weights
    from astra_jax.tokenizer import padded

    found = _source()
    stored = found.model()
    auto.check_same(stored, model, weights=found.named, config=CONFIG.value or "")
    if _INIT_SEED.value is None:
        weights.check_stored(found.folder)
    elif found.adapter is not None:
        raise cli.UsageError(
            f"--{_INIT_SEED.name}={_INIT_SEED.value} starts from random weights, and --weights={found.adapter} is an "
            "adapter to others; give the folder of a model, or leave one of them out"
        )
    tokenizer = load_tokenizer()
    rows = tokenizer.rows(stored.vocab_size)
    # A configuration may say how many rows there are, will be, or were before tokens were added in an earlier run.
    were_added = model.vocab_size < tokenizer.vocab_size and stored.vocab_size == padded(tokenizer.vocab_size)
    if model.vocab_size not in (stored.vocab_size, rows) and not were_added:
        raise cli.UsageError(
            f"--weights={source} has vocab_size {stored.vocab_size}, but --config={CONFIG.value} has "
            f"{model.vocab_size}; give the same --config.model.vocab_size"
        )
    tokenizer.check_fits(rows)
    return tokenizer, dataclasses.replace(model, vocab_size=rows)


def with_added_tokens(config: Config, tokenizer: ChatTokenizer) -> Config:
    """Return the configuration of a run. With adapters, it trains the rows of tokens that the weights have no rows for,
    and the rows that a continued adapter has trained.

    Raises:
        UsageError: --weights is an adapter with other settings than the run's.
        WeightsError: --weights is an adapter that training cannot continue.
    """
    if config.lora.rank is None:
        return config
    if _INIT_SEED.value is not None:
        raise cli.UsageError(
            f"--{_INIT_SEED.name}={_INIT_SEED.value} starts from random weights, which adapters leave as they are: "
            "leave out --config.lora.rank, or start from trained weights"
        )
    stored = _start(config.lora).model().vocab_size
    tokens = {*range(stored, tokenizer.vocab_size), *(tokenizer.new_ids if _is_own() else ())}
    if (adapter := _source().adapter) is not None:
        tokens.update(_continued(config.lora, adapter).tokens)
    if not tokens:
        return config
    tokens.update(config.lora.tokens)
    return dataclasses.replace(config, lora=dataclasses.replace(config.lora, tokens=tuple(sorted(tokens))))


def _start(lora: LoRA) -> NamedWeights:
    """Return what `load` reads: the weights under a run's adapters; without adapters, those with the given adapter
    merged."""
    return _source() if lora.rank is None else NamedWeights(_source().folder, None)


def _continued(lora: LoRA, adapter: epath.Path) -> LoRA:
    """Return the settings of the adapter that a run continues. Raises `UsageError`: the run has other settings."""
    from astra_jax.models import adapters, peft

    model = _source().model()
    theirs = peft.read_lora(adapter, model)

    def shape(one: LoRA) -> Any:
        return one.rank, one.alpha, one.rank_stabilized, sorted(adapters.targeted(model, one))

    if shape(theirs) != shape(lora):
        wanted = {"rank": theirs.rank, "alpha": theirs.alpha, "targets": json.dumps(theirs.targets)}
        wanted |= {"rank_stabilized": "true"} if theirs.rank_stabilized else {}
        said = " ".join(f"--config.lora.{name}={shlex.quote(str(value))}" for name, value in wanted.items())
        raise cli.UsageError(
            f"--weights={adapter} is an adapter with other settings than the run's. To continue it: {said}. To train "
            f"another on top of it: {peft.MERGE_FIRST}. Without --config.lora.rank it is merged, and all weights are "
            "trained"
        )
    return theirs


def check_reference(config: GRPOConfig) -> None:
    """Refuse a KL penalty in a run that continues an adapter: its reference would be the weights without the adapter.
    Raises `UsageError`."""
    from astra_jax.models import peft

    if config.objective.kl_coef and config.lora.rank is not None and (adapter := _source().adapter) is not None:
        raise cli.UsageError(
            f"--config.grpo.objective.kl_coef={config.objective.kl_coef}: the run continues the adapter {adapter}, and "
            f"its reference would be the weights without it. To have both, {peft.MERGE_FIRST}; or set kl_coef to 0"
        )


def _is_own() -> bool:
    """Return whether the tokenizer is that of the weights' folder, so that tokens it lacks have no trained rows."""
    return tokenizer_folder() == _source().tokenizer


@cache  # a run that is still training may save a newer one meanwhile
def step() -> int | None:
    """Return the step of --weights that `load` reads, the same on all hosts; None for a Hugging Face folder.

    It is the newest. A resumed run with adapters uses the step that its adapters belong to.

    Raises:
        WeightsError: there are no weights.
    """
    from astra_jax.run import frozen, model_card, weights
    from astra_jax.run.hosts import broadcast_from_host0

    source = _source().folder
    found = weights.stored_step(source)
    before = None if found is None else frozen.read(workdir() / model_card.CHECKPOINTS)
    if before is not None and before.origin is not None and before.origin.folder == str(source):
        found = before.origin.step if before.origin.step is not None else found
    said = broadcast_from_host0(str(found).encode()).decode()
    return None if found is None else int(said)


def _new_token_pieces(rows: int) -> dict[int, tuple[int, ...]]:
    """Return `ChatTokenizer.new_token_pieces` of weights with an embedding of `rows`."""
    return load_tokenizer().new_token_pieces(rows, own=_is_own())


def origin(config: TrainingConfig, model: Model) -> WeightsSource | None:
    """Return the source of a run's base weights, which a run with adapters stores; None if it trains all weights."""
    from astra_jax.run.frozen import WeightsSource

    if config.lora.rank is None:
        return None
    source = _source()
    found = WeightsSource(str(source.folder), step(), adapter=None if source.adapter is None else str(source.adapter))
    rows = _start(config.lora).model().vocab_size
    new_token_pieces = _new_token_pieces(rows)
    if rows >= model.vocab_size and not new_token_pieces:
        return found
    return dataclasses.replace(found, rows=rows, new_token_pieces=new_token_pieces)


def complete(tokenizer: ChatTokenizer, workdir: epath.Path) -> None:
    """Write tokenizer, chat template and generation configuration to a run's checkpoints."""
    from astra_jax.run import model_card

    folder = workdir / model_card.CHECKPOINTS
    for note in model_card.complete(folder, tokenizer, tokenizer_folder()):
        say(f"{folder}: {note}")


def ended(stopped: StopReason) -> int:
    """Return the exit code of a run.

    A preempted run on several hosts exits with a code of its own, since only one of them may have received SIGTERM and
    none should look finished.
    """
    import jax

    if stopped == "preempted" and jax.process_count() > 1:
        return endings.TOLD
    return int(stopped == "exhausted")


def skipped(count: int) -> str:
    """Return a note about steps that `on_nonfinite=skip` skipped, for a run's last line; "" if there are none."""
    return f" ({count} of them changed nothing: not finite)" if count else ""


def write_card(
    workdir: epath.Path, method: str, config: Any, datasets: Sequence[TrainedOn], summary: RunSummary | None = None
) -> None:
    """Write the model card of a finished run."""
    from astra_jax.run import model_card

    base = (_WEIGHTS.value or "").removeprefix(hub.PREFIX) if _INIT_SEED.value is None else ""
    weights, rows = _source().folder if base else None, () if summary is None else summary.rows
    model_card.write_card(workdir, method, config, datasets, base=base, weights=weights, summary=rows)


def load(config: TrainingConfig, model: Model, mesh: Mesh | None) -> Params:
    """Load the weights of --weights, or random ones of --init_seed, to their devices; call `checked` first.

    A run with adapters that continues an adapter of `peft` loads the base alone. Otherwise an adapter is merged.

    Raises:
        WeightsError, CheckpointError: they cannot be read.
    """
    import jax

    from astra_jax.run import weights

    shardings = None if mesh is None else model.param_shardings(mesh)
    if _INIT_SEED.value is not None:
        if is_first_host():
            say(f"random weights of --{_INIT_SEED.name}={_INIT_SEED.value}")
        return jax.jit(model.init, out_shardings=shardings)(jax.random.key(_INIT_SEED.value))
    source, start = _source(), _start(config.lora)
    if source.adapter is not None and is_first_host():
        what = "the base of an adapter that the run continues" if start.adapter is None else "with an adapter merged"
        say(f"{source.folder}: {what}, {source.adapter}")
    rows = start.model().vocab_size
    how: dict[str, Any] = {
        "step": step(),
        "rows": rows,
        "new_token_pieces": _new_token_pieces(rows),
        "adapter": start.adapter,
    }
    return weights.load(start.folder, model, shardings=shardings, **how)
