"""What `--help_config` prints: every setting of a configuration, its value, what it may be, and what it means."""

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
        name: dotted.
        value: what it is.
        allowed: what it may be, in words.
        meaning: what its class's docstring says of it.
    """

    name: str
    value: Any
    allowed: str
    meaning: str

    @property
    def written(self) -> str:
        """The value as it may stand behind the equals sign."""
        import msgspec  # here, so that --help does not wait for it

        value = self.value
        return value if isinstance(value, str) else "None" if value is None else msgspec.json.encode(value).decode()


def documented(kind: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of its fields, by name; the class itself has the last word."""
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
    """A paragraph for each setting.

    Args:
        prefix: what the command line writes before a setting's name.
    """
    return "\n".join(
        f"{prefix}{one.name}={one.written}\n{_indented(f'[{one.allowed}]')}\n{_indented(one.meaning)}"
        for one in settings(config)
    )


def _indented(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def settings(config: Any, prefix: str = "") -> Iterator[Setting]:
    """Each leaf of a configuration.

    Args:
        prefix: stands before the names.
    """
    kind = type(config)
    meanings = documented(kind)
    for name, annotation in declared(kind).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, value, wording(annotation), meanings[name])
