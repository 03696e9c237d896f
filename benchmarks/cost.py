"""Estimate the cost of the paper's run: chips x hours and dollars, on four kinds of chips; writes docs/cost.md.

    python -m benchmarks.cost
    python -m benchmarks.cost --prices=v6e=1.9,h100=2.2 --conversation_tokens=4000 --sampled_tokens=12000

Nothing is compiled or measured here. Training time comes from the plan nearest in size, for each kind of chip
(`benchmarks/results/plans.jsonl`, compiled cycles), or for GPUs from arithmetic. Rollout time is arithmetic. The page
names the source of each number.
"""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from absl import flags

from astra_jax.base.settings import Bound, Count, CountOrZero
from benchmarks import rows
from launch.flags import cli
from launch.flags.numbers import number_flag

if TYPE_CHECKING:  # --help does not wait for it
    from astra_jax.run.chips import Chip

PAGE = rows.ROOT / "docs" / "cost.md"
KINDS = ("v5p", "v6e", "h100", "h200")
SIZES = ("14b", "32b")
CONVERSATIONS, EPOCHS = 54_885, 2
UPDATES, GROUPS = 140, 256
PRICED = "2026-11-25"
PRICES = {"v5p": 4.2, "v6e": 2.7, "h100": 3.0, "h200": 4.0}
"""Dollars a chip and hour, on demand: Google's list in the United States, and for GPUs the middle of what specialised
clouds asked in 2026."""
_Share = Annotated[float, Bound(above=0, most=1)]
_PRICES = flags.DEFINE_list("prices", [], "KIND=DOLLARS a chip and hour, in place of the page's.")
_CONVERSATION = number_flag("conversation_tokens", 6_000, Count, "Of an SFT conversation, in the mean.")
_PROMPT = number_flag("prompt_tokens", 4_000, Count, "Of an episode's prompt, with its tools' documents.")
_SAMPLED = number_flag("sampled_tokens", 6_000, Count, "That the policy draws in an episode.")
_TOOLS = number_flag("tool_tokens", 2_000, CountOrZero, "Of tool outputs in an episode.")
_VALID = number_flag("valid_share", 0.5, _Share, "Of the groups that are sampled, those whose rewards differ.")
_GROUP = number_flag("group_size", 8, Count, "Episodes of a group.")


@dataclass(frozen=True)
class Assumed:
    """Assumptions where the paper gives no number: mean lengths in tokens."""

    conversation: int
    prompt: int
    sampled: int
    tools: int
    valid_share: float
    group_size: int

    @property
    def episode(self) -> int:
        return self.prompt + self.sampled + self.tools

    @property
    def episodes(self) -> int:
        """Return the number of episodes that all updates train on."""
        return UPDATES * GROUPS * self.group_size


@dataclass(frozen=True)
class Work:
    """Work of one model on one kind of chip.

    Attributes:
        mfu, update_mfu: model flops utilization of SFT, and of GRPO's updates: useful arithmetic over the bf16 peak.
        source, update_source: sources of these numbers.
        sft, update, rollout: chip-hours.
        server: chips of a rollout server, which decodes `sequences` at the same time.
        bound: resource that limits a server's decoding.
        trainer: see `planned_slice`.
    """

    kind: str
    mfu: float
    source: str
    update_mfu: float
    update_source: str
    sft: float
    update: float
    rollout: float
    server: int
    sequences: int
    bound: str
    trainer: tuple[str, int]

    @property
    def is_bound(self) -> bool:
        """Return whether real training certainly takes longer."""
        return not self.source.startswith("compiled")


def fitting_plans(kind: str) -> list[dict[str, Any]]:
    """Return the newest row of each plan on a kind of chip that fits."""
    newest = rows.newest(rows.read("plans"), "job", "size", "tokens", "topology")
    return [row for row in newest if row["fits"] and row["topology"].startswith(f"{kind}:")]


def attended(length: int, chip: Chip) -> int:
    """Return a document's length for attention: on TPUs two blocks longer, for the shared blocks at its ends."""
    from astra_jax.attention.splash import LARGEST_BLOCK

    return length if chip.clock is None else length + 2 * LARGEST_BLOCK


def training_mfu(size: str, kind: str, tokens: int, job: str = "sft") -> tuple[float, str]:
    """(MFU, where it comes from) of a training step: of the compiled one whose model is nearest in size, of those the
    nearest in length, of those the job's own, of those the newest."""
    from astra_jax.planner.jobs import executed_flops_per_token
    from astra_jax.planner.plan import GPU_EFFICIENCY
    from astra_jax.run.chips import CHIPS
    from configs.training import MODELS

    model = MODELS[size].in_training_precision()
    expected = [row for row in fitting_plans(kind) if row.get("expected")]

    def near(row: dict[str, Any]) -> tuple[bool, float, float, bool, str]:
        other = MODELS[row["size"]]
        alike = (other.n_experts > 0) == (model.n_experts > 0)
        times = math.log(sum(other.matmul_parameters()) / sum(model.matmul_parameters()))
        return alike, -abs(times), -abs(math.log(row["tokens"] / tokens)), row["job"] == job, row["date"]

    if expected:
        row = max(expected, key=near)
        where = f"{row['job']}:{row['size']}, {row['tokens']:,} tokens, {row['topology']}"
        return row["mfu"], f"compiled cycles: {where}"
    executed = executed_flops_per_token(model, tokens, "attention", CHIPS[kind])  # all their plans have room for it
    useful = model.flops_per_token(tokens)[0]
    return GPU_EFFICIENCY * useful / executed, f"arithmetic: {GPU_EFFICIENCY:.0%} of the peak, a bound"


@functools.cache
def decode_share() -> float:
    """Return the share of the memory's bandwidth that decoding reaches: the median of the engine's compiled
    programs."""
    found = [{"stored": "none"} | row for row in rows.read("compiled_decode")]  # as it was before there was a choice
    programs = rows.newest(found, "model", "topology", "mesh", "slots", "length", "steps", "stored")
    return statistics.median(row["share"] for row in programs)


def work_of(size: str, kind: str, assumed: Assumed) -> Work:
    """The run's chip-hours."""
    from astra_jax.planner.rollouts import SERVERS, cache_bytes, server_of
    from astra_jax.run.chips import CHIPS
    from configs.training import MODELS

    model, chip = MODELS[size].in_training_precision(), CHIPS[kind]
    mfu, source = training_mfu(size, kind, assumed.conversation)
    update_mfu, update_source = training_mfu(size, kind, assumed.episode, "grpo")

    def chip_hours(tokens: float, length: int, mfu: float) -> float:
        return tokens * model.flops_per_token(length)[0] / (chip.flops * mfu * 3600)

    sft = chip_hours(CONVERSATIONS * EPOCHS * assumed.conversation, attended(assumed.conversation, chip), mfu)
    update = chip_hours(assumed.episodes * assumed.episode, attended(assumed.episode, chip), update_mfu)

    context = assumed.prompt + (assumed.sampled + assumed.tools) / 2
    servers = [server_of(model, chip, chips, mfu, context, share=decode_share()) for chips in SERVERS]
    server = min((one for one in servers if one is not None), key=lambda one: (one.chip_seconds, one.chips))
    cached, weights = server.sequences * cache_bytes(model) * context, 2.0 * sum(model.matmul_parameters())
    bound = "memory: the cache" if cached > weights else "memory: the weights"
    bound = "arithmetic" if server.compute > server.memory else bound
    drawn = assumed.episodes / assumed.valid_share
    # A group's prompt is read once, tool outputs for each episode; forward alone.
    read = drawn * (assumed.prompt / assumed.group_size + assumed.tools)
    rollout = drawn * assumed.sampled * server.chip_seconds / 3600 + chip_hours(read, assumed.episode, mfu) / 3
    trained = (mfu, source, update_mfu, update_source, sft, update)
    return Work(kind, *trained, rollout, server.chips, server.sequences, bound, planned_slice(size, kind))


def planned_slice(size: str, kind: str) -> tuple[str, int]:
    """The smallest slice that a plan of GRPO at full length fits on, and its chips; ("", 0) where there is no plan."""
    fits = [row for row in fitting_plans(kind) if row["job"] == "grpo" and row["size"] == size]
    if not fits:
        return "", 0
    smallest = min(fits, key=lambda row: row["chips"])
    return smallest["topology"], smallest["chips"]


def exact(update: float, rollout: float) -> float:
    """Return the cost of a run that alternates sampling and training, each on its own chips, in dollars or chip-hours
    of both.

    With T chips for training and S for serving, an update takes rollout/S + update/T, in which T + S are paid for. The
    cost is least at S/T = sqrt(rollout/update).
    """
    return (math.sqrt(update) + math.sqrt(rollout)) ** 2


def prices(given: list[str]) -> dict[str, float]:
    """Raises `UsageError`."""
    found = dict(PRICES)
    for one in given:
        kind, _, text = one.partition("=")
        try:
            if kind not in found or not 0 < float(text) < 1e6:
                raise ValueError
        except ValueError:
            raise cli.UsageError(f"--prices={one}: write KIND=DOLLARS, of {', '.join(KINDS)}") from None
        found[kind] = float(text)
    return found


def _table(heads: list[str], lines: list[list[str]]) -> str:
    cells = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"


_HEAD = """# What the paper's run costs

Chips x hours and dollars of the whole run at the paper's size: SFT of {conversations:,} conversations, {epochs} epochs;
GRPO of {updates} updates of {groups} groups. **An estimate, in which nothing was measured on an accelerator.**
`python -m benchmarks.cost` writes this page; its flags are the prices and what the paper does not publish. Synthesis is
another bill ([Environments](environments.md), `--preview`), and so are storage, hosts without accelerators, evaluation
and what is tried before.

| assumed | |
| --- | --- |
| tokens of a conversation | {assumed.conversation:,} |
| tokens of an episode: prompt, drawn, of tools | {assumed.prompt:,} + {assumed.sampled:,} + {assumed.tools:,} |
| episodes of a group | {assumed.group_size}; {assumed.episodes:,} trained on in all |
| groups that are valid | {assumed.valid_share:.0%} of those sampled |
| dollars a chip and hour, on demand, as of {priced} | {prices} |

None of the lengths is published, and the cost grows a little faster than they do. Prices differ by two between sellers;
spot is a third to a half of them.

Chip-hours of "updates" and "rollouts" are of two fleets, one that trains and one that serves. "≥" is a bound: real GPUs
take longer. The last column is chips that serve for each that trains: in turns, and with `async_rollouts=true`.
"""

_FROM = """
## Where the figures come from

{table}
- **Compiled cycles** are the TPU compiler's own of a whole step ([Full size](scale.md#the-planner)), at the length and
  size that are named, the nearest there are, whose MFU is taken for all lengths. Attention leaves out the blocks of
  other documents; the two at a document's ends, of 1,024 tokens each, count whole. On v6e attention's heads fill half
  of a matrix unit ([by line](scale.md#the-step-in-compiled-cycles)).
- **Arithmetic** is a bound: matmuls and attention with what `remat=attention` computes again, at 60 % of the peak;
  on GPUs attention visits no other document, so that it goes by the lengths above.
  SFT of 4B on one H200 [carried out 49 %](scale.md#the-planner).
- **Rollouts** are arithmetic everywhere: a step of a server reads the weights once and the cache of all its sequences
  at {share:.0%} of the memory's bandwidth, which the embedded engine's decoding has in compiled cycles on v6e
  ([rows](../benchmarks/results/compiled_decode.jsonl)); on an H200 it had 47 and 49 %.
  A server has as many sequences as its memory holds, {most} at
  most, and always so many; of {servers} chips the cheapest number is taken. A group's prompt is read once.
- **In turns**, the paper's way and exact, chips that train wait for rollouts and the other way round: with T that train
  and S that serve an update takes rollouts/S + updates/T, and the bill is least at S/T = √(rollouts/updates).
  With `async_rollouts=true` both work at once, and neither waits at S/T = rollouts/updates.
- **Not counted**: places of rows that nothing fills; the longest episodes of a batch, for which a fleet waits;
  what tensor parallelism sends while it samples; syncs; starts, preemptions and repeated steps (divide by the goodput);
  that a slice has no part of a chip.

## What bounds it

Of GRPO's chip-hours {least:.0%} to {greatest:.0%} are rollouts, and drawing a token waits for memory, not for
arithmetic; SFT is small beside GRPO. So what serves cheaply is memory and its bandwidth for a dollar, what trains
cheaply is arithmetic, and they need not be one kind of chip. A higher share of valid groups
([a curriculum](grpo.md#a-curriculum)) takes off as much as a faster kernel. Longer episodes cost more than in
proportion, since fewer of them fit into a server's cache:

{longer}"""


def page(assumed: Assumed, price: dict[str, float]) -> str:
    """The page."""
    from astra_jax.planner.rollouts import MOST_SEQUENCES, SERVERS

    every = {size: {kind: work_of(size, kind, assumed) for kind in KINDS} for size in SIZES}
    told = ", ".join(f"{kind} {price[kind]:.2f}" for kind in KINDS)
    parts = [
        _HEAD.format(
            conversations=CONVERSATIONS, epochs=EPOCHS, updates=UPDATES, groups=GROUPS, assumed=assumed, priced=PRICED,
            prices=told,
        )
    ]  # fmt: skip
    heads = ["chip", "SFT, chip-hours", "updates", "rollouts", "SFT, $", "GRPO in turns, $"]
    heads.append("GRPO, `async_rollouts=true`, $")
    for size, works in every.items():
        lines = []
        for kind, one in works.items():
            sign = "≥ " if one.is_bound else ""
            hours = (f"{sign}{one.sft:,.0f}", f"{sign}{one.update:,.0f}", f"{one.rollout:,.0f}")
            costs = (one.sft, exact(one.update, one.rollout), one.update + one.rollout)
            ratio = one.rollout / one.update
            lines.append(
                [
                    kind,
                    *hours,
                    *(f"{sign}{cost * price[kind]:,.0f}" for cost in costs),
                    f"{ratio**0.5:.1f}, {ratio:.1f}",
                ]
            )
        table = _table([*heads, "serving for each that trains"], lines)
        parts.append(f"\n## {size.upper()}\n\n{table}\n{_cheapest(works, price)}{_smallest(works)}")
    shares = [one.rollout / (one.rollout + one.update) for works in every.values() for one in works.values()]
    parts.append(
        _FROM.format(
            table=_sources(every), share=decode_share(), most=MOST_SEQUENCES, least=min(shares), greatest=max(shares),
            servers=", ".join(map(str, SERVERS)), longer=_longer(every, assumed),
        )
    )  # fmt: skip
    return "".join(parts)


def _cheapest(works: dict[str, Work], price: dict[str, float]) -> str:
    sft = min(one.sft * price[kind] for kind, one in works.items())
    costs = {
        (train, serve): (works[train].update * price[train], works[serve].rollout * price[serve])
        for train in works
        for serve in works
    }
    turns = min(costs, key=lambda pair: exact(*costs[pair]))
    beside = min(costs, key=lambda pair: sum(costs[pair]))

    def named(pair: tuple[str, str]) -> str:
        return f"on {pair[0]}" if pair[0] == pair[1] else f"training on {pair[0]} and serving on {pair[1]}"

    where = min(works, key=lambda kind: works[kind].sft * price[kind])
    return (
        f"**Cheapest**, if GPUs reached their bound: SFT on {where} ({sft:,.0f} $); GRPO in turns {named(turns)}\n"
        f"({exact(*costs[turns]):,.0f} $), with `async_rollouts=true` {named(beside)} ({sum(costs[beside]):,.0f} $). "
        f"In all {sft + exact(*costs[turns]):,.0f} $ or {sft + sum(costs[beside]):,.0f} $.\n"
    )


def _smallest(works: dict[str, Work]) -> str:
    """Return how long alternating GRPO takes on the smallest slice that it fits on."""
    found = []
    for one in works.values():
        name, train = one.trainer
        if train:
            serve = max(1, round(train * math.sqrt(one.rollout / one.update) / one.server)) * one.server
            days = (one.update / train + one.rollout / serve) / 24
            found.append(f"{name} and {serve} that serve, {days:.1f} days")
    return "\nOn the smallest slices with a plan, GRPO in turns takes: " + ";\n".join(found) + ".\n"


def _sources(every: dict[str, dict[str, Work]]) -> str:
    lines = [
        [size, kind, f"{one.mfu:.0%}, {one.update_mfu:.0%}", _from(one), f"{one.server}, {one.sequences}", one.bound]
        for size, works in every.items()
        for kind, one in works.items()
    ]
    return _table(
        ["size", "chip", "MFU: SFT, updates", "from", "chips of a server, sequences", "a token waits for"], lines
    )


def _from(one: Work) -> str:
    differs = one.update_source != one.source
    return one.source + (f"; {one.update_source.removeprefix('compiled cycles: ')}" if differs else "")


def _longer(every: dict[str, dict[str, Work]], assumed: Assumed) -> str:
    lengths = {name: 2 * getattr(assumed, name) for name in ("conversation", "prompt", "sampled", "tools")}
    lines = []
    for size, works in every.items():
        for kind, before in works.items():
            after = work_of(size, kind, replace(assumed, **lengths))
            lines.append([size, kind, *(f"{one.update:,.0f}, {one.rollout:,.0f}" for one in (before, after))])
    return _table(["size", "chip", "updates, rollouts: chip-hours", "twice as long"], lines)


def assumed() -> Assumed:
    """Return the assumptions of the flags."""
    given = (_CONVERSATION, _PROMPT, _SAMPLED, _TOOLS, _VALID, _GROUP)
    return Assumed(*(flag.value for flag in given))


def main() -> None:
    PAGE.write_text(page(assumed(), prices(_PRICES.value)), encoding="utf-8")


if __name__ == "__main__":
    cli.run(main)
