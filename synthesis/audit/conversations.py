"""Rules for one trajectory: its calls, its answers and its texts."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jsonschema
import msgspec
import referencing
import referencing.exceptions

from synthesis.audit import agent_phrases
from synthesis.audit import text_claims as texts
from synthesis.core.records import Message, ToolSpec, Trajectory

RULES: Final = (
    "unknown_tool", "invalid_arguments", "bad_schema", "missing_result", "argument_from_nowhere", "repeated_call",
    "contradictory_results", "unsupported_claim", "success_after_failure", "refusal_after_success", "template_tokens",
    "talk_of_simulation", "wrong_language", "foreign_words",
)  # fmt: skip
_FAILED_TEXT: Final = re.compile(
    r"\A\s{0,80}(?:[\w.]{0,80}(?:error|exception|fault)\b|traceback|fail(?:ed|ure)\b|timed? ?-?out|request timed"
    r"|tool .{0,60}failed|(?:http )?[45]\d\d\b|too many requests|rate limit|service unavailable"
    r"|错误|失败|超时|请求(?:失败|超时)|出错)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class AuditedCall:
    """A call with its result.

    Attributes:
        place: position of its message in the conversation.
        turn: number of user messages before it.
        result: text of the result; None: there is none.
        failed: the record or the text of the result says so.
        trained: the loss counts its turn.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]
    place: int
    turn: int
    result: str | None
    failed: bool
    trained: bool

    @property
    def key(self) -> tuple[str, str]:
        """Tool and arguments: equal for equal calls."""
        return self.name, texts.canonical(self.arguments)


def is_failure(result: str) -> bool:
    """Return whether the text of a result says that the call failed."""
    if not result.strip():
        return True
    value = texts.parsed(result)
    if not isinstance(value, dict):
        return isinstance(value, str) and _FAILED_TEXT.match(value) is not None
    status = value.get("status", value.get("code"))
    explained = any(name in value for name in ("message", "detail", "error", "reason"))
    return (
        bool(value.get("error") or value.get("errors") or value.get("isError") or value.get("is_error"))
        or value.get("success") is False
        or value.get("ok") is False
        or (isinstance(status, str) and status.lower() in ("error", "failed", "failure", "timeout"))
        or (explained and isinstance(status, int) and not isinstance(status, bool) and 400 <= status < 600)
    )


def calls_of(record: Trajectory) -> list[AuditedCall]:
    """Return a trajectory's calls in order, each with its result by id, or by position where ids are missing."""
    marked = {one.call_id for one in record.errors} | {one.call_id for one in record.failures}
    results: dict[int, list[Message]] = {}
    place = -1
    for position, message in enumerate(record.messages):
        if message.role == "assistant":
            place = position
        elif message.role == "tool":
            results.setdefault(place, []).append(message)
    found: list[AuditedCall] = []
    turn = 0
    for position, message in enumerate(record.messages):
        turn += message.role == "user"
        here = results.get(position, [])
        by_id = {one.tool_call_id: one for one in here if one.tool_call_id}
        for number, call in enumerate(message.tool_calls):
            reply = by_id.get(call.id) or (
                here[number] if number < len(here) and not here[number].tool_call_id else None
            )
            text = None if reply is None else reply.content
            failed = call.id in marked or (text is not None and is_failure(text))
            found.append(
                AuditedCall(
                    call.id, call.name, call.arguments, position, turn, text, failed, trained=message.weight != 0
                )
            )
    return found


@functools.lru_cache(maxsize=10_000)
def _validator(schema: bytes) -> tuple[jsonschema.Draft202012Validator, str]:
    """Return the validator of a schema in JSON, and why the schema is not one of an object, or ""."""
    parameters = msgspec.json.decode(schema)
    if parameters.get("type", "object") != "object":
        return jsonschema.Draft202012Validator({}), f"the type is {parameters['type']!r}"
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        return jsonschema.Draft202012Validator({}), error.message
    # An empty registry: a schema from anywhere may not have addresses fetched.
    return jsonschema.Draft202012Validator(parameters, registry=referencing.Registry()), ""


def check_schema(tool: ToolSpec) -> str:
    """Return why a tool's parameters are not a schema of an object, or ""."""
    _, reason = _validator(msgspec.json.encode(tool.parameters))
    return reason and f"{tool.name}: {reason}"


def misfit(arguments: Mapping[str, Any], tool: ToolSpec) -> str:
    """Return the first reason why arguments do not fit a tool's schema by JSON Schema 2020-12, or ""."""
    validator, _ = _validator(msgspec.json.encode(tool.parameters))
    try:
        error = next(validator.iter_errors(dict(arguments)), None)
    except (referencing.exceptions.Unresolvable, re.error, RecursionError) as failure:
        return f"the schema cannot be followed: {failure}"
    return "" if error is None else f"{'.'.join(map(str, error.absolute_path)) or 'arguments'}: {error.message:.200}"


def schema_text(tool: ToolSpec) -> str:
    """Return the texts of a tool's document, in which values of arguments may stand."""
    return f"{tool.name} {tool.description} " + " ".join(str(one) for one in texts.leaves(tool.parameters))


def findings(record: Trajectory) -> Iterator[tuple[str, str]]:
    """Yield the faults of a trajectory: rule and detail."""
    calls = calls_of(record)
    yield from _structure(record, calls)
    yield from _call_faults(record, calls)
    yield from _answer_faults(record, calls)
    yield from _text_faults(record)


def _structure(record: Trajectory, calls: list[AuditedCall]) -> Iterator[tuple[str, str]]:
    tools = {tool.name: tool for tool in record.tools}
    for tool in record.tools:
        if reason := check_schema(tool):
            yield "bad_schema", reason
    refused = {one.call_id for one in record.errors if one.kind in ("unknown_tool", "invalid_arguments")}
    last = max((call.place for call in calls), default=-1)
    for call in calls:
        if call.result is None and call.place < last:
            yield "missing_result", f"{call.name} has no result"
        if call.id in refused or not call.trained:
            continue
        if call.name not in tools:
            yield "unknown_tool", call.name
        elif reason := misfit(call.arguments, tools[call.name]):
            yield "invalid_arguments", f"{call.name}: {reason}"
    made = sum(call.result is not None for call in calls)
    results = sum(message.role == "tool" for message in record.messages)
    if results > made:
        yield "missing_result", f"{results - made} results belong to no call"


def _call_faults(record: Trajectory, calls: list[AuditedCall]) -> Iterator[tuple[str, str]]:
    tools = {tool.name: tool for tool in record.tools}
    held = texts.HeldText()
    by_place: dict[int, list[AuditedCall]] = {}
    for call in calls:
        by_place.setdefault(call.place, []).append(call)
    succeeded: dict[tuple[str, str], str] = {}
    for place, message in enumerate(record.messages):
        for call in by_place.get(place, ()):
            tool = tools.get(call.name)
            document = texts.HeldText(schema_text(tool)) if tool else texts.HeldText()
            for value in texts.leaves(dict(call.arguments)):
                if not held.has_value(value) and not document.has_value(value):
                    yield "argument_from_nowhere", f"{call.name}({value!r})"
        for call in by_place.get(place, ()):
            if call.failed or call.result is None:
                continue
            about = f"{call.name} {tools[call.name].description if call.name in tools else ''}"
            if call.key in succeeded and not texts.changes_by_itself(about):
                if texts.parsed(succeeded[call.key]) != texts.parsed(call.result):
                    yield (
                        "contradictory_results",
                        f"{call.name}{call.key[1]}: {succeeded[call.key]:.80}, then {call.result:.80}",
                    )
                yield "repeated_call", f"{call.name}{call.key[1]}"
            if texts.is_write(call.name):
                succeeded.clear()
            succeeded[call.key] = call.result
        if message.role != "assistant":
            held.add(message.content)


def _answers(record: Trajectory) -> Iterator[tuple[int, str]]:
    """Yield the place and text of each assistant's message that ends a turn."""
    for place, message in enumerate(record.messages):
        following = record.messages[place + 1] if place + 1 < len(record.messages) else None
        ends = following is None or following.role == "user"
        if message.role == "assistant" and not message.tool_calls and ends and message.content.strip():
            yield place, message.content


def _answer_faults(record: Trajectory, calls: list[AuditedCall]) -> Iterator[tuple[str, str]]:
    start = 0
    for place, answer in _answers(record):
        before = [call for call in calls if call.place < place]
        own = [call for call in before if call.place >= start]
        start = place
        if not before:
            continue
        yield from _unsupported(record, answer, place, before)
        if not own:
            continue
        answered = [call for call in own if not call.failed]
        admits = agent_phrases.admits_failure(answer, record.language)
        failed = _failed_for_good(own)
        if failed and not answered and admits is False:
            yield "success_after_failure", f"{failed[0].name} failed; the answer is {answer:.160}"
        elif failed and admits is False and failed[0].place >= answered[-1].place:
            yield "success_after_failure", f"{failed[0].name} failed last; the answer is {answer:.160}"
        if len(answered) == len(own) and all(_has_content(call.result) for call in own):
            pattern = agent_phrases.REFUSALS.get(record.language)
            if not record.dialogue and pattern and (match := pattern.search(answer)):
                yield "refusal_after_success", f"{match[0]!r} in {answer:.160}"


def _failed_for_good(calls: list[AuditedCall]) -> list[AuditedCall]:
    """Return the failed calls whose tool does not succeed afterwards, and that never succeed themselves."""
    last = {call.name: call.place for call in calls if not call.failed}
    keys = {call.key for call in calls if not call.failed}
    return [call for call in calls if call.failed and last.get(call.name, -1) <= call.place and call.key not in keys]


def _has_content(result: str | None) -> bool:
    """Return whether a result holds anything besides empty lists, nulls and zeros."""
    return any(one not in ("", 0, False) for one in texts.leaves(texts.parsed(result or "")))


def _unsupported(record: Trajectory, answer: str, place: int, calls: list[AuditedCall]) -> Iterator[tuple[str, str]]:
    heard = [one.content for one in record.messages[:place] if one.role != "assistant"]
    held = texts.HeldText(*heard, *map(schema_text, record.tools))
    outputs = [texts.parsed(call.result) for call in calls if call.result is not None]
    text = texts.claims(answer)
    derived = texts.derived_numbers(outputs)
    for token, _ in texts.numbers(text):
        digits = re.sub(r"\D", "", token)
        if not (texts.is_held(token, held.numbers) or texts.is_held(token, derived) or digits in held.text):
            yield "unsupported_claim", f"the number {token} in {answer:.160}"
    if record.language in ("de", "lb"):  # all nouns have capitals
        return
    for name in texts.names(text):
        if not texts.is_named(name, held.text, held.words):
            yield "unsupported_claim", f"the name {name} in {answer:.160}"


def _text_faults(record: Trajectory) -> Iterator[tuple[str, str]]:
    heard = " ".join(one.content for one in record.messages if one.role == "user")
    allowed = f"{heard} {' '.join(map(schema_text, record.tools))}".lower()
    for message in record.messages:
        said = [message.content, message.reasoning, *(str(one) for call in message.tool_calls
                for one in texts.leaves(dict(call.arguments)))]  # fmt: skip
        for text in said:
            match = agent_phrases.TEMPLATE.search(text)
            if match is None and message.role != "tool":
                match = agent_phrases.UNFILLED.search(text)
            if match:
                yield "template_tokens", f"{match[0]} in the {message.role}'s {text:.120}"
        if message.role in ("assistant", "tool"):
            for text in said[:2]:
                if talk := agent_phrases.simulation_talk(text, record.language, allowed):
                    yield "talk_of_simulation", f"{talk!r} in the {message.role}'s {text:.160}"
    spoken = [one.content for one in record.messages if one.role == "user"] + [text for _, text in _answers(record)]
    values = texts.HeldText(*(one.content for one in record.messages if one.role == "tool"))
    for message in record.messages:
        for call in message.tool_calls:
            values.add(" ".join(map(str, texts.leaves(dict(call.arguments)))))
    for text in spoken:
        if texts.is_other_language(text, record.language):
            yield "wrong_language", f"not {record.language}: {text:.160}"
        found = [word for word in texts.foreign_words(text, record.language) if word not in values.words]
        if len(found) > 1:  # a single one may be a name
            yield "foreign_words", f"{', '.join(found[:5])} in {text:.160}"
