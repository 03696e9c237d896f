"""tau2-bench: customer service with tools and a simulated user (Barres et al. 2025, arXiv:2506.07982).

There are two releases: v1.0.1 to report, and v0.2.0, the release of ASTRA's paper, to compare with it. Tasks and
scoring differ: 10 gold action lists and 21 scenarios of retail, and v1.0.1 uses a judge where v0.2.0 searches text. The
harness is in no package registry (`tau2` on PyPI is about magnetism), so the user clones its git repository.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astra_jax.evaluation.endpoint_agent import room_left
from astra_jax.evaluation.harness import Checkout, HarnessEnvironment, WorkerProgram
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.suite import (
    Category,
    Decoding,
    EvalItem,
    EvaluationError,
    ModelEndpoint,
    Role,
    SuiteContext,
    SuiteInfo,
)
from synthesis.core.stages import Transient

_REPOSITORY = "https://github.com/sierra-research/tau2-bench"
_PINS = Path(__file__).parents[1] / "workers" / "tau2_bench.txt"
_DOMAINS = ("retail", "telecom")
_PROBE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Release:
    """A version of the harness.

    Attributes:
        tag: tag in the repository.
        commit: commit of the tag.
        has_splits: a file says which tasks are the benchmark.
        sha256: digests by part (`harness.fingerprint`).
        needs: models that it asks in addition to the scored one.
        notes: notes on this version alone.
    """

    tag: str
    commit: str
    has_splits: bool
    sha256: Mapping[str, str]
    needs: frozenset[Role]
    notes: tuple[str, ...]


_PARTS: Mapping[str, tuple[str, ...]] = {
    "src/tau2": ("src/tau2/**/*.py",),
    "retail": tuple(f"data/tau2/domains/retail/{name}" for name in ("db.json", "policy.md", "tasks.json")),
    "telecom": tuple(
        f"data/tau2/domains/telecom/{name}"
        for name in ("db.toml", "main_policy.md", "tasks.json", "tech_support_manual.md", "user_db.toml")
    ),
    "user_simulator": tuple(
        f"data/tau2/user_simulator/{name}" for name in ("simulation_guidelines.md", "simulation_guidelines_tools.md")
    ),
}

V1 = Release(
    tag="v1.0.1",
    commit="fc0055dc4e0a316c3f83133267fbd6faaa770992",
    has_splits=True,
    sha256={
        "src/tau2": "f8f8b936a5268e4ccfe0153f657a76539bd850bb11fe66a0620a1600219e57d1",
        "retail": "f40e74918c80856cef31a5afa8e219be6835a3bec3c66c534769a1548f4fbc76",
        "telecom": "65688fd107330fe20864103261923125cab09df56e5407220f7cbe7b649476fb",
        "user_simulator": "79bcb6826d75caf1eff1540a2914af3bb4b6cd672376ff083bf51221b7ebf281",
    },
    needs=frozenset({"user", "judge"}),
    notes=(
        "The judge decides 40 of retail's 114 tasks, beside the database; none of telecom's. The harness would ask "
        "gpt-4.1-2025-04-14; here it is the endpoint that is named.",
        "The harness leaves tasks that failed for infrastructure out of its mean, and takes a judge's empty answer for "
        "agreement; here both fail the run.",
    ),
)
V0 = Release(
    tag="v0.2.0",
    commit="f8de30c298689cbe0117d76a378e7315a17e5bd8",
    has_splits=False,
    sha256={
        "src/tau2": "69422548bedf18a3093c3cacae85b80f24465d4153ac23715753a206c0869ee3",
        "retail": "d7fadd3413557797b2bcee57a2f1ec2d1fbe9fedc6b14fc2378424bd02208c01",
        "telecom": "1ea91f7e44e753d0497b0d8ee71426442c2f6d773388ab6fe16488d43188c8aa",
        "user_simulator": "1fefd64505b8a1a902412d3f2ed83bc791c3046c9a0376247fdf8557ed10e36f",
    },
    needs=frozenset({"user"}),
    notes=(
        "No judge: what retail's agent must have said is looked up as text in its messages.",
        "It runs with the dependencies that v1.0.1 pins.",
    ),
)
_NOTES = (
    "pass^1 is the mean over all trials. The harness's defaults: 200 steps, 10 errors, the user at temperature 0.",
    "A call whose arguments are not JSON, a message with neither text nor call, and a conversation longer than the "
    "model's context score 0; the harness stops at them (v0.2.0), or leaves the task out of its mean (v1.0.1).",
    "The simulated user decides much: up to 30 % of failed retail runs were found to be its fault (tau2-bench #392). "
    "Its model belongs beside every figure; the paper's is GPT-5.1.",
    "The harness shows a model its earlier answers without their reasoning.",
    "Retail's tool `calculate` evaluates the model's text as Python, of digits, + - * / ( ) . and spaces alone. A tool "
    "call has 10 s of CPU time, so that `9**9**9**9` fails like any other bad call. Tools are looked up by name.",
    "sub_tasks is 1: the benchmark scores a conversation as a whole.",
)
_DECODING = Decoding(temperature=0.0, trials=4)


class Tau2:
    """tau2-bench v1.0.1. Implements `Suite`."""

    NAME = "tau2"
    RELEASE = V1

    def __init__(self, context: SuiteContext) -> None:
        release = self.RELEASE
        self._context = context
        self._ids: dict[str, list[str]] = {}
        self._workers: WorkerProgram | None = None
        self.info = SuiteInfo(
            name=self.NAME,
            title=f"tau2-bench {release.tag}",
            harness=f"tau2-bench {release.tag} ({release.commit[:7]})",
            license="MIT",
            data_sha256={part: digest for part, digest in release.sha256.items() if not part.startswith("src/")},
            categories=tuple(Category(name=name, title=name.capitalize(), decoding=_DECODING) for name in _DOMAINS),
            headline={"tau2-bench": _DOMAINS},
            needs=release.needs,
            notes=release.notes + _NOTES,
        )

    async def prepare(self) -> None:
        tree = self._checkout()
        environment = HarnessEnvironment(
            name="tau2-bench", requirements=tuple(_PINS.read_text(encoding="utf-8").split()), python=(12, 14)
        )
        self._workers = WorkerProgram(
            await environment.make(self._context.harnesses),
            "tau2_bench.py",
            _DOMAINS,
            env={
                **_proxies(),
                "PYTHONPATH": str(tree / "src"),
                "TAU2_DATA_DIR": str(tree / "data"),
                "OPENBLAS_NUM_THREADS": "1",  # numpy's threads would not survive the worker's forks
            },
            log=self._context.logs / f"{self.NAME}.log",
        )
        await self._workers.start()
        async with self._workers.open() as worker:
            self._ids = {domain: await worker.call("tasks", domain=domain) for domain in _DOMAINS}
            for role in sorted(self.info.needs):
                served = self._context.models[role]
                if problem := await worker.call("ask", served=_fields(served), timeout=_PROBE_SECONDS):
                    raise EvaluationError(f"the {role} of {self.NAME}, {served.model} at {served.url}: {problem}")

    def _checkout(self) -> Path:
        """The folder of the pinned version, checked."""
        release, folder = self.RELEASE, self._context.sources.get(self.NAME)
        parts = dict(_PARTS)
        if release.has_splits:
            parts |= {one: (*_PARTS[one], f"data/tau2/domains/{one}/split_tasks.json") for one in _DOMAINS}
        checkout = Checkout(repository=_REPOSITORY, commit=release.tag, parts=parts, sha256=release.sha256)
        return checkout.check(self.NAME, folder)

    def ids(self, category: str) -> Sequence[str]:
        return self._ids[category]

    async def run(self, item: EvalItem, decoding: Decoding) -> ItemResult:
        assert self._workers is not None, "prepare comes first"
        context = self._context
        models: dict[str, dict[str, Any]] = {role: _fields(context.models[role]) for role in self.info.needs}
        limit = context.policy.limit
        models["agent"] = {
            **_fields(context.policy),
            "request": decoding.request(item.seed, limit),
            "limit": limit,
        }

        async def room(said: str, max_tokens: int | None) -> int | None:
            return room_left(400, said, max_tokens)

        async with self._workers.open({"room": room}) as worker:
            done: dict[str, Any] = await worker.call(
                "run",
                domain=item.category,
                task=item.id,
                seed=item.seed,
                models=models,
                timeout=context.endpoint.config.timeout_seconds,
            )
        finish, problem = done["finish"], done["problem"]
        if finish == "refused":
            raise Transient(f"{context.policy.model} at {context.policy.url}: {problem}")
        return ItemResult(
            suite=self.NAME,
            category=item.category,
            item=item.id,
            trial=item.trial,
            score=done["reward"],
            metrics=done["components"],
            finish=finish,
            problem=problem,
            sub_tasks=1,
            steps=done["steps"],
            calls=done["calls"],
            prompt_tokens=done["prompt_tokens"],
            completion_tokens=done["completion_tokens"],
            messages=done["messages"],
        )

    async def close(self) -> None:
        if self._workers is not None:
            await self._workers.close()


class Tau2Paper(Tau2):
    """tau2-bench v0.2.0, to compare with the paper. Implements `Suite`."""

    NAME = "tau2_v0_2"
    RELEASE = V0


def _fields(served: ModelEndpoint) -> dict[str, Any]:
    return {"url": served.url, "model": served.model, "key": served.key}


def _proxies() -> dict[str, str]:
    """Return the proxies for hosted endpoints, as environment variables."""
    names = ("http_proxy", "https_proxy", "no_proxy", "ssl_cert_file")
    return {name: value for name, value in os.environ.items() if name.lower() in names}
