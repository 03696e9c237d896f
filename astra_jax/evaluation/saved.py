"""A finished evaluation on disk: every scored item with its conversation, models and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.suite import Decoding, EvaluationError, Role, Suite, SuiteInfo
from synthesis.core.compat import convert_stored
from synthesis.core.datasets import read_card, read_dataset, write_dataset

FOLDER = "results"
"""Folder of the dataset in the evaluation's workdir."""


class SuiteRun(msgspec.Struct, frozen=True, kw_only=True, rename={"info": "about"}):
    """The part of a suite that was run.

    Attributes:
        info: declaration of the suite, with the paper's decodings; `about` on the card.
        decodings: the decodings that were used, by category.
        totals: number of items of each category, run or not.
    """

    info: SuiteInfo
    decodings: Mapping[str, Decoding]
    totals: Mapping[str, int]

    @classmethod
    def of(cls, suite: Suite, decodings: Mapping[str, Decoding]) -> SuiteRun:
        """Return the run of a prepared suite."""
        totals = {one.name: len(suite.ids(one.name)) for one in suite.info.categories}
        return cls(info=suite.info, decodings=dict(decodings), totals=totals)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of an evaluation, from which tables and comparisons are made.

    Attributes:
        model: served name of the scored model.
        suites: suites by name, in the order of the table.
        results: results of all suites.
        roles: served names of the other models that the suites asked, for every role that a suite needs.
        config: the run's resolved configuration, as JSON.
        weights: of a model that the program served itself: `{"folder", "step", "sha256"}`. None: an endpoint's.

    Raises:
        EvaluationError: a role is missing, or a scored model is also its user simulator or judge.
    """

    model: str
    suites: Mapping[str, SuiteRun]
    results: tuple[ItemResult, ...]
    roles: Mapping[Role, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for run in self.suites.values():
            if missing := run.info.needs - self.roles.keys():
                raise EvaluationError(
                    f"the evaluation does not name the model of the {' and the '.join(sorted(missing))} of "
                    f"{run.info.name}; name it in roles"
                )


class _Card(msgspec.Struct):
    """The evaluation's part of the dataset's card. A list keeps the suites' order, which a sorted card would lose."""

    model: str
    suites: list[SuiteRun]
    roles: dict[Role, str]
    config: dict[str, Any]
    weights: dict[str, Any] | None = None


def save_evaluation(workdir: Path, evaluation: Evaluation) -> Path:
    """Write the dataset `results` in an evaluation's workdir atomically, replacing an older one."""
    runs = list(evaluation.suites.values())
    card = _Card(evaluation.model, runs, dict(evaluation.roles), dict(evaluation.config))
    card.weights = None if evaluation.weights is None else dict(evaluation.weights)
    folder = workdir / FOLDER
    write_dataset(folder, ItemResult, evaluation.results, card=msgspec.to_builtins(card))
    return folder


def load_evaluation(workdir: Path) -> Evaluation:
    """Read an evaluation that `save_evaluation` wrote.

    Raises:
        DatasetError: there is none, or it is corrupt.
        EvaluationError: its card does not describe the run.
    """
    folder = workdir / FOLDER
    results = read_dataset(folder, ItemResult)
    try:
        card = convert_stored(read_card(folder), _Card)
    except msgspec.ValidationError as error:
        raise EvaluationError(
            f"the card of {folder} is not an evaluation's ({error}); evaluate again with this version"
        ) from None
    return Evaluation(
        model=card.model,
        suites={run.info.name: run for run in card.suites},
        results=tuple(results),
        roles=card.roles,
        config=card.config,
        weights=card.weights,
    )
