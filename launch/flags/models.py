"""What a training program starts from and runs on: flags, and the weights, tokenizer, mesh and hosts that they name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from collections.abc import Iterator, Sequence
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
    "A preset, or a file that defines CONFIG; such as sft:14b. sft:auto and grpo:auto take the model of --weights, and "
    "choose settings for your data and devices.",
    required=True,
)
WORKDIR = shared.workdir("made if it is not there. Or gs://BUCKET/FOLDER.")
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
    "Classes of your own that run beside training, my_module:MyHook, separated by commas; docs/extending.md.",
)
PROFILE = flags.DEFINE_string("profile_steps", None, "FIRST:LAST step of a trace, in WORKDIR/profile.")
_MESH = shared.mesh("Of several TPU slices data is a multiple. By default one device.")
_MULTIHOST = flags.DEFINE_bool("multihost", False, "Several hosts that find each other: on TPU slices and clusters.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "Several hosts: address of the first one, host:port.")
_HOSTS = number_flag("hosts", None, Count, "How many; with --coordinator.")
_HOST = number_flag("host_index", None, CountOrZero, "This one's number, from 0; with --coordinator.")
_DEADLINE = number_flag("host_deadline", 60.0, Seconds, "Seconds without a sign of life after which a host is gone.")
_STEP_DEADLINE = number_flag(
    "host_step_deadline", 1800.0, Seconds, "Seconds by which a host may be behind the others before it is called hung."
)
_RENDEZVOUS_DEADLINE = number_flag(
    "rendezvous_deadline", 300.0, Seconds, "Seconds in which all hosts are to come, at the start."
)

_LATER = 60.0
"""Seconds by which JAX's own heartbeat, whose error names no host, is behind ours."""


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """Find the other hosts, before anything else of JAX is used; what is done inside ends when one of them is gone.

    So what can be checked is checked inside: the others learn of it. One host wakes no device here.

    Raises:
        UsageError: some of the flags are missing, or there are several hosts without a mesh.
        RendezvousError: not all of them came.
        BackendError: JAX cannot start its backend, on several hosts.
    """
    import jax

    from astra_jax.run.backends import start_backend
    from astra_jax.run.hosts import HostWatch
    from astra_jax.run.rendezvous import RendezvousDeadline, rendezvous

    make_output_optional()  # also on the hosts that hold no lock
    given = [flag for flag in (_COORDINATOR, _HOSTS, _HOST) if flag.value is not None]
    if given and len(given) < 3:
        raise cli.UsageError(f"--{given[0].name} goes with all of --coordinator, --hosts and --host_index")
    if given and _HOST.value >= _HOSTS.value:
        raise cli.UsageError(
            f"--host_index={_HOST.value} of --hosts={_HOSTS.value}: write a number from 0 to one below"
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
        if jax.process_count() > 1 and not _MESH.value:
            raise cli.UsageError("several hosts want a --mesh of all their devices")
        yield


def config(kind: str, *, example: str | None = None) -> Any:
    """The configuration of --config, before --config.NAME=VALUE.

    Args:
        kind: see `cli.load_config`.
        example: the preset to take where there is no --config, for a list of settings, which reads no weights.

    Raises:
        UsageError: there is no such configuration, or it is of another kind.
    """
    name = CONFIG.value if CONFIG.present or example is None else example
    return cli.load_config(name, kind, model=_model_of_weights if example is None else _any_model)


def hooks() -> list[Hook]:
    """Return the hooks of --hooks. Raises InputError: one cannot be loaded."""
    from astra_jax.run.hooks import load_hooks

    return load_hooks(_HOOKS.value)


def settings(kind: str) -> Any:
    """Return the configuration of --config with --config.NAME=VALUE; of `auto` the choices are still to be made.

    Raises:
        UsageError: as `config` and `cli.overridden`.
        WeightsError: `auto`, and --weights have no model that is computed here.
    """
    found = config(kind)
    return auto.provisional(found) if is_auto() else cli.overridden(found)


def is_auto() -> bool:
    """Return whether --config leaves the model and other settings to be chosen."""
    return auto.is_auto(CONFIG.value)


def _model_of_weights() -> Model:
    return auto.read_model(_source())


def _any_model() -> Model:
    """A model for the list of settings, which reads no weights."""
    from configs.training import MODELS

    return MODELS["0.6b"]


def context_size() -> int:
    """Return how many devices share a row by --mesh, which is not made. Raises `UsageError`: it names no axis."""
    from astra_jax.mesh import AXES

    return max(1, meshes.axis_sizes(_MESH, AXES).get("context", 1))


def workdir() -> epath.Path:
    """The folder of --workdir. Raises `UsageError`: it cannot be used."""
    return cli.folder(WORKDIR, written=True)


def tokenizer_folder() -> epath.Path:
    """The folder of --tokenizer, or --weights."""
    return hub.model_folder(_TOKENIZER) if _TOKENIZER.value else _source().tokenizer


def _source() -> NamedWeights:
    """The folder of --weights, and the adapter where that is one. Raises as `sources.source`."""
    return source(_WEIGHTS, _BASE)


def load_tokenizer() -> ChatTokenizer:
    """The tokenizer of `tokenizer_folder`. Raises as `ChatTokenizer.load`."""
    return _source().load_tokenizer(tokenizer_folder())


def mesh() -> Mesh | None:
    """The mesh of --mesh, or None: one device. Raises as `meshes.made`."""
    return meshes.made(_MESH)


def profiled_steps() -> tuple[int, int] | None:
    """First and last step of --profile_steps. Raises `UsageError`: it names none."""
    text = PROFILE.value
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise cli.UsageError(f"--profile_steps={text}: write FIRST:LAST, for example 10:12")
    return int(first), int(last)


@contextlib.contextmanager
def held(folder: epath.Path) -> Iterator[None]:
    """The workdir, held by the first host for all of them; which one is first, JAX's backend says.

    Raises:
        BackendError: JAX cannot start its backend.
        WorkdirError: another process works in it.
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
    """The tokenizer, and the model, which has more rows where the tokenizer gets tokens that the weights have none for.

    All that can be known without reading the weights is looked at, before a device is.

    Raises:
        UsageError: the weights are of another model than the configuration's.
        WeightsError, TokenizerError: there are none, or they cannot be read.
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
            f"--weights={source} has vocab_size {stored.vocab_size}, --config={CONFIG.value} says {model.vocab_size}"
        )
    tokenizer.check_fits(rows)
    return tokenizer, dataclasses.replace(model, vocab_size=rows)


def with_added_tokens(config: Config, tokenizer: ChatTokenizer) -> Config:
    """The configuration of a run; where it has adapters, rows of tokens that the weights have none for are trained,
    and those that an adapter has trained which the run continues.

    Raises:
        UsageError: --weights is an adapter of other settings than the run's.
        WeightsError: --weights is an adapter that training does not continue.
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
    """What `load` gives: the weights under a run's adapters; where it has none, those with an adapter merged."""
    return _source() if lora.rank is None else NamedWeights(_source().folder, None)


def _continued(lora: LoRA, adapter: epath.Path) -> LoRA:
    """The settings of the adapter that a run continues. Raises `UsageError`: the run has others."""
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
    """Raises `UsageError`: the run continues an adapter, and its KL term would be to the weights without that."""
    from astra_jax.models import peft

    if config.objective.kl_coef and config.lora.rank is not None and (adapter := _source().adapter) is not None:
        raise cli.UsageError(
            f"--config.grpo.objective.kl_coef={config.objective.kl_coef}: the run continues the adapter {adapter}, and "
            f"its reference would be the weights without it. To have both, {peft.MERGE_FIRST}; or set kl_coef to 0"
        )


def _is_own() -> bool:
    """Whether the tokenizer is the one beside the weights, so that tokens that it lacks have no trained rows there."""
    return tokenizer_folder() == _source().tokenizer


@cache  # a run that is still training may save a newer one meanwhile
def step() -> int | None:
    """The step of --weights that `load` reads, on all hosts; None for a Hugging Face folder.

    It is the newest; for a run with adapters that goes on, the one that they are of.

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
    """What a run with adapters keeps of where its weights come from; None where it trains all of them."""
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
    """Put tokenizer, chat template and generation configuration beside a run's checkpoints."""
    from astra_jax.run import model_card

    folder = workdir / model_card.CHECKPOINTS
    for note in model_card.complete(folder, tokenizer, tokenizer_folder()):
        say(f"{folder}: {note}")


def ended(stopped: StopReason) -> int:
    """The exit code of a run. Of several hosts one alone may have been told to stop, by whom the others are seen too:
    none of them is to look as if the run were finished."""
    import jax

    if stopped == "preempted" and jax.process_count() > 1:
        return endings.TOLD
    return int(stopped == "exhausted")


def skipped(count: int) -> str:
    """What the last line of a run says of steps that `on_nonfinite=skip` left out; "" where there are none."""
    return f" ({count} of them changed nothing: not finite)" if count else ""


def write_card(
    workdir: epath.Path, method: str, config: Any, datasets: Sequence[TrainedOn], summary: RunSummary | None = None
) -> None:
    """Write the model card of a run that has come to its end."""
    from astra_jax.run import model_card

    base = (_WEIGHTS.value or "").removeprefix(hub.PREFIX) if _INIT_SEED.value is None else ""
    weights, rows = _source().folder if base else None, () if summary is None else summary.rows
    model_card.write_card(workdir, method, config, datasets, base=base, weights=weights, summary=rows)


def load(config: TrainingConfig, model: Model, mesh: Mesh | None) -> Params:
    """The weights of --weights, or random ones of --init_seed, on their devices; ask `checked` before.

    Of an adapter of `peft` they are the base alone where the run has adapters too, which continue that one; else it is
    merged into them.

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
