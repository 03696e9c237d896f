"""Flags that are numbers, with the bounds of settings.

SEED = number_flag("seed", 0, Seed, "Random seed.")
"""

from __future__ import annotations

from typing import Any

from absl import flags

from astra_jax.base.settings import SettingError, check, wording

flags.disclaim_key_flags()  # a flag belongs to the module that asks for it


class NumberParser(flags.ArgumentParser[Any]):
    """Parser of a number. It refuses a number that its declaration does not allow, NaN and infinity included.

    Args:
        declaration: annotation of a setting, for example `Count`.
        whole: the number is an integer.
    """

    def __init__(self, declaration: Any, *, whole: bool) -> None:
        super().__init__()
        self.declaration = declaration
        self.syntactic_help = wording(declaration)
        self._whole = whole

    def parse(self, argument: Any) -> int | float:
        """Return the number. Raises `ValueError`, to which absl adds the flag's name and value."""
        value: Any = argument
        if isinstance(argument, str):
            try:
                value = int(argument) if self._whole else float(argument)
            except ValueError:
                raise ValueError(f"use {self.syntactic_help}") from None
        try:
            check(self.declaration, value, "it")
        except SettingError:
            raise ValueError(f"use {self.syntactic_help}") from None
        return value

    def flag_type(self) -> str:
        """Return the type's name in absl's help."""
        return "int" if self._whole else "float"


def numbers_of(flag: flags.FlagHolder[Any], declaration: Any) -> list[Any]:
    """Return the numbers of a flag that is a list.

    Args:
        declaration: allowed values of each number.

    Raises:
        SettingError: an item is not a number, or not one that the declaration allows.
    """
    parser = NumberParser(declaration, whole=declaration.__origin__ is int)
    found = []
    for text in flag.value or []:
        try:
            found.append(parser.parse(text))
        except ValueError as error:
            raise SettingError(f"--{flag.name}={','.join(flag.value)}: {text!r} is not allowed; {error}") from None
    return found


def number_flag(name: str, default: int | float | None, declaration: Any, help: str) -> flags.FlagHolder[Any]:
    """Define a flag that is a number.

    Args:
        default: a number that the declaration allows, or None.
        declaration: allowed values, for example `Count` or `Annotated[float, Bound(above=0, most=1)]`.
        help: meaning of the flag; the bounds are appended.

    Raises:
        TypeError: the declaration is not of a number.
    """
    kind = getattr(declaration, "__origin__", declaration)
    if kind not in (int, float):
        raise TypeError(f"--{name}: {declaration} declares no number; use Count, Seconds or the like")
    parser = NumberParser(declaration, whole=kind is int)
    return flags.DEFINE(parser, name, default, help, serializer=flags.ArgumentSerializer())
