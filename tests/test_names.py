"""One name for one thing, and no library that is not asked for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("launch", "configs", "astra_jax", "synthesis", "sandbox")
ELSEWHERE = ("astra_jax/rollout/vllm/plugin", "astra_jax/evaluation/workers")
"""Run in environments of their own: beside vLLM, and beside a benchmark's harness."""


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            if "build" not in path.parts:  # what pip leaves when the plugin is installed
                yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def test_no_two_public_classes_share_a_name() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_two_files_of_tests_share_a_name() -> None:
    """Python has them as modules of one name: pytest collects the first one, and in each of its processes."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name not in ("conftest.py", "__init__.py"):
            places[path.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 300 and not {name: where for name, where in places.items() if len(where) > 1}


def test_no_module_takes_what_another_keeps_to_itself() -> None:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in LAYERS:
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{path} imports {private[0]} of {node.module}"


def declared() -> set[str]:
    """The distributions that setup.py asks for, with or without an extra; those of `test` and `bench` left out."""
    code = (
        "import setuptools; setuptools.setup = lambda **given: print(*given['install_requires'], "
        "*(one for name, extra in given['extras_require'].items() if name not in ('test', 'bench') for one in extra), "
        "sep=chr(10)); exec(open('setup.py').read(), {'__file__': 'setup.py'})"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {normal(re.split(r"[^\w.-]", line)[0]) for line in found.splitlines()}


def normal(name: str) -> str:
    """Of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_library_that_is_imported_is_asked_for() -> None:
    """Also inside functions; what is only in an extra is the importing function's to say."""
    asked = declared()
    providers = metadata.packages_distributions()
    for path, tree in trees():
        if str(path).startswith(ELSEWHERE):
            continue
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                if top in sys.stdlib_module_names or top in LAYERS:
                    continue
                by = {normal(one) for one in providers.get(top, [top])}
                assert by & asked, (
                    f"{path} imports {name}, of {' or '.join(sorted(by))}, which setup.py does not ask for"
                )


def test_nothing_reaches_a_terminal_but_by_what_makes_it_safe() -> None:
    """`astra_jax/base/terminal.py`; a terminal obeys what it is sent, and nearly all text is a stranger's."""
    may = {
        "astra_jax/base/terminal.py",  # it is what makes text safe
        "astra_jax/base/progress.py",  # bars and their log, whose labels it makes safe
        "astra_jax/sft/preview.py",  # colours around text that it makes safe
        "launch/bootstrap.py",  # before anything is installed; it shows nobody's text
        "sandbox/zygote.py",  # the lowest layer; an error of the operating system's, to the pool's log
        "sandbox/script.py",  # runs in the sandbox, where standard error is a part of the answer
    }
    for path, tree in trees():
        if path.as_posix() in may or path.as_posix().startswith(ELSEWHERE):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                loud = called in ("print", "tqdm.write") or re.fullmatch(r"sys\.std(out|err)\.write", called)
                assert not loud, f"{path}:{node.lineno} calls {called}; use astra_jax.base.terminal.say"
