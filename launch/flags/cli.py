"""Command line of all programs: absl flags, `--config.NAME=VALUE` overrides, and user errors as one line.

A configuration is a tree of frozen dataclasses. `--config.grpo.learning_rate=1e-4` replaces one leaf of it. The value
is JSON, or a bare string, and is checked against the field's annotation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import re
import runpy
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from absl import app, flags, logging

import astra_jax
from astra_jax.base.errors import InputError, UserError
from astra_jax.base.former_settings import todays_name
from astra_jax.base.settings import SettingError, declared, wording
from astra_jax.base.terminal import say
from astra_jax.cpu.environment import cpu_environment
from launch.flags import endings, help_text, known_names, settings_list, shared

if TYPE_CHECKING:
    from etils import epath

    from astra_jax.models.model import Model


Config = TypeVar("Config")

_PREFIX = "--config."
_HELP_CONFIG = "help_config"
_HELPS = ("--help", "-help", "-h", "--helpshort", "-helpshort")
_ABSL_HELPED = 1
"""Exit code of absl after it has printed a requested help text, such as for --helpfull."""
_MISSING = re.compile(r"flag --(\S+)=None: Flag --\1 must have a value other than None\.")
_OLD_PRESET = re.compile(r"(sft|grpo)_qwen3_(\w+)\.py")
"""File name of a preset in versions up to 0.1."""
_overrides: list[tuple[str, str]] = []


class UsageError(UserError):
    """The command line, the configuration or an input is wrong; the message names the fault and the fix."""


def with_cpu_environment(module: str, *, large: bool = False) -> None:
    """Restart this program with `cpu_environment`; return in the new process.

    A process reads these variables only when it starts. Its children do not inherit the malloc.

    Args:
        large: see `cpu_environment`. Programs for models of any size set it, on accelerators too, since their hosts
            hold checkpoints and batches.
    """
    if "ASTRA_CPU" not in os.environ and not any(one.startswith(("--help", "--version")) for one in sys.argv):
        environment = cpu_environment(os.environ, large=large)
        if environment != os.environ:
            own = "malloc" if "GLIBC_TUNABLES" not in os.environ else "set"
            # -P: the current folder, which may have a `launch/` of its own, is not looked at before PYTHONPATH.
            paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            added = {"ASTRA_CPU": own, "PYTHONPATH": os.pathsep.join(paths)}
            os.execve(sys.executable, [sys.executable, "-P", "-m", module, *sys.argv[1:]], environment | added)
    if os.environ.pop("ASTRA_CPU", None) == "malloc":
        del os.environ["GLIBC_TUNABLES"]


def run(
    main: Callable[[], int | None],
    *,
    argument: flags.FlagHolder[str | None] | None = None,
    settings: Callable[[], Any] | None = None,
    again: str = "",
) -> None:
    """Parse the command line and run a program.

    The exit code is the result of `main`, with None as 0. It is 0 after `--help`, `--version` and `--help_config`, and
    2 after a one-line message about unknown flags or bad values. For an exception it is `endings.code`.

    Args:
        argument: flag that may also be given without its name: `PROGRAM DIR` for `PROGRAM --data=DIR`.
        settings: returns the configuration that `--config.NAME=VALUE` changes, for `--help_config`; called after the
            flags are parsed. None: the program has none, and refuses such arguments.
        again: what the same command does after Ctrl-C, such as "it resumes from its last checkpoint".
    """
    endings.run_unoptimized()
    _define_standard_flags(configurable=settings is not None)
    if argument is not None:
        flags.FLAGS.set_gnu_getopt()  # else absl takes the flags after it for arguments too

    def guarded(argv: Sequence[str]) -> int | None:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # orbax's notes would drown the progress bars
        try:
            stray = argv[1:]
            if stray and argument is not None and not argument.present:
                flags.FLAGS[argument.name].parse(stray[0])
                stray = stray[1:]
            if stray:
                takes = "flags only" if argument is None else f"one argument, --{argument.name}, next to its flags"
                name, equals, value = stray[0].partition("=")
                found = _suggestion(name, value, settings) if equals else None
                remedy = found or f"this program takes {takes} (see --help)"
                raise UsageError(f"unexpected argument {stray[0]!r}; {remedy}")
            if "model_class" in flags.FLAGS and (own := flags.FLAGS.model_class):
                from astra_jax.models.families import use_class

                use_class(own)
            return main()
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # no program of ours raises the last
            if flags.FLAGS.pdb_post_mortem:
                raise
            return endings.code(error, again=again)

    endings.prepare()
    code: object
    try:
        app.run(guarded, flags_parser=partial(_parse, settings=settings))
    except (KeyboardInterrupt, SystemExit) as ended:  # Ctrl-C: while flags are parsed
        code = ended.code if isinstance(ended, SystemExit) else endings.code(ended, again=again)
        try:
            sys.stdout.flush()
        except Exception as error:
            code = code or endings.code(error)
        endings.leave(code)
        sys.exit(code)


class _VersionFlag(flags.BooleanFlag):
    """Flag that prints the version and exits, whatever else is given or missing."""

    def __init__(self) -> None:
        super().__init__("version", False, "Print the version, and stop.", allow_hide_cpp=True)

    def parse(self, arg: Any) -> None:
        if self._parse(arg):
            say(f"astra_jax {astra_jax.__version__}")
            sys.exit(0)


def _define_standard_flags(*, configurable: bool) -> None:
    """Define the flags that every program has in addition to absl's; --help lists them among the program's own."""
    if "version" in flags.FLAGS:
        return
    flags.DEFINE_flag(_VersionFlag(), module_name=sys.argv[0])
    if configurable:
        about = f"List the settings that {_PREFIX}NAME=VALUE changes, with allowed values and meaning, and stop."
        flags.DEFINE_bool(_HELP_CONFIG, False, about, module_name=sys.argv[0])


def _parse(argv: Sequence[str], settings: Callable[[], Any] | None) -> list[str]:
    """Return the arguments that are not flags. Exit for a request for help, and for a wrong command line."""
    kept = _without_overrides(argv)
    try:
        if any(one in _HELPS for one in kept[1:]):
            say(help_text.help_text())
            sys.stdout.flush()
            sys.exit(0)
        if _overrides and settings is None:
            raise UsageError(f"{_PREFIX}{_overrides[0][0]}: this program has no such settings (see --help)")
        try:
            rest = flags.FLAGS(kept)
        except flags.UnrecognizedFlagError as error:
            if (today := shared.todays_flag(error.flagname)) is not None:
                raise UsageError(f"--{error.flagname}: this flag is called --{today} now; see --help") from None
            flags.FLAGS.mark_as_parsed()  # absl stops before; `settings` reads --config
            found = _suggestion(error.flagname, str(error.flagvalue).partition("=")[2], settings)
            listed = f"--help lists the flags{' and settings' * (settings is not None)}"
            raise UsageError(f"--{error.flagname} is not a flag of this program; {found or listed}") from None
        except flags.Error as error:
            # A flag that is missing does not matter to who asks for the settings; one that is wrong does.
            if not (flags.FLAGS.is_parsed() and settings is not None and flags.FLAGS[_HELP_CONFIG].value):
                raise UsageError(_in_our_words(error)) from None
            rest = kept[:1]
        if settings is not None and flags.FLAGS[_HELP_CONFIG].value:
            say(settings_list.listing(overridden(settings()), _PREFIX))
            sys.exit(0)
        return rest
    except SystemExit as ended:
        sys.exit(0 if ended.code == _ABSL_HELPED else ended.code)
    except Exception as error:
        sys.exit(endings.code(error))


def _suggestion(name: str, value: str, settings: Callable[[], Any] | None) -> str | None:
    """Return what to type for a name that is not a flag; None if nothing is close. The flags are parsed."""
    names: list[str] = []
    if settings is not None:
        with contextlib.suppress(Exception):  # --config is wrong too, which the next start reports
            names = list(setting_names(settings()))
    return known_names.suggest(name, value, names, help_text.own_flags().keys())


def _in_our_words(error: flags.Error) -> str:
    """Return one line with absl's messages about flags."""
    lines = str(error).splitlines()
    missing = [_MISSING.fullmatch(line) for line in lines]
    if names := [f"--{one[1]}" for one in missing if one is not None]:
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing; see --help"
    return " ".join(line.removeprefix("flag ") for line in lines)


def _without_overrides(argv: Sequence[str]) -> list[str]:
    """Return the arguments without configuration overrides, which are kept for `overridden`."""
    kept: list[str] = []
    _overrides.clear()
    arguments = iter(argv)
    for argument in arguments:
        if not argument.startswith(_PREFIX):
            kept.append(argument)
            continue
        name, equals, value = argument[len(_PREFIX) :].partition("=")
        _overrides.append((name, value if equals else next(arguments, "")))
    return kept


def given_overrides(config: Any, *, but: Collection[str] = ()) -> list[str]:
    """Return the command line's `--config.NAME=VALUE` arguments, with whole names.

    Args:
        but: names to leave out.
    """
    given = [(whole, value) for name, value in _overrides for whole in _whole_names(config, name)]
    return [f"{_PREFIX}{name}={value}" for name, value in given if name not in but]


def refuse_unused(given: Iterable[flags.FlagHolder[Any]], why: str) -> None:
    """Refuse flags that the user set and that have no effect. Raises `UsageError`: `--NAME`, and `why`."""
    for flag in given:
        if flag.value != flag.default:
            raise UsageError(f"--{flag.name} {why}")


def token_of(flag: flags.FlagHolder[str | None]) -> str | None:
    """Return the token in the file that a flag names, or None. Raises `UsageError`."""
    return token_in(flag.value, f"--{flag.name}") if flag.value else None


def token_in(file: str, named: str) -> str:
    """Return the token in a file.

    Args:
        named: the flag or field with the file's name, for the message.

    Raises:
        UsageError: there is no token.
    """
    path = Path(file)
    if not path.is_file() or not (token := path.read_text(encoding="utf-8").partition("\n")[0].strip()):
        raise UsageError(f"{named}={path} is not a file with a key on its first line")
    return token


def certificates_of(flag: flags.FlagHolder[str | None]) -> str | None:
    """Return the absolute path of the certificate authorities' file that a flag names, or None. Raises `UsageError`:
    the file has no certificates."""
    from astra_jax.base.access import trusting

    if not flag.value:
        return None
    path = str(Path(flag.value).absolute())
    try:
        trusting(path)
    except SettingError as error:
        raise UsageError(f"--{flag.name}={error}") from None
    return path


def folder(flag: flags.FlagHolder[str | None], *, written: bool = False, s3: bool = False) -> epath.Path:
    """Return the folder of a flag, on disk (as an absolute path) or in a bucket.

    Args:
        written: a run writes there; writing to a bucket is tried.
        s3: the flag may also be `s3://BUCKET/FOLDER`.

    Raises:
        UsageError: it is neither, or cannot be used.
    """
    from astra_jax.base.buckets import check_writable
    from astra_jax.base.files import StorageError, location

    try:
        found = location(flag.value or "", s3=s3)
        if written:
            endings.note_folder(flag.name, flag.value or "")
            check_writable(found)
    except (InputError, StorageError) as error:
        raise UsageError(f"--{flag.name}={error}") from None
    return found


def checkpoints_of(folder: epath.Path) -> epath.Path:
    """Return the checkpoints of a training run's folder; of any other folder itself."""
    inner = folder / "checkpoints"
    return inner if (inner / "config.json").exists() and not (folder / "config.json").exists() else folder


def local_folder(flag: flags.FlagHolder[str | None]) -> Path:
    """Return the absolute path of a flag's folder.

    Raises:
        UsageError: it is a URL.
    """
    if "://" in (flag.value or ""):
        raise UsageError(
            f"--{flag.name}={flag.value} is not a folder, and cannot be a bucket; give one on this machine"
        )
    endings.note_folder(flag.name, flag.value or "")
    return Path(flag.value or "").absolute()


def load_config(name: str, *kinds: str, model: Callable[[], Model] | None = None) -> Any:
    """Return a preset of `configs`, for example `sft:14b`, or the `CONFIG` of a user's own file.

    Args:
        kinds: kinds of configurations that the program can use: `sft`, `grpo`, or both; or `trajectories` or
            `environments`.
        model: reads the model of --weights, for `sft:auto` and `grpo:auto`. None: there are no weights.

    Raises:
        UsageError: there is no such preset or file; the message names the nearest preset, or the current one for an
            earlier version's file. Or the file fails, defines no `CONFIG`, has unknown settings, or is of another kind.
    """
    # Here, so that --help does not wait for them; and a program that only writes data never imports jax.
    classes: Mapping[str, type]
    presets: Mapping[str, Callable[[], Any]]
    own: Mapping[str, Callable[[Model], Any]] = {}
    if set(kinds) & {"trajectories", "environments"}:
        from configs.synthesis import KINDS as classes
        from configs.synthesis import PRESETS as presets
    else:
        from configs.training import AUTO as own
        from configs.training import KINDS as classes
        from configs.training import PRESETS as presets
    wanted = {kind: classes[kind] for kind in kinds or classes}
    if name in own:
        if model is None:
            raise UsageError(f"--config={name} takes the model from --weights: give them, or a preset with its sizes")
        found = own[name](model())
    else:
        found = presets[name]() if name in presets else _config_of_file(name, presets, wanted, own)
    if not isinstance(found, tuple(wanted.values())):
        such = {kind: "14b" if f"{kind}:14b" in presets else "paper" for kind in wanted}
        needs = " or ".join(f"{one.__name__}, such as {kind}:{such[kind]}" for kind, one in wanted.items())
        raise UsageError(f"--config={name} is of type {type(found).__name__}; this program takes one of {needs}")
    return found


def _config_of_file(name: str, presets: Mapping[str, Any], kinds: Mapping[str, type], own: Iterable[str]) -> Any:
    wanted = tuple(kinds.values())
    file = Path(name)
    if not file.is_file():
        old = _OLD_PRESET.fullmatch(file.name)
        renamed = f"{old[1]}:{old[2].replace('p', '.').replace('_', '-')}" if old else ""
        if renamed in presets:
            raise UsageError(f"--config={name}: presets have names now; use --config={renamed}")
        of_kind = [one for one in own if one.partition(":")[0] in kinds]
        of_kind += [one for one in presets if isinstance(presets[one](), wanted)]
        near = known_names.preset_meant(name, of_kind)
        nearest = f"the nearest preset is {near}. There" if near else "there"
        raise UsageError(f"--config={name} is neither a preset nor a file; {nearest} are {', '.join(of_kind)}")
    try:
        defined = runpy.run_path(str(file))
    except Exception as error:  # whatever a file of one's own raises, such as for a setting of an earlier version
        said = endings.told_by(error, in_file=str(file))
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown and (today := todays_name(unknown[1])) != unknown[1]:
            said += f"; this setting is called {today} now"
        raise UsageError(f"--config={name}: {said}; docs/architecture.md lists the modules") from error
    if "CONFIG" not in defined:
        raise UsageError(f"--config={name} defines no CONFIG, of type {' or '.join(one.__name__ for one in wanted)}")
    return defined["CONFIG"]


def overridden(config: Config, overrides: Sequence[tuple[str, str]] | None = None) -> Config:
    """Return the configuration with replaced settings, by default those of the command line.

    Args:
        overrides: (dotted name, value) pairs.

    Raises:
        UsageError: there is no such setting (the message names the nearest), or a value does not fit it.
    """
    wanted: _Tree = {}
    for name, text in _overrides if overrides is None else overrides:
        _put(wanted, config, name, text)
    return _replaced(config, wanted)


_Tree = dict[str, "tuple[str, Any] | _Tree"]
"""Replacements by field; a leaf is (text of the user, value)."""


def given_settings(config: Any) -> dict[str, Any]:
    """Return the settings that the command line gives, by their whole dotted names. Raises as `overridden`."""
    wanted: _Tree = {}
    for name, text in _overrides:
        _put(wanted, config, name, text)
    return dict(_leaves(wanted))


def _leaves(wanted: _Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, change in wanted.items():
        if isinstance(change, dict):
            yield from _leaves(change, f"{prefix}{name}.")
        elif _is_config(change[1]):
            for leaf in setting_names(change[1], f"{prefix}{name}."):
                yield leaf, attrgetter(leaf.removeprefix(f"{prefix}{name}."))(change[1])
        else:
            yield prefix + name, change[1]


def _put(wanted: _Tree, config: Any, name: str, text: str) -> None:
    for whole in _whole_names(config, name):
        _put_whole(wanted, config, whole, name, text)


def _put_whole(wanted: _Tree, config: Any, whole: str, name: str, text: str) -> None:
    *outer, last = whole.split(".")
    at = config
    for part in [*outer, last]:
        if not _is_config(at) or part not in {field.name for field in dataclasses.fields(at)}:
            every = list(setting_names(config))
            if (today := todays_name(name)) in every:
                raise UsageError(f"{_PREFIX}{name}: this setting is called {_PREFIX}{today} now")
            found = known_names.suggest(name, text, every, help_text.own_flags().keys(), as_flag=False)
            listed = f"--{_HELP_CONFIG} lists the settings"
            raise UsageError(f"{_PREFIX}{name}: there is no such setting; {found or listed}")
        holder, at = at, getattr(at, part)
    for part in outer:
        branch = wanted.setdefault(part, {})
        if not isinstance(branch, dict):
            raise UsageError(f"{_PREFIX}{name}: {_PREFIX}{part} is given as a whole too; give one of the two")
        wanted = branch
    annotation = typing.get_type_hints(type(holder))[last]
    # A model's class is its family's, which the configuration leaves open.
    allowed = wording(declared(type(holder))[last])
    value = _convert(text, type(at) if inspect.isabstract(annotation) else annotation, name, allowed)
    wanted[last] = (f"{_PREFIX}{name}={text}", value)


def _whole_names(config: Any, name: str) -> list[str]:
    """Return the full names of a setting that is written without its section: `lora.rank` is `sft.lora.rank` or
    `grpo.lora.rank`, or both in a configuration with both sections."""
    group, dot, _ = name.partition(".")
    parts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    holders = [part for part, value in parts.items() if _is_config(value) and _is_config(getattr(value, group, None))]
    return [f"{part}.{name}" for part in holders] if dot and group not in parts and holders else [name]


def _replaced(config: Any, wanted: _Tree) -> Any:
    """Return the configuration with all replacements applied together, so that settings are checked against each
    other."""
    changes = {}
    for name, change in wanted.items():
        changes[name] = _replaced(getattr(config, name), change) if isinstance(change, dict) else change[1]
    try:
        return dataclasses.replace(config, **changes)
    except SettingError as error:
        written = [change[0] for change in wanted.values() if not isinstance(change, dict)]
        raise UsageError(f"{' '.join(written) or _PREFIX + '.'.join(wanted)}: {error}") from None


def _is_config(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _convert(text: str, annotation: Any, name: str, allowed: str) -> Any:
    import msgspec  # here, so that --help does not wait for it

    from astra_jax.base.typed import convert_to

    readings: list[Any] = [_plain(text), text]
    if not text.startswith("["):  # a list needs no quotes: wandb,trackio is ["wandb", "trackio"]
        items = [one.strip() for one in text.split(",") if one.strip()]
        readings += [[*map(_plain, items)], items] if items else []
    for reading in readings:
        with contextlib.suppress(msgspec.ValidationError):
            return convert_to(reading, annotation)
    raise UsageError(f"{_PREFIX}{name}={shown(text)} is not allowed; use {allowed}")


def _plain(text: str) -> Any:
    """Return the value of JSON, or of Python's True, False and None; else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or of thousands of digits or brackets
        return {"True": True, "False": False, "None": None}.get(text, text)


def shown(text: str) -> str:
    """Return a value as an error message quotes it."""
    return text if len(text) <= 80 else f"{text[:60]}…"


def setting_names(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all leaves of a configuration."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if _is_config(value):
            yield from setting_names(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name
