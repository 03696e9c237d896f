"""Detection of the chat format that a model folder's own chat template writes.

A template is a program, so its text is not compared: it renders probes, and so do the formats. Released templates that
differ only in text are one format. A template that renders a probe differently is refused. Otherwise the model would be
trained on conversations that no server of the model writes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from etils import epath
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from astra_jax.base.errors import UserError
from synthesis.core.chat_format import ChatFormat, NotInFormat, written
from synthesis.core.chatml import QWEN3, QWEN3_INSTRUCT, TURN_END, TURN_START, ChatML
from synthesis.core.llama3_chat import LLAMA3, LLAMA3_0, TODAY, Llama3
from synthesis.core.records import Message, ToolCall, ToolSpec

TEMPLATE = "chat_template.jinja"
OTHER_TEMPLATES = "additional_chat_templates"
"""Folder with a file for each named template, such as `tool_use`."""
_MOST_CHARACTERS = 1 << 18
"""Maximum length of a template; Qwen3's has 4,000."""


class TemplateError(UserError):
    """A folder's chat template cannot be read, or writes no known format; the message says which."""


@dataclass(frozen=True)
class FoundFormat:
    """Chat format of a folder's template.

    Attributes:
        format: in which its model's conversations are rendered and parsed.
        knows_tools: False if the template leaves tools and calls out, and the format adds them.
        has_template: False if the folder has none, and the format follows from the vocabulary.
    """

    format: ChatFormat
    knows_tools: bool = True
    has_template: bool = True


def format_of(folder: epath.Path, vocabulary: Collection[str] = ()) -> FoundFormat:
    """Return the chat format of a folder's model.

    A ChatML template that leaves tools out, such as SmolLM2's, becomes ChatML with calls in tags and keeps its system
    turn. Llama 3.0's gets calls in the form of Llama 3.1. A folder without a template, e.g. of a base model, has the
    format whose tokens are in the vocabulary: Qwen3's, Llama 3.1's, or ChatML.

    Args:
        vocabulary: the tokenizer's tokens.

    Raises:
        TemplateError: the template cannot be read or rendered, or a probe is rendered in none of the formats.
    """
    template = _Template(folder)
    if not template:
        return _format_with(vocabulary)
    plain = ChatML(default_system=_default_system(template))
    differences: list[tuple[int, str, str]] = []
    for one in (QWEN3, QWEN3_INSTRUCT, plain, LLAMA3, LLAMA3_0):
        difference = _difference(template, one, _PROBES)
        if difference is None:
            return FoundFormat(one)
        differences.append(difference)
    if template.ignores_tools():
        for one in (plain, LLAMA3_0):
            if _difference(template, one, _WITHOUT_TOOLS) is None:
                return FoundFormat(one, knows_tools=False)
    # The nearest format agrees with the template for the longest.
    _, found, wanted = nearest = max(differences, key=lambda one: (one[0], _shared(one)))
    at = max(0, _shared(nearest) - 20)
    raise TemplateError(
        f"{folder}: its chat template is of no format that is trained here: it writes {found[at : at + 60]!r} "
        f"where the nearest has {wanted[at : at + 60]!r}. Give a folder with Qwen3's, Qwen2.5's, Llama 3's or "
        f"plain ChatML's (--tokenizer), or take the template out of it ({TEMPLATE}, {OTHER_TEMPLATES}/, and "
        "chat_template in tokenizer_config.json) to train the format whose tokens its vocabulary has"
    )


def _format_with(vocabulary: Collection[str]) -> FoundFormat:
    """Return the format of a model without a template."""
    tokens = frozenset(vocabulary)
    for one in (QWEN3, LLAMA3):
        if tokens.issuperset(one.needed):
            return FoundFormat(one, has_template=False)
    if tokens.issuperset(ChatML().needed):
        return FoundFormat(ChatML(), knows_tools=False, has_template=False)
    return FoundFormat(QWEN3, has_template=False)


def template_of(chat_format: ChatFormat) -> str:
    """Return a template that writes the same as a format, for a folder whose own leaves tools out or is missing."""
    if isinstance(chat_format, Llama3):
        text = (Path(__file__).parent / "llama3.jinja").read_text(encoding="utf-8")
        return text.replace("TODAY", written(TODAY) if chat_format.dates else "none", 1)
    assert isinstance(chat_format, ChatML)
    text = (Path(__file__).parent / "chatml.jinja").read_text(encoding="utf-8")
    system = chat_format.default_system
    thoughts = "true" if chat_format.thoughts else "false"
    text = text.replace("WRITES_THOUGHTS", thoughts, 1)
    return text.replace("DEFAULT_SYSTEM", "none" if system is None else written(system), 1)


def _default_system(template: _Template) -> str | None:
    """Return the text of a system turn that no message asked for; None if there is none."""
    opening, behind = f"{TURN_START}system\n", f"{TURN_END}\n{TURN_START}user\n"
    found = template.render(_TALK[1:2], (), opened=False)
    text, divided, _ = found.removeprefix(opening).partition(behind)
    return text if found.startswith(opening) and divided else None


def _shared(difference: tuple[int, str, str]) -> int:
    _, found, wanted = difference
    pairs = enumerate(zip(found, wanted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(found), len(wanted)))


def _templates(folder: epath.Path) -> Mapping[str, str]:
    """Return the templates by name, as transformers looks for them: own files precede `tokenizer_config.json`."""
    config = folder / "tokenizer_config.json"
    files = {file.name.removesuffix(".jinja"): file for file in named_templates(folder)}
    if (folder / TEMPLATE).exists():
        files.setdefault("default", folder / TEMPLATE)
    try:
        found: Any = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        if not files and config.exists():
            content = json.loads(config.read_bytes())
            found = content.get("chat_template") if isinstance(content, dict) else None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise TemplateError(f"{folder}: its chat template cannot be read ({error}); copy the folder again") from None
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        found = {str(one.get("name")): one.get("template") for one in found}
    templates = {} if not found else found if isinstance(found, dict) else {"default": found}
    for name, text in templates.items():
        if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
            raise TemplateError(
                f"{folder}: its chat template {name!r} is not a text of at most {_MOST_CHARACTERS} characters; "
                "copy the folder again"
            )
    if templates and "default" not in templates:
        raise TemplateError(f"{folder}: of its chat templates ({', '.join(templates)}) none is called 'default'")
    return templates


def named_templates(folder: epath.Path) -> list[epath.Path]:
    """Return the files of `additional_chat_templates`, by name."""
    return sorted((folder / OTHER_TEMPLATES).glob("*.jinja")) if (folder / OTHER_TEMPLATES).is_dir() else []


def _tokens(folder: epath.Path) -> dict[str, str]:
    """Return the special tokens that a template may name: those of `tokenizer_config.json`, and of
    `special_tokens_map.json`, which transformers reads if the first has no `added_tokens_decoder`."""
    config, tokens_map = (_object(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    found = {}
    for name, token in (config if "added_tokens_decoder" in config else config | tokens_map).items():
        token = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(token, str):
            found[name] = token
    return found


def _object(file: epath.Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty if there is none."""
    try:
        content = json.loads(file.read_bytes())
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


class _Generation(Extension):
    """`{% generation %}`, which marks the model's text in templates; it changes no text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> jinja2.Environment:
    # Templates may use here what they may use in transformers, and nothing more.
    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: TODAY}
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
Probe = tuple[tuple[Message, ...], tuple[ToolSpec, ...], bool]
_PROBES: tuple[Probe, ...] = (
    (_TALK[1:2], (), True),
    (_TALK[:2], (), True),
    (_TALK[1:2], (_WEATHER,), True),
    (_TALK[:2], (_WEATHER, _WEATHER), True),
    (_TALK[:5], (_WEATHER,), True),
    (_TALK, (_WEATHER,), False),
    ((*_TALK[:2], *_MORE[1:]), (_WEATHER, _WEATHER), False),
    (_TALK[1:2] + _MORE[-1:], (), False),
    ((*_TALK[:2], *_TALK[5:], *_MORE[:1], Message("system", "Be briefer."), Message("user", "\n北京?\n")), (), True),
    (_TALK + _MORE, (_WEATHER,), False),
    ((*_TALK, *_MORE, Message("system", "Be briefer."), Message("user", "\n北京?\n")), (), True),
)
"""Probes: messages, tools and True to open the assistant's turn. Their texts hold no tags, which only we escape."""
_WITHOUT_TOOLS = tuple(probe for probe in _PROBES if not probe[1] and not any(one.tool_calls for one in probe[0]))


class _Template:
    """A folder's chat templates; renders as transformers does."""

    def __init__(self, folder: epath.Path) -> None:
        self._folder, self._texts = folder, _templates(folder)
        self._tokens = _tokens(folder)
        self._compiled: dict[str, jinja2.Template] = {}

    def __bool__(self) -> bool:
        return bool(self._texts)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, opened: bool) -> str:
        """Render a conversation. Raises `TemplateError`: it cannot."""
        name = "tool_use" if tools and "tool_use" in self._texts else "default"
        try:
            if name not in self._compiled:
                self._compiled[name] = _environment().from_string(self._texts[name])
            text = self._compiled[name].render(
                messages=[_openai(message) for message in messages],
                tools=[tool.to_openai() for tool in tools] or None,
                documents=None,
                add_generation_prompt=opened,
                **self._tokens,
            )
            text.encode("utf-8")  # half of a character is none
            return text
        except Exception as error:  # a template may divide by zero: Jinja has no base for what one raises
            raise TemplateError(
                f"{self._folder}: its chat template {name!r} cannot be rendered ({type(error).__name__}: {error}); "
                "copy the folder again"
            ) from None

    @property
    def has_tool_use(self) -> bool:
        """Return whether conversations with tools have a template of their own."""
        return "tool_use" in self._texts

    @cached_property
    def always_opens(self) -> bool:
        """Return whether it opens the assistant's turn unasked, as the first Llama 3's does."""
        return self.render(_TALK[:2], (), opened=True) == self.render(_TALK[:2], (), opened=False)

    def ignores_tools(self) -> bool:
        """Return whether it writes the same with tools as without, and nothing of a call."""
        called, plain = _TALK[2], Message("assistant", _TALK[2].content)
        return self.render(_TALK[:2], (_WEATHER,), opened=True) == self.render(_TALK[:2], (), opened=True) and (
            self.render([*_TALK[:2], called], (), opened=False) == self.render([*_TALK[:2], plain], (), opened=False)
        )


def _difference(template: _Template, chat_format: ChatFormat, probes: Sequence[Probe]) -> tuple[int, str, str] | None:
    """Return the first probe that differs: its number, the template's text, and ours."""
    for number, (messages, tools, opened) in enumerate(probes):
        if template.has_tool_use and not tools and any(one.tool_calls for one in messages):
            continue  # calls are for the other template, which is given their tools
        try:
            segments = chat_format.render(messages, tools, add_generation_prompt=opened or template.always_opens)
        except NotInFormat:
            continue
        found = template.render(messages, tools, opened=opened)
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
