"""Interface of a benchmark for the runner: its declaration, its items, and a function that runs an item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from astra_jax.base.errors import UserError
from astra_jax.base.settings import Bound, Count, Length, SettingError, Settings, Temperature, TopP
from astra_jax.evaluation.results import ItemResult
from sandbox import Sandbox
from synthesis.core.endpoint import Endpoint

Role = Literal["user", "judge"]
"""A model that a benchmark asks in addition to the scored one: the simulated user, or the judge of answers."""


Limit = Literal["max_tokens", "max_completion_tokens"]
_RESERVED = {"max_tokens", "messages", "model", "n", "seed", "stream", "temperature", "tools", "top_k", "top_p"}


class EvaluationError(UserError):
    """A requirement of an evaluation is missing or not as declared; the message names it, and the fix."""


@dataclass(frozen=True)
class ModelEndpoint:
    """A model behind an OpenAI-compatible endpoint.

    Attributes:
        url: URL of the endpoint; it ends in `/v1`.
        model: served name.
        key: API key.
        limit: name of the field for a completion's token limit; OpenAI's newer models refuse the older name.
    """

    url: str
    model: str
    key: str = field(default="EMPTY", repr=False)
    limit: Limit = "max_tokens"


@dataclass(frozen=True, kw_only=True)
class Decoding(Settings):
    """Sampling parameters of the scored model.

    Attributes:
        temperature: sampling temperature; 0 is greedy.
        top_p: probability mass of nucleus sampling; 1 is the whole distribution.
        top_k: number of most likely tokens to sample from; -1: all. It is sent only if it is not -1, since some
            endpoints do not accept it.
        trials: samples of each item.
        max_tokens: maximum tokens of one completion. None: the endpoint's default.
        extra: additional fields of the request, such as `chat_template_kwargs`.
    """

    temperature: Temperature
    top_p: TopP = 1.0
    top_k: Annotated[int, Bound(least=-1, most=2**31 - 1)] = -1
    trials: Count = 4
    max_tokens: Length | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k == 0:
            raise SettingError("Decoding.top_k is 0; use -1 for all tokens, or a number from 1")
        if reserved := sorted(_RESERVED & self.extra.keys()):
            raise SettingError(f"Decoding.extra has {reserved[0]}, which the evaluation itself decides; leave it out")

    def request(self, seed: int, limit: Limit = "max_tokens") -> dict[str, Any]:
        """Return the sampling fields of a chat completions request; `limit`: see `ModelEndpoint`."""
        fields: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "seed": seed, **self.extra}
        if self.top_k != -1:
            fields["top_k"] = self.top_k
        if self.max_tokens is not None:
            fields[limit] = self.max_tokens
        return fields


@dataclass(frozen=True, kw_only=True)
class Category:
    """A column of the table: items that are averaged.

    Attributes:
        name: name of the column, in `snake_case`; unique in its suite.
        title: title in the table.
        decoding: the paper's sampling parameters (§3.3), if it gives them.
    """

    name: str
    title: str
    decoding: Decoding


@dataclass(frozen=True, kw_only=True)
class SuiteInfo:
    """Declaration of a suite.

    Attributes:
        name: name in `--suites`.
        title: title in the table.
        harness: the code that scores, with its pinned version, such as `bfcl-eval 2026.3.23`.
        license: SPDX identifier of the harness and its data.
        data_sha256: digests of the data, by file or part; checked before anything runs.
        categories: categories in the table's order.
        headline: the paper's mean over categories that weigh the same: title -> names of categories.
        shared_questions: the categories have variants of the same questions, in the same order. A question that is hard
            in one is hard in the others, so a headline's interval is taken over questions instead of over categories.
        needs: other models that it asks.
        notes: known pitfalls of the harness and how each is handled, for the report.
    """

    name: str
    title: str
    harness: str
    license: str
    data_sha256: Mapping[str, str]
    categories: tuple[Category, ...]
    headline: Mapping[str, tuple[str, ...]]
    shared_questions: bool = False
    needs: frozenset[Role] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvalItem:
    """One question to run once.

    Attributes:
        category: name of its category.
        id: id, unique in the category.
        trial: number of the trial, from 0.
        seed: seed of sampling and of all other random choices; each trial has another.
    """

    category: str
    id: str
    trial: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class SuiteContext:
    """Everything that a suite needs to run.

    Attributes:
        policy: the scored model.
        endpoint: client of its endpoint, shared by all suites that call it themselves.
        models: models of the roles that suites need.
        harnesses: folder of the harnesses' Python environments, kept between runs.
        sources: folders of suites that no package registry has: a benchmark's repository, or its data.
        logs: folder for the harnesses' output.
        sandbox: runs the code of our own environments.
        reward: named rewards of environments that are suites; None: F1 for records, the environment's own score for
            others.
        timeout_seconds: time limit of one completion of a model that a suite asks itself.
    """

    policy: ModelEndpoint
    endpoint: Endpoint
    models: Mapping[Role, ModelEndpoint]
    harnesses: Path
    sources: Mapping[str, Path]
    logs: Path
    sandbox: Sandbox | None = None
    reward: str | None = None
    timeout_seconds: float = 1800.0


class Suite(Protocol):
    """A benchmark. Items may run concurrently, up to the runner's concurrency."""

    @property
    def info(self) -> SuiteInfo: ...

    async def prepare(self) -> None:
        """Install and check everything that it needs: harness, versions, data.

        Raises:
            EvaluationError: something is missing or not the pinned version.
        """
        ...

    def ids(self, category: str) -> Sequence[str]:
        """Return the ids of a category's items, in a fixed order; call it after `prepare`."""
        ...

    async def run(self, item: EvalItem, decoding: Decoding) -> ItemResult:
        """Run and score one item.

        Raises:
            Transient: the infrastructure failed (an endpoint, a worker, a judge), which says nothing about the model.
                The runner retries, and fails the whole evaluation if that does not help.
        """
        ...

    async def close(self) -> None:
        """Stop workers; also after a failed `prepare`."""
        ...
