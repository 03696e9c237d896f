"""What `--help_config` prints: every setting of a configuration, its value, what it may be, and what it means."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from sandbox.settings import declared, wording

_SECTION = re.compile(r"^Attributes\b.*:$")
_ENTRY = re.compile(r"^(\w+(?:, \w+)*): +(.*)$")
_WIDTH = 110


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
    paragraphs = []
    for name, value, allowed, meaning in _settings(config, ""):
        paragraphs.append(f"{prefix}{name}={_written(value)}\n{_indented(f'[{allowed}]')}\n{_indented(meaning)}")
    return "\n".join(paragraphs)


def _indented(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def _settings(config: Any, prefix: str) -> Iterator[tuple[str, Any, str, str]]:
    """Of each leaf: its dotted name, value, what it may be, what it means."""
    kind = type(config)
    meanings = documented(kind)
    for name, annotation in declared(kind).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value, wording(annotation), meanings[name]


def _written(value: Any) -> str:
    """As it may stand behind the equals sign."""
    import msgspec  # here, so that --help does not wait for it

    return value if isinstance(value, str) else "None" if value is None else msgspec.json.encode(value).decode()
