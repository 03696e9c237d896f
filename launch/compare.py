"""Stages of training beside each other: what each benchmark says before and after SFT and RL, paired by item.

    python -m launch.compare --run=base=DIR --run=sft=DIR --run=rl=DIR --page=compare.html

Each DIR is a workdir of launch.evaluate, given in the order of training. The tables are printed as markdown; a watched
category (BFCL's missing functions) that falls by more than its interval from one run to the next is a warning on top.
Runs that were not measured alike are refused: another harness, other data, another user simulator or judge, or other
items.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from launch.flags import cli
from synthesis.core.terminal import say

_RUN = flags.DEFINE_multi_string(
    "run", [], "Run to compare, as NAME=DIR; repeat it for two or more runs, in the order of training."
)
_PAGE = flags.DEFINE_string("page", None, "HTML page to write, self-contained.")
_FIGURES = flags.DEFINE_string("figures", None, "JSON file to write all numbers to.")


def main() -> None:
    folders = _runs()

    from astra_jax.evaluation.comparison import compare
    from astra_jax.evaluation.grids import as_json, markdown
    from astra_jax.evaluation.saved import load_evaluation
    from launch.viewer.evaluation_page import write_evaluation
    from synthesis.core.files import write_text

    compared = compare({name: load_evaluation(folder) for name, folder in folders.items()})
    say(markdown(compared))
    if _PAGE.value:
        write_evaluation(Path(_PAGE.value), compared)
    if _FIGURES.value:
        write_text(Path(_FIGURES.value), as_json(compared))


def _runs() -> dict[str, Path]:
    """The folders by name, as given. Raises `UsageError`."""
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
