"""What an endpoint says: a completion, or why there is none; each service has words of its own for both."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from synthesis.core.endpoint_limits import BYTES_PER_TOKEN
from synthesis.core.openai_messages import text_of
from synthesis.core.rate_limits import Usage
from synthesis.core.typed import decode_any_json, decode_json, json_decoder

_WHOLE = frozenset(
    {"", "stop", "tool_calls", "function_call"}  # OpenAI's
    | {"eos", "eos_token", "stop_sequence"}  # Text Generation Inference, llama.cpp
    | {"end_turn", "tool_use"}  # Anthropic's, which gateways hand on
    | {"complete", "completed", "tool_call"}  # Cohere's
    | {"stopped", "null"}
)
"""How an answer ends that its model has ended, in lower case. Any other word is believed to say the opposite: there are
too many for a list (`content_filter`, `abort`, `error`, `repetition`, `SAFETY`, `insufficient_system_resource`,
`sensitive`, ...), and half an answer that is taken for a whole one is trained on, while a good one that is asked for
again costs a request and, if it is always so, an error that names the word."""

_AT_THE_LIMIT = frozenset(
    {"length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"}
)

_EMPTY_ACCOUNT = frozenset(
    {"insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "exceeded_current_quota_error"}
)
"""`code` or `type` of a 429 where money is missing, and not patience: OpenAI's, the last Moonshot's."""

_TOO_LARGE = re.compile(r"request too large", re.IGNORECASE)
_OF_A_MINUTE = re.compile(r"Limit:? ([\d,]{1,15})(?:, Used:? [\d,]{1,15})?, Requested:? ([\d,]{1,15})", re.IGNORECASE)
"""As OpenAI and Groq write it."""


class EndpointReply(msgspec.Struct, frozen=True):
    """One completion.

    Attributes:
        text: the message's content; "" where it has none.
        finish_reason: as the endpoint gave it (`stop`, `length`, `tool_calls`, ...); "" where it gave none.
        usage: tokens as the endpoint counted them, estimated by size where it did not.
        sent: the message's JSON.
    """

    text: str
    finish_reason: str
    usage: Usage
    sent: msgspec.Raw

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut it off."""
        return self.finish_reason.lower() in _AT_THE_LIMIT

    @property
    def broken_off(self) -> bool:
        """Whether something else ended it than its model or the token limit, such as a filter or an error."""
        return not self.truncated and self.finish_reason.lower() not in _WHOLE

    @property
    def message(self) -> dict[str, Any]:
        """The message with all that the endpoint put in it (`role`, `content`, `tool_calls`, `reasoning_content`, ...).

        Decoded at each access: who only wants the text does not pay for it.
        """
        return decode_json(self.sent, dict[str, Any])


class _Message(msgspec.Struct):
    content: Any = None


class _Choice(msgspec.Struct):
    message: msgspec.Raw
    finish_reason: str | None = None


class _Counts(msgspec.Struct):
    prompt_tokens: float | None = None
    completion_tokens: float | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Counts | None = None


class _Counted(msgspec.Struct):
    """Of a body that is otherwise of no use."""

    usage: _Counts


_counted = json_decoder(_Counted)
_completions = json_decoder(_Completion)
_messages = json_decoder(_Message)


class UnreadableReply(Exception):
    """A body that is no completion; the message says why, and shows its beginning."""


def read_completion(data: bytes, size: int) -> EndpointReply:
    """The completion that a body holds.

    Args:
        size: of the request's body, bytes; its tokens are estimated by it where the endpoint has not counted them.

    Raises:
        UnreadableReply: it holds none.
    """
    try:
        completion = _completions.decode(data)
        choice = completion.choices[0]
        text = text_of(_messages.decode(choice.message).content)
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError, RecursionError) as error:
        raise UnreadableReply(f"the body is no chat completion ({error}): {shown(data)}") from None
    counts = completion.usage or _Counts()
    prompt, written = counts.prompt_tokens, counts.completion_tokens
    used = Usage(
        size // BYTES_PER_TOKEN if prompt is None else int(prompt),
        len(text.encode(errors="replace")) // BYTES_PER_TOKEN if written is None else int(written),
    )
    return EndpointReply(text, choice.finish_reason or "", used, choice.message)


def said_used(data: bytes) -> Usage | None:
    """What a body says was used that is of no other use."""
    try:
        usage = _counted.decode(data).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if usage.prompt_tokens is None or usage.completion_tokens is None:
        return None
    return Usage(int(usage.prompt_tokens), int(usage.completion_tokens))


def too_many(data: bytes) -> Literal["busy", "account", "request"]:
    """What a 429 with this body is about: the moment, an account that is empty, or a request that is too large for any
    moment."""
    try:
        given = decode_any_json(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "busy"
    given = given[0] if isinstance(given, list) and given else given
    error = given.get("error", given) if isinstance(given, dict) else None
    if not isinstance(error, dict):
        error = {"message": error}
    if any(error.get(name) in _EMPTY_ACCOUNT for name in ("code", "type") if isinstance(error.get(name), str)):
        return "account"
    message = error.get("message")
    if not isinstance(message, str):
        return "busy"
    if _TOO_LARGE.search(message):
        return "request"
    if found := _OF_A_MINUTE.search(message):
        limit, requested = (int(one.replace(",", "") or 0) for one in found.groups())
        return "request" if requested > limit else "busy"
    return "busy"


def shown(data: bytes) -> str:
    """The beginning of a body, for a person."""
    return " ".join(data[:500].decode(errors="replace").split())
