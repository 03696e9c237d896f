"""Calls, results and thinking within the text of a message, because nothing parsed the model's output.

A call is read in the format of the model that wrote it. It stands between the tags of `FRAMES`, or is a whole turn of
JSON or Python (Llama 3, xLAM, Llama 4). It may also be in Llama's, Qwen3-Coder's or Anthropic's XML, in ReAct's lines,
or in the channels of GPT-OSS. `synthesis.core.chatml` reads calls in tags, and `synthesis.core.llama3_chat` Llama 3's,
as servers read them.

Text about calls stays text: a code block, a code span or text between quotation marks is quoted. A turn that is just
one code block is a call if it names a tool that the row lists.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from synthesis.core.chat_format import MalformedCall, decoded
from synthesis.core.chatml import CALL_END, CALL_START, RESPONSE_END, RESPONSE_START, parse_tagged_call
from synthesis.core.llama3_chat import LLAMA3, PYTHON_TAG
from synthesis.core.loose_json import read_loosely, unfenced
from synthesis.core.markup import THINK_END, THINK_START, Quotes, split_thought
from synthesis.core.openai_messages import read_reply
from synthesis.core.records import ToolCall, ToolSpec

FRAMES: Mapping[str, str] = {
    CALL_START: CALL_END,  # Hermes, Qwen, GLM, Qwen3-Coder
    "<tool_calls>": "</tool_calls>",
    "<function_call>": "</function_call>",
    "<function_calls>": "</function_calls>",  # Anthropic
    "<functioncall>": "",  # Glaive
    "<tool_use>": "</tool_use>",
    "<minimax:tool_call>": "</minimax:tool_call>",
    "<|tool_call|>": "<|/tool_call|>",  # Phi-4; Granite does not close it
    "<|tool_call_start|>": "<|tool_call_end|>",  # LFM2
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",  # Kimi
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",  # DeepSeek
    "[TOOL_CALLS]": "[TOOL_CALLS]",  # Mistral
    "[TOOL_REQUEST]": "[END_TOOL_REQUEST]",  # LM Studio
    PYTHON_TAG: "",  # Llama 3
    "functools[": "",  # Phi-4-mini
    "<function=": "</function>",  # Llama 3.1, Qwen3-Coder
    "<invoke name=": "</invoke>",  # Anthropic
    "Action:": "\nObservation:",  # ReAct
}
"""Opening of one or several calls → closing; if it is missing, the turn's end closes them."""
THOUGHTS = (
    (THINK_START, THINK_END), ("<thinking>", "</thinking>"), ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
)  # fmt: skip
"""Tags around the thinking that a turn begins with."""
RESULTS = (
    (RESPONSE_START, RESPONSE_END), ("<tool_result>", "</tool_result>"), ("<tool_results>", "</tool_results>"),
    ("<tool_output>", "</tool_output>"), ("<function_response>", "</function_response>"),
    ("<function_result>", "</function_result>"), ("<function_results>", "</function_results>"),
    ("<observation>", "</observation>"), ("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)  # fmt: skip
"""Tags around a result that stands in a message of the user or of the tool."""
_INCLUSIVE = ("<function=", "<invoke name=", "functools[")
"""Openings that are part of the call."""
_REACT = r"(?m:^)Action:(?=[^\n]{0,200}\nAction Input:)"
_OPENING = re.compile("|".join(_REACT if one == "Action:" else re.escape(one) for one in FRAMES))
_ENDS = ("</s>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<｜end▁of▁sentence｜>")
_NAMES = ("name", "tool_name", "tool", "function_name", "action", "recipient_name")
_ARGUMENTS = ("tool_input", "action_input", "kwargs")
"""Names of a call's arguments beside those of endpoints (`openai_messages.read_reply`)."""
_CALL_KEYS = re.compile(r"""["'](?:arguments|parameters|args|input|tool_input|action_input|kwargs)["']\s{0,8}:""")
"""A bare JSON object is a call only with arguments, which may be empty."""
_SEPARATORS = ("<｜tool▁sep｜>", "<|tool_call_argument_begin|>")
_CHANNEL = re.compile(
    r"<\|channel\|>(analysis|commentary|final)\b([^<]{0,200})(?:<\|constrain\|>\w{1,20})?<\|message\|>"
)
_ADDRESS = re.compile(r"to=([\w.-]{1,200})")
_CHANNEL_END = re.compile(r"<\|(?:end|call|return)\|>")
_MOST_CALLS = 128
_LONGEST_PYTHON = 1 << 16


@dataclass
class TextTurn:
    """Parsed text of an assistant's turn.

    Attributes:
        calls: in the order in which they are written; their ids mean nothing.
        problem: why a piece of the text that looks like a call or thinking is not read; empty: all is read.
    """

    content: str
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    problem: str = ""


def read_turn(text: str, tools: Sequence[ToolSpec]) -> TextTurn:
    """Read the text of an assistant's turn: its thinking, its calls, and what it says beside them.

    Where something is not read (`problem`), the content is the whole text behind the thinking.
    """
    if found := _channels(text, tools):
        return found
    reasoning, rest = thinking_of(text)
    open = next((pair for pair in THOUGHTS if rest.lstrip().startswith(pair[0])), None)
    if open and open[1] not in rest:
        return TextTurn(rest, reasoning, problem=f"{open[0]} without {open[1]}: {rest[:200]!r}")
    if not rest:
        return TextTurn(rest, reasoning)
    schemas = {tool.name: tool.parameters for tool in tools}
    try:
        content, calls = _whole_turn(rest, schemas) or _in_frames(rest, schemas)
    except (ValueError, RecursionError) as error:
        return TextTurn(rest, reasoning, problem=f"what looks like a call cannot be read: {error}")
    return TextTurn(content, reasoning, calls)


def thinking_of(text: str) -> tuple[str, str]:
    """Split a turn into the thinking that it begins with, in any of the tags of `THOUGHTS`, and the rest."""
    begun = text.lstrip()
    first, last = next((pair for pair in THOUGHTS if begun.startswith(pair[0])), THOUGHTS[0])
    reasoning, rest = split_thought(text, first, last)
    return (reasoning, rest.lstrip()) if rest != text else ("", text)


def results_of(
    text: str, tags: Sequence[tuple[str, str]] = (*RESULTS, ("Observation:", ""))
) -> tuple[list[dict[str, Any]], str]:
    """Return the results in tags that a message begins with, as fields of tools' messages, and the text behind them.

    A tag that is not closed takes all of the rest.
    """
    results: list[dict[str, Any]] = []
    rest = text.lstrip()
    while pair := next((pair for pair in tags if rest.startswith(pair[0])), None):
        rest = rest.removeprefix(pair[0])
        inside, _, rest = rest.partition(pair[1]) if pair[1] else (rest, "", "")
        results.append(result_fields(inside.strip()))
        rest = rest.lstrip()
    return results, rest if results else text


def result_fields(text: str) -> dict[str, Any]:
    """Return a result's fields: Hermes names the tool, and may name the call, beside the `content`."""
    try:
        given = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or "content" not in given or not given.keys() <= {"name", "content", "tool_call_id"}:
        return {"content": text}
    content = given.pop("content")
    named = {key: value for key, value in given.items() if isinstance(value, str)}
    return {**named, "content": content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)}


def written_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls of JSON, an object or a list of them, as entries of OpenAI's `tool_calls`.

    Raises:
        ValueError: the text is no JSON, or a call names no function.
    """
    return [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in _calls_in(_json_values(text), {})
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Where calls stand


def _whole_turn(text: str, schemas: Mapping[str, Any]) -> tuple[str, list[ToolCall]] | None:
    """Return the calls of a turn of calls without tags; None: it is no such turn, or names no listed tool."""
    body = text.strip()
    inside = unfenced(body)
    if inside is not None:
        body = inside.strip()
        if _OPENING.match(body):
            content, calls = _in_frames(body, schemas)
            return ("", calls) if calls and not content and _all_listed(calls, schemas) else None
    turn = LLAMA3.parse_assistant(body)
    found = [call for call in turn.calls if isinstance(call, ToolCall)]
    if not found:
        try:
            values = _json_values(body) if body.startswith(("{", "[")) else []
            found = _calls_in(values, schemas) if _CALL_KEYS.search(body) else []
        except (ValueError, RecursionError):
            found = _python_calls(body)
        found = found or _python_calls(body)
    return ("", found) if found and _all_listed(found, schemas) else None


def _all_listed(calls: Sequence[ToolCall], schemas: Mapping[str, Any]) -> bool:
    return all(call.name in schemas for call in calls)


def _in_frames(text: str, schemas: Mapping[str, Any]) -> tuple[str, list[ToolCall]]:
    """Return the text outside of calls, and the calls. Raises `ValueError`: an opened call is not valid."""
    said: list[str] = []
    calls: list[ToolCall] = []
    quotes = Quotes(text)
    position = start = 0
    while found := _OPENING.search(text, start):
        if quotes.has(found.start()):
            start = found.end()
            continue
        if len(calls) > _MOST_CALLS:
            raise ValueError(f"the turn has more than {_MOST_CALLS} calls")
        several, end = _framed(text, found, schemas)
        said.append(text[position : found.start()])
        calls += several
        position = start = end
    if not calls:
        return text, []
    rest = text[position:].strip()
    while ending := next((one for one in _ENDS if rest.endswith(one)), ""):
        rest = rest.removesuffix(ending).rstrip()
    return "\n".join(filter(None, (part.strip() for part in (*said, rest)))), calls


def _framed(text: str, found: re.Match[str], schemas: Mapping[str, Any]) -> tuple[list[ToolCall], int]:
    """Return the calls after an opening, and the start of the rest."""
    opening, closing = found[0], FRAMES[found[0]]
    if opening == CALL_START:
        call, end, _ = parse_tagged_call(text, found.end(), "")
        if isinstance(call, ToolCall):
            return _with_listed_names([call], schemas), end
        if text.find(CALL_END, found.end()) < 0:
            raise ValueError(f"{CALL_START} without {CALL_END}: {text[found.start() :][:200]!r}")
        return _body(call.text, schemas), end
    start = found.start() if opening in _INCLUSIVE[:2] else found.end() - (opening in _INCLUSIVE)
    end = _closing(text, start, closing)
    if end < 0:
        if closing.startswith(("</", "<｜", "<|tool_c", "[END")):
            raise ValueError(f"{opening} without {closing}: {text[found.start() :][:200]!r}")
        end, closing = len(text), ""
    if opening in _INCLUSIVE[:2]:
        end += len(closing)
        return _body(text[start:end], schemas), end
    body = text[start:end]
    if opening == "Action:":
        return _react(body, schemas), end
    return _body(body, schemas), end if closing == opening else end + len(closing)


def _closing(text: str, start: int, closing: str) -> int:
    """Return the position where a frame is closed, -1 if nowhere. JSON decides where it ends, whatever tags its strings
    hold."""
    if not closing:
        return len(text)
    body = len(text) - len(text[start:].lstrip())
    if text.startswith(("{", "["), body):
        try:
            _, behind = decoded(text, body)
        except (ValueError, RecursionError):
            pass
        else:
            return text.find(closing, behind)
    return text.find(closing, start)


# ---------------------------------------------------------------------------------------------------------------------
# How calls are written


def _body(text: str, schemas: Mapping[str, Any]) -> list[ToolCall]:
    """Return the calls in a frame, in any form. Raises `ValueError`: there are none, or one cannot be read."""
    body = text.strip()
    while ending := next((one for one in _ENDS if body.endswith(one)), ""):
        body = body.removesuffix(ending).rstrip()
    try:
        if "<function=" in body:
            calls = [_xml_call(*one, "parameter=", schemas) for one in _elements(body, "<function=", "</function>")]
        elif "<invoke name=" in body:
            calls = [
                _xml_call(*one, "parameter name=", schemas) for one in _elements(body, "<invoke name=", "</invoke>")
            ]
        elif "<arg_key>" in body:
            calls = [_glm_call(body, schemas)]
        elif "<｜tool▁call▁begin｜>" in body:
            calls = [_named(one) for one in _between(body, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")]
        elif "<|tool_call_begin|>" in body:
            calls = [_named(one) for one in _between(body, "<|tool_call_begin|>", "<|tool_call_end|>")]
        elif "[ARGS]" in body and not body.startswith(("[", "{")):
            name, _, arguments = body.partition("[ARGS]")
            calls = [_call({"name": name.partition("[CALL_ID]")[0].strip(), "arguments": arguments.strip()})]
        elif not body.startswith(("{", "[{", "[\n", "[ ", "`")) and (python := _python_calls(body)):
            calls = python
        else:
            try:
                calls = _calls_in(_json_values(body), schemas)
            except ValueError:
                if not (python := _python_calls(body)):
                    raise
                calls = python
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{error}: {body[:200]!r}") from None
    if not calls:
        raise ValueError(f"it names no function: {body[:200]!r}")
    return _with_listed_names(calls, schemas)


def _json_values(text: str) -> list[Any]:
    """Return the JSON values of a text: one, with the repairs of `loose_json`; or several in a row."""
    try:
        return [read_loosely(text)[0]]
    except ValueError as error:
        problem = error
    values, place = [], 0
    while rest := text[place:].lstrip(" \t\r\n;,"):
        place = len(text) - len(rest)
        try:
            value, place = decoded(text, place)
        except ValueError:
            raise problem from None
        values.append(value)
    if len(values) < 2:
        raise problem
    return values


def _calls_in(values: Sequence[Any], schemas: Mapping[str, Any]) -> list[ToolCall]:
    found: list[ToolCall] = []
    for value in values:
        several = value.get("tool_calls", [value]) if isinstance(value, Mapping) else value
        found += [_call(one, schemas) for one in (several if isinstance(several, list) else [several])]
    return found


def _call(value: Any, schemas: Mapping[str, Any] | None = None) -> ToolCall:
    """Return the call of a JSON object in any of the forms that endpoints send. Raises `ValueError`."""
    if isinstance(value, Mapping) and not isinstance(value.get("function"), Mapping):
        name = next((value[key] for key in (*_NAMES, "function") if isinstance(value.get(key), str)), None)
        given = {key: one for key, one in value.items() if key not in _NAMES}
        more = next((given.pop(key) for key in _ARGUMENTS if key in given), None)
        value = {**given, "name": name, **({} if more is None else {"arguments": more})}
        value.pop("function", None)
    [call] = read_reply({"tool_calls": [value]}, list(schemas or ())).calls
    if isinstance(call, MalformedCall):
        raise ValueError(call.error)
    return call


def _named(text: str) -> ToolCall:
    """Parse a call of DeepSeek or Kimi: its name, a separator, its arguments."""
    separator = next((one for one in _SEPARATORS if one in text), "\n")
    name, _, arguments = text.partition(separator)
    if name.strip() == "function":  # DeepSeek V3 has the kind of call before the name
        name, _, arguments = arguments.partition("\n")
    name = re.sub(r":\d{1,4}\s{0,9}\Z", "", name.strip()).removeprefix("functions.")
    return _call({"name": name, "arguments": arguments.strip()})


def _react(body: str, schemas: Mapping[str, Any]) -> list[ToolCall]:
    name, _, arguments = body.partition("Action Input:")
    return _with_listed_names([_call({"name": name.strip(), "arguments": arguments.strip()}, schemas)], schemas)


def _elements(text: str, opening: str, closing: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the inside of each element. Raises `ValueError`: one is not closed."""
    for piece in text.split(opening)[1:]:
        name, opened, rest = piece.partition(">")
        inside, closed, _ = rest.partition(closing)
        if not opened or not closed:
            raise ValueError(f"{opening}…> without {closing}")
        yield name.strip().strip("\"'"), inside


def _between(text: str, opening: str, closing: str) -> list[str]:
    return [piece.partition(closing)[0] for piece in text.split(opening)[1:]]


def _xml_call(name: str, inside: str, parameter: str, schemas: Mapping[str, Any]) -> ToolCall:
    """Parse a call in XML whose arguments are elements, or JSON."""
    if f"<{parameter}" not in inside:
        return _call({"name": name, "arguments": inside.strip()}, schemas)
    arguments = {}
    for key, value in _elements(inside, f"<{parameter}", "</parameter>"):
        arguments[key] = _value(value.removeprefix("\n").removesuffix("\n"), name, key, schemas)
    return ToolCall("", name, arguments)


def _glm_call(body: str, schemas: Mapping[str, Any]) -> ToolCall:
    name, *pairs = body.split("<arg_key>")
    arguments = {}
    for pair in pairs:
        key, closed, rest = pair.partition("</arg_key>")
        value, ended, _ = rest.lstrip().removeprefix("<arg_value>").partition("</arg_value>")
        if not closed or not ended:
            raise ValueError("<arg_key> without </arg_key> and <arg_value>…</arg_value>")
        arguments[key.strip()] = _value(value, name.strip(), key.strip(), schemas)
    return ToolCall("", name.strip(), arguments)


def _value(text: str, name: str, key: str, schemas: Mapping[str, Any]) -> Any:
    """Return the value of an argument that is written as text: JSON, unless its schema takes a text."""
    properties = schemas.get(name, {}).get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds) or schema is None:
        return text
    try:
        return read_loosely(text)[0]
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _python_calls(text: str) -> list[ToolCall]:
    """Return the calls of a Python expression, such as `[weather(city="Oslo")]`; none where it is no such thing."""
    if len(text) > _LONGEST_PYTHON or not text.endswith((")", ")]")):
        return []
    try:
        tree = ast.parse(text, mode="eval").body
        calls = []
        for node in tree.elts if isinstance(tree, ast.List) else [tree]:
            if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
                return []
            arguments = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
            calls.append(_call({"name": ast.unparse(node.func), "arguments": json.dumps(arguments, allow_nan=False)}))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return []
    return calls


def _with_listed_names(calls: Sequence[ToolCall], schemas: Mapping[str, Any]) -> list[ToolCall]:
    """Return the calls with the names that the row lists, without additions of the model."""
    return [_call({"name": one.name, "arguments": one.arguments}, schemas) for one in calls]


# ---------------------------------------------------------------------------------------------------------------------
# GPT-OSS


def _channels(text: str, tools: Sequence[ToolSpec]) -> TextTurn | None:
    """Parse a turn in channels; None: it has none, or begins with something else."""
    if not text.lstrip().startswith(("<|channel|>", "<|start|>assistant")):
        return None
    schemas = {tool.name: tool.parameters for tool in tools}
    turn = TextTurn("")
    thoughts: list[str] = []
    said: list[str] = []
    place = 0
    try:
        for found in _CHANNEL.finditer(text):
            if found.start() < place:
                continue
            end = _CHANNEL_END.search(text, found.end())
            place = end.start() if end else len(text)
            body = text[found.end() : place]
            before = text[max(0, found.start() - 220) : found.start()].rpartition("<|start|>assistant")[2]
            if address := _ADDRESS.search(found[2]) or _ADDRESS.search(before):
                turn.calls.append(_call({"name": address[1].removeprefix("functions."), "arguments": body}, schemas))
            else:
                (thoughts if found[1] == "analysis" else said).append(body.strip())
    except (ValueError, RecursionError) as error:
        return TextTurn(text, problem=f"what looks like a call cannot be read: {error}")
    if not place:
        return TextTurn(text, problem="channels without <|message|>")
    turn.reasoning, turn.content = "\n".join(thoughts), "\n".join(said)
    return turn
