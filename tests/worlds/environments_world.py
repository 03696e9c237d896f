"""Environment synthesis in small: a configuration, and the offline teacher with answers to be spoilt."""

from __future__ import annotations

from typing import Any

from synthesis.core.records import Answer, ToolSpec
from synthesis.core.stages import rng_for
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.proof import Case
from synthesis.offline.environment_author import HANDLERS

ONE_EACH = {"high": 1, "medium": 1, "low": 1}
CONFIG = EnvironmentsConfig(count=30, held_out_fraction=0.4, max_hops=2, max_branches=2, distractors=ONE_EACH)


class Rules:
    """The offline teacher of this pipeline; `changes` spoils the first answer of a kind for each request."""

    BY_RULES = True

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.feedback: list[tuple[str, str]] = []

    async def ask(self, answer: type, variables: Any, *, language: Any, seed: int) -> Any:
        self.feedback.append((answer.__name__, variables["feedback"]))
        given = HANDLERS[answer.__name__](variables, language, rng_for(seed, answer.__name__))
        change = self.changes.get(answer.__name__)
        return change(given, variables) if change else given


SPEC = ToolSpec(
    "capital", "Capital of a country.", {"type": "object", "properties": {"c": {"type": "string"}}, "required": ["c"]}
)
CASE = Case(1, {"c": "Japan"}, {"c": "Italy"}, Answer("Tokyo"))
HONEST = "T = {'Japan': 'Tokyo', 'Italy': 'Rome'}\ndef capital(c):\n    return {'capital': T[c]}\n"
