"""Validation of tools for training: a tool must return the same answer each time, from its arguments alone.

    finding = await validate(pool, code, [("capital_of_country", {"country": "France"})])
    if finding is not None:
        finding.reason, finding.detail

Every call runs twice, on different workers: once as in a rollout, and once with another random seed, at another time,
and with an observer of what the code accesses. Both must return the same. Findings are hints that a model can act on.
They are not a defence: the sandbox's layers confine hostile code.
"""

from __future__ import annotations

import ast
import enum
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.determinism import EPOCH
from sandbox.interface import Sandbox
from sandbox.modules import ALLOWED, DEEPEST, NETWORK, is_among
from sandbox.outcomes import CallResult

ANOTHER_TIME = EPOCH + 200 * 86_400 + 43_211
"""Time of the second call, in Unix seconds. Half-year, day of the week, hour, minute and second all differ."""

_SHOWN = 200


class Reason(enum.StrEnum):
    """Reason to reject code."""

    DOES_NOT_PARSE = "does_not_parse"
    DISALLOWED_IMPORT = "disallowed_import"
    NEEDS_NETWORK = "needs_network"
    READS_CLOCK = "reads_clock"
    FAILS = "fails"
    NONDETERMINISTIC = "nondeterministic"


@dataclass(frozen=True)
class Finding:
    """Problem found in a tool.

    Attributes:
        reason: kind of the problem.
        detail: one line, which can be shown to the model that wrote the code.
    """

    reason: Reason
    detail: str


@dataclass(frozen=True)
class Validation:
    """Result of the validation of one call.

    Attributes:
        result: result of the first call, a normal one.
        finding: the problem, or None. Also None after an infrastructure outcome, which tells nothing about the code.
    """

    result: CallResult
    finding: Finding | None


async def validate(
    sandbox: Sandbox,
    code: str,
    calls: Iterable[tuple[str, Mapping[str, Any]]],
    *,
    allowed: frozenset[str] = ALLOWED,
) -> Finding | None:
    """Return the first problem in a module or in one of these calls, or None.

    Args:
        sandbox: sandbox to run the calls in.
        code: source of the module.
        calls: functions with arguments that must work.
        allowed: modules that may be imported, packages with everything in them.

    Raises:
        RuntimeError: the sandbox itself failed, twice.
    """
    if finding := check_source(code.removeprefix("\ufeff"), allowed):
        return finding
    for function, arguments in calls:
        validation = await validate_call(sandbox, code, function, arguments, allowed=allowed)
        if validation.result.is_infrastructure:
            raise RuntimeError(f"sandbox: {validation.result.kind}: {validation.result.error}")
        if validation.finding is not None:
            return validation.finding
    return None


async def validate_call(
    sandbox: Sandbox,
    code: str,
    function: str,
    arguments: Mapping[str, Any],
    *,
    allowed: frozenset[str] = ALLOWED,
) -> Validation:
    """Make a call twice and compare the results, after `check_source`. See `validate` for the parameters."""
    code = code.removeprefix("\ufeff")  # byte-order mark that some editors write
    first = await sandbox.call(code, function, arguments)
    if first.is_infrastructure:
        return Validation(first, None)
    if finding := check_source(code, allowed):
        return Validation(first, finding)
    observed = await sandbox.call(
        f"{_observer()}\nSOURCE = {code!r}\n",
        "observe",
        {"function": function, "arguments": dict(arguments)},
        seed=1,
        now=ANOTHER_TIME,
    )
    if observed.is_infrastructure:
        return Validation(observed, None)
    seen = observed.value if observed.ok else {}
    if finding := _reached_for(seen, allowed):
        return Validation(first, finding)
    if not first.ok:
        return Validation(first, Finding(Reason.FAILS, first.error))
    if (seen.get("value"), observed.stdout) == (first.value, first.stdout) and seen.get("error") == "":
        return Validation(first, None)
    now = seen.get("error") or (_short(seen["value"]) if observed.ok else observed.error)
    if now == _short(first.value):
        now = f"printed {observed.stdout[:_SHOWN]!r}, not {first.stdout[:_SHOWN]!r}"
    detail = f"returned {_short(first.value)} at first, and under another random seed, at another time: {now}"
    return Validation(first, Finding(Reason.NONDETERMINISTIC, detail))


@functools.cache
def _observer() -> str:
    return Path(__file__).with_name("observer.py").read_text(encoding="utf-8")


@functools.lru_cache(maxsize=128)  # calls of one module are validated in sequence
def check_source(code: str, allowed: frozenset[str] = ALLOWED) -> Finding | None:
    """Return the first problem visible in the source: a syntax error, or an import that is not allowed."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Finding(Reason.DOES_NOT_PARSE, f"{type(error).__name__}: {error}")
    if _names_loaded_modules(tree):
        detail = "reads sys.modules, which holds what the sandbox happens to have loaded: import what you need by name"
        return Finding(Reason.NONDETERMINISTIC, detail)
    return _imported(sorted(set(_imports(tree))), allowed)


def _names_loaded_modules(tree: ast.AST) -> bool:
    """Return whether the source names `sys.modules` in a usual way; `observer.py` catches names built at run time."""
    nodes = list(ast.walk(tree))
    imports = [(node, alias) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    if any(getattr(node, "module", "") == "sys" and alias.name in ("modules", "*") for node, alias in imports):
        return True
    has_sys = any(isinstance(node, ast.Import) and alias.name == "sys" for node, alias in imports)
    for node in nodes:
        match node:
            case ast.Attribute(attr="modules", value=ast.Attribute(attr="sys")):  # sys of another module
                return True
            case ast.Attribute(attr="modules") if has_sys:  # sys under any name
                return True
            case ast.Call(func=ast.Name("getattr"), args=[_, ast.Constant("modules"), *_]):
                return True
            case ast.Subscript(value=ast.Attribute(attr="__dict__"), slice=ast.Constant("modules")):
                return True
            case ast.Subscript(value=ast.Call(func=ast.Name("vars")), slice=ast.Constant("modules")):
                return True
    return False


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from urllib import request` imports a module, `from math import pi` does not: try the longer name too.
            if module.count(".") >= DEEPEST:  # no set has a longer name, and building all of them takes quadratic time
                yield module
                continue
            longer = [f"{module}.{alias.name}" for alias in node.names]
            yield from (name if is_among(name, NETWORK) else module for name in longer)


def _imported(names: Iterable[str], allowed: frozenset[str]) -> Finding | None:
    for name in names:
        if is_among(name, NETWORK):
            return Finding(Reason.NEEDS_NETWORK, f"imports {name}: a tool has no network, put its data into the code")
        if not is_among(name, allowed):
            detail = f"imports {name}, which a tool may not: use plain Python and modules that only compute"
            return Finding(Reason.DISALLOWED_IMPORT, detail)
    return None


def _reached_for(seen: Mapping[str, Any], allowed: frozenset[str]) -> Finding | None:
    if names := seen.get("network"):
        detail = f"used {', '.join(names)}: a tool has no network, put its data into the code"
        return Finding(Reason.NEEDS_NETWORK, detail)
    if finding := _imported(seen.get("imports", ()), allowed):
        return finding
    if names := seen.get("clock"):
        detail = f"read the clock (time.{', time.'.join(names)}): its answer must depend on its arguments alone"
        return Finding(Reason.READS_CLOCK, detail)
    return None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
