"""Journals of version 0.1, whose stages were named after all settings of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from synthesis.core.compat import former_setting
from synthesis.core.journal import Journal
from synthesis.core.records import ToolEnvironment
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.decompose import QuestionSeed
from synthesis.pipeline.pipeline_run import resolved
from synthesis.pipeline.stage_keys import digest_of

_NOT_NAMED = {"concurrency": 0, "questions": "", "knowledge": "", "taxonomy": "", "tools_of": ""}
_LATER = ("documents", "license", "stateful_share", "informative_joins", "own_stages")
"""Settings that were added later: version 0.1 had none of them."""


def old_prefix(
    journal: Journal,
    config: EnvironmentsConfig,
    seed: int,
    embedder: str,
    seeds: Sequence[QuestionSeed],
    given: Mapping[str, ToolEnvironment],
) -> str:
    """Return the prefix of the stages of this run if version 0.1 started it in this journal, else ""."""
    if not journal.has_stage("environments/"):
        return ""
    settings = {
        former_setting(key): value
        for key, value in resolved(config).items()
        if (key not in _LATER or value) and key != "stop_after"
    }
    what = [{**settings, **_NOT_NAMED}, seed, embedder, seeds, sorted(given.items())]
    prefix = f"environments/{digest_of(what)[:8]}/"
    return prefix if journal.has_stage(prefix) else ""
