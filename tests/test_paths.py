"""What pages, docstrings, comments and messages call a file or a module of ours is there."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from functools import cache
from pathlib import Path

from configs.training import AUTO, PRESETS

ROOT = Path(__file__).parent.parent
TRACKED = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
FILES = {
    Path(name)
    for name in subprocess.run(TRACKED, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    if (ROOT / name).is_file()
}
FOLDERS = {folder for file in FILES for folder in file.parents}
TOPS = "launch|configs|astra_jax|synthesis|sandbox|tests|benchmarks|docs"
PATH = re.compile(rf"(?<![\w/.:*-])(?:{TOPS})/[\w./-]*\w")
MODULE = re.compile(rf"(?<![\w/.-])(?:{TOPS})(?:\.[A-Za-z_]\w*)+(?![\w/])")
BARE = re.compile(r"(?<![\w/.*<:-])\w+(?:\.html)?\.(?:py|jinja|sh)\b")
PRESET = re.compile(r"--config=((?:sft|grpo):[a-z0-9.-]*[a-z0-9])")
LINK = re.compile(r"\]\((?!\w+://)([^)#\s]*)(?:#([^)\s]+))?\)")
PAGES = sorted(path for path in FILES if path.suffix in (".md", ".svg") and path.parts[0] != "tests")
MARKDOWN = [path for path in PAGES if path.suffix == ".md"]
SOURCES = sorted(path for path in FILES if path.suffix == ".py" and path.parts[0] != "tests")
NOT_OURS = {
    "synthesis/offline/facts/repository.py": {  # files of the repository that a git server shows
        "tests/test_reader.py", "docs/format.md", "docs/encoding.md", "docs/install", "docs/install.md",
        "docs/roadmap.md",
    },
    "synthesis/offline/templates.py": {"docs/install"},
    "astra_jax/run/hosts.py": {"astra_jax/hosts"},  # a key
    "astra_jax/evaluation/suites/acebench.py": {"category.py", "eval_main.py"},  # the harness's
    "astra_jax/evaluation/suites/tau2.py": {"tau2_bench.py"},  # of the folder that its caller knows
    "astra_jax/evaluation/workers/serving.py": {"worker.py"},
    "astra_jax/models/hf_checkpoint.py": {"chat_template.jinja"},  # a file of Hugging Face's
    "astra_jax/models/gguf/tokenizer.py": {"chat_template.jinja"},
    "synthesis/core/chat_template.py": {"chat_template.jinja"},
    "astra_jax/tokenizer.py": {"chat_template.jinja"},
    "launch/flags/sources.py": {"chat_template.jinja"},
    "benchmarks/sft_vs_pytorch_side.py": {"qwen3_training.jinja"},  # TRL's
    "benchmarks/teacher.py": {"capital_answer.jinja"},
    "benchmarks/decode_floor.py": {"benchmarks/results/decode_floor.jsonl"},  # written on an accelerator
    "launch/inspect.py": {"sandbox.tier"},  # an attribute
}  # fmt: skip
"""By file: names that look like ours."""


@cache
def names_of(module: Path) -> set[str]:
    """What a module defines or imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found.add(asname or name)
    return found


def is_there(dotted: str) -> bool:
    """Whether a dotted name is a module, or something that a module has."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = Path(*parts[:length])
        for module in (path.with_suffix(".py"), path / "__init__.py"):
            if module in FILES:
                return length == len(parts) or parts[length] in names_of(module)
    return Path(*parts) in FOLDERS


@cache
def prose(path: Path) -> list[tuple[int, str]]:
    """(line, text) of a page; of a source, its comments and strings."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix != ".py":
        return [*enumerate(text.splitlines(), 1)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    shown = [token for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING)]
    return [line for token in shown for line in enumerate(token.string.splitlines(), token.start[0])]


def resolved(page: Path, target: str) -> Path:
    """What a link leads to, from the root."""
    return Path(*(ROOT / page.parent / target).resolve().relative_to(ROOT.resolve()).parts) if target else page


def test_paths_modules_and_presets_are_there() -> None:
    wrong = []
    for path in PAGES + SOURCES:
        for line, text in prose(path):
            names = {name for name in PATH.findall(text) if Path(name) not in FILES | FOLDERS}
            names |= {name for name in MODULE.findall(text) if not is_there(name)}
            names |= {f"--config={name}" for name in PRESET.findall(text) if name not in {*PRESETS, *AUTO}}
            names -= NOT_OURS.get(str(path), set())
            wrong += [f"{path}:{line}: {name}" for name in names if "NAME" not in name]
    assert len(PAGES) > 20 and len(SOURCES) > 300 and not wrong, "\n".join(wrong)


def test_a_source_calls_files_of_its_own_folder_by_their_names_alone() -> None:
    wrong = []
    for path in SOURCES:
        known = {"FILE.py", "__init__.py", "setup.py"} | NOT_OURS.get(str(path), set())
        wrong += [
            f"{path}:{line}: {name}"
            for line, text in prose(path)
            for name in BARE.findall(text)
            if path.parent / name not in FILES and name not in known
        ]
    assert not wrong, "write their paths:\n" + "\n".join(wrong)


def test_a_page_calls_files_by_their_names_where_their_folder_is_named() -> None:
    """In the same section; or the folder of their package, which they are somewhere in."""
    wrong = []
    for page in MARKDOWN:
        for section in re.split(r"^#+ ", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE):
            named = {Path(name) for name in PATH.findall(section)}
            named |= {resolved(page, target) for target, _ in LINK.findall(section)}
            folders = {one if one in FOLDERS else one.parent for one in named}
            there = {
                file.name
                for file in FILES
                for folder in folders
                if file.parent == folder or folder in file.parents[:-2]
            }
            wrong += [
                f"{page}, {section.splitlines()[0]!r}: {one}" for one in BARE.findall(section) if one not in there
            ]
    assert not wrong, "\n".join(wrong)


@cache
def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in MARKDOWN:
        for target, anchor in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            there = resolved(page, target)
            if there not in FILES | FOLDERS or (anchor and anchor not in anchors(there)):
                wrong.append(f"{page}: {target}#{anchor}")
    assert not wrong, "\n".join(wrong)
