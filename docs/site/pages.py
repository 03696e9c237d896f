"""Handwritten pages as sources of the site: those of docs/ and of the root, with adapted links."""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from astra_jax.base.errors import InputError
from docs.notebooks import cells

ROOT = Path(__file__).resolve().parents[2]
OF_THE_ROOT = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages outside docs/ → their path on the site."""
FLOORS = ("configs", "astra_jax", "synthesis", "sandbox")
"""Packages for use from Python; programs have their own pages."""
COPIED = {"benchmarks/results/": "rows/", "launch/recipes/": "recipe_files/"}
"""Folders with files that pages link to → their path on the site."""
NOTEBOOKS = "docs/notebooks/"
_LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]*)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^ *```")


def module_page(module: str) -> str:
    """Return the path of a module's page."""
    return f"reference/modules/{module}.md"


def notebook_page(name: str) -> str:
    """Return the path of a notebook's page.

    Args:
        name: file name, without folder and suffix.
    """
    return f"notebook_{name}.md"


def write(folder: Path) -> None:
    """Write all pages, pictures, and what else pages link to.

    Args:
        folder: the sources' root.

    Raises:
        InputError: a page links to a file that the site does not have.
    """
    for picture in (ROOT / "docs").glob("*.svg"):
        shutil.copy(picture, folder)
    shutil.copy(ROOT / "LICENSE", folder / "license.txt")
    for source, target in COPIED.items():
        shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
    named = {page.relative_to(ROOT).as_posix(): page.name for page in sorted((ROOT / "docs").glob("*.md"))}
    for source, target in (named | OF_THE_ROOT).items():
        text = (ROOT / source).read_text(encoding="utf-8")
        (folder / target).write_text(adapted(text, source), encoding="utf-8")
    (folder / "notebooks").mkdir()
    for file in cells.files():
        shutil.copy(file, folder / "notebooks")
        page = adapted(cells.page(cells.read(file)), f"{NOTEBOOKS}{file.name}")
        download = (
            f"The cells are those of [a notebook](notebooks/{file.name}), which the tests run as they are printed."
        )
        (folder / notebook_page(file.stem)).write_text(f"{page}\n{download}\n", encoding="utf-8")


def adapted(text: str, source: str) -> str:
    """Return a page's text for the site, with links that work there.

    Args:
        source: path of the page, from the repository's root.

    Raises:
        InputError: see `write`.
    """

    def led(link: re.Match[str]) -> str:
        opening, target, anchor, closing = link.groups()
        there = on_site(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)), source) if target else ""
        return f"{opening}{there}{anchor or ''}{closing}"

    return "\n".join(_outside_code(text, lambda line: _LINK.sub(led, line))) + "\n"


def on_site(path: str, source: str) -> str:
    """Return the target on the site of a link to a file of the repository, from the root of the sources.

    Raises:
        InputError: the site does not have it.
    """
    if path in OF_THE_ROOT:
        return OF_THE_ROOT[path]
    if path == "LICENSE":
        return "license.txt"
    if path.startswith("docs/") and "/" not in path[5:]:
        return path[5:]
    if path.startswith(NOTEBOOKS) and path.endswith(".ipynb"):
        return notebook_page(path.removeprefix(NOTEBOOKS).removesuffix(".ipynb"))
    for folder, there in COPIED.items():
        if path.startswith(folder) and (ROOT / path).is_file():
            return f"{there}{path.removeprefix(folder)}"
    floor = path.partition("/")[0]
    if floor in FLOORS and path.endswith(".py"):
        return module_page(path[:-3].replace("/", "."))
    if floor in FLOORS and (ROOT / path).is_dir():
        return f"reference/modules/index.md#{floor}"
    raise InputError(f"{source} links to {path}, which the site has no page of: link to a page, a module or rows")


def _outside_code(text: str, change: Callable[[str], str]) -> list[str]:
    """Return the lines, with `change` applied to those outside code blocks."""
    found, fenced = [], False
    for line in text.splitlines():
        fence = _FENCE.match(line) is not None
        fenced ^= fence
        found.append(line if fenced or fence else change(line))
    return found
