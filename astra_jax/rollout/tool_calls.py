"""The tool calls of an episode: checked, run in the sandbox, shown as `synthesis.core.tool_results` has it.

Whatever the policy got wrong (a call that cannot be read, an unknown tool, arguments that do not fit) becomes an error
observation and counts as a call. What the infrastructure got wrong voids the episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sandbox import Sandbox
from synthesis.core.chat_format import Call, MalformedCall
from synthesis.core.records import CodeTool, SubQuestion, ToolCall, ToolEnvironment
from synthesis.core.reward import Grade, solved_by
from synthesis.core.tool_results import error_text, outcome_text, refusal
from synthesis.core.tool_schemas import UncheckableSchema
from synthesis.core.worlds import EpisodeCalls


class CallRecord(msgspec.Struct, frozen=True):
    """What one call did.

    Attributes:
        turn: the assistant turn that made it, from 0.
        name: the called tool; empty when the call could not be read.
        outcome: the sandbox's outcome (`ok`, `tool_error`, ...), or that of `tool_results.refusal` (`malformed`,
            `unknown_tool`, `invalid_arguments`), or `bad_schema`: the tool's schema cannot be checked.
        output: what the policy was shown.
        solved: ids of the sub-questions whose answer the output contains.
    """

    turn: int
    name: str
    arguments: dict[str, Any]
    outcome: str
    output: str
    solved: list[int] = []

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


@dataclass(frozen=True)
class ToolCallResult:
    """A record, the whole JSON value that the tool returned, and whether the infrastructure failed."""

    call_id: str
    call: ToolCall | None
    record: CallRecord
    value: Any = None
    infrastructure: bool = False


class NotTakenOver(Exception):
    """An episode cannot go on from its recorded turns; it is begun anew. The message says why."""


class EpisodeTools:
    """The tools of one episode: carries out calls and remembers them, with the sub-tasks that each solved.

    Args:
        environment: whose episode it is.
        tools: what the episode offers, by name.
        sub_tasks: by the name of the tool that solves them.
        max_chars: the shown output is cut after this many characters.

    Attributes:
        calls: in the order in which they were made.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        environment: ToolEnvironment,
        tools: Mapping[str, CodeTool],
        sub_tasks: Mapping[str, list[SubQuestion]],
        *,
        max_chars: int,
    ) -> None:
        self.calls: list[CallRecord] = []
        self._calls = EpisodeCalls(sandbox, environment)
        self._tools, self._sub_tasks, self._max_chars = tools, sub_tasks, max_chars
        self._specs = {name: tool.spec for name, tool in tools.items()}

    async def execute(self, turn: int, calls: Sequence[Call]) -> list[ToolCallResult]:
        """Run the calls of a turn, as parsed from it, all at once; those to a world one after the other."""
        numbered = enumerate(calls)
        results = await asyncio.gather(*(self._execute(turn, call, f"call_{turn}_{i}") for i, call in numbered))
        for result in results:
            record = result.record
            solved = solved_by(self._sub_tasks, record.name, result.value) if record.ok else []
            self.calls.append(msgspec.structs.replace(record, solved=solved))
        return results

    async def repeat(
        self, turn: int, calls: Sequence[Call], recorded: Sequence[CallRecord]
    ) -> Sequence[ToolCallResult]:
        """What became of a turn's calls when they were made before. In a world they are made again, since they are its
        state, and must come to the same.

        Raises:
            NotTakenOver: they are other calls than those, or came to something else.
        """
        asked = [("", {}) if isinstance(one, MalformedCall) else (one.name, one.arguments) for one in calls]
        if asked != [(one.name, one.arguments) for one in recorded] or any(one.turn != turn for one in recorded):
            raise NotTakenOver(f"turn {turn} has other calls than those that were recorded of it")
        if self._calls.stateful:
            results = await self.execute(turn, calls)
            for before, now in zip(recorded, self.calls[-len(recorded) :], strict=True):
                if before != now:
                    raise NotTakenOver(f"turn {turn}: {now.name} came to {now.output!r}, {before.output!r} before")
            return results
        self.calls += recorded
        made = enumerate(zip(calls, recorded, strict=True))
        return [ToolCallResult(f"call_{turn}_{i}", _call(one, f"call_{turn}_{i}"), record) for i, (one, record) in made]

    async def grade(self) -> Grade | None:
        """What the calls so far have left behind is worth; None where the infrastructure failed."""
        return await self._calls.grade()

    async def _execute(self, turn: int, requested: Call, call_id: str) -> ToolCallResult:
        call = _call(requested, call_id)
        name, arguments = ("", dict[str, Any]()) if call is None else (call.name, call.arguments)
        try:
            refused = refusal(requested, self._specs)
        except UncheckableSchema as problem:
            refused = "bad_schema", f"the arguments cannot be checked by the schema of {name}: {problem}"
        if refused:
            outcome, why = refused
            shown = error_text(why, max_characters=self._max_chars)
            return ToolCallResult(call_id, call, CallRecord(turn, name, arguments, outcome, shown))
        result = await self._calls.call(self._tools[name], arguments)
        shown = outcome_text(result, max_characters=self._max_chars)
        record = CallRecord(turn, name, arguments, result.kind.value, shown)
        return ToolCallResult(call_id, call, record, result.value if result.ok else None, result.is_infrastructure)


def _call(requested: Call, call_id: str) -> ToolCall | None:
    """A call that could be read."""
    return None if isinstance(requested, MalformedCall) else ToolCall(call_id, requested.name, requested.arguments)


def outputs_of(results: Sequence[ToolCallResult]) -> list[str] | None:
    """What the policy is shown of each call; None when the infrastructure failed."""
    return None if any(result.infrastructure for result in results) else [result.record.output for result in results]
