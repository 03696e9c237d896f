"""One tool call of the policy: checked against the tool's schema, run in the sandbox, shown as compact JSON.

Whatever the policy got wrong (a call that cannot be read, an unknown tool, arguments that do not fit) becomes an error
observation and counts as a call. What the infrastructure got wrong voids the episode.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jsonschema
import msgspec

from sandbox import Sandbox
from synthesis.core.chat_format import MalformedCall
from synthesis.core.records import CodeTool, SubQuestion, ToolCall
from synthesis.core.reward import solved_by


class CallRecord(msgspec.Struct, frozen=True):
    """What one call did.

    Attributes:
        turn: the assistant turn that made it, from 0.
        name: the called tool; empty when the call could not be read.
        outcome: the sandbox's outcome (`ok`, `tool_error`, ...), or `malformed`, `unknown_tool`, `bad_arguments`.
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


async def execute(
    sandbox: Sandbox,
    tools: Mapping[str, CodeTool],
    request: ToolCall | MalformedCall,
    *,
    turn: int,
    call_id: str,
    max_chars: int,
) -> ToolCallResult:
    """Run one call.

    Args:
        tools: the tools that this episode offers, by name.
        request: as parsed from the assistant turn.
        max_chars: the shown output is cut after this many characters.
    """
    if isinstance(request, MalformedCall):
        record = CallRecord(turn, "", {}, "malformed", _error(f"the tool call could not be read: {request.error}"))
        return ToolCallResult(call_id, None, record)

    def refused(outcome: str, why: str) -> ToolCallResult:
        shown = truncate(_error(why), max_chars)
        return ToolCallResult(call_id, call, CallRecord(turn, call.name, call.arguments, outcome, shown))

    call = ToolCall(id=call_id, name=request.name, arguments=request.arguments)
    tool = tools.get(call.name)
    if tool is None:
        return refused("unknown_tool", f"there is no tool named {call.name!r}")
    problem = argument_error(tool.spec.parameters, call.arguments)
    if problem:
        return refused("bad_arguments", problem)

    result = await sandbox.call(tool.code, call.name, call.arguments)
    outcome = result.kind.value
    shown = compact_json(result.value) if result.ok else _error(result.error or outcome)
    record = CallRecord(turn, call.name, call.arguments, outcome, truncate(shown, max_chars))
    return ToolCallResult(call_id, call, record, result.value if result.ok else None, result.is_infrastructure)


class Desk:
    """Where the calls of one episode are carried out and remembered, with the sub-tasks that each solved.

    Args:
        tools: what the episode offers, by name.
        sub_tasks: by the name of the tool that solves them.
        max_chars: as `execute`.

    Attributes:
        calls: in the order in which they were made.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        tools: Mapping[str, CodeTool],
        sub_tasks: Mapping[str, list[SubQuestion]],
        *,
        max_chars: int,
    ) -> None:
        self.calls: list[CallRecord] = []
        self._sandbox, self._tools, self._sub_tasks, self._max_chars = sandbox, tools, sub_tasks, max_chars

    async def carry_out(self, turn: int, requests: Sequence[ToolCall | MalformedCall]) -> list[ToolCallResult]:
        """Run the calls of a turn, all at once."""
        results = await asyncio.gather(
            *(
                execute(
                    self._sandbox,
                    self._tools,
                    request,
                    turn=turn,
                    call_id=f"call_{turn}_{i}",
                    max_chars=self._max_chars,
                )
                for i, request in enumerate(requests)
            )
        )
        for result in results:
            record = result.record
            solved = solved_by(self._sub_tasks, record.name, result.value) if record.ok else []
            self.calls.append(msgspec.structs.replace(record, solved=solved))
        return results


def outputs_of(results: Sequence[ToolCallResult]) -> list[str] | None:
    """What the policy is shown of each call; None when the infrastructure failed."""
    return None if any(result.infrastructure for result in results) else [result.record.output for result in results]


_TAG = re.compile(r"<(?=\||/?tool_|/?think>)")


def compact_json(value: Any) -> str:
    """JSON without spaces, Unicode as it is: the fewest tokens for the same value.

    The chat format's own tags are escaped (`\\u003c`): a tool must not be able to end its turn and speak for the user.
    Lone surrogates, which no tokenizer takes, become question marks.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace").decode("utf-8")
    return _TAG.sub(r"\\u003c", text)


def truncate(text: str, max_chars: int) -> str:
    """`text`, or its first `max_chars` characters and a marker that says how many are missing."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}... [truncated, {len(text) - max_chars} more characters]"


def argument_error(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Why the arguments do not fit the tool's JSON schema, or the empty string.

    Names that the schema does not list are refused too, even where it says nothing about them: the tool's function
    takes its properties as keywords and would raise.
    """
    unknown = sorted(set(arguments) - set(schema.get("properties", {})))
    if unknown:
        known = ", ".join(sorted(schema.get("properties", {}))) or "none"
        return f"unknown argument {unknown[0]!r}; known arguments: {known}"
    error = jsonschema.exceptions.best_match(_validator(json.dumps(schema, sort_keys=True)).iter_errors(arguments))
    if error is None:
        return ""
    where = ".".join(str(part) for part in error.absolute_path)
    return f"argument {where!r}: {error.message}" if where else error.message


@lru_cache(maxsize=4096)
def _validator(schema_json: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(schema_json))


def _error(text: str) -> str:
    return compact_json({"error": text})
