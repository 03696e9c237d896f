"""Generate the tables and figures of docs/performance.md, docs/comparison.md and README from the committed rows.

Each comparison is shown by its newest row: the number, the baseline, the goal, the processor, the date and the commit.
The program names each newest row that is worse than the previous one of its case and hardware by more than the spread
of both. It then exits with 1, and so it does when a measurement fails, after the others.

python -m benchmarks.report                          # from the existing rows
python -m benchmarks.report --measure --workdir=DIR  # measures here first: three hours on two idle cores

--measure prints which measurements are impossible here because another library is not installed. TRL and Tunix need
their own environments, which --trl and --tunix name as in `benchmarks.grpo_step`.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from absl import flags

from astra_jax.base.terminal import say
from benchmarks import async_page, drawings, growth_page, rows, simulation_page
from launch.flags import cli
from launch.flags.cli import UsageError

DOCS, README = rows.ROOT / "docs", rows.ROOT / "README.md"
SPREAD = 0.1
"""Spread of a number whose row has none: the difference of two runs of an hour on machines with other users."""
MEASURED: tuple[tuple[str, ...], ...] = (
    ("benchmarks.quickstart", "--seeds=0,1,2,3,4"),
    ("benchmarks.train_step", "--rounds=5", "--save"),
    ("benchmarks.sft_vs_pytorch", "--save"),
    ("benchmarks.sft_vs_pytorch", "--texts=0.3", "--save"),
    ("benchmarks.grpo_step", "--save"),
    ("benchmarks.decode", "--rounds=3", "--save"),
    ("benchmarks.sft_input", "--save"),
    ("benchmarks.teacher", "--save"),
    ("benchmarks.sandbox", "--only=rates", "--save"),
    ("benchmarks.growth", "--save"),
)
"""Measurements of --measure, in order."""
NEEDS = {"benchmarks.train_step": "torch", "benchmarks.sft_vs_pytorch": "trl", "benchmarks.growth": "ray"}
"""Packages without which they are left out."""
FRONT = {
    "SFT step, speed": "",
    "GRPO step, speed beside TRL": "",
    "GRPO step, speed beside Tunix": "",
    "Decoding beside transformers": ", 16",
    "Decoding beside vLLM": ", 16",
    "Sandbox calls a second and core": "",
}
"""Comparisons in README, and the suffixes of their cases."""

_MEASURE = flags.DEFINE_bool("measure", False, "Run the benchmarks of the tables first.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where --measure runs the quickstart; finished runs are not run again.")
_TRL = flags.DEFINE_string("trl", None, "--measure: the Python of an environment with TRL.")
_TUNIX = flags.DEFINE_string("tunix", None, "--measure: the Python of an environment with Tunix.")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """A figure of a benchmark's rows beside a peer, a floor or a limit.

    Attributes:
        file: the rows' file, without `.jsonl`.
        what: its name in the table, which docs/performance.md also gives the reason by where a goal is missed.
        value: the figure of a row; None if the row has not got it.
        beside: what it is compared with.
        case: names of the fields that tell one case from another.
        goals: by the case as it is shown; "" is any.
        more_is_better: else less.
        unit: written behind figures: " x" for ratios.
        spread: of a row, relative, from its own rounds; None: `SPREAD`.
        trainer: the trainer that it is compared with, for docs/comparison.md; empty where it is none.
    """

    file: str
    what: str
    value: Callable[[Row], float | None]
    beside: str
    case: tuple[str, ...] = ()
    goals: Mapping[str, float] = field(default_factory=dict)
    more_is_better: bool = True
    unit: str = " x"
    spread: Callable[[Row], float] | None = None
    trainer: str = ""

    def case_of(self, row: Row) -> str:
        return ", ".join(f"{row[name]:,}" if isinstance(row[name], int) else str(row[name]) for name in self.case)

    def goal(self, case: str) -> float | None:
        return self.goals.get(case, self.goals.get(""))

    def reached(self, value: float, goal: float) -> bool:
        return value >= goal if self.more_is_better else value <= goal


@dataclass(frozen=True)
class Line:
    """The newest row of a comparison's case, and the one before of the same hardware."""

    comparison: Comparison
    case: str
    row: Row
    before: Row | None

    @property
    def value(self) -> float:
        value = self.comparison.value(self.row)
        assert value is not None
        return value

    @property
    def missed(self) -> bool:
        """Return whether there is a goal that is not reached."""
        goal = self.comparison.goal(self.case)
        return goal is not None and not self.comparison.reached(self.value, goal)

    def behind(self) -> str | None:
        """Return a message if the row is worse than the previous one by more than both rows' spread."""
        if self.before is None or (old := self.comparison.value(self.before)) is None or not old or not self.value:
            return None
        spread = sum((self.comparison.spread or (lambda row: SPREAD / 2))(row) for row in (self.row, self.before))
        worse = old / self.value - 1 if self.comparison.more_is_better else self.value / old - 1
        if worse <= spread:
            return None
        return (
            f"{self.comparison.what}{f' ({self.case})' if self.case else ''}: {self.value:.3g} on {self.row['date']} "
            f"({self.row['commit']}), {old:.3g} on {self.before['date']} ({self.before['commit']}): {worse:.0%} worse, "
            f"where the rounds differ by {spread:.0%}"
        )


def at(*path: str) -> Callable[[Row], float | None]:
    """Return a function that reads a nested field of a row."""

    def value(row: Row) -> float | None:
        found: Any = row
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return None if found is None else float(found)

    return value


def over(path: Sequence[str], other: Sequence[str]) -> Callable[[Row], float | None]:
    """One figure of a row over another."""

    def value(row: Row) -> float | None:
        above, below = at(*path)(row), at(*other)(row)
        return None if above is None or not below else above / below

    return value


def where(
    name: str, value: Any, figure: Callable[[Row], float | None], *, before: Any = None
) -> Callable[[Row], float | None]:
    """Return a number of the rows with this value; rows from before the choice existed have the value `before`."""
    return lambda row: figure(row) if row.get(name, before) == value else None


def size_of(figure: Callable[[Row], float | None]) -> Callable[[Row], float | None]:
    """A figure without its sign."""
    return lambda row: None if (found := figure(row)) is None else abs(found)


def rounds(*sides: str) -> Callable[[Row], float]:
    """Half of what the rounds of sides differ by, over their middles, together."""

    def spread(row: Row) -> float:
        ends = [row["slowest_and_fastest"][side] for side in sides]
        return sum((fastest - slowest) / (fastest + slowest) for slowest, fastest in ends)

    return spread


COMPARISONS = (
    Comparison(
        "train_step",
        "SFT step, speed",
        at("speed_ratio"),
        "the better of PyTorch eager and compiled",
        ("case",),
        {"1m": 2.0, "30m": 1.2, "vocabulary": 1.0, "135m": 2.2},
    ),
    Comparison(
        "train_step",
        "SFT step, memory",
        at("memory_ratio"),
        "the same",
        ("case",),
        {"vocabulary": 0.6, "135m": 0.4},
        more_is_better=False,
    ),
    *(
        Comparison(
            "sft_vs_pytorch",
            what,
            where("texts", texts, at("speed_ratio"), before=0.05),
            "TRL's faster way",
            ("device",),
            {"": 1.2},
            trainer="TRL",
        )
        for what, texts in (("SFT run, speed", 0.05), ("SFT run, speed, rows three quarters full", 0.3))
    ),
    Comparison(
        "grpo_step",
        "GRPO step, speed beside TRL",
        at("speed_ratio", "trl"),
        "TRL",
        ("case", "lengths"),
        {"": 1.5},
        trainer="TRL",
    ),
    Comparison(
        "grpo_step",
        "GRPO step, speed beside Tunix",
        at("speed_ratio", "tunix"),
        "Tunix",
        ("case", "lengths"),
        {"": 1.3},
        trainer="Tunix",
    ),
    Comparison(
        "grpo_step",
        "GRPO step, memory beside TRL",
        at("memory_ratio", "trl"),
        "TRL",
        ("case", "lengths"),
        {"vocabulary, equal": 0.7, "vocabulary, varied": 0.7},
        more_is_better=False,
        trainer="TRL",
    ),
    Comparison(
        "decode",
        "Decoding beside transformers",
        at("speed_ratio", "transformers"),
        "transformers' generate",
        ("case", "batch"),
        {"1m, 16": 3.0, "30m, 16": 3.0, "135m, 16": 2.0},
        spread=rounds("engine", "transformers"),
    ),
    Comparison(
        "decode",
        "Decoding beside vLLM",
        at("speed_ratio", "vllm"),
        "vLLM for CPUs",
        ("case", "batch"),
        {"135m, 16": 1.2},
        spread=rounds("engine", "vllm"),
    ),
    Comparison(
        "decode_floor",
        "Decoding on an accelerator",
        at("share"),
        "the bandwidth's floor",
        ("device", "model", "batch"),
        {"": 0.70},
        unit="",
    ),
    Comparison(
        "compiled_decode",
        "Decoding, compiled for a TPU",
        at("share"),
        "the bandwidth's floor, by the compiler's cycles",
        ("model", "topology", "slots", "length"),
        {"": 0.70},
        unit="",
    ),
    Comparison(
        "sandbox", "Sandbox call, CPU ms", at("cpu_ms_per_call"), "", (), {"": 1.6}, more_is_better=False, unit=" ms"
    ),
    Comparison(
        "sandbox", "Sandbox calls a second and core", at("calls_per_second_per_cpu"), "", (), {"": 500}, unit=""
    ),
    Comparison("sandbox", "Sandbox beside new processes", at("ratio", "python -I"), "`python -I` for each call"),
    Comparison(
        "teacher", "Teacher's client, share of the ideal", at("stage", "of_ideal"), "256 requests of 0.1 s", unit=""
    ),
    Comparison(
        "teacher", "Teacher's client beside openai", over(("stage", "per_second"), ("openai", "per_second")), "openai"
    ),
    Comparison("weight_sync", "Weight sync", at("ratio"), "vLLM's reload of a folder", more_is_better=False),
    Comparison(
        "weight_sync",
        "Weights handed over from memory, CPU seconds",
        at("direct", "processor_ratio"),
        "the same through files",
        (),
        {"": 1.0},
        more_is_better=False,
    ),
    Comparison(
        "rl_simulation",
        "Simulated GRPO, the trainer's idle share at k = 2",
        where("async_steps", 2, at("idle_share")),
        "",
        ("case", "servers"),
        {"": 0.05},
        more_is_better=False,
        unit="",
    ),
    Comparison(
        "rl_simulation",
        "Simulated GRPO, a strictly online step",
        at("of_lower_bound"),
        "its lower bound: all servers at their fastest, or the longest episode alone",
        ("case", "servers"),
        {"": 1.15},
        more_is_better=False,
    ),
    Comparison(
        "rl_simulation",
        "Simulated GRPO, error of a step's time",
        size_of(at("step_error")),
        "a real run of a tiny model",
        ("async_steps",),
        {"": 0.15},
        more_is_better=False,
        unit="",
        spread=lambda row: math.inf,  # of a difference of two that are near: the goal judges it alone
    ),
    Comparison(
        "sft_input", "Batches beside steps", at("ratio", "0"), "steps of 1M parameters", ("parameters",), unit=""
    ),
)


def lines(comparisons: Sequence[Comparison] = COMPARISONS) -> list[Line]:
    """A line for each case of each comparison that has a row."""
    found = []
    for comparison in comparisons:
        newest: dict[str, list[Row]] = {}
        for row in rows.read(comparison.file):
            if comparison.value(row) is not None:
                newest.setdefault(comparison.case_of(row), []).append(row)
        for case, of_case in newest.items():
            alike = [row for row in of_case[:-1] if row["hardware"] == of_case[-1]["hardware"]]
            found.append(Line(comparison, case, of_case[-1], alike[-1] if alike else None))
    return found


def shown(value: float) -> str:
    """To three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def table(found: Sequence[Line]) -> str:
    """The lines as Markdown."""
    text = ["| what | case | beside | figure | goal | | processor | date | commit |", "| --- " * 9 + "|"]
    for line in found:
        one, goal = line.comparison, line.comparison.goal(line.case)
        wanted = "" if goal is None else f"{'≥' if one.more_is_better else '≤'} {goal:g}{one.unit}"
        state = "" if goal is None else "missed" if line.missed else "reached"
        cells = [one.what, line.case, one.beside, f"{shown(line.value)}{one.unit}", wanted, state]
        text.append("| " + " | ".join([*cells, line.row["hardware"], line.row["date"], line.row["commit"]]) + " |")
    return "\n".join(text) + "\n"


def figure(found: Sequence[Line], path: Path) -> None:
    """Ratios as bars from 1 on a logarithmic axis, so that left is behind and right ahead; goals as marks."""
    shown = []
    for line in found:
        if line.comparison.unit == " x":
            more, goal = line.comparison.more_is_better, line.comparison.goal(line.case)
            name = f"{line.comparison.what} {line.case}".strip()
            shown.append((name, line.value if more else 1 / line.value, goal if more or goal is None else 1 / goal))
    about = "times the peer (memory: times less); | the goal"
    path.write_text(drawings.standalone(drawings.ratios("Beside peers", shown, about=about)), encoding="utf-8")


def learnt(found: Sequence[Row]) -> str:
    """README's table: the seeds of `quick` that were measured at the newest row's commit, `full` where it was too."""
    commit = next((row["commit"] for row in reversed(found) if row["profile"] == "quick"), None)
    if commit is None:
        raise UsageError(
            "benchmarks/results/quickstart.jsonl has no row of the profile quick: run with --measure first"
        )
    newest: dict[tuple[str, int], Row] = {
        (row["profile"], row["seed"]): row for row in found if row["commit"] == commit
    }
    quick = [newest[key] for key in sorted(newest) if key[0] == "quick"]
    processors = "; ".join(sorted({row["hardware"] for row in quick}))
    minutes = statistics.median(row["seconds"] for row in quick) / 60
    columns = ["seed", "untrained", "SFT", "GRPO", "answers after SFT, GRPO", "of full reward", "minutes", "GiB"]
    if fulls := {seed: row for (profile, seed), row in newest.items() if profile == "full"}:
        columns.append("GRPO, `full`")
    text = [
        "Mean F1 on held-out environments, no entity and no question structure of which was trained on; the share of",
        "right final answers, and that among GRPO's episodes with full reward. Commit "
        f"{commit}, {processors}, {minutes:.1f} minutes a run (median);",
        "`full` makes up to 160 updates of GRPO instead of 28 ([more](docs/quickstart.md#measured)).",
        "",
        f"| {' | '.join(columns)} |",
        "| --- " * len(columns) + "|",
    ]
    for row in quick:
        answers, of_full = row.get("answer_accuracy"), row.get("full_reward_accuracy", {}).get("grpo")
        cells = [str(row["seed"]), *(f"{row['f1'][name]:.2f}" for name in ("untrained", "sft", "grpo"))]
        cells.append(f"{answers['sft']:.2f}, {answers['grpo']:.2f}" if answers else "")
        cells.append("" if of_full is None else f"{of_full:.2f}")
        cells += [f"{row['seconds'] / 60:.1f}", f"{row['peak_rss_gib']:.1f}"]
        if fulls:
            cells.append(f"{fulls[row['seed']]['f1']['grpo']:.2f}" if row["seed"] in fulls else "")
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def beside(found: Sequence[Line]) -> str:
    """docs/comparison.md's table: what was measured beside other trainers, with the date."""
    text = ["| what | case | beside | ours | processor | date |", "| --- " * 6 + "|"]
    for line in found:
        if line.comparison.trainer:
            cells = [
                line.comparison.what,
                line.case,
                line.comparison.trainer,
                f"{line.value:#.3g}{line.comparison.unit}",
            ]
            text.append("| " + " | ".join([*cells, line.row["hardware"], line.row["date"]]) + " |")
    return "\n".join(text) + "\n"


def speed(found: Sequence[Line]) -> str:
    """README's table of speeds."""
    text = ["| what | case | beside | figure | processor | date |", "| --- " * 6 + "|"]
    for line in found:
        one = line.comparison
        if (ending := FRONT.get(one.what)) is not None and line.case.endswith(ending):
            cells = [one.what, line.case, one.beside, f"{shown(line.value)}{one.unit}", line.row["hardware"]]
            text.append("| " + " | ".join([*cells, line.row["date"]]) + " |")
    return "\n".join(text) + "\n"


def measurements(workdir: str, peers: Sequence[str]) -> Iterator[list[str]]:
    """The commands of --measure that can be run here; says of the others what they lack.

    Args:
        workdir: of the quickstart's runs.
        peers: flags of `benchmarks.grpo_step`.
    """
    own = {"benchmarks.quickstart": [f"--workdir={workdir}"], "benchmarks.grpo_step": peers}
    for module, *arguments in MEASURED:
        lacks = NEEDS.get(module)
        if lacks and importlib.util.find_spec(lacks) is None:
            say(f"not measured: {module}, for which {lacks} is not installed")
        elif module == "benchmarks.grpo_step" and not peers:
            say(f"not measured: {module}; give --trl or --tunix")
        else:
            yield [module, *own.get(module, []), *arguments]


def rewrite() -> list[Line]:
    """Bring the pages up to the rows; returns what they show."""
    found = lines()
    rows.rewrite(DOCS / "comparison.md", "peers", beside(found))
    rows.rewrite(DOCS / "performance.md", "rows", table(found))
    figure(found, DOCS / "performance.svg")
    grown = growth_page.newest(rows.read("growth"))
    rows.rewrite(DOCS / "performance.md", "growth", growth_page.table(grown))
    growth_page.figure(grown, DOCS / "growth.svg")
    rows.rewrite(DOCS / "performance.md", "simulation", simulation_page.table(rows.read("rl_simulation")))
    rows.rewrite(DOCS / "performance.md", "async", async_page.table(rows.read("async_rollouts")))
    rows.rewrite(README, "results", learnt(rows.read("quickstart")))
    rows.rewrite(README, "speed", speed(found))
    return found


def main() -> int:
    failed: list[str] = []
    if _MEASURE.value:
        if not _WORKDIR.value:
            raise UsageError("--measure runs the quickstart: give a folder for its runs, --workdir=DIR")
        peers = [f"--{name}={value}" for name, value in (("trl", _TRL.value), ("tunix", _TUNIX.value)) if value]
        for command in measurements(_WORKDIR.value, peers):
            if code := subprocess.run([sys.executable, "-m", *command], cwd=rows.ROOT).returncode:
                failed.append(command[0])
                say(f"{command[0]} ended with {code}; what it measures stays as it was")
    found = rewrite()
    behind = [said for line in found if (said := line.behind()) is not None]
    for said in behind:
        say(said)
    say(f"{len(found)} figures, {sum(line.missed for line in found)} short of their goals, {len(behind)} behind before")
    return 1 if behind or failed else 0


if __name__ == "__main__":
    cli.run(main)
