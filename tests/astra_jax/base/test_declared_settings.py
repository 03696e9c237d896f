"""Settings are what they declare to be: bounds, vocabularies, types, and what they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import pytest

from astra_jax.base.settings import (
    Amount,
    Bound,
    Count,
    CountOrZero,
    OneOf,
    Port,
    Seconds,
    Seed,
    SettingError,
    Settings,
    Share,
    wording,
)


@dataclass(frozen=True)
class Plain:
    """No configuration, but part of one."""

    level: Annotated[int, Bound(least=1, most=5)] = 3


@dataclass(frozen=True)
class Inner(Settings):
    rate: Annotated[float, Bound(above=0, below=1)] = 0.5


@dataclass(frozen=True)
class Outer(Settings):
    count: Count = 1
    least: CountOrZero | None = None
    ratio: Annotated[float | None, Bound(least=0, most=1)] = None
    share: Share = 0.5
    pair: tuple[Share, Share] | None = None
    sizes: tuple[Count, ...] = (1, 2)
    weights: Mapping[Literal["en", "zh"], Amount] = None  # type: ignore[assignment]
    kind: Literal["red", "green"] = "red"
    level: Literal[1, 2] = 1
    name: Annotated[str, OneOf(lambda: ["lake", "river"])] = "lake"
    flag: bool = False
    groups: Annotated[int, Bound(least=2, most=64, why="advantages are relative to the group")] = 8
    plain: Plain = Plain()
    inner: Inner = Inner()

    def __post_init__(self) -> None:
        if self.weights is None:
            object.__setattr__(self, "weights", {"en": 1.0})
        super().__post_init__()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("count", 0, "Outer.count is 0; use a whole number from 1 to 2,147,483,647"),
        ("count", True, "Outer.count is True; use a whole number"),
        ("count", 1.0, r"Outer.count is 1\.0; use a whole number"),
        ("count", None, "Outer.count is None; use a whole number"),
        pytest.param("count", 10**5_000, "Outer.count is an integer of thousands of digits; use", id="digits"),
        ("least", -1, "Outer.least is -1; use a whole number from 0 to 2,147,483,647, or None"),
        ("ratio", 2.0, "Outer.ratio is 2.0; use a number from 0 to 1, or None"),
        ("share", math.nan, "Outer.share is nan; use a number from 0 to 1"),
        ("share", 10**400, "Outer.share is 1000000.*; use a number from 0 to 1"),
        ("share", "much", "Outer.share is 'much'; use a number from 0 to 1"),
        ("pair", (0.5, 2.0), r"Outer.pair\[1\] is 2\.0; use a number from 0 to 1"),
        ("pair", (0.5,), r"Outer.pair is \(0\.5,\); use \(a number"),
        ("pair", (0.5, 0.5, 0.5), r"Outer.pair is \(0\.5, 0\.5, 0\.5\); use \(a number"),
        ("sizes", (4, 0), r"Outer.sizes\[1\] is 0"),
        ("sizes", 4, "Outer.sizes is 4; use a list, each a whole number"),
        ("weights", {"en": math.inf}, r"Outer.weights\['en'\] is inf; use a number from 0"),
        ("weights", {"fr": 1.0}, r"a key of Outer.weights is 'fr'; use one of en, zh"),
        ("kind", "gren", r"Outer.kind is 'gren'; use one of red, green \(the nearest is green\)"),
        ("level", True, "Outer.level is True; use one of 1, 2"),
        ("name", "rivers", r"Outer.name is 'rivers'; use one of lake, river \(the nearest is river\)"),
        ("flag", 1, "Outer.flag is 1; use true or false"),
        ("groups", 1, "Outer.groups is 1; use a whole number from 2 to 64: advantages are relative to the group"),
        ("plain", Plain(9), "Outer.plain.level is 9; use a whole number from 1 to 5"),
        ("inner", Plain(), r"Outer.inner is Plain\(level=3\); use {rate: a number above 0 and below 1}"),
    ],
)
def test_what_is_not_declared_is_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(SettingError, match=f"^{message}"):
        replace(Outer(), **{field: value})


@pytest.mark.parametrize("value", [0.0, 1.0, -1, math.nan, math.inf, -math.inf, 1e308, 2**70])
def test_open_ends_are_not_within(value: float) -> None:
    with pytest.raises(SettingError, match="^Inner.rate is .*; use a number above 0 and below 1$"):
        Inner(value)
    assert Bound(least=-1).holds(value) == (math.isfinite(value) and value >= -1)


def test_what_is_declared_passes() -> None:
    made = Outer(least=0, share=1, pair=(0.0, 1.0), weights={"zh": 0.0}, kind="green", name="river", groups=2)
    assert made.share == 1 and made.least == 0


def test_declarations_in_words() -> None:
    assert wording(Port) == "a whole number from 0 to 65,535"
    assert wording(Seed | None) == "a whole number from 0 to 4,294,967,295, or None"
    assert wording(Seconds) == "a number above 0 and at most 31,622,400"
    assert wording(Mapping[str, Share]) == "a mapping from a text to a number from 0 to 1"
    assert wording(Annotated[str, OneOf(map(str, range(40)))]) == "one of 40 names"
