"""Convert trajectories from and to the format that ASTRA released (ASTRA-SFT), and for other trainers.

    astra astra_sft --from=FILE --to=DIR                 # .jsonl, .jsonl.gz, .json or .parquet to a dataset
    astra astra_sft --from=DIR --to=FILE.jsonl               # the released columns, .jsonl or .parquet
    astra astra_sft --from=DIR --to=FILE.parquet --form=trl  # messages and tools, as TRL reads them

Imported trajectories keep the scores of their file and get no others. The dataset's card names and counts defective
rows; --accept keeps rows with the named defects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from absl import flags

from astra_jax.base.terminal import say
from launch.flags import cli, released

if TYPE_CHECKING:
    from pathlib import Path

    from synthesis.astra_format.sft import Form

_FORM = flags.DEFINE_enum(
    "form",
    "qwen",
    ["qwen", "openai", "trl"],
    "Format of an exported file. qwen: the released columns. openai: tools and messages. trl: the same, in the form "
    "that TRL reads.",
)
_ACCEPT = flags.DEFINE_list(
    "accept", [], "Accept rows of files with these defects, separated by commas; the dataset's card names them."
)


def main() -> None:
    with released.places() as (source, target):
        if source.is_dir():
            cli.refuse_unused((_ACCEPT,), "is for an import; leave it out")
            _export(source, target)
        else:
            _import(source, target)


def _export(source: Path, target: Path) -> None:
    from synthesis.astra_format.sft import write_records
    from synthesis.core.datasets import CARD_FILE, read_dataset
    from synthesis.core.records import Task, ToolServer, Trajectory

    trajectories = read_dataset(source, Trajectory)
    # Beside the trajectories of a run stand its servers and tasks, of which the released columns have more.
    beside = {name: source.parent / name for name in ("servers", "tasks")}
    found = {name: folder for name, folder in beside.items() if (folder / CARD_FILE).exists()}
    servers = read_dataset(found["servers"], ToolServer) if "servers" in found else []
    tasks = read_dataset(found["tasks"], Task) if "tasks" in found else []
    count = write_records(
        target, trajectories, form=cast("Form", _FORM.value), servers={one.id: one for one in servers},
        tasks={one.id: one for one in tasks},
    )  # fmt: skip
    say(f"{target}: {count} records")


def _import(source: Path, target: Path) -> None:
    from synthesis.astra_format.sft import MENDED, import_dataset
    from synthesis.core.datasets import write_dataset
    from synthesis.core.records import Trajectory

    cli.refuse_unused((_FORM,), "is for an export; the format of an imported file is detected. Leave it out")
    imported = import_dataset(source, accept=_ACCEPT.value)
    card = {"source": source.name, **imported.account()}
    write_dataset(target, Trajectory, imported.records, card=card)
    released.say_imported(target, imported)
    for name in (one for one in MENDED if one in imported.defects):
        say(f"  {imported.defects[name]} rows with {name}, such as {imported.details[name]}")


if __name__ == "__main__":
    cli.run(main, again="it begins anew, since nothing was written")
