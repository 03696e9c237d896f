"""The planner's table: size x job x length x slice. Compiles each real step, appends rows, rewrites docs/scale.md.

python -m benchmarks.plans                 # all of them; a plan takes one to three minutes on two cores
python -m benchmarks.plans --only=14b

What goes by these rows: docs/cost.md (`python -m benchmarks.cost`), and the sizes in the recipes' comments.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from absl import flags

from benchmarks import processes, rows
from launch.flags import cli

LONG, SHORT = 74_752, 20_480
"""Tokens of the paper's longest episodes, and of its SFT."""


class Asked(NamedTuple):
    """One plan.

    Attributes:
        remat: what the backward pass keeps: of `REMATS` what fits and computes least again.
        mesh, rows: axis sizes, and rows of a forward pass, where others are faster than the planner's own.
    """

    job: str
    size: str
    tokens: int
    topology: str
    remat: str = "full"
    rows: int | None = None
    mesh: str | None = None


PLANS = (
    Asked("sft", "0.6b", SHORT, "v5e:2x2", "dots"),
    Asked("sft", "1.7b", SHORT, "v5e:2x4", "dots"),
    Asked("sft", "4b", SHORT, "v5p:2x2x2", "dots", rows=8, mesh="fsdp=8"),
    Asked("sft", "4b", SHORT, "v6e:2x4", "attention", rows=8, mesh="fsdp=8"),
    Asked("sft", "8b", 32_768, "v6e:2x4", "attention"),
    Asked("sft", "14b", SHORT, "v5p:2x2x2", "dots", rows=4),
    Asked("sft", "14b", SHORT, "v6e:4x4", "attention", rows=8, mesh="fsdp=8,context=2"),
    Asked("sft", "14b", LONG, "v5p:2x2x2", "dots"),
    Asked("sft", "14b", LONG, "v6e:4x4", "heads"),
    Asked("sft", "32b", LONG, "v5p:2x2x4", "heads"),
    Asked("sft", "32b", LONG, "v6e:4x8"),
    Asked("sft", "30b-a3b", SHORT, "v5p:2x2x4", "attention", rows=32, mesh="fsdp=16"),
    Asked("grpo", "0.6b", LONG, "v6e:2x2", "dots"),
    Asked("grpo", "1.7b", LONG, "v6e:2x4", "dots"),
    Asked("grpo", "4b", LONG, "v6e:2x4", "heads"),
    Asked("grpo", "8b", LONG, "v6e:4x4", "heads"),
    Asked("grpo", "14b", SHORT, "v5p:2x2x2", "dots"),
    Asked("grpo", "14b", SHORT, "v6e:4x4", "attention"),
    Asked("grpo", "14b", LONG, "v5p:2x2x2", "dots"),
    Asked("grpo", "14b", LONG, "v6e:4x4", "heads"),
    Asked("grpo", "32b", LONG, "v5p:2x2x4", "heads"),
    Asked("grpo", "32b", LONG, "v6e:4x8"),
    Asked("grpo", "30b-a3b", LONG, "v5p:2x2x4", "attention", rows=4, mesh="fsdp=4,context=4"),
    Asked("sft", "1.7b", 65_536, "h200:1", "heads"),
    Asked("sft", "4b", 16_384, "h200:1", "dots"),
    Asked("sft", "4b", 65_536, "h200:1", "attention"),
    Asked("sft", "8b", 32_768, "h200:4", "dots"),
    Asked("grpo", "14b", LONG, "h200:4", "heads"),
    Asked("grpo", "14b", LONG, "h100:8", "heads"),
    Asked("grpo", "32b", LONG, "h200:8", "attention"),
)
OF_A_PLAN = ("job", "size", "tokens", "topology")
"""In which rows of one plan agree."""
PAGE = rows.ROOT / "docs" / "scale.md"

_ONLY = flags.DEFINE_list("only", None, "Sizes, for example 14b,32b; by default all.")
_CHIPS = flags.DEFINE_list("chips", None, "Kinds, for example v5p,h200; by default all.")


def plan(one: Asked) -> dict:
    """Return the JSON output of `astra plan`."""
    asked = [f"--config={one.job}:{one.size}", f"--topology={one.topology}", f"--tokens={one.tokens}"]
    asked += [f"--config.{one.job}.remat={one.remat}"]
    asked += [f"--config.{one.job}.micro_batch_size={one.rows}"] if one.rows else []
    asked += [f"--mesh={one.mesh}"] if one.mesh else []
    said = processes.run("launch.plan", *asked, "--json", keep=True)
    return {"size": one.size} | json.loads(said.splitlines()[-1])


def table(found: list[dict]) -> str:
    """Return the newest row of each plan, as Markdown, in the order of `PLANS`; old rows may have no times."""
    newest = {tuple(row[name] for name in OF_A_PLAN): row for row in rows.newest(found, *OF_A_PLAN)}
    heads = ["job", "size", "tokens", "slice", "mesh", "rows at once", "`remat`", "fits", "GiB a chip", "s a step"]
    heads += ["tokens/s a chip", "MFU", "most of it"]
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    for one in PLANS:
        if (row := newest.get(tuple(getattr(one, name) for name in OF_A_PLAN))) is None:
            continue
        mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items())
        gib = f"{row['peak_bytes_per_chip'] / 2**30:.1f} of {row['hbm_bytes_per_chip'] / 2**30:.1f}"
        cells = [row["job"], row["size"], f"{row['tokens']:,}", row["topology"], mesh]
        cells += [row.get("micro_batch_size") or row["micro_batch_rows"], row["remat"]]
        cells += ["yes" if row["fits"] else "no", gib]
        if row["fits"] and "mfu" in row:
            sign = ("", "") if row["expected"] else ("≥ ", "≤ ")
            cells += [f"{sign[0]}{row['step_seconds']:,.1f}", f"{sign[1]}{row['tokens_per_second_per_chip']:,.0f}"]
            cells += [f"{sign[1]}{row['mfu']:.0%}", row["bound"]]
        else:
            cells += [""] * 4
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    for one in PLANS:
        kind = one.topology.partition(":")[0]
        if one.size in (_ONLY.value or [one.size]) and kind in (_CHIPS.value or [kind]):
            rows.append("plans", plan(one))
    rows.rewrite(PAGE, "plans", table(rows.read("plans")))


if __name__ == "__main__":
    cli.run(main)
