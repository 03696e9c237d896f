"""What docstrings say of parameters, attributes and classes is so."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("launch", "configs", "astra_jax", "synthesis", "sandbox", "benchmarks")
SECTION = re.compile(r"^ *(Args|Attributes|Raises|Returns|Yields):$", re.M)
ENTRY = re.compile(r"^( *)([\w*, ]+):(?: |$)")
CLASS = re.compile(r"`([A-Z][a-z0-9]+(?:[A-Z]+[a-z0-9]*)+)`")
NOT_OURS = {
    "OpenAICompletionsHandler",  # of the benchmark's harness
    "TaskScoresAnswer",  # an example
    "ToolAnnotations",  # of MCP
}

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources() -> dict[Path, ast.Module]:
    found = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py")) if "build" not in path.parts]
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in found}


def docstrings() -> Iterator[tuple[str, Documented, str]]:
    """(place, what it is of, text)."""
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                yield f"{path}:{getattr(node, 'lineno', 1)}", node, text


def entries(text: str, section: str) -> list[str]:
    """The names that begin the entries of a section."""
    found: list[str] = []
    for begin in SECTION.finditer(text):
        if begin[1] != section:
            continue
        depth = None
        for line in text[begin.end() + 1 :].splitlines():
            indent = len(line) - len(line.lstrip())
            if not line.strip() or indent <= len(begin[0]) - len(begin[0].lstrip()):
                break
            depth = indent if depth is None else depth
            if indent == depth and (entry := ENTRY.match(line)):
                found += [name.strip(" *") for name in entry[2].split(",")]
    return found


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    return {one.arg for one in every if one is not None}


def assigned(node: ast.ClassDef) -> set[str]:
    """Names that a class has of its own: fields, methods, what its methods set, its constructor's parameters."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            found.add(part.attr)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= {part.name, *(parameters(part) if part.name == "__init__" else ())}
    return found


@cache
def attributes() -> dict[str, set[str]]:
    """Of each class."""
    classes = [node for tree in sources().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name: assigned(node) for node in classes}


def test_parameters_and_attributes_that_docstrings_explain_are_there() -> None:
    wrong = []
    for place, node, text in docstrings():
        if isinstance(node, ast.Module):
            continue
        if isinstance(node, ast.ClassDef):
            bases = [one.id for one in node.bases if isinstance(one, ast.Name)]
            there = assigned(node).union(*(attributes()[name] for name in bases if name in attributes()))
            named = [*entries(text, "Args"), *entries(text, "Attributes")]
        else:
            there, named = parameters(node), entries(text, "Args")
        wrong += [f"{place}: {name}" for name in named if name not in there]
    assert not wrong, "\n".join(wrong)


def test_classes_that_docstrings_name_are_there() -> None:
    known = {*dir(builtins), *NOT_OURS}
    for tree in sources().values():
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                    known.add(name)
                case ast.alias(name=name, asname=asname):
                    known.add(asname or name.rpartition(".")[2])
    wrong = []
    for place, _, text in docstrings():
        raised = [name for name in entries(text, "Raises") if name[:1].isupper()]
        wrong += [f"{place}: {name}" for name in [*raised, *CLASS.findall(text)] if name not in known]
    assert not wrong, "\n".join(wrong)
