"""Tool calls of an episode: checked, executed in its session, and shown as in `synthesis.core.tool_results`.

A mistake of the policy (malformed call, unknown tool, invalid arguments) becomes an error observation and counts as a
call. An infrastructure failure excludes the episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astra_jax.rollout.sessions import EpisodeSession
from synthesis.core.chat_format import Call, MalformedCall
from synthesis.core.environment import CallRecord
from synthesis.core.records import ToolCall, ToolSpec
from synthesis.core.tool_results import error_text, refusal
from synthesis.core.tool_schemas import UncheckableSchema, with_integers


@dataclass(frozen=True)
class ToolCallResult:
    """A parsed call, its record, and whether the infrastructure failed."""

    call_id: str
    call: ToolCall | None
    record: CallRecord
    infrastructure: bool = False


class EpisodeTools:
    """Tools of one episode: executes calls and records them, with the sub-tasks that each solved.

    Args:
        session: executes the calls.
        specs: the tools that the episode offers, by name.
        max_chars: the shown output is cut after this many characters.

    Attributes:
        calls: in the order in which they were made.
    """

    def __init__(self, session: EpisodeSession, specs: Mapping[str, ToolSpec], *, max_chars: int) -> None:
        self.calls: list[CallRecord] = []
        self._session, self._specs, self._max_chars = session, specs, max_chars

    async def execute(self, turn: int, calls: Sequence[Call]) -> list[ToolCallResult]:
        """Execute the parsed calls of a turn, all at once, or one after the other if the session is stateful."""
        numbered = enumerate(calls)
        results = await asyncio.gather(*(self._execute(turn, call, f"call_{turn}_{i}") for i, call in numbered))
        self.calls += [result.record for result in results]
        return results

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
        given = with_integers(self._specs[name].parameters, arguments)
        made = await self._session.call(name, given, max_chars=self._max_chars)
        record = CallRecord(turn, name, arguments, made.outcome, made.output, made.solved)
        return ToolCallResult(call_id, call, record, made.infrastructure)


def _call(requested: Call, call_id: str) -> ToolCall | None:
    """Return the call, or None if it is malformed."""
    return None if isinstance(requested, MalformedCall) else ToolCall(call_id, requested.name, requested.arguments)


def outputs_of(results: Sequence[ToolCallResult]) -> list[str] | None:
    """Return the output shown to the policy for each call, or None if the infrastructure failed."""
    return None if any(result.infrastructure for result in results) else [result.record.output for result in results]
