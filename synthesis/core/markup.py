"""Markup of chat formats that stands in a text: special tokens, tags of calls, tags of thinking.

A server parses what its model writes into thinking, text and calls. Where its parser fails, or was never switched on,
markup stays in the text, and a model that is trained on that text learns to write it. `markup_in` finds it, of every
format in `_TABLE`, whatever model wrote the text.

Text may also be about markup. A tag is quoted where it stands in a code span or between quotation marks, and, unless it
is the tag of a call, in a code block. A call in a code block is a call that was not parsed, so it counts.

Sources of the table: the chat templates on Hugging Face, and the tags that the tool and reasoning parsers of vLLM,
SGLang and llama.cpp know.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Literal

THINK_START, THINK_END = "<think>", "</think>"

Kind = Literal["special token", "call tag", "thinking tag"]

_TABLE: tuple[tuple[Kind, str, str], ...] = (
    # Kind, pattern, where it is written.
    ("special token", r"<\|[/\"]?(?-i:[A-Za-z]\w|[a-z]>|\"\|>)", "most formats: <|im_end|>, <|eot_id|>, <|channel|>"),
    ("special token", r"<\|\Z", "the same, cut off"),
    ("special token", r"<\w+\|>", "Gemma 4: <tool_call|>, <turn|>"),
    ("special token", r"</?｜|｜>|[a-z]▁[a-z]", "DeepSeek, also DSML: <｜tool▁calls▁begin｜>, <｜DSML｜invoke"),
    (
        "special token",
        r"\b(?:im_(?:start|end|sep)|eo[tm]_id|endoftext)\|?>",
        "ChatML and Llama, their ends",
    ),
    ("special token", r"<(?:bos|eos|pad|unk|eot|eod|sop|eop)>|\[gMASK\]", "Gemma, Llama 2, ChatGLM and others"),
    ("special token", r"<(?:start|begin(?:ning)?|end)_of_\w+>", "Gemma: <end_of_turn>; MiniMax M1"),
    ("special token", r"\[\|(?:system|user|assistant|tool|endofturn)\|\]", "EXAONE"),
    ("special token", r"<role>(?:system|human|user|assistant|observation)</role>", "Ling"),
    ("special token", r"<_(?:system|user|bot|observation|start|end)>", "TeleChat"),
    ("special token", r"<(?:bot|human)_end>|<<function>>", "NexusRaven, Gorilla"),
    ("special token", r"<(?:unused|ctrl|extra_id_|extra_|reserved_|special_)\d+>", "spare tokens"),
    ("special token", r"<0x[0-9a-f]{2}>", "SentencePiece bytes"),
    ("special token", r"\[unused(?:_token_)?\d+\]|\[(?:start|end)_header_id\]", "openPangu, InternLM, Kimi K2"),
    ("special token", r"(?-i:\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CONTENT)\])", "Mistral"),
    ("special token", r"<</?SYS>>", "Llama 2"),
    ("special token", r"\]<\]\w+\[>\[|\]~!?b[\[\]]|\[e~\[", "MiniMax M3 and M2"),
    ("special token", r"_never_used_\w+", "Doubao"),
    ("special token", r"</?co(?::\s?\d[\d,]*)?>", "Command R's citations"),
    ("special token", r"【\d+(?::\d+)?†|[\ue200-\ue206]", "OpenAI's citations"),
    ("special token", r"</(?:parameter|function)>", "what is left of calls in tags"),
    (
        "call tag",
        r"</?(?:[a-z]\w*[:_])?(?:tool_?calls?|function_?calls?|tool_use|tool_code|arg_key|arg_value|use_mcp_tool"
        r"|(?:tool|function)_(?:response|result|output)s?)(?=[\s:>=/|]|\Z)",
        "Hermes, Qwen, GLM, Granite, Kimi, Seed, LongCat, Hunyuan, xAI, Nemotron, FunctionGemma",
    ),
    ("call tag", r"<(?:function|parameter|tool)=", "Llama, Qwen3-Coder, Step"),
    ("call tag", r"</?(?:[a-z]\w*:)?invoke(?:\s+name=|>)", "Anthropic, MiniMax, DeepSeek"),
    ("call tag", r"(?-i:\[/?(?:END_)?TOOL_?(?:CALLS?|REQUEST)\]|\w\[ARGS\]|\[CALL_ID\])", "Mistral, LM Studio"),
    ("call tag", r"✿(?:function|args|result|return)✿", "Qwen-Agent"),
    ("call tag", r"\bfunctools\[", "Phi-4-mini"),
    ("call tag", r"\bto=(?:functions|tools?)\.\w|\bmulti_tool_use\.parallel", "GPT-OSS and OpenAI"),
    (
        "call tag",
        r"\bfunctions\.(?!(?:[\w-]{1,40}\.){0,3}(?:py|[cm]?[jt]sx?|php|rb|go|rs|c|cpp|h|java|cs|lua|sh|ps1):)[\w.-]+:\d",
        "Kimi K2; not a line of a source file",
    ),
    ("call tag", r"```tool_code|\bdefault_api\.\w+\(", "Gemma, Gemini"),
    ("call tag", r">>>\w+\n\{", "Functionary, behind other text"),
    ("call tag", r"\*\*Tool Call:\*\*", "RWKV"),
    ("call tag", r"^Action:(?:[^\n]*\nAction Input:|\s{0,9}```json)", "ReAct, Command R"),
    ("call tag", r"\bcall:\w+\{", "Gemma 4"),
    (
        "thinking tag",
        r"</?(?:[a-z]\w*[:_])?(?:think(?:ing)?|thoughts?|reasoning|reflection|scratch_?pad|inner_monologue)(?::[^\s<>]+)?>",
        "DeepSeek, Qwen, GLM, Gemini, Seed, LongCat, MiniMax, Hunyuan",
    ),
    ("thinking tag", r"</?seed:\w+", "Seed"),
    ("thinking tag", r"(?-i:\[/?THINK\])", "Mistral"),
    ("thinking tag", r"◁/?think▷", "Kimi"),
    ("thinking tag", r"\bassistant(?:final|commentary|analysis)", "GPT-OSS without its special tokens"),
    ("thinking tag", r"\AHere(?: is|'s) my thought process:", "Granite"),
)
_OF_TURNS: tuple[tuple[Kind, str, str], ...] = (
    # What no turn begins with, though other texts may.
    ("thinking tag", r"\A(?:thought|analysis)\n|\A(?-i:analysis|commentary)(?-i:[A-Z])", "Gemma 4, GPT-OSS"),
    ("special token", r"(?:\A|\n)(?-i:assistant|model)\s*\n", "headers of turns without their special tokens"),
    ("special token", r"(?-i:\A\[BOS\]|\[EO[ST]\]\s*\Z)", "Kimi K2"),
    ("call tag", r"\A>>>\w+\n|(?-i:\Aall\n)", "Functionary"),
)
_GROUPS: dict[Kind, str] = {"special token": "token", "call tag": "call", "thinking tag": "thought"}
_IN_TEXT = re.compile(
    "|".join(
        f"(?P<{group}>{'|'.join(form for kind, form, _ in _TABLE if kind == one)})" for one, group in _GROUPS.items()
    ),
    re.IGNORECASE | re.MULTILINE,
)
_IN_TURN = re.compile(
    "|".join(
        f"(?P<{group}>{'|'.join(form for kind, form, _ in _OF_TURNS if kind == one)})" for one, group in _GROUPS.items()
    ),
    re.IGNORECASE,
)
_STRUCK = re.compile(r"<(/?)s>", re.IGNORECASE)
"""Ends a turn of Llama 2 and Mistral; HTML strikes text out between two of them."""
_WRAPPERS = ("answer", "final_answer", "response", "analysis", "plan")
"""Tags that enclose a whole turn: Hunyuan's, ERNIE's, and tags that prompts ask for. Within a text they are XML."""
_FENCE = re.compile(r"^[ \t]{0,8}(?:```+|~~~+)", re.MULTILINE)
_CODE_SPAN = re.compile(r"`[^`\n]{1,200}`")
_QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’", "«": "»", "„": "“", "「": "」", "『": "』", "《": "》"}
_MOST_QUOTED = 80
_MOST_SHOWN = 60
_CALL_PREFIX = r"(?:functions?\.|tools?\.|default_api\.|api\.)?"
_OF_JSON = r"""["'](?:arguments|parameters|params|args|input|tool_input|action_input|kwargs)["']\s{0,8}:"""
_HAS_ARGUMENTS = re.compile(_OF_JSON)
_ONLY_A_CALL = re.compile(
    r"""[\[\s]{0,9}\{\s{0,9}(?:["'](?:id|type|call_id)["']\s{0,9}:\s{0,9}["'][^"'\n]{0,99}["'],\s{0,9})?"""
    r"""["'](?:name|tool|tool_name|function|function_name|action|recipient_name|tool_calls|tool_uses)["']\s{0,9}:\s{0,9}"""
    rf"""(?:["']([\w.-]{{1,99}})["'],\s{{0,9}}{_OF_JSON}\s{{0,9}}["'\[{{]|[\[{{])"""
)
"""A turn that is a call in JSON and nothing else, whatever tools there are."""
_UNOPENED_THOUGHT = re.compile(r" </think> (?! *\n)")


def markup_in(text: str, tools: Collection[str] = (), *, turn: bool = False) -> str:
    """Name the first piece of a chat format's markup in a text, or "" where there is none.

    Args:
        text: what a model wrote as text.
        tools: names of the tools that it could call; a call of one that is written out as text counts too.
        turn: whether the text is an assistant's whole turn, which no header or wrapper begins.
    """
    if call := _written_call(text, tools):
        return f"a call of {call!r} written as text"
    if turn and _ONLY_A_CALL.match(_plain(text)):
        return "a call written as text"
    code: list[tuple[int, int, bool]] | None = None
    opened: list[int] = []
    for found in _found(text, turn=turn):
        if code is None:
            code = _code(text)
        kind = next((kind for kind, group in _GROUPS.items() if found.groupdict().get(group) is not None), None)
        if _is_quoted(text, found.start(), kind or "special token", code):
            continue
        if kind is not None:
            return f"the {kind} {_shown(text, found)!r}"
        if found[0].startswith("</") and not opened:
            return f"the special token {found[0]!r}"
        if found[0].startswith("</"):
            opened.pop()
        else:
            opened.append(found.start())
    if opened:
        return f"the special token {text[opened[0] : opened[0] + 3]!r}"
    return _wrapper(text.strip()) if turn else ""


def split_thought(text: str, first: str = THINK_START, last: str = THINK_END) -> tuple[str, str]:
    """Split what a model wrote into its thinking and the rest at `</think>`, as for a server that does not parse it.

    The opening tag may be missing: many templates put it into the prompt. A quoted tag closes nothing, and neither does
    one in the middle of a sentence, which stays where it is and `markup_in` finds.

    Args:
        first: the opening tag.
        last: the closing tag.
    """
    rest = text.lstrip()
    opened = rest.startswith(first)
    if last not in rest:
        return "", text
    code = _code(rest)
    start = -1
    while (start := rest.find(last, start + 1)) >= 0:
        if _is_quoted(rest, start, "thinking tag", code):
            continue
        if not opened and _UNOPENED_THOUGHT.match(rest, start - 1):
            return "", text
        return rest[:start].removeprefix(first).strip(), rest[start + len(last) :]
    return "", text


class Quotes:
    """Quoted parts of a text: code blocks and code spans of Markdown, and text between quotation marks."""

    def __init__(self, text: str) -> None:
        self._text, self._code = text, _code(text)

    def has(self, start: int) -> bool:
        """Return whether the tag that starts there is quoted."""
        return _is_quoted(self._text, start, "special token", self._code)

    def outside(self) -> str:
        """Return the text with "…" in the place of code."""
        pieces, place = [], 0
        for first, last, is_block in self._code:
            if first >= place:
                pieces.append(self._text[place:first])
                place = last + 3 * is_block
        return "…".join([*pieces, self._text[place:]])


def _found(text: str, *, turn: bool) -> Iterator[re.Match[str]]:
    yield from _IN_TEXT.finditer(text)
    if turn:
        yield from _IN_TURN.finditer(text)
    yield from _STRUCK.finditer(text)


def _wrapper(turn: str) -> str:
    for name in _WRAPPERS:
        first, last = f"<{name}>", f"</{name}>"
        opens, closes = turn.startswith(first), turn.endswith(last)
        if (opens and (closes or last not in turn)) or (closes and first not in turn):
            return f"the thinking tag {first if opens else last!r}"
    return ""


def _shown(text: str, found: re.Match[str]) -> str:
    """Return the piece up to where its tag ends."""
    end = found.end()
    while end < min(len(text), found.start() + _MOST_SHOWN) and text[end - 1] not in ">]▷✿" and not text[end].isspace():
        end += 1
    return text[found.start() : end].strip()


def _code(text: str) -> list[tuple[int, int, bool]]:
    """Code in Markdown: start, end and whether it is a block, in order. A block that is never closed is none."""
    fences = [found.start() for found in _FENCE.finditer(text)]
    blocks = [(first, last, True) for first, last in zip(fences[::2], fences[1::2], strict=False)]
    spans = [(found.start(), found.end(), False) for found in _CODE_SPAN.finditer(text)]
    starts = [first for first, _, _ in blocks]

    def in_block(start: int) -> bool:
        place = bisect_right(starts, start) - 1
        return place >= 0 and start <= blocks[place][1] + 2

    return sorted([*blocks, *(span for span in spans if not in_block(span[0]))])


def _is_quoted(text: str, start: int, kind: Kind, code: list[tuple[int, int, bool]]) -> bool:
    place = bisect_right(code, (start, len(text) + 1, True)) - 1
    if place >= 0 and start < code[place][1]:
        first, last, is_block = code[place]
        if kind != "call tag":
            return True
        return not is_block and "{" not in text[first:last] and "(" not in text[first:last]
    closing = _QUOTES.get(text[start - 1]) if start else None
    inside, found, _ = text[start : start + _MOST_QUOTED].partition(closing or "\0")
    return bool(found) and "\n" not in inside and "{" not in inside


# ---------------------------------------------------------------------------------------------------------------------
# Calls as text


def _plain(text: str) -> str:
    """Return the text without a code block's fences."""
    body = text.strip()
    return body.strip("`").partition("\n")[2].strip() if body.startswith("```") else body


def _written_call(text: str, tools: Collection[str]) -> str:
    """Return the name of a tool whose call stands in a text as JSON, as Python, in tags or behind its name."""
    if not tools or not any(name in text for name in tools):
        return ""
    in_json, at_start, addressed, in_tags = _calls_of(tuple(tools))
    if (found := in_json.search(text)) and _HAS_ARGUMENTS.search(text):
        return found[1]
    body = _plain(text).removeprefix("[").removeprefix("print(").lstrip()
    if (found := at_start.match(body)) and (found[2] != "(" or body.endswith((")", ")]"))):
        return found[1]
    if found := addressed.search(text):
        return found[1] or found[2]
    if in_tags is not None and (found := in_tags.search(text)) and f"</{found[1]}>" in text:
        return found[1]
    return ""


@lru_cache(256)
def _calls_of(
    tools: tuple[str, ...],
) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str], re.Pattern[str] | None]:
    """Patterns of a call of these tools: within JSON, at the start of a text, by address or name tag, and in tags."""
    names = "|".join(map(re.escape, sorted(tools, key=len, reverse=True)))
    keys = r"""["'](?:name|tool|tool_name|function|function_name|action|recipient_name)["']\s{0,8}:\s{0,8}["']"""
    # An element of HTML may have the name of a tool, but none has an underscore.
    tagged = "|".join(re.escape(name) for name in tools if "_" in name)
    return (
        re.compile(rf"""{keys}{_CALL_PREFIX}({names})["']"""),
        re.compile(rf"{_CALL_PREFIX}({names})(\(|:?[ \t]{{0,8}}\n?(?:```json)?\s{{0,8}}\{{)"),
        re.compile(
            rf"(?:^|(?<=\s))to={_CALL_PREFIX}({names})(?=[\s{{<]|\Z)"
            rf"|<(?:tool|function)(?:_name)?>\s{{0,9}}{_CALL_PREFIX}({names})\s{{0,9}}</"
        ),
        re.compile(rf"<({tagged})>") if tagged else None,
    )
