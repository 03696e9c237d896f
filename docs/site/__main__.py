"""Build the documentation site: the pages, and a reference of programs, settings and modules generated from the code.

    pip install '.[docs]'
    python -m docs.site --to=DIR

Modules are read, not imported. A broken link ends the program with exit code 2. Open DIR/index.html, or serve DIR.
"""

from __future__ import annotations

from absl import flags

from astra_jax.base.terminal import say
from docs.site.build import build
from launch.flags import cli

_TO = flags.DEFINE_string("to", None, "Folder to write the site to; a site that is there is replaced.", required=True)


def main() -> None:
    target = cli.local_folder(_TO)
    say(f"{target}: {build(target)} pages")


if __name__ == "__main__":
    cli.run(main)
