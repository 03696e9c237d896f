"""Measure an index of tool documents: the time to build it, and irrelevant tools sampled from it per second.

The documents are distinct variants of the fact relations' (each about one subject), in as many domains; every
environment needs a few of them. Building computes the embeddings and all similarities. Prints a row; `--save` appends
it.

    python -m benchmarks.distractors --tools=20000
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from typing import Annotated, Any

import msgspec
from absl import flags

from astra_jax.base.settings import Bound, Count
from benchmarks import rows
from launch.flags import cli
from launch.flags.numbers import number_flag
from synthesis.core.records import CodeTool
from synthesis.environments.config import BANDS
from synthesis.environments.distract import Candidate, Index
from synthesis.environments.drafts import NeededTool
from synthesis.offline.facts.relations import all_relations
from synthesis.offline.facts.servers import tool_spec
from synthesis.pipeline.embedding import SentenceEmbedder

_TOOLS = number_flag("tools", 20_000, Annotated[int, Bound(least=100, most=2**31 - 1)], "Documents in the index.")
_NEEDED = number_flag("needed", 4, Count, "Tools that an environment needs.")
_DRAWS = number_flag("draws", 5_000, Count, "Environments of each round.")
_ROUNDS = number_flag("rounds", 5, Count, "Rounds of draws; the median counts.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to benchmarks/results/distractors.jsonl.")


def documents(count: int) -> list[Candidate]:
    """`count` distinct tools: every relation, restricted to one of its subjects after the other."""
    found: list[Candidate] = []
    relations = list(all_relations().values())
    for number in itertools.count():
        for relation in relations:
            if len(found) == count:
                return found
            every = list(relation.rows)
            if number < len(every):
                spec = tool_spec(relation, "en", name=f"{relation.id[:48]}_{number}")
                spec = msgspec.structs.replace(spec, description=f"{spec.description} Only for {every[number]}.")
                found.append(Candidate(relation.id, relation.domain, CodeTool(spec, "")))
    raise AssertionError("itertools.count does not end")


async def measure(tools: int, needed: int, draws: int, rounds: int) -> dict[str, Any]:
    candidates = documents(tools)
    all_needed = [NeededTool(one.intent, one.domain, one.tool, [], []) for one in candidates]
    await SentenceEmbedder().embed(["the model is read once"])
    started = time.perf_counter()
    index = await Index.build(candidates, all_needed, SentenceEmbedder(), high_cut=0.85, low_cut=0.4)
    seconds = time.perf_counter() - started
    rng = random.Random(0)
    environments = [rng.sample(all_needed, needed) for _ in range(draws)]
    counts = dict.fromkeys(BANDS, 2)
    rates, drawn = [], 0
    for number in range(rounds):
        begun = time.perf_counter()
        for seed, environment in enumerate(environments):
            bands = index.draw(environment, counts, random.Random(seed * rounds + number))
            drawn += sum(map(len, bands.values()))
        rates.append(draws / (time.perf_counter() - begun))
    rate = statistics.median(rates)
    return {
        "tools": tools,
        "build_seconds": round(seconds, 2),
        "environments_per_second": round(rate),
        "tools_per_second": round(rate * drawn / (draws * rounds)),
        "tools_per_environment": round(drawn / (draws * rounds), 2),
    }


def main() -> None:
    figures = asyncio.run(measure(_TOOLS.value, _NEEDED.value, _DRAWS.value, _ROUNDS.value))
    rows.report("distractors", figures, save=_SAVE.value)


if __name__ == "__main__":
    cli.run(main)
