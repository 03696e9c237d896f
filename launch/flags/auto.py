"""`--config=sft:auto` and `--config=grpo:auto`: the model of `--weights`, and settings chosen for data and devices.

The choices are printed before step 1 and stored in `WORKDIR/auto.json`, so that a run resumes with the same ones. A
setting on the command line takes precedence over each of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from astra_jax.base.terminal import say
from launch.flags import cli

if TYPE_CHECKING:
    from etils import epath
    from jax.sharding import Mesh

    from astra_jax.models.model import Model
    from astra_jax.planner.hardware import Slice
    from astra_jax.sft.data import DataConfig, DataStats
    from astra_jax.tokenizer import ChatTokenizer
    from configs.auto import ChosenSetting, DeviceSetup
    from configs.training import GRPORun, SFTRun
    from launch.flags.sources import NamedWeights
    from synthesis.core.datasets import Folder
    from synthesis.core.environment import AnyEnvironment

FILE = "auto.json"
_OF_DEVICES = ("micro_batch_size", "remat", "concurrent_groups")
"""Choices that are made again for another mesh or kind of device; a run may resume with other values of them."""


def is_auto(name: str | None) -> bool:
    """Return whether a `--config` takes the model from `--weights` and chooses settings."""
    return name in ("sft:auto", "grpo:auto")


def read_model(source: NamedWeights) -> Model:
    """Read the model of a folder of weights, in the precision that it is trained in.

    Raises:
        WeightsError: there is no `config.json`, or it has unsupported features; the message lists all of them.
    """
    from astra_jax.models import hf_checkpoint

    return source.model(dtype=hf_checkpoint.computed_dtype(source.folder), param_dtype="float32")


def check_same(stored: Model, wanted: Model, *, weights: object, config: str) -> None:
    """Check that weights and configuration are of the same model, except for the number of rows.

    Args:
        weights: value of `--weights`.
        config: value of `--config`.

    Raises:
        UsageError: they differ; the message lists every field, and the fix.
    """
    from astra_jax.models.families import differences

    if not (differs := differences(stored, wanted, but=("vocab_size",))):
        return
    if stored.vocab_size != wanted.vocab_size:
        differs.append(("vocab_size", stored.vocab_size, wanted.vocab_size))
    fields = "; ".join(f"{name} is {theirs} there, {ours} here" for name, theirs, ours in differs)
    if is_auto(config):
        fix = "leave out " + " and ".join(f"--config.model.{name}" for name, _, _ in differs)
    else:
        kind, colon, _ = config.partition(":")
        fix = f"use --config={kind}:auto" if colon and kind in ("sft", "grpo") else "use --config=sft:auto or grpo:auto"
        fix += ", which takes the model from --weights"
    raise cli.UsageError(f"--weights={weights} and --config={config} are different models: {fields}; {fix}")


def provisional(config: Any) -> Any:
    """Return an `auto` configuration with the settings of the command line, before choices are made.

    Raises:
        UsageError: as `cli.overridden`.
    """
    given = cli.given_settings(config)
    for loop, unit in (("sft", "micro_batch_size"), ("grpo", "mini_batches")):
        if (size := given.get(f"{loop}.{unit}")) and f"{loop}.batch_size" not in given:
            of_loop = dataclasses.replace(getattr(config, loop), batch_size=size)
            config = dataclasses.replace(config, **{loop: of_loop})
    config = cli.overridden(config)
    return _with_frozen_precision(config)


def _with_frozen_precision(config: Any) -> Any:
    """Return a configuration whose weights under adapters are in the model's dtype, which they never leave."""
    loop = getattr(config, "sft", None) or config.grpo
    if loop.lora.rank is None or "model.param_dtype" in cli.given_settings(config):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, param_dtype=config.model.dtype))


def sft_settings(
    config: SFTRun,
    data: Folder,
    rehearsal: Folder | None,
    tokenizer: ChatTokenizer,
    workdir: epath.Path,
    mesh: Mesh | None,
) -> SFTRun:
    """Complete `sft:auto`: with the stored choices of the workdir's run, else for the data and the devices. Prints the
    choices.

    Raises:
        DatasetError: nothing in the data can be trained on.
        UsageError: the stored choices cannot be read, or do not fit the command line.
    """
    from astra_jax.sft.data import of_rehearsal
    from astra_jax.sft.statistics import kept_statistics
    from configs import auto

    def count(data_config: DataConfig) -> DataStats:
        return kept_statistics(data, tokenizer, data_config, workdir)

    def count_rehearsal(data_config: DataConfig) -> DataStats:
        assert rehearsal is not None
        return kept_statistics(rehearsal, tokenizer, of_rehearsal(data_config), workdir)

    given, place = _given(config, "sft"), _place(mesh)
    before = _before(workdir, place)
    sft, choices = _again(config.sft, before, given)
    if not choices:
        rehearsed = None if rehearsal is None else count_rehearsal
        sft, choices = auto.choose_adapters(sft, config.model, place, given)
        sft, more = auto.choose_for_data(sft, config.model, count, given, rehearsed=rehearsed, mesh=place.mesh)
        choices = [*choices, *more]
    config = _with_frozen_precision(dataclasses.replace(config, sft=sft))
    if not {*_OF_DEVICES} & {one.setting for one in choices}:
        sft, more = auto.choose_for_devices(
            sft, config.model, place, given, tokens=sft.data.seq_len, rows=sft.batch_size
        )
        choices = [*choices, *more]
    _keep(workdir, place, choices, "sft")
    return dataclasses.replace(config, sft=sft)


def sft_row(
    config: SFTRun, data: Folder, tokenizer: ChatTokenizer, workdir: epath.Path, *, is_open: bool
) -> tuple[int, int | None]:
    """Return what the default mesh of SFT follows from: the tokens of a row, and the rows of a batch or micro-batch,
    None for any number.

    Args:
        is_open: the configuration is `sft:auto`, so that the data decide what the command line does not give.

    Raises:
        DatasetError: nothing in the data can be trained on.
        UsageError: the stored choices cannot be read.
    """
    from astra_jax.sft.statistics import kept_statistics
    from configs.auto import row_length

    sft, batch = config.sft, config.sft.micro_batch_size or config.sft.batch_size
    if not is_open:
        return sft.data.seq_len, batch
    given = _given(config, "sft")
    before = {one.setting: one.value for one in _stored(workdir)[0]}
    tokens = sft.data.seq_len
    if "data.seq_len" not in given:
        tokens = row_length(kept_statistics(data, tokenizer, sft.data, workdir), config.model.max_positions, 1)
    return tokens, batch if {"batch_size", "micro_batch_size"} & given else before.get("batch_size")


def previewed(config: SFTRun, data: Folder, tokenizer: ChatTokenizer) -> SFTRun:
    """Complete `sft:auto` for the data alone, without devices. Raises `DatasetError`."""
    from astra_jax.sft.data import scan
    from configs import auto

    sft, choices = auto.choose_for_data(
        config.sft, config.model, lambda data_config: scan(data, tokenizer, data_config), _given(config, "sft")
    )
    _print("sft", choices)
    return dataclasses.replace(config, sft=sft)


def planned(config: Any, slice_: Slice, mesh: dict[str, int] | None, tokens: int | None) -> Any:
    """Complete an `auto` configuration for a plan: without data, and for the memory of a slice.

    Args:
        mesh: sizes by axis; None: the planner's.
        tokens: the longest sequence, if the plan has one.
    """
    from astra_jax.mesh import AXES
    from astra_jax.planner.hardware import mesh_sizes
    from configs import auto

    sizes = dict.fromkeys(AXES, 1) | (mesh or mesh_sizes(slice_, tokens or auto.UNKNOWN))
    rest = slice_.chips // abs(math.prod(sizes.values()))
    sizes = {axis: rest if size == -1 else size for axis, size in sizes.items()}
    kind = slice_.chip.name
    place = auto.DeviceSetup(sizes, slice_.chip.hbm_bytes, kind, "gpu" if slice_.chip.clock is None else "tpu")
    loop = "sft" if hasattr(config, "sft") else "grpo"
    given = _given(config, loop)
    settings: Any = getattr(config, loop)
    if loop == "sft":
        settings, adapters = auto.choose_adapters(settings, config.model, place, given, tokens=tokens)
        config = _with_frozen_precision(dataclasses.replace(config, sft=settings))
        settings, choices = auto.choose_without_data(settings, config.model, given, mesh=sizes, tokens=tokens)
        choices = [*adapters, *choices]
        row, batch = settings.data.seq_len, settings.batch_size
    else:
        settings, choices = auto.choose_for_episodes(
            settings, config.model, given, prompts=None, context=sizes["context"]
        )
        row, batch = max(settings.row_buckets), None
    settings, more = auto.choose_for_devices(settings, config.model, place, given, tokens=row, rows=batch)
    _print(loop, [*choices, *more])
    return dataclasses.replace(config, **{loop: settings})


def episode_settings(
    config: GRPORun, known: Sequence[AnyEnvironment] | None, tokenizer: ChatTokenizer, context: int
) -> tuple[GRPORun, list[ChosenSetting]]:
    """Complete the part of `grpo:auto` that depends on environments and model. Return it with the choices.

    Args:
        known: every environment of the run; None: some are not known before servers start.
        context: devices that share a row.

    Raises:
        InputError: an environment cannot be used, or its prompt is too long for any response.
    """
    from astra_jax.rollout.episode import longest_task
    from configs import auto

    prompts = None
    if known:
        unlimited = dataclasses.replace(config.grpo.episode, max_prompt_tokens=2**24)
        prompts = [len(longest_task(one, tokenizer, unlimited).prompt_ids) for one in known]
    grpo, choices = auto.choose_for_episodes(
        config.grpo, config.model, _given(config, "grpo"), prompts=prompts, context=context
    )
    return dataclasses.replace(config, grpo=grpo), choices


def grpo_settings(
    config: GRPORun,
    known: Callable[[], Sequence[AnyEnvironment] | None],
    tokenizer: ChatTokenizer,
    workdir: epath.Path,
    mesh: Mesh | None,
    *,
    engine: bool,
) -> GRPORun:
    """Complete `grpo:auto`: with the stored choices of the workdir's run, else for environments and devices. Prints the
    choices.

    Args:
        known: as in `episode_settings`.
        engine: the devices of the update sample too.

    Raises:
        InputError: as `episode_settings`.
        UsageError: the stored choices cannot be read, or do not fit the command line.
    """
    from configs import auto

    given, place = _given(config, "grpo"), _place(mesh)
    grpo, choices = _again(config.grpo, _before(workdir, place), given)
    if not choices:
        completed, choices = episode_settings(config, known(), tokenizer, place.mesh["context"])
        grpo = completed.grpo
    if not {*_OF_DEVICES} & {one.setting for one in choices}:
        reserved = 0
        if engine:
            grpo, more, reserved = auto.choose_concurrency(grpo, config.model, place, given, mesh)
            choices = [*choices, *more]
        grpo, more = auto.choose_for_devices(
            grpo, config.model, place, given, tokens=max(grpo.row_buckets), reserved=reserved
        )
        choices = [*choices, *more]
    _keep(workdir, place, choices, "grpo")
    return dataclasses.replace(config, grpo=grpo)


# ---------------------------------------------------------------------------------------------------------------------
# What a run began with


def _given(config: Any, loop: str) -> frozenset[str]:
    """Return the names of the loop's settings that the command line sets."""
    names = cli.given_settings(config)
    return frozenset(name.removeprefix(f"{loop}.") for name in names if name.startswith(f"{loop}."))


def _place(mesh: Mesh | None) -> DeviceSetup:
    """Return the devices, with the memory of the first host's, so that all hosts make the same choices."""
    from astra_jax.run.hosts import broadcast_from_host0
    from configs.auto import DeviceSetup

    found = DeviceSetup.of(mesh)
    return dataclasses.replace(found, memory=int(broadcast_from_host0(str(found.memory).encode())))


def _before(workdir: epath.Path, place: DeviceSetup) -> list[ChosenSetting]:
    """Return the stored choices of the workdir's run, if it has a checkpoint; choices for devices only if those are the
    same."""
    choices, before = _stored(workdir)
    same = before == dataclasses.asdict(place)
    return [one for one in choices if same or one.setting not in _OF_DEVICES]


def _stored(workdir: epath.Path) -> tuple[list[ChosenSetting], Any]:
    """Return the stored choices of the workdir's run, and its devices; nothing before it has a checkpoint. Raises
    `UsageError`: they cannot be read."""
    from configs.auto import ChosenSetting

    file = workdir / FILE
    if not file.exists() or not _has_checkpoint(workdir):
        return [], None
    try:
        found = json.loads(file.read_bytes())
        choices = [ChosenSetting(one["setting"], _immutable(one["value"]), one["reason"]) for one in found["choices"]]
        return choices, found["place"]
    except (ValueError, KeyError, TypeError) as error:
        raise cli.UsageError(
            f"{file} does not have the settings that the run started with ({error}); copy it from a backup, or give "
            "the settings in run.json with --config.NAME=VALUE"
        ) from None


def _has_checkpoint(workdir: epath.Path) -> bool:
    from astra_jax.models.hf_checkpoint import WeightsError
    from astra_jax.run import model_card, weights

    try:
        weights.check_stored(workdir / model_card.CHECKPOINTS)
    except WeightsError:
        return False
    return True


def _immutable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _again(loop: Any, before: Sequence[ChosenSetting], given: frozenset[str]) -> tuple[Any, list[ChosenSetting]]:
    """Return a loop's settings with the stored choices, except for settings on the command line; and the choices."""
    from astra_jax.base.settings import SettingError
    from configs import auto

    kept = {one.setting: one for one in before if one.setting not in given}
    try:
        loop = auto.replaced(loop, {name: one.value for name, one in kept.items()})
    except SettingError as error:
        raise cli.UsageError(f"the settings that the run started with do not fit the command line: {error}") from None
    return loop, [
        kept.get(one.setting, dataclasses.replace(one, value=attrgetter(one.setting)(loop), reason="given"))
        for one in before
    ]


def _keep(workdir: epath.Path, place: DeviceSetup, choices: Sequence[ChosenSetting], loop: str) -> None:
    """Store and print the choices, on the first host."""
    from astra_jax.base.files import write_text
    from astra_jax.run.hosts import is_first

    if is_first():
        content = {"place": dataclasses.asdict(place), "choices": [dataclasses.asdict(one) for one in choices]}
        write_text(workdir / FILE, json.dumps(content, indent=1) + "\n")
        _print(loop, choices)


def _print(loop: str, choices: Sequence[ChosenSetting]) -> None:
    say(f"--config={loop}:auto chooses (--config.{loop}.NAME=VALUE replaces a choice):")
    for (value, reason), alike in itertools.groupby(choices, lambda one: (one.value, one.reason)):
        names = ", ".join(one.setting for one in alike)
        say(f"  {names} {f'{value:,}' if isinstance(value, int) else value}: {reason}")
