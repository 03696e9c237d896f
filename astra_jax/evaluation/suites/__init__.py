"""One file a benchmark: what it declares, and how one of its items is run."""

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
"""Module and class by the suite's name in `--suites`; imported when asked for."""
_SOURCES = {"acebench_zh": "acebench"}
"""Whose source another suite's is."""
_WITHOUT_SOURCE = {"bfcl_v3_mt"}


def sources_of(names: Iterable[str]) -> set[str]:
    """The names under which `SuiteContext.sources` has what these suites want.

    Raises:
        EvaluationError: there is no such suite.
    """
    return {_SOURCES.get(name, name) for name in map(_known, names) if name not in _WITHOUT_SOURCE}


def _known(name: str) -> str:
    if name not in _CLASSES:
        raise EvaluationError(f"there is no suite {name!r}; the suites are {', '.join(_CLASSES)}")
    return name


def make(name: str, context: SuiteContext) -> Suite:
    """A suite by its name.

    Raises:
        EvaluationError: there is no such suite, or it asks a model that `context.models` does not have.
    """
    module, _, cls = _CLASSES[_known(name)].partition(":")
    suite: Suite = getattr(import_module(f"{__name__}.{module}"), cls)(context)
    if missing := sorted(suite.info.needs - context.models.keys()):
        role = missing[0]
        raise EvaluationError(f"{name} needs a model for the {role}: give --{role}_url and --{role}_model")
    return suite
