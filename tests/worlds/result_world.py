"""What the tests of evaluation tables share: a benchmark of four categories, and runs of it with known scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.saved import Evaluation, SuiteRun
from astra_jax.evaluation.suite import Category, Decoding, SuiteInfo

DECODING = Decoding(temperature=0.6, trials=1)
CATEGORIES = (
    Category(name="base", title="Base", decoding=DECODING),
    Category(name="miss_func", title="Missing function", decoding=DECODING),
    Category(name="miss_param", title="Missing parameter", decoding=DECODING),
    Category(name="long_context", title="Long context", decoding=DECODING),
)
BFCL = SuiteInfo(
    name="bfcl_v3_mt",
    title="BFCL v3 multi-turn",
    harness="bfcl-eval 2026.3.23",
    license="Apache-2.0",
    data_sha256={"base.json": "0123abcd"},
    categories=CATEGORIES,
    headline={"Overall": tuple(one.name for one in CATEGORIES)},
    notes=("Simulators are made anew for each trial.",),
)

Scores = Mapping[str, Sequence[Sequence[float]]]
"""By category: by item: the score of each trial."""


def result(category: str, item: str, trial: int, score: float, **more) -> ItemResult:
    """A run of two steps and one call for each of two sub-tasks."""
    defaults = dict(
        suite=BFCL.name, finish="answered", sub_tasks=2, steps=4, calls=2, prompt_tokens=100, completion_tokens=60
    )
    return ItemResult(category=category, item=item, trial=trial, score=score, **(defaults | more))


def evaluation(
    scores: Scores, *, model: str = "tiny", total: int | None = None, info: SuiteInfo = BFCL, **more
) -> Evaluation:
    """A run of the categories that `scores` has, with as many trials as the first item of each."""
    names = [one.name for one in info.categories if one.name in scores]
    info = replace(
        info,
        categories=tuple(one for one in info.categories if one.name in names),
        headline={"Overall": tuple(names)},
    )
    results = [
        result(
            category,
            f"{category}_{item}",
            trial,
            score,
            problem="" if score == 1 else f"turn {item}: the state differs",
        )
        for category in names
        for item, trials in enumerate(scores[category])
        for trial, score in enumerate(trials)
    ]
    run = SuiteRun(
        info=info,
        decodings={name: replace(DECODING, trials=len(scores[name][0])) for name in names},
        totals={name: total or len(scores[name]) for name in names},
    )
    return Evaluation(model=model, suites={info.name: run}, results=tuple(results), config={"seed": 0}, **more)
