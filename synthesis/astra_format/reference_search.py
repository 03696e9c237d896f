"""The calls behind gold answers that come without any: arguments are tried until an output holds the answer, proven."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from astra_jax.base.settings import Count, Settings
from sandbox import validate_call
from synthesis.astra_format.candidates import Sources, candidates, combinations, leaves, names_value
from synthesis.core.matching import contains
from synthesis.core.plays import play
from synthesis.core.records import Answer, CodeTool, Language
from synthesis.core.stages import Rejected
from synthesis.environments.proof import Case, invalid_value, prove_case, shown, without_default

if TYPE_CHECKING:
    from sandbox import Sandbox

_BATCH = 64
"""Calls in one process: few enough that a likely call does not wait for all the others."""


@dataclass(frozen=True)
class SearchConfig(Settings):
    """Bounds of the search.

    Attributes:
        calls_per_answer: maximum calls tried for one gold answer in one round. Another round follows as long as the
            last one found a call whose output may contain a missing argument.
        proofs_per_answer: maximum calls giving an answer that are proved before the answer counts as unreachable.
    """

    calls_per_answer: Count = 512
    proofs_per_answer: Count = 4


@dataclass(frozen=True)
class Found:
    """A proven call of `tool`, and the rule by which its output holds the answer."""

    tool: str
    answer: Answer
    arguments: dict[str, Any]
    output: Any
    rule: str


@dataclass(frozen=True)
class _Call:
    """A call that was tried, whether it succeeded, and the positions of the answers in its output."""

    arguments: dict[str, Any]
    ok: bool
    holds: frozenset[int]


@dataclass
class _Tried:
    """Knowledge about one tool: its calls so far, and the indices of the answers that are still missing."""

    tool: CodeTool
    answers: Sequence[Answer]
    missing: list[int]
    language: Language
    calls: list[_Call] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)
    refused: dict[int, list[Rejected]] = field(default_factory=dict)
    proofs: set[tuple[int, bytes]] = field(default_factory=set)


async def find_calls(
    tools: Mapping[str, CodeTool],
    answers: Mapping[str, Sequence[Answer]],
    question: str,
    sandbox: Sandbox,
    config: SearchConfig,
    language: Language = "en",
) -> list[Found]:
    """Return a proven call for every gold answer, in the order of `answers`.

    Args:
        tools: by name; each name of `answers` is among them.
        answers: tool name → the answers that calls of it give.
        question: names most arguments; the others come from the tools' sources and from outputs of other calls.
        sandbox: an open one.
        config: the bounds.
        language: of the answers and outputs; see `matching.match`.

    Raises:
        Rejected: `unreachable_answer` where no call that was tried gives an answer, `shared_call` where only one call
            gives two answers, or the reason of `proof.prove_case` for which the first call that does was refused.
        Transient: the sandbox itself failed.
    """
    state = {name: _Tried(tools[name], wanted, list(range(len(wanted))), language) for name, wanted in answers.items()}
    found: dict[tuple[str, int], Found] = {}
    gold = [value for wanted in answers.values() for answer in wanted for value in _values(answer)]
    progress = True
    while progress and any(one.missing for one in state.values()):
        progress = False
        for name, one in state.items():
            if not one.missing:
                continue
            known = [*gold, *(leaf for other in found.values() for leaf in leaves(other.output, sentences=True))]
            sources = Sources.of(one.tool, question, known)
            calls = _untried(one, sources)
            calls = itertools.islice(calls, config.calls_per_answer * len(one.missing))
            while one.missing and (batch := list(itertools.islice(calls, _BATCH))):
                made = await play([one.tool], [(name, arguments) for arguments in batch], sandbox)
                for arguments, call in zip(batch, made, strict=True):
                    holds = (
                        i for i, answer in enumerate(one.answers) if call.ok and contains(call.output, answer, language)
                    )
                    one.calls.append(_Call(arguments, call.ok, frozenset(holds)))
                for position, proven in await _settle(one, question, found, sandbox, config):
                    found[name, position] = proven
                    progress = True
    for one in state.values():
        if one.missing:
            raise await _unreached(one, question, sandbox)
    return [found[name, position] for name, wanted in answers.items() for position in range(len(wanted))]


def _values(answer: Answer) -> list[Any]:
    return answer.value if isinstance(answer.value, list) else [answer.value]


def _untried(one: _Tried, sources: Sources) -> Iterator[dict[str, Any]]:
    """Calls with the required arguments, likely ones first; with all arguments where none is required."""
    schemas = one.tool.spec.parameters["properties"]
    required = one.tool.spec.parameters["required"]
    needed = without_default(one.tool)
    names = [name for name in schemas if name in required or name in needed] or list(schemas)
    for arguments in combinations({name: candidates(name, schemas[name], sources) for name in names}):
        key = _key(arguments)
        if key not in one.seen:
            one.seen.add(key)
            yield arguments


async def _settle(
    one: _Tried,
    question: str,
    found: Mapping[tuple[str, int], Found],
    sandbox: Sandbox,
    config: SearchConfig,
) -> list[tuple[int, Found]]:
    """Calls for missing answers among those tried, proven; they are missing no longer."""
    name = one.tool.spec.name
    used = {_key(call.arguments) for (tool, _), call in found.items() if tool == name}
    settled: list[tuple[int, Found]] = []
    hits = {position: _hits(one, position, question) for position in one.missing}
    for position in sorted(one.missing, key=lambda position: len(hits[position])):
        answer = one.answers[position]
        for arguments in hits[position]:
            key = _key(arguments)
            refused = one.refused.setdefault(position, [])
            if len(refused) >= config.proofs_per_answer:
                break
            if key in used or (position, key) in one.proofs:
                continue
            one.proofs.add((position, key))
            try:
                case = Case(position, arguments, _other(one, arguments, position), answer, one.language)
                proven = await prove_case(one.tool, case, sandbox)
            except Rejected as rejection:
                refused.append(rejection)
                continue
            used.add(key)
            settled.append((position, Found(name, answer, arguments, proven.output, proven.rule)))
            one.missing.remove(position)
            break
    return settled


def _hits(one: _Tried, position: int, question: str) -> list[dict[str, Any]]:
    """Return the calls whose outputs contain an answer; first those without another answer of the tool."""
    # A call that states the answer finds nothing; but the largest of five numbers is one of the five.
    hits = [
        call
        for call in one.calls
        if position in call.holds and not _gives_away(call.arguments, one.answers[position], question)
    ]
    return [call.arguments for call in sorted(hits, key=lambda call: len(call.holds))]


def _gives_away(arguments: Mapping[str, Any], answer: Answer, question: str) -> bool:
    return any(contains(one, answer) and not names_value(question, one) for one in leaves(dict(arguments)))


def _other(one: _Tried, arguments: Mapping[str, Any], position: int) -> dict[str, Any]:
    """Return other arguments that must not give the answer: such that succeeded before such that failed, else nonsense.

    Raises:
        Rejected: `ignores_arguments`: all others that were tried give it.
    """
    others = [call for call in one.calls if call.arguments != arguments]
    without = [call for call in others if position not in call.holds]
    if without:
        return next((call for call in without if call.ok), without[0]).arguments
    if not others:
        return {name: invalid_value(value) for name, value in arguments.items()}
    raise Rejected(
        "ignores_arguments",
        f"all {len(others)} other calls of {one.tool.spec.name} that were tried give "
        f"{one.answers[position].value!r} too, as {shown(one.tool, arguments)} does",
    )


async def _unreached(one: _Tried, question: str, sandbox: Sandbox) -> Rejected:
    """Why the first missing answer has no call."""
    position = one.missing[0]
    answer, name = one.answers[position], one.tool.spec.name
    if refused := one.refused.get(position):
        return refused[0]
    if _hits(one, position, question):
        return Rejected("shared_call", f"{name} gives {answer.value!r} only in a call that stands for another answer")
    ok = next((call.arguments for call in one.calls if call.ok), None)
    why = f"; {sum(call.ok for call in one.calls)} of them succeeded"
    if ok is not None:
        validation = await validate_call(sandbox, one.tool.code, name, ok)
        if validation.finding is not None:
            why += f"; {shown(one.tool, ok)} {validation.finding.reason.value}: {validation.finding.detail}"
    return Rejected(
        "unreachable_answer", f"no call of {name} that was tried gives {answer.value!r} ({len(one.calls)} calls{why})"
    )


def _key(arguments: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(arguments, order="sorted")
