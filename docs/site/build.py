"""A site is made: sources in a folder of their own, Zensical over them, the result looked through and put in place."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from astra_jax.base.errors import InputError
from docs.site import links, pages, reference


def build(target: Path) -> int:
    """Write the site; returns how many pages it has.

    Raises:
        InputError: what builds it is not installed, the folder holds something else, or a link leads nowhere.
    """
    if missing := [name for name in ("zensical", "mkdocstrings") if importlib.util.find_spec(name) is None]:
        raise InputError(f"{' and '.join(missing)} not installed: pip install '.[docs]'")
    if target.exists() and any(target.iterdir()) and not (target / "objects.inv").is_file():
        raise InputError(f"{target} holds something that is no site; give a new folder")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        (work / "docs").mkdir()
        (work / "code").symlink_to(pages.ROOT)
        shutil.copy(pages.ROOT / "docs" / "site" / "zensical.toml", work)
        pages.write(work / "docs")
        reference.write(work / "docs")
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        made = subprocess.run(command, cwd=work, capture_output=True, text=True)
        if made.returncode:
            raise InputError(f"zensical refuses the pages: {made.stdout}{made.stderr}")
        if wrong := links.broken(work / "site"):
            raise InputError(f"{len(wrong)} links lead nowhere: " + "; ".join(wrong))
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(work / "site", target)
    return sum(one.is_file() for one in target.rglob("*.html"))
