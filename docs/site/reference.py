"""Generated pages as sources of the site: one for each program, configuration and module."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import astra_packages
from configs import synthesis, training
from configs.quickstart import PROFILES
from docs.site import pages
from docs.site.pages import ROOT, module_page
from launch.flags import settings_list

FOLDER = "reference"
SETTINGS = {
    "sft": "sft:0.6b",
    "grpo": "grpo:0.6b",
    "trajectories": "trajectories:paper",
    "environments": "environments:paper",
    "quickstart": "quick",
}
"""The programs with settings, and whose values of theirs are shown."""
_OF_MODELS = "model."
"""Prefixes of settings in which presets differ by the sizes of their models only."""
_FLAG = re.compile(r"^  (--\S+(?: \(required\))?): (.*)$")
_SECTION = re.compile(r"^((?:\w+ )*\w+):$")
_NOT_API = re.compile(r"/(?:workers|plugin|offline|cpu)/|__(?:init|main)__\.py$")
"""Modules without a page: programs of other Python environments, internal rules, and files without content of their
own."""


def write(folder: Path) -> None:
    """Write all pages of the reference below the sources' root; asks each program for its help."""
    for kind in ("programs", "settings", "modules"):
        (folder / FOLDER / kind).mkdir(parents=True)
    _write_programs(folder / FOLDER / "programs")
    _write_settings(folder / FOLDER / "settings")
    _write_modules(folder)


def _write_programs(folder: Path) -> None:
    names = list(astra_packages.programs())
    told = _helps(names)
    listed = [
        "# Command line\n",
        "`astra NAME` and `python -m launch.NAME` are the same. How programs end:",
        "[Architecture](../../architecture.md#how-programs-end).\n",
    ]
    for name, text in zip(names, told, strict=True):
        (folder / f"{name}.md").write_text(program_page(name, text), encoding="utf-8")
        listed.append(f"- [`astra {name}`]({name}.md): {_first(text)}")
    (folder / "index.md").write_text("\n".join(listed) + "\n", encoding="utf-8")


def _helps(names: Sequence[str]) -> list[str]:
    """Return the `--help` text of each program."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    commands = ([sys.executable, "-P", "-m", f"launch.{name}", "--help"] for name in names)
    return [
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        for command in commands
    ]


def program_page(name: str, told: str) -> str:
    """Return a page of a program's `--help`: the text unchanged, its flags as lists."""
    about, _, _ = re.split(r"^((?:most used )?flags:)$", told, maxsplit=1, flags=re.M)
    settings = f"\nIts settings: [{name}](../settings/{name}.md).\n" if name in SETTINGS else ""
    return f"# astra {name}\n\n{about.strip()}\n{settings}\n" + "\n".join(_flag_lists(told[len(about) :])) + "\n"


def _flag_lists(told: str) -> Iterator[str]:
    """Yield the lines of Markdown for the sections of flags in a `--help` text."""
    entry: list[str] = []
    for line in [*told.splitlines(), "end:"]:
        section, flag = _SECTION.match(line), _FLAG.match(line)
        if entry and (section or flag):
            yield f"- `{entry[0]}`: {plain(' '.join(entry[1:]))}"
            entry = []
        if section and section[1] != "end":
            yield f"\n## {section[1].capitalize()}\n"
        elif flag:
            entry = [flag[1], flag[2]]
        elif entry and line.strip():
            entry.append(line.strip())


def plain(text: str) -> str:
    """Return a sentence as Markdown that renders it literally; text within backticks stays code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts = [text.replace("`", "'")]
    for place in range(0, len(parts), 2):
        parts[place] = re.sub(r"([\\*_\[\]<>|#])", r"\\\1", parts[place])
    return "`".join(parts)


def _write_settings(folder: Path) -> None:
    listed = [
        "# Settings\n",
        "Every setting of these is `--config.NAME=VALUE` of its program: JSON, or a bare word. What does not fit is",
        "refused with what would. `--help_config` prints the same. Settings of classes that flags set, such as the",
        "sandbox's, are beside them in the [modules](../modules/index.md).\n",
    ]
    for program, shown in SETTINGS.items():
        presets = _presets(program)
        page = settings_page(program, shown, presets)
        (folder / f"{program}.md").write_text(page, encoding="utf-8")
        listed.append(f"- [{program}]({program}.md): {len(presets)} presets")
    (folder / "index.md").write_text("\n".join(listed) + "\n", encoding="utf-8")


def _presets(program: str) -> dict[str, Any]:
    if program == "quickstart":
        return {name: made() for name, made in PROFILES.items()}
    every = {**training.PRESETS, **synthesis.PRESETS}
    return {name: made() for name, made in every.items() if name.partition(":")[0] == program}


def settings_page(program: str, shown: str, presets: dict[str, Any]) -> str:
    """Return a page of every setting of a program: values of one preset, and the different values of the others.

    Args:
        shown: name of the preset.
        presets: configurations by name.
    """
    flag = "profile" if program == "quickstart" else "config"
    text = [
        f"# Settings of {program}\n",
        f"[`astra {program}`](../programs/{program}.md), values of `--{flag}={shown}`.\n",
    ]
    every = list(settings_list.settings(presets[shown]))
    values = {one.name: one.value for one in every}
    for group in dict.fromkeys(one.name.rpartition(".")[0] for one in every):
        text.append(f"\n## {group or program}\n")
        for one in every:
            if one.name.rpartition(".")[0] == group:
                text += [
                    f"- `--config.{one.name}={one.written}`  ",
                    f"  {plain(one.allowed)}.  ",
                    f"  {plain(one.meaning)}",
                ]
    text += ["\n## Presets\n", f"What others than `{shown}` have instead, but for the sizes of their models.\n"]
    for name, config in presets.items():
        others = [
            f"`{one.name}={one.written}`"
            for one in settings_list.settings(config)
            if not one.name.startswith(_OF_MODELS) and values.get(one.name, _MISSING) != one.value
        ]
        text.append(f"- `{name}`: {', '.join(others) or 'the same'}")
    return "\n".join(text) + "\n"


_MISSING = object()


def _write_modules(folder: Path) -> None:
    listed = [
        "# Modules\n",
        "From the docstrings, which give shapes, units, errors and sources. [Architecture](../../architecture.md) says",
        "how it hangs together, the [glossary](../../glossary.md#machines) what letters of shapes stand for.",
    ]
    for floor in pages.FLOORS:
        listed.append(f"\n## {floor}\n")
        for path in sorted((ROOT / floor).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not _NOT_API.search(name):
                module = name[:-3].replace("/", ".")
                first = _first(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
                (folder / module_page(module)).write_text(f"# {module}\n\n::: {module}\n", encoding="utf-8")
                listed.append(f"- [{module}]({module}.md): {plain(first)}")
    (folder / FOLDER / "modules" / "index.md").write_text("\n".join(listed) + "\n", encoding="utf-8")


def _first(text: str) -> str:
    """Return about the first sentence, on one line."""
    return " ".join(text.strip().partition("\n\n")[0].split())
