"""Compare benchmark results of several runs, paired by item, such as before and after training.

    astra compare --run=base=DIR --run=sft=DIR --run=rl=DIR --page=compare.html

Each DIR is a workdir of astra evaluate, given in the order of training. The tables are printed as Markdown. A warning
is printed first if a monitored category (BFCL's missing functions) falls by more than its interval from one run to the
next. Runs that were measured differently are refused: with another harness, data, user simulator, judge or set of
items.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from astra_jax.base.terminal import say
from launch.flags import cli

_RUN = flags.DEFINE_multi_string(
    "run", [], "Run to compare, as NAME=DIR; repeat it for two or more runs, in the order of training."
)
_PAGE = flags.DEFINE_string("page", None, "HTML page to write, self-contained.")
_FIGURES = flags.DEFINE_string("figures", None, "JSON file to write all numbers to.")


def main() -> None:
    folders = _runs()

    from astra_jax.base.files import write_text
    from astra_jax.evaluation.comparison import compare
    from astra_jax.evaluation.grids import as_json, markdown
    from astra_jax.evaluation.saved import load_evaluation
    from launch.viewer.evaluation_page import write_evaluation

    compared = compare({name: load_evaluation(folder) for name, folder in folders.items()})
    say(markdown(compared))
    if _PAGE.value:
        write_evaluation(Path(_PAGE.value), compared)
    if _FIGURES.value:
        write_text(Path(_FIGURES.value), as_json(compared))


def _runs() -> dict[str, Path]:
    """Return the folders by name, as given. Raises `UsageError`."""
    runs: dict[str, Path] = {}
    for given in _RUN.value:
        name, equals, folder = given.partition("=")
        if not (name and equals and folder):
            raise cli.UsageError(f"--run={given} is not NAME=DIR; write for example --run=sft=evaluation/sft")
        if name in runs:
            raise cli.UsageError(f"--run={given}: there is a run {name!r} already; give each a name of its own")
        runs[name] = Path(folder)
    if len(runs) < 2:
        raise cli.UsageError(f"{len(runs)} runs are given; write --run=NAME=DIR for each of two or more")
    return runs


if __name__ == "__main__":
    cli.run(main)
