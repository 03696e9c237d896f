"""Sentences of docstrings and pages: faults of style are counted for each file, and a count may only fall.

`tests/prose.json` has the counts. After you fixed some, run `ASTRA_WRITE_COUNTS=1 pytest tests/test_prose.py`.
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COUNTS = Path(__file__).parent / "prose.json"
PACKAGES = ("launch", "configs", "astra_jax", "synthesis", "sandbox", "benchmarks")
MOST_WORDS = 30
HEADLESS = re.compile(r"(?:What|Whether|Of|How|That|Where|Those|Who|Whoever)\b")
BANNED = re.compile(
    r"\b(?:go(?:es|ing)? on|gone on|draws?|drawn|anew|looked at|voided|mend(?:s|ed)?|told|whoever|the one that|"
    r"those that|of before|as it was|dearer|no folder|gives? away)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"(?s:```.*?```)|`[^`\n]*`|\]\([^)\n]*\)|^(?: {8,}| *[|<>#]).*$", re.MULTILINE)
_SENTENCE = re.compile(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*[-*\d]+[.)]?\s")


def counts(texts: list[str], *, first_lines: bool) -> list[int]:
    """Sentences of more than `MOST_WORDS` words, first lines without a subject, words that have a better one."""
    long = headless = banned = 0
    for text in texts:
        headless += first_lines and HEADLESS.match(text.strip()) is not None
        prose = _CODE.sub(" x ", text)
        long += sum(len(sentence.split()) > MOST_WORDS for sentence in _SENTENCE.split(prose))
        banned += len(BANNED.findall(prose))
    return [long, headless, banned]


_ASSIGNED = ast.Assign | ast.AnnAssign


def _text(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


def docstrings(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(ast.get_docstring(node) or "")
        if isinstance(body := getattr(node, "body", None), list):  # strings behind constants and fields
            found += [_text(one) for before, one in zip(body, body[1:], strict=False) if isinstance(before, _ASSIGNED)]
    return found


def measured() -> dict[str, list[int]]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "build" not in path.parts:
                found[str(path.relative_to(ROOT))] = counts(docstrings(path), first_lines=True)
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        found[str(path.relative_to(ROOT))] = counts([path.read_text(encoding="utf-8")], first_lines=False)
    return {name: count for name, count in found.items() if any(count)}


def test_counts_only_fall() -> None:
    now = measured()
    if os.environ.get("ASTRA_WRITE_COUNTS"):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(count)}" for name, count in sorted(now.items()))
        COUNTS.write_text(f"{{\n{lines}\n}}\n")
    known = json.loads(COUNTS.read_text())
    kinds = (
        f"sentences of over {MOST_WORDS} words",
        "first lines that begin with What, Of, …",
        "words of STYLE's table",
    )
    worse = [
        f"{name}: {after} {kind}, {before} are recorded"
        for name, count in now.items()
        for kind, before, after in zip(kinds, known.get(name, [0, 0, 0]), count, strict=True)
        if after > before
    ]
    assert not worse, "\n".join(worse)
    better = sum(sum(known[name]) - sum(now.get(name, [0])) for name in known)
    assert not better, f"{better} fewer than recorded: run ASTRA_WRITE_COUNTS=1 pytest tests/test_prose.py"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Return the loss per token, in nats.", [0, 0, 0]),
        ("What a run came to.", [0, 1, 0]),
        ("Sums " + "of words " * 16 + ".", [1, 0, 0]),
        ("The run goes on, and is told to stop.", [0, 0, 2]),
        ("Calls `goes on` and\n\n        draws\n", [0, 0, 0]),
    ],
)
def test_faults_are_found(text: str, expected: list[int]) -> None:
    assert counts([text], first_lines=True) == expected
