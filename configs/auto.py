"""Settings that follow from a run's own model, data and devices: `--config=sft:auto` and `--config=grpo:auto`.

Each rule gives a value and its reason. A setting from the command line is never replaced. docs/sft.md and docs/grpo.md
state the rules for users.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from astra_jax.attention.splash import good_length
from astra_jax.base.errors import InputError
from astra_jax.grpo.config import GRPOConfig
from astra_jax.mesh import AXES, BATCH, pieces_of, slice_count
from astra_jax.models.adapters import abstract_trained
from astra_jax.models.lora import LoRA
from astra_jax.models.model import Model, parameters
from astra_jax.models.remat import REMATS
from astra_jax.planner.hardware import context_size
from astra_jax.planner.search import least_bytes, unsized
from astra_jax.rollout.engine.cache_memory import bytes_wanted, memory_of
from astra_jax.run.chips import GIB
from astra_jax.run.config import TrainingConfig
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig, DataStats, steps_for_epochs

FITTING = 0.95
"""Share of the examples that fit into a row."""
_LITTLE_MORE = 1.25
"""Largest factor by which rows may be longer to cut no example."""
STEPS_AN_EPOCH = 64
"""Fewest steps of an epoch, as long as a step has `FEWEST` examples. Two epochs have at least 128."""
FEWEST, MOST = 8, 32
"""Fewest and most examples of a step; the paper's batch has 32 rows."""
UNKNOWN = 4_096
"""Tokens of a row if there is no data."""
_TOKENS_AT_ONCE = 8_192
"""Tokens of a micro-batch on one device: more make no matmul faster."""
_USED = 0.7
"""Share of a device's memory that the planner's estimate may fill; the estimate is a lower bound."""
PROMPT, RESPONSE = 4_096, 8_192
"""Tokens of a GRPO prompt that is not known before its environment is opened, and of the response to any prompt."""
_GROUPS = 32
_ENGINE = 0.25
"""Share of a device's memory for the embedded engine's keys and values."""
_RECOMPUTED_LEAST_FIRST = ("none", "dots", "heads", "attention", "full")
assert {*_RECOMPUTED_LEAST_FIRST, "offload"} == {*REMATS}

_FULL_RATES = ((0.2, 1e-4), (0.45, 5e-5), (6.0, 1e-5), (20.0, 5e-6), (math.inf, 2e-6))
"""(upper bound in billions of parameters, SFT's peak rate with all weights trained): the paper's for 14B and 32B."""
_LORA_RATES = ((20.0, 2e-4), (math.inf, 1e-4))
"""Same table for adapters: QLoRA's (arXiv 2305.14314, table 9), which has 2e-4 up to 13B and 1e-4 from 33B on."""
_RANK = 16
"""Rank of adapters that are chosen for lack of memory; 8 to 64 are usual."""
_GRPO_RATES = {"full": 2e-6, "lora": 2e-5}
"""Learning rates of GRPO: the paper's, and ten times that for adapters."""

Config = TypeVar("Config", bound=TrainingConfig)


@dataclass(frozen=True)
class ChosenSetting:
    """Setting that was chosen for a run.

    Attributes:
        setting: dotted, without the loop's name: `data.seq_len`.
        value: JSON.
        reason: the reason, for people.
    """

    setting: str
    value: Any
    reason: str


@dataclass(frozen=True)
class DeviceSetup:
    """Devices that a run trains on.

    Attributes:
        mesh: sizes by axis, all axes.
        memory: bytes of one device.
        kind: kind of the device, as JAX names it.
        platform: `cpu`, `gpu` or `tpu`.
    """

    mesh: dict[str, int]
    memory: int
    kind: str
    platform: str

    @classmethod
    def of(cls, mesh: Mesh | None) -> DeviceSetup:
        """Describe a mesh, or the first device if it is None. CPU devices share their host's memory."""
        device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
        sizes = dict.fromkeys(AXES, 1) if mesh is None else dict(mesh.shape)
        shared = jax.local_device_count() if device.platform == "cpu" and mesh is not None else 1
        return cls(sizes, memory_of(device) // shared, device.device_kind, device.platform)

    @property
    def rows(self) -> int:
        """Number of devices over which rows are spread."""
        return math.prod(self.mesh[axis] for axis in BATCH)


@dataclass(frozen=True)
class Accelerators:
    """All devices that a run can use, on all hosts.

    Attributes:
        count: number of devices.
        hosts: number of hosts (processes), each with as many devices.
        slices: number of TPU slices.
        memory: bytes of one device.
        kind: kind of the device, as JAX names it.
        platform: `cpu`, `gpu` or `tpu`.
    """

    count: int
    hosts: int
    slices: int
    memory: int
    kind: str
    platform: str

    @classmethod
    def all(cls) -> Accelerators:
        """Describe JAX's devices, with this host's memory. CPU devices share their host's memory."""
        devices = jax.devices()
        first, hosts = devices[0], jax.process_count()
        shared = len(devices) // hosts if first.platform == "cpu" else 1
        memory = memory_of(jax.local_devices()[0]) // shared
        return cls(len(devices), hosts, slice_count(devices), memory, first.device_kind, first.platform)


def choose_mesh(
    model: Model, config: TrainingConfig, devices: Accelerators, *, tokens: int, batch: int | None
) -> tuple[dict[str, int], str]:
    """Choose a mesh over all devices. Return its sizes by axis, and the reason.

    Rows are spread over the devices. A row of more than `TOKENS_PER_CHIP` tokens is spread over several (`context`).
    So are rows of a batch that has fewer rows than devices. Weights are copied to each device (`data`) if a step fits
    there without recomputation. Otherwise they are spread over the devices (`fsdp`), on GPU hosts with a copy for each
    host if that fits.

    Args:
        tokens: tokens of a row.
        batch: rows of a batch, or of a micro-batch if that is given; None: any number.
    """
    chips = devices.count // devices.slices
    context = context_size(chips, tokens)
    rows = chips // context
    if batch is not None:
        rows = max(n for n in _divisors(rows) if batch % (n * devices.slices) == 0 or n == 1)
        context = chips // rows

    def sizes(fsdp: int) -> dict[str, int]:
        wanted = {"data": rows // fsdp * devices.slices, "fsdp": fsdp, "context": context}
        return {axis: wanted.get(axis, 1) for axis in AXES}

    shared = f"; rows of {tokens:,} tokens are spread over {context} devices" if context > 1 else ""
    if unsized(model) or rows == 1:
        return sizes(rows), f"weights, gradients and optimizer state are spread{shared}"
    weights = parameters(model)
    trained = sum(leaf.size for leaf in jax.tree.leaves(abstract_trained(model, config.lora)))
    at_once = max(tokens, _TOKENS_AT_ONCE * context)

    def holds(fsdp: int, remat: str) -> float:
        return least_bytes(model, config, weights, trained, at_once, 1, sizes(fsdp), remat)  # type: ignore[arg-type]

    whole, memory = holds(1, "none"), f"{devices.memory / GIB:.3g} GiB"
    if whole <= _USED * devices.memory:
        holder = "each device has" if context == 1 else f"{context} devices together have"
        return sizes(1), f"{holder} a copy of the weights: about {whole / GIB:.2g} of a device's {memory}{shared}"
    reason = f"a copy of the weights on each device would take about {whole / GIB:.2g} of its {memory}"
    per_host = rows // devices.hosts
    if devices.platform == "gpu" and rows % devices.hosts == 0 and 1 < per_host < rows:
        of_host = holds(per_host, "full")
        if of_host <= _USED * devices.memory:
            return sizes(per_host), f"{reason}, a copy on each host {of_host / GIB:.2g}{shared}"
    width: int = model.d_model  # type: ignore[attr-defined]
    widest = max(n for n in _divisors(rows) if width % (n * context) == 0 or n == 1)
    return sizes(widest), f"{reason}, so they are spread{shared}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def billions(model: Model) -> float:
    """Return a model's size, in billions of parameters. With experts: the geometric mean of all and of a token's."""
    active = sum(model.matmul_parameters())
    experts: int = getattr(model, "n_experts", 0)
    whole = dataclasses.replace(model, **{"experts_per_token": experts}) if experts else model
    every = sum(whole.matmul_parameters())
    return math.sqrt(active * every) / 1e9


def _size(model: Model) -> str:
    size, unit = (billions(model), "billion") if billions(model) >= 1 else (1e3 * billions(model), "million")
    return f"{size:,.0f} {unit}" if size >= 10 else f"{size:.2g} {unit}"


def sft_rate(model: Model, lora: LoRA) -> float:
    """Return SFT's peak learning rate, by the model's size and by whether adapters are trained."""
    rates = _FULL_RATES if lora.rank is None else _LORA_RATES
    size = billions(model)
    return next(rate for below, rate in rates if size < below)


# ---------------------------------------------------------------------------------------------------------------------
# SFT


def provisional_sft(model: Model) -> SFTConfig:
    """Return settings that leave every choice open: rows as long as the model accepts, one per step."""
    return SFTConfig(data=DataConfig(seq_len=model.max_positions), batch_size=1)


def choose_adapters(
    config: SFTConfig, model: Model, place: DeviceSetup, given: Collection[str], *, tokens: int | None = None
) -> tuple[SFTConfig, list[ChosenSetting]]:
    """Choose adapters in place of all weights, and 8 bits for the weights under them, as far as memory needs it.

    Args:
        config: `provisional_sft` with the settings of the command line.
        given: names of the settings that the command line gives.
        tokens: tokens of a row; None: the command line's, or `UNKNOWN`.
    """
    chosen = _Chosen(config, given)
    if unsized(model):
        return config, []
    usual = config.data.seq_len if not chosen.is_open("data.seq_len") else min(UNKNOWN, model.max_positions)
    there = f"the {place.memory / GIB:.3g} GiB of a {place.kind}"

    def needed() -> float:
        own = model if chosen.config.lora.rank is None else dataclasses.replace(model, param_dtype=model.dtype)  # type: ignore[type-var]
        trained = sum(leaf.size for leaf in jax.tree.leaves(abstract_trained(own, chosen.config.lora)))
        return least_bytes(own, chosen.config, parameters(own), trained, tokens or usual, 1, place.mesh, "full")  # type: ignore[arg-type]

    if config.lora.rank is None and chosen.is_open("lora.rank") and (size := needed()) > place.memory:
        reason = f"adapters, because training all weights needs {size / GIB:.3g} GiB or more, above {there}"
        chosen.put("lora.rank", _RANK, f"{reason}; --config.sft.lora.rank=None trains all")
    dense = chosen.config.lora.rank is not None and not getattr(model, "n_experts", 0)
    if dense and chosen.is_open("lora.weight_quantization") and (size := needed()) > _USED * place.memory:
        reason = f"with weights in 16 bits a step needs {size / GIB:.3g} GiB or more of {there}"
        chosen.put("lora.weight_quantization", "int8", reason)
    return chosen.config, chosen.choices


def choose_for_data(
    config: SFTConfig,
    model: Model,
    count: Callable[[DataConfig], DataStats],
    given: Collection[str],
    *,
    rehearsed: Callable[[DataConfig], DataStats] | None = None,
    mesh: dict[str, int] | None = None,
) -> tuple[SFTConfig, list[ChosenSetting]]:
    """Choose the settings of SFT that follow from the data and the model.

    Args:
        config: `provisional_sft` with the settings of the command line.
        count: counts the dataset under a configuration.
        given: names of the settings that the command line gives.
        rehearsed: counts the rehearsal, if there is one.
        mesh: sizes by axis; None: one device.

    Raises:
        DatasetError: nothing in the data can be trained on.
    """
    chosen = _Chosen(config, given)
    sizes = mesh or dict.fromkeys(AXES, 1)
    whole = stats = count(config.data)
    data = config.data
    if chosen.is_open("data.seq_len"):
        data = dataclasses.replace(data, seq_len=row_length(whole, model.max_positions, sizes["context"]))
        stats = count(data)
    chosen.put("data.seq_len", data.seq_len, _fit(whole, stats))
    rows = steps_for_epochs(stats, data, 1, 1.0, rehearsal=None if rehearsed is None else rehearsed(data))
    examples = len(stats.lengths)
    unit = math.prod(sizes[axis] for axis in BATCH)
    if config.micro_batch_size is not None:
        unit = math.lcm(unit, config.micro_batch_size)
    batch = chosen.config.batch_size
    if chosen.is_open("batch_size"):
        wanted = min(MOST, max(FEWEST, examples // STEPS_AN_EPOCH))
        batch = unit * _power_below(wanted * rows / examples / unit)
    steps = -(-rows // batch)
    chosen.put(
        "batch_size",
        batch,
        f"{examples:,} examples fill {rows:,} rows, so an epoch has {steps:,} steps of about "
        f"{examples / steps:.0f} examples",
    )
    kind = "all weights of a model" if config.lora.rank is None else "adapters of a model"
    chosen.put("learning_rate", sft_rate(model, config.lora), f"{kind} of {_size(model)} parameters are trained")
    every = config.steps or math.ceil(rows * config.epochs / batch)
    often = min(100, max(10, steps // 2), max(1, every))
    for name in ("eval_every", "sample_every", "checkpoint_every"):
        chosen.put(name, often, "twice an epoch, but every 10 to 100 steps, and after the last")
    return chosen.config, chosen.choices


def choose_without_data(
    config: SFTConfig,
    model: Model,
    given: Collection[str],
    *,
    mesh: dict[str, int] | None = None,
    tokens: int | None = None,
) -> tuple[SFTConfig, list[ChosenSetting]]:
    """Choose the settings of SFT without data, as for a plan: `FEWEST` rows or more per step.

    Args:
        tokens: tokens of the longest example; None: as many as the model accepts, up to `UNKNOWN`.
    """
    chosen, sizes = _Chosen(config, given), mesh or dict.fromkeys(AXES, 1)
    length = good_length(tokens or min(UNKNOWN, model.max_positions), sizes["context"])
    length = length if tokens else min(length, model.max_positions)
    chosen.put("data.seq_len", length, f"--tokens={tokens}" if tokens else "without data, the usual length")
    unit = math.lcm(math.prod(sizes[axis] for axis in BATCH), config.micro_batch_size or 1)
    chosen.put("batch_size", unit * -(-FEWEST // unit), f"without data, {FEWEST} rows or a row for each device")
    chosen.put("learning_rate", sft_rate(model, config.lora), f"a model of {_size(model)} parameters")
    return chosen.config, chosen.choices


def row_length(stats: DataStats, longest: int, context: int) -> int:
    """Return the length of rows for a dataset.

    `FITTING` of the examples fit; all do if rows need to be only little longer.

    Args:
        stats: counted with rows of `longest` tokens.
        longest: most tokens that the model accepts.
        context: devices that share a row.
    """
    lengths = sorted(stats.lengths) + [longest] * stats.dropped.get("too_long", 0)
    usual, most = (good_length(lengths[math.ceil(share * len(lengths)) - 1], context) for share in (FITTING, 1.0))
    length = most if most <= _LITTLE_MORE * usual else usual
    if length <= longest:
        return length
    pieces = pieces_of(context)
    return max(longest // pieces, 1) * pieces


def _fit(whole: DataStats, stats: DataStats) -> str:
    left = stats.dropped.get("too_long", 0)
    every = len(stats.lengths) + left
    fitting = len(stats.lengths) - stats.cut
    rest = [f"{count:,} are {what}" for count, what in ((stats.cut, "cut"), (left, "dropped")) if count]
    more = whole.cut or whole.dropped.get("too_long")
    longest = f"the longest has {'more than ' * bool(more)}{max(whole.lengths):,} tokens"
    return (
        f"{fitting:,} of {every:,} examples ({fitting / every:.0%}) fit{''.join(f', {one}' for one in rest)}; {longest}"
    )


def choose_for_devices(
    config: Config,
    model: Model,
    place: DeviceSetup,
    given: Collection[str],
    *,
    tokens: int,
    rows: int | None = None,
    reserved: int = 0,
) -> tuple[Config, list[ChosenSetting]]:
    """Choose the rows of a micro-batch, and the rematerialisation that saves memory.

    Policies are tried in order: `none`, `dots`, `heads`, `attention`, `full`. The first is chosen with which a
    micro-batch of `_TOKENS_AT_ONCE` tokens per device fits; otherwise `full` with the largest micro-batch that fits.

    Args:
        tokens: tokens of a row.
        rows: rows of a batch, a multiple of the micro-batch; None: any number.
        reserved: bytes of a device that are used otherwise.
    """
    chosen = _Chosen(config, given)
    if rows is not None and rows % place.rows:
        return config, []  # the run refuses it, and names the axes
    most = 16 if rows is None else max(1, rows // place.rows)
    room = max(1, _TOKENS_AT_ONCE * place.mesh["context"] // tokens)
    possible = [n for n in range(1, most + 1) if most % n == 0 and n <= room]
    if not chosen.is_open("micro_batch_size") and config.micro_batch_size is not None:
        possible = [max(1, config.micro_batch_size // place.rows)]
    remats = _RECOMPUTED_LEAST_FIRST if chosen.is_open("remat") else (config.remat,)
    if missing := unsized(model):
        reason = f"the least memory: {type(model).__name__} has no {missing[0]}, by which more could be estimated"
        chosen.put("micro_batch_size", possible[0] * place.rows, reason)
        chosen.put("remat", remats[-1], reason)
        return chosen.config, chosen.choices
    weights = parameters(model)
    trained = sum(leaf.size for leaf in jax.tree.leaves(abstract_trained(model, config.lora)))

    def holds(n: int, remat: str) -> float:
        return least_bytes(model, config, weights, trained, tokens, n, place.mesh, remat)  # type: ignore[arg-type]

    limit = _USED * (place.memory - reserved)
    n, remat = next(
        ((n, remat) for remat in remats for n in [possible[-1]] if holds(n, remat) <= limit),
        (next((n for n in reversed(possible) if holds(n, remats[-1]) <= limit), 1), remats[-1]),
    )
    needed, there = holds(n, remat) / GIB, place.memory / GIB
    loop = "sft" if isinstance(config, SFTConfig) else "grpo"
    reason = f"about {needed:.2g} GiB of the {there:.3g} GiB of a {place.kind}"
    if holds(n, remat) > limit:
        reason += (
            "; it may not fit: train adapters (--config.lora.rank=16), keep the optimizer on the host "
            f"(--config.{loop}.optimizer_offload=true), or spread the run over more devices (--mesh)"
        )
    chosen.put("micro_batch_size", n * place.rows, reason)
    chosen.put("remat", remat, "computes as little again as fits in the memory")
    return chosen.config, chosen.choices


# ---------------------------------------------------------------------------------------------------------------------
# GRPO


def provisional_grpo() -> GRPOConfig:
    """Return settings that leave every choice open: the shortest episodes, one group per step."""
    base = GRPOConfig()
    episode = dataclasses.replace(base.episode, max_prompt_tokens=1, max_response_tokens=1)
    return dataclasses.replace(base, batch_size=1, episode=episode, row_buckets=(2**24,))


def choose_for_episodes(
    config: GRPOConfig,
    model: Model,
    given: Collection[str],
    *,
    prompts: Sequence[int] | None,
    context: int = 1,
) -> tuple[GRPOConfig, list[ChosenSetting]]:
    """Choose the settings of GRPO that follow from the environments and the model.

    Args:
        config: `provisional_grpo` with the settings of the command line.
        given: names of the settings that the command line gives.
        prompts: the longest prompt of each environment, in tokens; None: unknown before servers start.
        context: devices that share a row.

    Raises:
        InputError: the model has no room for a response after the longest prompt.
    """
    chosen = _Chosen(config, given)
    most = 0 if prompts is None else max(prompts)
    if most >= model.max_positions:
        raise InputError(
            f"the longest prompt of the environments has {most:,} tokens, and the model takes {model.max_positions:,} "
            "in all; leave out tools or environments, or stretch the model with YaRN (rope_scaling in config.json)"
        )
    prompt, response = config.episode.max_prompt_tokens, config.episode.max_response_tokens
    if chosen.is_open("episode.max_prompt_tokens"):
        usual = PROMPT if prompts is None else -(-most // 256) * 256
        prompt = max(most, min(usual, model.max_positions // 2)) if usual >= model.max_positions else usual
    if chosen.is_open("episode.max_response_tokens"):
        response = max(1, min(RESPONSE, model.max_positions - prompt))
    row = good_length(prompt + response, context)
    rows = tuple(sorted({good_length(max(1, row // part), context) for part in (4, 2, 1)}))
    known = "the usual length" if prompts is None else f"the longest prompt has {most:,} tokens"
    chosen.put_all(
        {
            "episode.max_prompt_tokens": (prompt, known),
            "episode.max_response_tokens": (response, f"{RESPONSE:,}, or what the model leaves behind the prompt"),
            "row_buckets": (rows, "a quarter, a half and all of an episode's length"),
        }
    )
    batch = _GROUPS if prompts is None else min(_GROUPS, max(4, _power_below(len(prompts) / 2)))
    batch = -(-batch // config.mini_batches) * config.mini_batches
    what = (
        "the usual number" if prompts is None else f"at most half of {len(prompts):,} environments, {_GROUPS} at most"
    )
    chosen.put("batch_size", batch, f"groups of a step: {what}")
    kind = "full" if config.lora.rank is None else "lora"
    why = {"full": "the paper's, for all weights", "lora": "for adapters, ten times that of whole weights"}
    chosen.put("learning_rate", _GRPO_RATES[kind], why[kind])
    return chosen.config, chosen.choices


def choose_concurrency(
    config: GRPOConfig, model: Model, place: DeviceSetup, given: Collection[str], mesh: Mesh | None
) -> tuple[GRPOConfig, list[ChosenSetting], int]:
    """Choose how many groups the embedded engine samples at once, beside training on the same devices.

    Args:
        mesh: mesh of these devices; None: one device.

    Returns:
        the configuration, the choice, and the bytes of a device that the engine needs.
    """
    chosen = _Chosen(config, given)
    episode = config.episode
    slots = config.group_size * place.rows
    length = episode.max_prompt_tokens + episode.max_response_tokens
    keys, weights = bytes_wanted(model, slots, length, mesh, config.weight_quantization, place.platform)
    at_once = min(GRPOConfig().concurrent_groups, 2 * config.batch_size)
    at_once = max(1, min(at_once, int(_ENGINE * place.memory / keys * place.rows)))
    chosen.put("concurrent_groups", at_once, "twice a step's groups, as far as keys and values have room")
    at_once = chosen.config.concurrent_groups
    return chosen.config, chosen.choices, keys * at_once // place.rows + weights


class _Chosen:
    """Configuration with the choices made so far."""

    def __init__(self, config: Any, given: Collection[str]) -> None:
        self.config = config
        self.choices: list[ChosenSetting] = []
        self._given = given

    def is_open(self, name: str) -> bool:
        """Return whether the command line leaves a setting open."""
        return name not in self._given

    def put(self, name: str, value: Any, reason: str) -> None:
        """Set a value and note the reason, unless the command line gives it."""
        self.put_all({name: (value, reason)})

    def put_all(self, values: dict[str, tuple[Any, str]]) -> None:
        """Set several values at once that depend on each other; see `put`."""
        changes = {name: value for name, (value, _) in values.items() if self.is_open(name)}
        self.config = replaced(self.config, changes)
        self.choices += [
            ChosenSetting(name, value, reason)
            if name in changes
            else ChosenSetting(name, attrgetter(name)(self.config), "given")
            for name, (value, reason) in values.items()
        ]


def replaced(config: Any, changes: dict[str, Any]) -> Any:
    """Return a configuration with new values for settings with dotted names, all at once. Raises `SettingError`."""
    inner: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for name, value in changes.items():
        first, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(first, {})[rest] = value
        else:
            own[first] = value
    own |= {name: replaced(getattr(config, name), values) for name, values in inner.items()}
    return dataclasses.replace(config, **own)


def _power_below(number: float) -> int:
    """Return the largest power of two that is at most a number, at least 1."""
    return 2 ** max(0, math.floor(math.log2(max(1.0, number))))
