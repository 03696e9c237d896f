"""Which of the chat formats that are rendered here a model folder's own chat template writes.

A template is a program, so it is not compared as text: it renders probes, and so does `chat_format`. Released templates
that differ in their text alone are one format; one that renders a probe otherwise is refused, because a model would be
trained on conversations that whoever serves it never writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jinja2
from etils import epath
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from synthesis.core.chat_format import render
from synthesis.core.records import Message, ToolCall, ToolSpec
from synthesis.core.refusals import Refusal

_MOST_CHARACTERS = 1 << 18
"""Of a template; Qwen3's has 4,000."""


class TemplateError(Refusal):
    """A folder's chat template cannot be read, or writes no format that is rendered here; the message says which."""


def writes_thoughts(folder: epath.Path) -> bool:
    """Whether conversations of a folder's model hold thoughts: the `thoughts` of `chat_format.render`.

    A folder without a template, such as that of a tokenizer made here, is of Qwen3's format, with thoughts.

    Raises:
        TemplateError: the template cannot be read or rendered, or a probe comes out in none of the formats.
    """
    templates = _templates(folder)
    if not templates:
        return True
    differences = []
    for thoughts in (True, False):
        difference = _difference(templates, folder, thoughts=thoughts)
        if difference is None:
            return thoughts
        differences.append(difference)
    # The nearer of the two is the one that comes further.
    _, found, wanted = nearer = max(differences, key=lambda one: (one[0], _shared(one)))
    at = max(0, _shared(nearer) - 20)
    raise TemplateError(
        f"{folder}: its chat template is neither Qwen3's nor Qwen3-Instruct-2507's: it writes {found[at : at + 60]!r} "
        f"where Qwen3 has {wanted[at : at + 60]!r}. Give a folder with Qwen3's template (--tokenizer), or take the "
        "template out of it (chat_template.jinja, and chat_template in tokenizer_config.json) to train Qwen3's format"
    )


def _shared(difference: tuple[int, str, str]) -> int:
    _, found, wanted = difference
    pairs = enumerate(zip(found, wanted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(found), len(wanted)))


def _templates(folder: epath.Path) -> Mapping[str, str]:
    """By name, as transformers looks for them: a file of its own goes before `tokenizer_config.json`."""
    own, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    try:
        if own.exists():
            found: Any = own.read_text(encoding="utf-8")
        elif config.exists():
            content = json.loads(config.read_bytes())
            found = content.get("chat_template") if isinstance(content, dict) else None
        else:
            return {}
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise TemplateError(f"{folder}: its chat template cannot be read ({error}); copy the folder again") from None
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        found = {str(one.get("name")): one.get("template") for one in found}
    templates = {} if not found else found if isinstance(found, dict) else {"default": found}
    for name, text in templates.items():
        if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
            raise TemplateError(
                f"{folder}: its chat template {name!r} is no text of at most {_MOST_CHARACTERS} characters; copy the "
                "folder again"
            )
    if templates and "default" not in templates:
        raise TemplateError(f"{folder}: of its chat templates ({', '.join(templates)}) none is called 'default'")
    return templates


class _Generation(Extension):
    """`{% generation %}`, with which templates mark what a model writes; it changes no text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> jinja2.Environment:
    # What templates may use where transformers renders them, and what it cannot do there it cannot do here.
    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: ""}
    return environment


_WEATHER = ToolSpec(
    "weather",
    "The weather, 天气, of a <city>",
    {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "北京"]}}, "required": ["city"]},
)
_TWO_CALLS = [ToolCall("a", "weather", {"city": "Oslo"}), ToolCall("b", "weather", {"city": "北京", "days": [1, 2.5]})]
_TALK = (
    Message("system", "Be brief."),
    Message("user", "Weather in Oslo and 北京?"),
    Message("assistant", "Both at once.", reasoning="Two calls.\nThen an answer.", tool_calls=_TWO_CALLS),
    Message("tool", '{"sky": "rain"}'),
    Message("tool", '{"sky": "sun"}'),
    Message("assistant", "Rain, sun."),
)
_MORE = (
    Message("user", "And Rome?"),
    Message("assistant", "", reasoning="One more.", tool_calls=[ToolCall("c", "weather", {"city": "Rome"})]),
    Message("tool", "haze"),
    Message("assistant", "Haze.", reasoning="It said so."),
)
_PROBES: tuple[tuple[tuple[Message, ...], tuple[ToolSpec, ...], bool], ...] = (
    (_TALK[1:2], (), True),
    (_TALK[:2], (), True),
    (_TALK[1:2], (_WEATHER,), True),
    (_TALK[:2], (_WEATHER, _WEATHER), True),
    (_TALK[:5], (_WEATHER,), True),
    (_TALK, (_WEATHER,), False),
    (_TALK[1:2] + _MORE[-1:], (), False),
    (_TALK + _MORE, (_WEATHER,), False),
    ((*_TALK, *_MORE, Message("system", "Be briefer."), Message("user", "\n北京?\n")), (), True),
)
"""Messages, tools and whether the assistant's turn is opened. No text of them holds a tag, which only we escape."""


def _difference(templates: Mapping[str, str], folder: epath.Path, *, thoughts: bool) -> tuple[int, str, str] | None:
    """The first probe that comes out otherwise: its number, what the template writes, and what is written here."""
    for number, (messages, tools, opened) in enumerate(_PROBES):
        name = "tool_use" if tools and "tool_use" in templates else "default"
        try:
            found = (
                _environment()
                .from_string(templates[name])
                .render(
                    messages=[_openai(message) for message in messages],
                    tools=[tool.to_openai() for tool in tools] or None,
                    documents=None,
                    add_generation_prompt=opened,
                )
            )
        except Exception as error:  # a template may divide by zero: Jinja has no base for what one raises
            raise TemplateError(
                f"{folder}: its chat template {name!r} cannot be rendered ({type(error).__name__}: {error}); copy the "
                "folder again"
            ) from None
        segments = render(messages, tools, add_generation_prompt=opened, thoughts=thoughts)
        if found != (wanted := "".join(segment.text for segment in segments)):
            return number, found, wanted
    return None


def _openai(message: Message) -> dict[str, Any]:
    given: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        given["reasoning_content"] = message.reasoning
    if message.tool_calls:
        given["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return given
