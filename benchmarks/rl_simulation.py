"""Simulate GRPO on a fleet, for 14B: the time of a step, the staleness of its tokens, and the bottleneck.

    python -m benchmarks.rl_simulation --save                     # 8 to 64 servers, strictly online and asynchronous
    python -m benchmarks.rl_simulation --servers=32 --async_steps=2 --sandboxes=16 --tool_seconds=2
    python -m benchmarks.rl_simulation --validate --save          # compares with a real run, some minutes

The simulation is `benchmarks/simulated_fleet.py`: the trainer's own classes decide, in simulated time. Durations are
arithmetic, as in `benchmarks.cost`, whose flags (lengths, the share of valid groups) apply here too. --validate trains
a tiny model on emulated servers whose latencies are sleeps, simulates the same, and compares
(`benchmarks/rl_validation.py`).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from absl import flags

from astra_jax.base.settings import Bound, Count, SecondsOrZero, Slots
from benchmarks import cost, rows
from launch.flags import cli
from launch.flags.numbers import number_flag

if TYPE_CHECKING:  # --help does not wait for it
    from benchmarks.simulated_fleet import Outcome, ServerSpeed, SimulatedRun, SimulatedTurn

BATCH = 256
MOST_TURN = 49_152
CALLS = 3.98
"""Mean calls of an episode: most of the paper's environments have two to five, all one to twenty."""

_Rate = Annotated[float, Bound(above=0, most=1e6)]
_SIZE = flags.DEFINE_enum("size", "14b", cost.SIZES, "The model.")
_CHIP = flags.DEFINE_enum("chip", "v5p", cost.KINDS, "Of trainer and servers.")
_SERVER_CHIPS = number_flag("server_chips", 4, Count, "Of a server.")
_TRAINER_CHIPS = number_flag("trainer_chips", 32, Count, "That train.")
_SERVERS = flags.DEFINE_list("servers", ["8", "16", "32", "64"], "How many serve, a case each.")
_ASYNC = flags.DEFINE_list("async_steps", ["0", "1", "2", "4"], "0 is strictly online; a case each.")
_SANDBOXES = number_flag("sandboxes", 64, Slots, "Calls that run at once.")
_TOOL_SECONDS = number_flag("tool_seconds", 0.05, SecondsOrZero, "Of a call, in the mean.")
_SIGMA = number_flag(
    "length_sigma", 1.0, Annotated[float, Bound(least=0, most=3)], "Deviation of the logarithm of a turn's length."
)
_PUBLISH = number_flag("publish_gb_per_second", 8.0, _Rate, "At which the trainer's hosts write weights, together.")
_READ = number_flag("read_gb_per_second", 4.0, _Rate, "At which each server reads and checks them, while it draws.")
_LOAD = number_flag("load_gb_per_second", 8.0, _Rate, "At which a server takes them over, paused.")
_UPDATES = number_flag(
    "updates", 5, Annotated[int, Bound(least=2, most=10_000)], "That are simulated; the first is left out."
)
_OVERSAMPLE = number_flag(
    "oversample", 1.25, Annotated[float, Bound(least=1, most=1_000)], "Strictly online, see `GRPOConfig.oversample`."
)
_CONCURRENT = number_flag(
    "concurrent_groups", None, Slots, "See `GRPOConfig`; by default 4 batches strictly online, else what fits."
)
_SEED = number_flag("seed", 0, Annotated[int, Bound(least=0, most=2**31)], "Of the lengths.")
_VALIDATE = flags.DEFINE_bool("validate", False, "Compare the simulation with a real run of a tiny model.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the real run; it must be empty.")
_SAVE = flags.DEFINE_bool("save", False, "Append the rows to benchmarks/results/rl_simulation.jsonl.")


def episode(
    draws: random.Random, *, sampled: int, tools: int, tool_seconds: float, sigma: float
) -> list[SimulatedTurn]:
    """Its turns: calls as the paper's environments have them, lengths with a long tail."""
    from benchmarks.simulated_fleet import SimulatedTurn, lognormal

    calls = 1
    gap = draws.expovariate(1.0)
    while gap < CALLS - 1 and calls < 31:  # Poisson
        calls, gap = calls + 1, gap + draws.expovariate(1.0)
    turns, left = [], MOST_TURN
    for place in range(calls + 1):
        tokens = max(1, min(left, round(lognormal(draws, sampled / (CALLS + 1), sigma))))
        left -= tokens
        last = place == calls or left <= 0
        said = 0 if last else round(tools / CALLS)
        turns.append(SimulatedTurn(tokens, 0.0 if last else lognormal(draws, tool_seconds or 1e-9, 0.5), said))
        if last:
            break
        left -= said
    return turns


def server_speed(mfu: float) -> ServerSpeed:
    """Return the speed of the flags' servers, by the planner's arithmetic."""
    from astra_jax.planner import rollouts
    from astra_jax.run.chips import CHIPS
    from benchmarks.simulated_fleet import ServerSpeed
    from configs.training import MODELS

    model, chip, chips = MODELS[_SIZE.value].in_training_precision(), CHIPS[_CHIP.value], _SERVER_CHIPS.value
    weights = 2.0 * sum(model.matmul_parameters())
    cache = rollouts.cache_bytes(model)
    room = chips * chip.hbm_bytes * rollouts.MEMORY_SHARE - weights
    if room < cache * MOST_TURN:
        raise cli.UsageError(f"--server_chips={chips}: {_SIZE.value} and one long episode do not fit on so many")
    decode = functools.partial(rollouts.decode_seconds, model, chip, chips, mfu, share=cost.decode_share())
    fixed, one = decode(1, 0.0)
    each = decode(1, 1.0)[0] - fixed
    return ServerSpeed(
        token_seconds=lambda sequences, cached: max(fixed + each * cached, one * sequences),
        prefill_seconds=weights / (chips * chip.flops * mfu),
        cache_tokens=int(room / cache),
        requests=rollouts.MOST_SEQUENCES,
        read_seconds=weights / 1e9 / _READ.value,
        load_seconds=weights / 1e9 / _LOAD.value,
    )


def settings(servers: int, async_steps: int) -> SimulatedRun:
    """A case of the flags."""
    from benchmarks.simulated_fleet import SimulatedRun, SimulatedWork
    from configs.training import MODELS

    assumed = cost.assumed()
    work = cost.work_of(_SIZE.value, _CHIP.value, assumed)
    model = MODELS[_SIZE.value].in_training_precision()
    weights = 2.0 * sum(model.matmul_parameters())
    second = work.update * 3600 / (assumed.episodes * assumed.episode) / _TRAINER_CHIPS.value  # of a trained token
    plays = functools.partial(
        episode, sampled=assumed.sampled, tools=assumed.tools, tool_seconds=_TOOL_SECONDS.value, sigma=_SIGMA.value
    )
    speed = server_speed(work.mfu)
    fit = max(1, servers * speed.most_sequences(assumed.episode) // assumed.group_size)
    return SimulatedRun(
        SimulatedWork(plays, assumed.prompt, MOST_TURN, assumed.valid_share, assumed.group_size, BATCH),
        [speed] * servers,
        update_seconds=lambda tokens: tokens * second,
        publish_seconds=weights / 1e9 / _PUBLISH.value,
        sandboxes=_SANDBOXES.value,
        async_steps=async_steps,
        updates=_UPDATES.value + async_steps,
        concurrent_groups=_CONCURRENT.value or (fit if async_steps else 4 * BATCH),
        oversample=_OVERSAMPLE.value,
        seed=_SEED.value,
    )


def figures(run: SimulatedRun, outcome: Outcome) -> dict[str, Any]:
    """A row's."""
    from benchmarks.simulated_fleet import bound_of

    step, bound = outcome.mean("step"), outcome.mean("bound")
    parts = {name: outcome.mean(name) for name in ("wait", "update", "publish", "sync")}
    found: dict[str, Any] = {
        "step_seconds": round(step, 1),
        "seconds": {name: round(value, 1) for name, value in parts.items()},
        "wait_share": round(parts["wait"] / step, 4),
        "idle_share": round(1 - parts["update"] / step, 4),
        "mean_age": round(outcome.mean("age"), 3),
        "bound_by": bound_of(outcome, run),
        "groups_sampled": round(outcome.mean("sampled"), 1),
        "groups_lost": round(outcome.mean("expired") + outcome.mean("cancelled"), 1),
        "prefix_kept": round(outcome.stayed, 3),
        "servers_busy": round(outcome.busy, 3),
        "length_bias": round(outcome.length_bias, 3),
    }
    if not run.async_steps:
        found["rollout_bound"] = round(bound, 1)
        found["of_lower_bound"] = round(step / (step - parts["wait"] + bound), 3)
    return found


def simulated_rows() -> Iterator[dict[str, Any]]:
    """One for each case of the flags."""
    from benchmarks.simulated_fleet import simulated

    for servers in numbers(_SERVERS.value, "servers", 1, 10_000):
        for k in numbers(_ASYNC.value, "async_steps", 0, 1_000):
            run = settings(servers, k)
            case = {"case": _SIZE.value, "chip": _CHIP.value, "servers": servers, "async_steps": k}
            chips = {"server_chips": _SERVER_CHIPS.value, "trainer_chips": _TRAINER_CHIPS.value}
            yield case | chips | figures(run, simulated(run))


def numbers(given: Sequence[str], flag: str, least: int, most: int) -> list[int]:
    """Raises `UsageError`."""
    try:
        found = [int(one) for one in given]
    except ValueError:
        found = []
    if not found or not all(least <= one <= most for one in found):
        raise cli.UsageError(f"--{flag}={','.join(given)}: give numbers from {least} to {most:,}, separated by commas")
    return found


def main() -> None:
    if _VALIDATE.value:
        from benchmarks.rl_validation import validated

        if not _WORKDIR.value:
            raise cli.UsageError("--validate trains a tiny model: give a folder for it, --workdir=DIR")
        folder = cli.local_folder(_WORKDIR)
        for k in numbers(_ASYNC.value, "async_steps", 0, 1_000):
            rows.report("rl_simulation", validated(folder / f"async_{k}", async_steps=k), save=_SAVE.value)
        return
    for row in simulated_rows():
        rows.report("rl_simulation", row, save=_SAVE.value)


if __name__ == "__main__":
    cli.run(main)
