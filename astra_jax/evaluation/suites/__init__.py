"""Suites, one file for each benchmark: its declaration, and how one of its items is run."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from astra_jax.evaluation.suite import EvaluationError, Suite, SuiteContext

_CLASSES = {
    "bfcl_v3_mt": "bfcl:BFCL",
    "tau2": "tau2:Tau2",
    "tau2_v0_2": "tau2:Tau2Paper",
    "acebench": "acebench:AceBench",
    "acebench_zh": "acebench:AceBenchZh",
    "aime": "aime:Aime",
    "environments": "held_out:Environments",
}
"""Module and class by the suite's name in `--suites`; imported on demand."""
_SOURCES = {"acebench_zh": "acebench"}
"""Suites that use another suite's source."""
_WITHOUT_SOURCE = {"bfcl_v3_mt"}


def sources_of(names: Iterable[str]) -> set[str]:
    """Return the keys of `SuiteContext.sources` that these suites need.

    Raises:
        EvaluationError: there is no such suite.
    """
    return {_SOURCES.get(name, name) for name in map(_known, names) if name not in _WITHOUT_SOURCE}


def _known(name: str) -> str:
    if name not in _CLASSES:
        raise EvaluationError(f"there is no suite {name!r}; the suites are {', '.join(_CLASSES)}")
    return name


def make(name: str, context: SuiteContext) -> Suite:
    """Return a suite by its name.

    Raises:
        EvaluationError: there is no such suite, or it asks a model that `context.models` does not have.
    """
    module, _, cls = _CLASSES[_known(name)].partition(":")
    suite: Suite = getattr(import_module(f"{__name__}.{module}"), cls)(context)
    if missing := sorted(suite.info.needs - context.models.keys()):
        role = missing[0]
        raise EvaluationError(f"{name} needs a model for the {role}: give --{role}_url and --{role}_model")
    return suite
