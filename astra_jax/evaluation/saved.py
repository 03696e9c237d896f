"""A finished evaluation on disk: every scored item with what was asked, of whom, and how."""

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
"""Of the dataset, in the evaluation's workdir."""


class SuiteRun(msgspec.Struct, frozen=True, kw_only=True, rename={"info": "about"}):
    """What was run of a suite.

    Attributes:
        info: what the suite declares, the paper's decodings among it; `about` on the card.
        decodings: as they were used, by category.
        totals: how many items each category has, run or not.
    """

    info: SuiteInfo
    decodings: Mapping[str, Decoding]
    totals: Mapping[str, int]

    @classmethod
    def of(cls, suite: Suite, decodings: Mapping[str, Decoding]) -> SuiteRun:
        """Of a prepared suite."""
        totals = {one.name: len(suite.ids(one.name)) for one in suite.info.categories}
        return cls(info=suite.info, decodings=dict(decodings), totals=totals)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What tables and comparisons are made of.

    Attributes:
        model: the scored model's served name.
        suites: by name, in the order of the table.
        results: of all of them.
        roles: served names of the models that the suites asked besides; of every role that a suite needs.
        config: the run's resolved configuration, as JSON.

    Raises:
        EvaluationError: a role is missing; a score is also its user simulator's or judge's.
    """

    model: str
    suites: Mapping[str, SuiteRun]
    results: tuple[ItemResult, ...]
    roles: Mapping[Role, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for run in self.suites.values():
            if missing := run.info.needs - self.roles.keys():
                raise EvaluationError(
                    f"the evaluation does not say which model was the {' and the '.join(sorted(missing))} of "
                    f"{run.info.name}; name it in roles"
                )


class _Card(msgspec.Struct):
    """The part of the dataset's card that is ours; a list keeps the suites' order, which a sorted card would lose."""

    model: str
    suites: list[SuiteRun]
    roles: dict[Role, str]
    config: dict[str, Any]


def save_evaluation(workdir: Path, evaluation: Evaluation) -> Path:
    """Write the dataset `results` in an evaluation's workdir, whole or not at all, replacing an older one."""
    runs = list(evaluation.suites.values())
    card = _Card(evaluation.model, runs, dict(evaluation.roles), dict(evaluation.config))
    folder = workdir / FOLDER
    write_dataset(folder, ItemResult, evaluation.results, card=msgspec.to_builtins(card))
    return folder


def load_evaluation(workdir: Path) -> Evaluation:
    """Read what `save_evaluation` wrote.

    Raises:
        DatasetError: there is none, or it is corrupt.
        EvaluationError: its card does not say what was run.
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
    )
