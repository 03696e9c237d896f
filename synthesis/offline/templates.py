"""Request templates for the real MCP servers (time, git): wordings with slots, and the calls that answer them.

They are for these servers what the grammar is for the fact tools: `fill` writes a request, `match` reads it back. They
are in `templates.toml`. Its patterns allow a space behind each comma and colon of a result, as older journals have it.
"""

from __future__ import annotations

import functools
import random
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synthesis.core.records import Language
from synthesis.pipeline.languages import PACKAGED_LANGUAGES

# Zones without daylight saving time: what is right in January is right in July.
_ZONES = (
    "UTC", "Asia/Tokyo", "Asia/Seoul", "Asia/Shanghai", "Asia/Singapore", "Asia/Bangkok", "Asia/Kolkata",
    "Asia/Kathmandu", "Asia/Dubai", "Asia/Tashkent", "Africa/Nairobi", "Africa/Lagos", "Africa/Johannesburg",
    "America/Bogota", "America/Lima", "America/Phoenix", "Australia/Brisbane", "Pacific/Honolulu",
)  # fmt: skip
_REVISIONS = (
    "v0.1", "v0.2", "v1.0", "feature/charts", "feature/export", "fix/encoding", "docs/install", "HEAD", "HEAD~1",
    "HEAD~2", "HEAD~3", "HEAD~4",
)  # fmt: skip
_TIMES = tuple(f"{hour:02d}:{minute:02d}" for hour in range(24) for minute in (0, 10, 15, 20, 30, 40, 45, 50))
_SLOTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "zone": (_ZONES, r"[A-Za-z_]+(?:/[A-Za-z_]+)?"),
    "time": (_TIMES, r"\d\d:\d\d"),
    "revision": (_REVISIONS, r"[\w./~]+"),
}
"""Slot kind → its values, and the pattern that reads one. The slots `zone` and `zone_b` are both of the kind `zone`."""


@dataclass(frozen=True)
class TemplateStep:
    """One call. In `arguments`, `{slot}` is a slot's value and `{0}` the value of step 0; `reads` finds its own."""

    tool: str
    arguments: Mapping[str, str | int]
    reads: str
    phrase: Mapping[Language, str]
    terminal: bool = True

    def needs(self) -> list[int]:
        """The earlier steps whose values the arguments use."""
        return [int(index) for value in self.arguments.values() for index in re.findall(r"\{(\d+)\}", str(value))]


@dataclass(frozen=True)
class Template:
    id: str
    wordings: Mapping[Language, Sequence[str]]
    steps: tuple[TemplateStep, ...]

    @property
    def chain(self) -> list[str]:
        """The tools in order."""
        return [step.tool for step in self.steps]

    @property
    def dependent(self) -> bool:
        """True: the steps form a chain, as opposed to independent calls."""
        return all(step.needs() for step in self.steps[1:])

    @property
    def slots(self) -> list[str]:
        return list(dict.fromkeys(re.findall(r"\{([a-z_]+)\}", self.wordings["en"][0])))


def _template(given: Mapping[str, Any]) -> Template:
    steps = [
        TemplateStep(one["tool"], one["arguments"], one["reads"], _by_language(one), one.get("terminal", True))
        for one in given["steps"]
    ]
    return Template(given["id"], _by_language(given), tuple(steps))


def _by_language(given: Mapping[str, Any]) -> dict[Language, Any]:
    return {language: given[language] for language in PACKAGED_LANGUAGES}


TEMPLATES = tuple(
    _template(one) for one in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["templates"]
)


def usable(tools: Sequence[str]) -> list[Template]:
    """The templates whose tools all belong to a server."""
    return [template for template in TEMPLATES if set(template.chain) <= set(tools)]


def draw_slots(template: Template, rng: random.Random, keep: Callable[[str], bool]) -> dict[str, str]:
    """Different values for the template's slots.

    Raises:
        ValueError: `keep` leaves too few values.
    """
    values: dict[str, str] = {}
    for slot in template.slots:
        every, _ = _SLOTS[slot.partition("_")[0]]
        free = [value for value in every if value not in values.values() and keep(value)]
        if not free:
            raise ValueError(f"template {template.id}: no value is left for {slot}")
        values[slot] = rng.choice(free)
    return values


def fill(template: Template, slots: Mapping[str, str], rng: random.Random, language: Language) -> str:
    """Return a request; `rng` chooses the wording."""
    return rng.choice(template.wordings[language]).format_map(slots)


def match(text: str, language: Language) -> tuple[Template, dict[str, str]] | None:
    """The template and the slots of a request: the inverse of `fill`. None when no template has these words."""
    for pattern, template in _patterns(language):
        if found := pattern.fullmatch(text):
            return template, found.groupdict()
    return None


@functools.cache
def _patterns(language: Language) -> list[tuple[re.Pattern[str], Template]]:
    patterns = []
    for template in TEMPLATES:
        for wording in template.wordings[language]:
            parts = re.split(r"\{([a-z_]+)\}", wording)
            texts = [
                f"(?P<{part}>{_SLOTS[part.partition('_')[0]][1]})" if index % 2 else re.escape(part)
                for index, part in enumerate(parts)
            ]
            patterns.append((re.compile("".join(texts), re.ASCII), template))
    return patterns
