"""Fields of a request: OpenAI's, and vLLM's fields that our clients use, each with its type.

A field that would change the answer and is not supported is refused by name, unless its value has no effect
(`min_tokens: 0`). A field that cannot change the answer (`user`, `verbosity`) is accepted and ignored, and the response
header `IGNORED_HEADER` names it. A null is an absent field. Every number and every list has bounds: the policy can
execute each request that is accepted here.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, TypeVar

import msgspec

from astra_jax.base import http_service
from astra_jax.base.typed import convert_to
from astra_jax.rollout.sampler import (
    MAX_ALTERNATIVES,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_TEMPERATURE,
    MAX_TOKEN_ID,
    MIN_REPETITION,
    MIN_TEMPERATURE,
    MIN_TOP_P,
)

MAX_CHOICES = 128
"""Completions of one request."""
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 256
"""Each is compared with every token's text, wherever it may begin."""
_SEEDS = (-(2**63), 2**63 - 1)  # as OpenAI has them
_LONGEST_TEXT, _LONGEST_NAME = 1_000, 100
IGNORED_HEADER = "Astra-Ignored-Fields"
"""Names the request's fields that did not change the answer, separated by commas."""


class InvalidRequest(http_service.HttpRefusal):
    """Error that refuses a request; the text names the field, the value and the fix.

    Attributes:
        param: the field.
        code: OpenAI's code, for the few errors that clients distinguish.
    """

    def __init__(
        self,
        text: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} …", headers)
        self.param = param if param is None else param[:_LONGEST_NAME]
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.text, "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options` of a request.

    Attributes:
        include_usage: end the stream with a chunk of the usage.
        continuous_usage_stats: with `include_usage`, each chunk has the usage so far (vLLM's).
        include_obfuscation: pad chunks with random characters; ignored, none are sent.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class _Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of all endpoints.

    Attributes:
        ignored: names of the given fields that cannot change the answer; set by `parse`.
    """

    model: str | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    skip_special_tokens: bool = True
    ignored: tuple[str, ...] = ()

    def check(self) -> None:
        """Check the values. Raises `InvalidRequest` for a value out of range."""
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE):
            raise InvalidRequest(
                f"temperature is {self.temperature}; use 0 (greedy), or a number from {MIN_TEMPERATURE:g} to "
                f"{MAX_TEMPERATURE:g}",
                param="temperature",
            )
        for name, low, high in (
            ("n", 1, MAX_CHOICES),
            ("top_p", MIN_TOP_P, 1),
            ("top_k", -1, MAX_TOKEN_ID),
            ("min_p", 0, 1),
            ("presence_penalty", -MAX_PENALTY, MAX_PENALTY),
            ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY),
            ("repetition_penalty", MIN_REPETITION, MAX_REPETITION),
            ("seed", *_SEEDS),
            ("max_tokens", self.fewest_tokens, MAX_TOKEN_ID),
            ("max_completion_tokens", 1, MAX_TOKEN_ID),
            ("top_logprobs", 0, MAX_ALTERNATIVES),
        ):
            value = getattr(self, name, None)
            if value is not None and not low <= value <= high:
                raise InvalidRequest(f"{name} is {value}; use a number from {low:,} to {high:,}", param=name)
        if len(self.stops) > MAX_STOP_STRINGS or any(len(stop) > MAX_STOP_CHARACTERS for stop in self.stops):
            raise InvalidRequest(
                f"stop has {len(self.stops)} strings, the longest of {max(map(len, self.stops))} characters; at most "
                f"{MAX_STOP_STRINGS} of {MAX_STOP_CHARACTERS} are watched for",
                param="stop",
            )
        if "" in self.stops:
            raise InvalidRequest(
                "stop has an empty string, which would end every completion; leave it out", param="stop"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is given without stream; set stream to true", param="stream_options")

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def fewest_tokens(self) -> int:
        """The smallest `max_tokens`."""
        return 1

    @property
    def thinking_fields(self) -> tuple[str, ...]:
        """Names of the given fields that switch thinking on or off; models that cannot think ignore them."""
        return ()

    @property
    def choices(self) -> int:
        """Number of requested completions."""
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """Most new tokens; None is as many as fit."""
        raise NotImplementedError

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError

    @property
    def alternatives(self) -> int:
        """Number of the likeliest tokens to return at each position."""
        raise NotImplementedError

    @property
    def one_call(self) -> bool:
        """True if a choice ends after its first call."""
        return False


class CompletionRequest(_Request, kw_only=True):
    """Request to `/v1/completions`. A prompt is text or token ids; several give `n` choices each, in order.

    Attributes:
        echo: put the prompt before the text, and the logprobs of the prompt's tokens before those of the text.
    """

    prompt: str | list[str | int | list[int]]
    max_tokens: int = 16
    logprobs: int | None = None
    echo: bool = False

    def check(self) -> None:
        super().check()
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_ALTERNATIVES:
            raise InvalidRequest(
                f"logprobs is {self.logprobs}; use a number from 0 to {MAX_ALTERNATIVES}", param="logprobs"
            )
        if self.choices > MAX_CHOICES:
            raise InvalidRequest(
                f"{len(self.prompts)} prompts x n {self.n} are above {MAX_CHOICES}; ask in parts", param="n"
            )

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(one, int) for one in self.prompt):
            return [[one for one in self.prompt if isinstance(one, int)]]
        several = [one for one in self.prompt if not isinstance(one, int)]
        if len(several) != len(self.prompt) or not several:
            raise InvalidRequest("prompt is empty, or mixes token ids with texts; send one kind", param="prompt")
        return several

    @property
    def fewest_tokens(self) -> int:
        return 0 if self.echo else 1

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def alternatives(self) -> int:
        return self.logprobs or 0


class TemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`chat_template_kwargs`, as in vLLM."""

    enable_thinking: bool | None = None


UNTHINKING_EFFORTS = ("none", "minimal")
"""Values of `reasoning_effort` that switch thinking off."""


class ChatRequest(_Request, kw_only=True):
    """Request to `/v1/chat/completions`.

    The module `messages` reads the fields `messages` and `tools`, and `grammars` reads `response_format` and
    `tool_choice`.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "text"})
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    chat_template_kwargs: TemplateOptions = msgspec.field(default_factory=TemplateOptions)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def check(self) -> None:
        super().check()
        enabled = self.chat_template_kwargs.enable_thinking
        if None not in (enabled, self.reasoning_effort) and enabled != self.thinking:
            raise InvalidRequest(
                f"reasoning_effort is {self.reasoning_effort}, but chat_template_kwargs.enable_thinking is "
                f"{json.dumps(enabled)}; leave one of them out",
                param="reasoning_effort",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt are both true; set one of them to false",
                param="continue_final_message",
            )
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt is false, which leaves nothing to answer; set continue_final_message to true, "
                "or leave it out",
                param="add_generation_prompt",
            )
        if not self.messages:
            raise InvalidRequest("messages is empty; send at least one", param="messages")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is given without logprobs; set logprobs to true", param="top_logprobs")

    @property
    def choices(self) -> int:
        return self.n

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @property
    def alternatives(self) -> int:
        return self.top_logprobs

    @property
    def thinking(self) -> bool:
        """True if the model may think before it answers."""
        if self.reasoning_effort is not None:
            return self.reasoning_effort not in UNTHINKING_EFFORTS
        return self.chat_template_kwargs.enable_thinking is not False

    @property
    def thinking_fields(self) -> tuple[str, ...]:
        effort = () if self.reasoning_effort is None else ("reasoning_effort",)
        enabled = self.chat_template_kwargs.enable_thinking
        return effort if enabled is None else (*effort, "chat_template_kwargs.enable_thinking")

    @property
    def one_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none" and not self.parallel_tool_calls


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Unsupported fields, and their values that have no effect."""

_INSTEAD = {
    "function_call": "send tool_choice instead",
    "functions": "send tools instead",
    "prompt_logprobs": "send echo and logprobs to /v1/completions instead",
    **dict.fromkeys(("guided_choice", "guided_json", "structured_outputs"), "send response_format instead"),
}
"""Fixes for fields for which there is a better one than to leave the field out."""

_IGNORED = {
    "add_special_tokens",  # Qwen3 has none to add
    "cache_salt",
    "metadata",
    "priority",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
}
"""Fields that cannot change the answer: user, billing, storage, caching, and hints to other models."""

Request = TypeVar("Request", CompletionRequest, ChatRequest)


def parse(fields: dict[str, Any], kind: type[Request]) -> Request:
    """Return the request for a body's fields, checked.

    Raises:
        InvalidRequest: a field is unknown, of another type, out of range or not supported.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    ignored = [name for name in fields if name in _IGNORED]
    fields = {name: value for name, value in fields.items() if name not in _IGNORED}
    if "best_of" in fields and (best_of := fields.pop("best_of")) != fields.get("n", 1):
        raise InvalidRequest(
            f"best_of is {shown(best_of)}; all completions are returned here, leave it out, or set it to n",
            param="best_of",
        )
    known = set(kind.__struct_fields__) - {"ignored"}
    for name in sorted(set(fields) & set(_NEUTRAL) - known):
        value = fields.pop(name)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in _NEUTRAL[name]):
            remedy = _INSTEAD.get(name, "leave it out")
            raise InvalidRequest(f"{name} is {shown(value)}; it is not supported here, {remedy}", param=name)
    if unknown := sorted(set(fields) - known):
        raise InvalidRequest(f"unknown field {unknown[0]!r:.100}; leave it out", param=unknown[0])
    try:
        request = convert_to(fields, kind)
    except msgspec.ValidationError as error:
        where = re.search(r"`\$\.([^`]+)`", str(error)) or re.search(r"field `([^`]+)`", str(error))
        param = where.group(1) if where else None
        name = f"{param} is {shown(fields[param])}: " if param in fields else ""
        raise InvalidRequest(f"{name}{error}", param=param) from None
    request.check()
    options = request.stream_options
    if options is not None and options.include_obfuscation is not None:
        ignored.append("stream_options.include_obfuscation")
    request.ignored = tuple(ignored)
    return request


def shown(value: Any) -> str:
    """Return the start of a value, for a refusal."""
    return json.dumps(value)[:80]
