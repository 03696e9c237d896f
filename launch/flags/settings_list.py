"""Text of `--help_config`: every setting of a configuration with its value, allowed values and meaning."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from astra_jax.base.settings import declared, wording

_SECTION = re.compile(r"^Attributes\b.*:$")
_ENTRY = re.compile(r"^(\w+(?:, \w+)*): +(.*)$")
_WIDTH = 110


@dataclass(frozen=True)
class Setting:
    """A leaf of a configuration.

    Attributes:
        name: dotted name.
        value: current value.
        allowed: allowed values, in words.
        meaning: description in the docstring of the setting's class.
    """

    name: str
    value: Any
    allowed: str
    meaning: str

    @property
    def written(self) -> str:
        """Return the value as the command line accepts it after the equals sign."""
        import msgspec  # here, so that --help does not wait for it

        value = self.value
        return value if isinstance(value, str) else "None" if value is None else msgspec.json.encode(value).decode()


def documented(kind: type) -> dict[str, str]:
    """Return descriptions by field name, from the docstrings of a class and its bases; the class itself takes
    precedence."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        found |= _entries(one.__dict__.get("__doc__") or "")
    return {name: found[name] for name in declared(kind) if name in found}


def _entries(text: str) -> dict[str, str]:
    lines = iter(textwrap.dedent(text.partition("\n")[2]).splitlines())
    if not any(_SECTION.match(line) for line in lines):  # which leaves those behind it
        return {}
    section: list[str] = []
    for line in lines:
        if line and not line.startswith(" "):
            break
        section.append(line)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in textwrap.dedent("\n".join(section)).splitlines():
        if entry := _ENTRY.match(line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def listing(config: Any, prefix: str) -> str:
    """Return the help text: a paragraph for each setting.

    Args:
        prefix: prefix of a setting's name on the command line.
    """
    return "\n".join(
        f"{prefix}{one.name}={one.written}\n{_indented(f'[{one.allowed}]')}\n{_indented(one.meaning)}"
        for one in settings(config)
    )


def _indented(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def settings(config: Any, prefix: str = "") -> Iterator[Setting]:
    """Yield each leaf of a configuration.

    Args:
        prefix: prefix of the names.
    """
    kind = type(config)
    meanings = documented(kind)
    for name, annotation in declared(kind).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, value, wording(annotation), meanings[name])
