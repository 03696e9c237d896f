"""Run suites: every item as often as its decoding says, each exactly once over all restarts, and scored or failed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from astra_jax.base.settings import Count, CountOrZero, Length, Seed, Settings, Temperature
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.suite import Decoding, EvalItem, EvaluationError, ModelEndpoint, Role, Suite, SuiteInfo
from synthesis.core.stages import Journal, rng_for, run_stage


@dataclass(frozen=True)
class RunConfig(Settings):
    """Settings of a benchmark run.

    Attributes:
        seed: random seed of sampling and of all other random choices.
        limit: maximum items of each category, for a trial run; the table reports it. None: all items.
        trials: samples of each item. None: as each category's decoding says.
        temperature: sampling temperature; replaces that of each category's decoding. None: keep it.
        max_tokens: maximum tokens of one completion; replaces that of each category's decoding. None: keep it.
        extra: additional fields of the requests to the scored model.
        concurrency: items that run at the same time.
        retries: how often an item is retried after a failure of the infrastructure.
    """

    seed: Seed = 0
    limit: Count | None = None
    trials: Count | None = None
    temperature: Temperature | None = None
    max_tokens: Length | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    concurrency: Count = 32
    retries: CountOrZero = 2

    def decodings(self, info: SuiteInfo) -> dict[str, Decoding]:
        """Return the decoding of each category: the paper's, with the overrides of this run."""
        return {
            one.name: replace(
                one.decoding,
                trials=self.trials or one.decoding.trials,
                temperature=one.decoding.temperature if self.temperature is None else self.temperature,
                max_tokens=self.max_tokens or one.decoding.max_tokens,
                extra={**one.decoding.extra, **self.extra},
            )
            for one in info.categories
        }


class InfrastructureFailed(EvaluationError):
    """Items could not be scored. A mean without them would hide it, so there is none.

    Attributes:
        failed: number of such items by suite.
    """

    def __init__(self, failed: Mapping[str, int], examples: Mapping[str, str]) -> None:
        self.failed = dict(failed)
        what = "; ".join(f"{suite}: {count} items, such as {examples[suite]}" for suite, count in failed.items())
        super().__init__(
            f"the infrastructure failed, nothing is concluded about the model ({what}). What is finished is kept; run "
            "the same command again for the rest"
        )


async def run_suites(
    suites: Sequence[Suite],
    *,
    journal: Journal,
    config: RunConfig,
    models: Mapping[Role, ModelEndpoint] = MappingProxyType({}),
) -> list[ItemResult]:
    """Run all items of all suites that the journal does not have yet.

    Args:
        suites: prepared suites.
        journal: journal of runs of one model with one config; suites may be added to it.
        models: models of the roles that suites need. With another model, the suites that need it run from scratch.

    Returns:
        All results, by suite, category, item and trial.

    Raises:
        InfrastructureFailed: an item could not be scored; all others are in the journal.
        AbortRun: the endpoint answers no more requests.
    """
    results: list[ItemResult] = []
    failed: dict[str, int] = {}
    examples: dict[str, str] = {}
    for suite in suites:
        decodings = config.decodings(suite.info)
        items = [
            EvalItem(category, id, trial, rng_for(config.seed, suite.info.name, category, id, trial).getrandbits(31))
            for category, decoding in decodings.items()
            for id in suite.ids(category)[: config.limit]
            for trial in range(decoding.trials)
        ]
        stage = _stage(suite.info, models)
        done = await run_stage(
            stage,
            partial(_run, suite, decodings),
            items,
            key=_key,
            out=ItemResult,
            journal=journal,
            concurrency=config.concurrency,
            retries=config.retries,
            description=suite.info.title,
        )
        results += done.outputs
        if lost := sum(done.rejected.values()):
            failed[suite.info.name] = lost
            examples[suite.info.name] = next(iter(done.details.values()))
            journal.forget_rejected(stage)
    if failed:
        raise InfrastructureFailed(failed, examples)
    return results


def _stage(info: SuiteInfo, models: Mapping[Role, ModelEndpoint]) -> str:
    """Return the name of a suite's results in the journal, which depends on its harness, data and roles."""
    measured: Any = [info.harness, dict(info.data_sha256)]
    if roles := {role: [models[role].url, models[role].model] for role in info.needs & models.keys()}:
        measured.append(roles)
    measured = json.dumps(measured, sort_keys=True)
    return f"{info.name} {hashlib.sha256(measured.encode()).hexdigest()[:12]}"


def _key(item: EvalItem) -> str:
    return f"{item.category}/{item.id}/{item.trial}"


async def _run(suite: Suite, decodings: Mapping[str, Decoding], item: EvalItem) -> list[ItemResult]:
    return [await suite.run(item, decodings[item.category])]
