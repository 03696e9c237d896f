"""Measure how cost grows with each size, beside the ideal growth: a row for each part.

tokens, vocabulary, layers   an SFT step of 1M parameters with one size increased; processor seconds, and the compiled
                             program's bytes. Ideal: the arithmetic's share of the first point; the state, and the first
                             point's temporaries for as many tokens or layers.
devices                      the same step over `fsdp` of fake devices: processor seconds, ideally constant, and bytes,
                             ideally divided.
synthesis, sandbox           requests of a stage per second, and calls per second, by concurrency. Ideal: the
                             endpoint's latency; the first point for each core.
ray                          environments per minute, proven on CPUs of Ray on this machine. Ideal: as many as without
                             Ray, whose sandbox has all cores too.
cluster                      proofs per second that this process gives to Ray, by CPUs that each is busy for 0.05 s, to
                             represent the cores of other machines. Ideal: the first point for each CPU.
records                      memory of a run's process, its processor ms and the journal's bytes, by the records of two
                             stages and a dataset. Ideal: an index of INDEX_BYTES per record; the first point.
restart                      seconds to the first step, of a new and of a resumed run. Ideal: the imports.

    python -m benchmarks.growth --save
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from benchmarks import processes, rows
from benchmarks.shapes import SHAPES
from launch.flags import cli
from launch.flags.cli import UsageError

BASE: Mapping[str, int] = {**vars(SHAPES["1m"]), "rows": 1, "tokens": 512, "devices": 1}
SIZES: Mapping[str, tuple[str, str, Sequence[int]]] = {
    "tokens": ("tokens", "T, tokens of a row", (256, 512, 1_024, 2_048)),
    "vocabulary": ("vocab_size", "V, words", (1_024, 8_192, 32_768, 131_072)),
    "layers": ("n_layers", "L, layers", (2, 4, 8, 16)),
    "devices": ("devices", "fake devices, fsdp", (1, 2, 4, 8)),
}
"""By part: what is made larger, its name on an axis, and its values."""
IN_FLIGHT = (1, 8, 64, 256)
CALLERS = (1, 2, 4, 16, 64)
CPUS = (1, 2)
CLUSTER = (1, 4, 16)
RECORDS = (1_000, 10_000, 100_000)
INDEX_BYTES = 200
LATENCY = 0.1
"""Latency of the endpoint, in seconds."""

Curves = dict[str, dict[str, list[float]]]

_ONLY = flags.DEFINE_list("only", [], "Parts to measure; by default all.")
_SAVE = flags.DEFINE_bool("save", False, "Append rows to benchmarks/results/growth.jsonl.")


def told(*command: str, **environment: str) -> dict[str, Any]:
    """The last line that a module prints, which is JSON."""
    return json.loads(processes.run(*command, environment=environment, keep=True).splitlines()[-1])


def grown(part: str) -> tuple[str, list[Any], Curves]:
    """Return (axis, values, curves) of a training step."""
    name, axis, values = SIZES[part]
    rows_ = max(values) if part == "devices" else BASE["rows"]
    points = []
    for value in values:
        shape = {**BASE, "rows": rows_, name: value}
        fake = f"--xla_force_host_platform_device_count={shape['devices']} {os.environ.get('XLA_FLAGS', '')}"
        points.append(told("benchmarks.growth_side", "step", json.dumps(shape), JAX_PLATFORMS="cpu", XLA_FLAGS=fake))
    return axis, list(values), step_curves(part, values, points)


def step_curves(part: str, values: Sequence[int], points: Sequence[Mapping[str, float]]) -> Curves:
    """Return the measured curves and the ideal ones.

    Args:
        points: results of `growth_side.step`.
    """
    first = points[0]
    seconds, mib, ideal = [], [], []
    for value, point in zip(values, points, strict=True):
        seconds.append(first["processor_seconds"] * point["flops"] / first["flops"])
        mib.append((point["state_bytes"] + point["temporary_bytes"]) / 2**20)
        times = value / values[0]
        if part == "devices":
            ideal.append((first["state_bytes"] + first["temporary_bytes"]) / times / 2**20)
        else:
            grows = first["temporary_bytes"] * (1 if part == "vocabulary" else times)
            ideal.append((point["state_bytes"] + grows) / 2**20)
    measured = [point["processor_seconds"] for point in points]
    return {"processor s a step": curve(measured, seconds), "MiB a device": curve(mib, ideal)}


def synthesis() -> tuple[str, list[Any], Curves]:
    asked = [
        told(
            "benchmarks.teacher",
            "--sides=stage",
            "--turns=1",
            f"--latency={LATENCY}",
            f"--in_flight={count}",
            f"--requests={max(100, 20 * count)}",
        )  # fmt: skip
        for count in IN_FLIGHT
    ]
    measured = [row["stage"]["per_second"] for row in asked]
    ideal = [count / LATENCY for count in IN_FLIGHT]
    return "requests under way", list(IN_FLIGHT), {"requests a second": curve(measured, ideal)}


def sandbox() -> tuple[str, list[Any], Curves]:
    found = [told("benchmarks.growth_side", "sandbox", str(count))["calls_per_second"] for count in CALLERS]
    ideal = [found[0] * min(count, cores()) for count in CALLERS]
    return "callers", list(CALLERS), {"calls a second": curve(found, ideal)}


def ray() -> tuple[str, list[Any], Curves]:
    here, *found = [
        told("benchmarks.growth_side", "environments", str(count))["environments_per_minute"] for count in (0, *CPUS)
    ]
    return "CPUs of Ray", list(CPUS), {"environments a minute": curve(found, [here] * len(CPUS))}


def cluster() -> tuple[str, list[Any], Curves]:
    found = [told("benchmarks.growth_side", "cluster", str(count))["proofs_per_second"] for count in CLUSTER]
    ideal = [found[0] * count for count in CLUSTER]
    return "CPUs of Ray", list(CLUSTER), {"proofs a second": curve(found, ideal)}


def records() -> tuple[str, list[Any], Curves]:
    points = [told("benchmarks.record_side", str(count)) for count in RECORDS]
    first = points[0]

    def of(name: str, unit: float = 1.0) -> list[float]:
        return [point[name] * unit for point in points]

    held = of("held_kib", 1 / 1024)
    index = [held[0] + (count - RECORDS[0]) * INDEX_BYTES / 2**20 for count in RECORDS]
    names = ("processor_ms_a_record", "journal_bytes_a_record")
    flat = {name: curve(of(name), [first[name]] * len(points)) for name in names}
    return "records", list(RECORDS), {
        "MiB held": curve(held, index),
        "processor ms a record": flat[names[0]],
        "journal bytes a record": flat[names[1]],
    }  # fmt: skip


def restart() -> tuple[str, list[Any], Curves]:
    with tempfile.TemporaryDirectory() as folder:
        command = ("benchmarks.growth_side", "start", folder)
        points = [told(*command, str(time.time()), JAX_PLATFORMS="cpu") for _ in range(2)]
    measured = [point["seconds"] for point in points]
    ideal = [point["import_seconds"] for point in points]
    return "start", ["first", "again"], {"s to a step": curve(measured, ideal)}


def curve(measured: Sequence[float], ideal: Sequence[float]) -> dict[str, list[float]]:
    """As rows have it, to four digits."""
    return {"measured": [float(f"{one:.4g}") for one in measured], "ideal": [float(f"{one:.4g}") for one in ideal]}


def cores() -> int:
    return len(os.sched_getaffinity(0))


PARTS: Mapping[str, Callable[[], tuple[str, list[Any], Curves]]] = {
    **{part: lambda part=part: grown(part) for part in SIZES},  # type: ignore[misc]
    "synthesis": synthesis,
    "sandbox": sandbox,
    "ray": ray,
    "cluster": cluster,
    "records": records,
    "restart": restart,
}


def chosen(only: Sequence[str]) -> list[str]:
    """The parts to measure. Raises `UsageError`: there is no such part."""
    if unknown := sorted(set(only) - PARTS.keys()):
        raise UsageError(f"--only={','.join(unknown)}: use some of {', '.join(PARTS)}")
    return list(only or PARTS)


def main() -> None:
    for part in chosen(_ONLY.value):
        load = round(os.getloadavg()[0], 1)
        axis, values, curves = PARTS[part]()
        figures = {"part": part, "axis": axis, "at": values, "curves": curves, "load": load}
        rows.report("growth", figures, save=_SAVE.value)


if __name__ == "__main__":
    cli.run(main)
