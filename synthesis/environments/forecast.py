"""Forecast of the number of records in each stage of a whole run, from the rates of a preview."""

from __future__ import annotations

from collections.abc import Mapping

from synthesis.environments.config import EnvironmentsConfig

STAGES = ("decompose", "validate", "implement", "merge", "distract", "verify")
WITH_TOOLS = ("augment", "validate", "distract", "verify")


def expected(config: EnvironmentsConfig, rates: Mapping[str, float], inputs: Mapping[str, int]) -> dict[str, float]:
    """Inputs of each stage, and under "" the environments.

    What `distinct` and `quality_percentile` take is not foreseen: a few records repeat none.

    Args:
        config: of the whole run.
        rates: the share of its inputs that each stage passes.
        inputs: of each stage in the preview.
    """
    found: dict[str, float] = {}
    left = float(config.count)
    for name in WITH_TOOLS if config.tools_of else STAGES:
        found[name] = left
        left *= rates.get(name, 1.0)
    return {**found, "": left}
