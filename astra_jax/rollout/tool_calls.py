"""The tool calls of an episode: checked, carried out in its session, shown as `synthesis.core.tool_results` has it.

Whatever the policy got wrong (a call that cannot be read, an unknown tool, arguments that do not fit) becomes an error
observation and counts as a call. What the infrastructure got wrong voids the episode.
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
    """A call that could be read, what became of it, and whether the infrastructure failed."""

    call_id: str
    call: ToolCall | None
    record: CallRecord
    infrastructure: bool = False


class NotTakenOver(Exception):
    """An episode cannot go on from its recorded turns; it is begun anew. The message says why."""


class EpisodeTools:
    """The tools of one episode: carries out calls and remembers them, with the sub-tasks that each solved.

    Args:
        session: where they are carried out.
        specs: the tools that the episode offers, by name.
        max_chars: the shown output is cut after this many characters.

    Attributes:
        calls: in the order in which they were made.
    """

    def __init__(self, session: EpisodeSession, specs: Mapping[str, ToolSpec], *, max_chars: int) -> None:
        self.calls: list[CallRecord] = []
        self._session, self._specs, self._max_chars = session, specs, max_chars

    async def execute(self, turn: int, calls: Sequence[Call]) -> list[ToolCallResult]:
        """Run the calls of a turn, as parsed from it, all at once; where they leave a state, one after the other."""
        numbered = enumerate(calls)
        results = await asyncio.gather(*(self._execute(turn, call, f"call_{turn}_{i}") for i, call in numbered))
        self.calls += [result.record for result in results]
        return results

    async def repeat(
        self, turn: int, calls: Sequence[Call], recorded: Sequence[CallRecord]
    ) -> Sequence[ToolCallResult]:
        """What became of a turn's calls when they were made before. Where they leave a state they are made again, and
        must come to the same.

        Raises:
            NotTakenOver: they are other calls than those, or came to something else.
        """
        asked = [("", {}) if isinstance(one, MalformedCall) else (one.name, one.arguments) for one in calls]
        if asked != [(one.name, one.arguments) for one in recorded] or any(one.turn != turn for one in recorded):
            raise NotTakenOver(f"turn {turn} has other calls than those that were recorded of it")
        if self._session.stateful:
            results = await self.execute(turn, calls)
            for before, now in zip(recorded, self.calls[-len(recorded) :], strict=True):
                if before != now:
                    raise NotTakenOver(f"turn {turn}: {now.name} came to {now.output!r}, {before.output!r} before")
            return results
        self.calls += recorded
        made = enumerate(zip(calls, recorded, strict=True))
        return [ToolCallResult(f"call_{turn}_{i}", _call(one, f"call_{turn}_{i}"), record) for i, (one, record) in made]

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
    """A call that could be read."""
    return None if isinstance(requested, MalformedCall) else ToolCall(call_id, requested.name, requested.arguments)


def outputs_of(results: Sequence[ToolCallResult]) -> list[str] | None:
    """What the policy is shown of each call; None when the infrastructure failed."""
    return None if any(result.infrastructure for result in results) else [result.record.output for result in results]
