"""Every setting of every configuration: bounds on both sides, a closed vocabulary or none on purpose, a meaning.

Configurations are found, not listed: whatever derives from `Settings`, and what presets are made of.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from astra_jax.base.settings import Bound, OneOf, SettingError, Settings, declared
from astra_jax.models.model import Model
from astra_jax.models.qwen3.presets import Qwen3Config
from configs.quickstart import PROFILES
from configs.training import PRESETS
from launch.flags.cli import setting_names
from launch.flags.settings_list import documented, listing

ROOT = Path(__file__).parent.parent
LAYERS = ("launch", "configs", "astra_jax", "synthesis", "sandbox")
BAD_NUMBERS = (-1, 0, math.nan, math.inf, -math.inf, 1e308, 2**70, 10**400)
FREE_TEXT = {
    "TrainingConfig.compiler_options", "SFTConfig.compiler_options", "GRPOConfig.compiler_options",
    "EnvironmentsConfig.questions", "EnvironmentsConfig.knowledge", "EnvironmentsConfig.taxonomy",
    "EnvironmentsConfig.tools_of", "EnvironmentsConfig.partition_salt",
    "EnvironmentsConfig.documents", "EnvironmentsConfig.domains",
    "TrajectoriesConfig.tools", "TrajectoriesConfig.personas",
    "TrajectoriesConfig.system_prompt", "TrajectoriesConfig.allowed_tools",
    "TrajectoriesConfig.license", "EnvironmentsConfig.license",
    "TrajectoriesConfig.server_weights", "TrajectoriesConfig.sources",
    "EnvironmentsConfig.own_stages", "TrajectoriesConfig.own_stages",  # a run checks the stages' names as it starts
    "Partition.salt", "QuickstartConfig.pretrained",
    "OpenAITeacherConfig.base_url", "OpenAITeacherConfig.model", "OpenAITeacherConfig.api_key",
    "OpenAITeacherConfig.extra_body", "RoleSettings.extra_body", "RoleSettings.base_url", "RoleSettings.model",
    "RoleSettings.api_key", "OpenAITeacherConfig.given_as", "RoleSettings.given_as",
    "EndpointConfig.base_url", "EndpointConfig.model", "EndpointConfig.api_key",
    "ReachConfig.host", "ReachConfig.token", "SandboxServiceConfig.host", "SandboxServiceConfig.token",
    "ServingConfig.host", "ServingConfig.token", "ServingConfig.model", "ViewerConfig.host", "ViewerConfig.token",
    "SandboxConfig.python", "VLLMConfig.urls", "VLLMConfig.api_key", "VLLMConfig.run_id", "VLLMConfig.sync_key",
    "VLLMConfig.ca_file",
    "ReachConfig.tls_cert", "ReachConfig.tls_key", "SandboxServiceConfig.tls_cert", "SandboxServiceConfig.tls_key",
    "ServingConfig.tls_cert", "ServingConfig.tls_key", "ViewerConfig.tls_cert", "ViewerConfig.tls_key",
    "Decoding.extra", "RunConfig.extra", "LoRA.targets", "EpisodeConfig.reward",
}  # fmt: skip
"""Settings that may be any text: names, files, addresses, secrets."""


@cache
def sources() -> dict[str, ast.Module]:
    """Our modules that can be imported here."""
    files = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py")) if "plugin" not in path.parts]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in files
    }


@cache
def configurations() -> list[type[Settings]]:
    """All that derive from `Settings`, wherever they are; an abstract one is in those that derive from it."""
    classes = [
        (module, node.name, {ast.unparse(base) for base in node.bases})
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.bases
    ]
    known, before = {"Settings"}, 0
    homes: set[str] = set()
    while len(known) > before:
        before = len(known)
        for module, name, bases in classes:
            if known & bases:
                known.add(name)
                homes.add(module)
    for module in homes:
        importlib.import_module(module)
    found: list[type[Settings]] = []
    queue: list[type[Settings]] = [Settings]
    while queue:
        below = [one for one in queue.pop().__subclasses__() if one.__module__ in homes]
        found += below
        queue += below
    return sorted({one for one in found if not inspect.isabstract(one)}, key=lambda one: one.__name__)


def leaves(annotation: Any, limits: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """What an annotation is made of: types and vocabularies, each with what is declared about it."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from leaves(parts[0], (*limits, *annotation.__metadata__))
    elif origin is Literal or origin is None:
        yield annotation, limits
    else:
        for part in parts:
            if part not in (types.NoneType, ...):
                yield from leaves(part, limits if origin in (typing.Union, types.UnionType) else ())


def example(annotation: Any, limits: tuple[Any, ...] = ()) -> Any:
    """A value that an annotation allows."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return example(parts[0], (*limits, *annotation.__metadata__))
    if origin in (typing.Union, types.UnionType):
        return example(next(part for part in parts if part is not types.NoneType), limits)
    if origin is tuple:
        return tuple(example(part) for part in parts if part is not ...)
    if origin is Literal:
        return parts[0]
    if annotation in (int, float):
        bounds = [limit for limit in limits if isinstance(limit, Bound)]
        return next(annotation(one) for one in (2, 1, 0.5, 0) if all(bound.holds(one) for bound in bounds))
    if annotation is bool:
        return False
    if annotation is str:
        return next((limit.all()[0] for limit in limits if isinstance(limit, OneOf)), "http://127.0.0.1:8000/v1")
    return made(annotation)


def made(kind: type) -> Any:
    """A configuration of this class, or one that derives from it: its defaults, and examples of what has none."""
    if kind is Model:
        kind = Qwen3Config
    kind = kind if not inspect.isabstract(kind) else next(one for one in configurations() if issubclass(one, kind))
    fields = [one for one in dataclasses.fields(kind) if one.init]
    wanted = {
        one.name: example(declared(kind)[one.name])
        for one in fields
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    }
    return kind(**wanted)


def bad_values(annotation: Any, value: Any) -> Iterator[Any]:
    """For a number, or what holds numbers: everything that a number should not be, in each place."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from bad_values(parts[0], value)
    elif origin in (typing.Union, types.UnionType):
        for part in parts:
            yield from bad_values(part, value)
    elif origin is tuple:
        elements = [part for part in parts if part is not ...]
        if not any(leaf in (int, float) for part in elements for leaf, _ in leaves(part)):
            return
        for place, part in enumerate(elements):
            rest = [example(one) for one in elements]
            yield from ((*rest[:place], bad, *rest[place + 1 :]) for bad in bad_values(part, rest[place]))
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield from ({example(parts[0]): bad} for bad in bad_values(parts[1], None))
    elif annotation in (int, float):
        yield from (*BAD_NUMBERS, True, "many", *([] if annotation is float else [1.5]))
    elif dataclasses.is_dataclass(annotation) or not declared(annotation):
        return
    else:  # a struct, which does not check itself
        for name, inner in declared(annotation).items():
            for bad in bad_values(inner, None):
                whole = {one: example(part) for one, part in declared(annotation).items()}
                yield annotation(**(whole | {name: bad}))


def numbers_in(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple):
        return list(value)
    if hasattr(value, "__struct_fields__"):
        return [getattr(value, name) for name in value.__struct_fields__]
    return [value]


def within(value: Any, annotation: Any) -> bool:
    """Whether a declaration allows a number; told apart from `Bound.holds`, which is under test."""
    for kind, limits in leaves(annotation):
        for bound in limits:
            if kind in (int, float) and isinstance(bound, Bound):
                assert isinstance(value, kind if kind is int else int | float), (value, annotation)
                lowest = bound.least if bound.least is not None else bound.above
                highest = bound.most if bound.most is not None else bound.below
                assert lowest is not None and highest is not None
                return lowest <= value <= highest and value not in (bound.above, bound.below)
    return False


def test_bad_numbers_are_refused_by_name_unless_they_are_declared() -> None:
    wrong = []
    for kind in configurations():
        config = made(kind)
        for name, annotation in declared(kind).items():
            for bad in bad_values(annotation, getattr(config, name)):
                place = f"{kind.__name__}.{name}={bad!r}"
                try:
                    changed = dataclasses.replace(config, **{name: bad})
                except SettingError as error:
                    if name not in str(error) or not re.search(r"use |give |must |choose ", str(error)):
                        wrong.append(f"{place}: {error}")
                    continue
                if getattr(changed, name) is not bad or not all(within(one, annotation) for one in numbers_in(bad)):
                    wrong.append(f"{place} is taken")
    assert len(configurations()) > 30 and not wrong, "\n".join(wrong)


def test_every_number_is_bounded_on_both_sides() -> None:
    for kind in configurations():
        for name, annotation in declared(kind).items():
            for leaf, limits in leaves(annotation):
                if leaf not in (int, float):
                    continue
                bounds = [limit for limit in limits if isinstance(limit, Bound)]
                assert len(bounds) == 1, f"{kind.__name__}.{name}: declare what it may be, for example with Count"
                (bound,) = bounds
                assert (bound.least is None) != (bound.above is None), f"{kind.__name__}.{name} has no lower bound"
                assert (bound.most is None) != (bound.below is None), f"{kind.__name__}.{name} has no upper bound"


def test_texts_have_a_vocabulary_or_are_free_on_purpose() -> None:
    free = set()
    for kind in configurations():
        for name, annotation in declared(kind).items():
            for leaf, limits in leaves(annotation):
                vocabulary = next((limit.all() for limit in limits if isinstance(limit, OneOf)), None)
                if typing.get_origin(leaf) is Literal:
                    vocabulary = [one for one in typing.get_args(leaf) if isinstance(one, str)]
                if leaf is str and vocabulary is None:
                    free.add(f"{kind.__name__}.{name}")
                if vocabulary:
                    right = vocabulary[-1]
                    with pytest.raises(SettingError, match=rf"{name}.* is '{right}x'; use .*nearest is {right}\)"):
                        dataclasses.replace(made(kind), **{name: _holding(annotation, f"{right}x")})
    assert free <= FREE_TEXT, f"{sorted(free - FREE_TEXT)}: give OneOf(names) or a Literal, or list it as free"


def _holding(annotation: Any, text: str) -> Any:
    """A text in the shape of the annotation: alone, in a tuple, as a key."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _holding(parts[0], text)
    if origin in (typing.Union, types.UnionType):
        return _holding(next(part for part in parts if part is not types.NoneType), text)
    if origin is tuple:
        return (text,)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {text: example(parts[1])}
    return text


def test_whatever_is_called_a_config_is_one() -> None:
    known = {one.__name__ for one in configurations()}
    named = {
        node.name: module
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
    }
    assert named.keys() <= known, {name: named[name] for name in named.keys() - known}


def test_presets_are_made_of_configurations_and_can_be_listed() -> None:
    def unchecked(config: Any) -> list[str]:
        """The classes that a preset is made of and that are no `Settings`: nothing checks their fields."""
        found = [] if isinstance(config, Settings) else [type(config).__name__]
        parts = (getattr(config, name) for name in declared(type(config)))
        return found + [one for part in parts if dataclasses.is_dataclass(part) for one in unchecked(part)]

    wrong = []
    for preset, make in (PRESETS | PROFILES).items():
        config = make()
        wrong += [f"{preset}: {name}" for name in unchecked(config)]
        text = listing(config, "--config.")
        listed = {match[1] for match in re.finditer(r"^--config\.(\S+?)=.*\n    \[\S.*\S", text, re.M)}
        wrong += [f"{preset}: {name} is not listed" for name in setting_names(config) if name not in listed]
    assert not wrong, "\n".join(wrong)


def test_no_secret_is_shown_with_its_setting() -> None:
    """Errors, logs and what Ray keeps of a task show configurations as `repr` does."""
    secret = re.compile(r"(^|_)(key|token|password|secret)$")
    others = {"tls_key", "experts_per_token"}  # the name of a file, a number
    shown = {
        f"{kind.__name__}.{one.name}"
        for kind in configurations()
        for one in dataclasses.fields(kind)
        if secret.search(one.name) and one.name not in others and one.repr
    }
    assert not shown
    assert any(secret.search(one.name) for kind in configurations() for one in dataclasses.fields(kind))


def test_every_setting_is_documented() -> None:
    for kind in configurations():
        missing = declared(kind).keys() - documented(kind).keys()
        assert not missing, f"{kind.__name__}: its Attributes say nothing of {', '.join(sorted(missing))}"
        for name, text in documented(kind).items():
            assert len(text) > 5, f"{kind.__name__}.{name}: {text!r}"


def test_rematerialisation_goes_by_the_names_of_settings() -> None:
    from astra_jax.models.decoder import REMAT_POLICIES
    from astra_jax.models.remat import REMATS

    assert tuple(REMAT_POLICIES) == REMATS
