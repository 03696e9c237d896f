"""Replies of model endpoints, in one form for every API: the text, why it may not be whole, what it cost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from astra_jax.base.typed import decode_any_json
from synthesis.core.rate_limits import Usage, retry_after

_COMPLETE = frozenset(
    {"stop", "tool_calls", "function_call"}  # OpenAI, Gemini
    | {"eos", "eos_token", "stop_sequence"}  # Text Generation Inference, llama.cpp
    | {"end_turn", "tool_use"}  # Anthropic, also through gateways
    | {"complete", "completed", "tool_call"}  # Cohere
    | {"stopped", "null"}
)
"""Finish reasons of complete answers, in lower case. Any other reason counts as broken off: services have too many for
a list (`content_filter`, `abort`, `error`, `SAFETY`, `refusal`, `unknown`, ...). Half an answer that passes for a whole
one is trained on; a good answer that is requested again costs one request."""

_AT_THE_LIMIT = frozenset(
    {"length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"}
)

_EMPTY_ACCOUNT = frozenset(
    {"insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "exceeded_current_quota_error"}
)
"""`code` or `type` of a 429 where money is missing, and not patience: OpenAI's, the last Moonshot's."""

_NO_CREDIT = re.compile(r"(credit balance is too low|insufficient (?:credits|balance|funds))", re.IGNORECASE)
"""Anthropic sends this with status 400, gateways with 200."""

_TOO_LARGE = re.compile(r"request too large", re.IGNORECASE)
_PER_MINUTE = re.compile(r"Limit:? ([\d,]{1,15})(?:, Used:? [\d,]{1,15})?, Requested:? ([\d,]{1,15})", re.IGNORECASE)
"""As OpenAI and Groq write it."""

_ERROR_FIELD = re.compile(r"(?:^|_)errors?(?:$|_)|^error|error$", re.IGNORECASE)


class EndpointReply(msgspec.Struct, frozen=True):
    """One answer of a model.

    Attributes:
        text: what the model says; "" where it says nothing.
        finish_reason: as the endpoint gave it (`stop`, `length`, `tool_calls`, ...); "" where it gave none.
        usage: tokens as the endpoint counted them, estimated by size where it did not.
        message: the assistant message in the API's own form, with every field that the endpoint sent. The next request
            of the conversation holds it as it is.
        problem: why the answer is not whole; "" where it is.
    """

    text: str
    finish_reason: str
    usage: Usage
    message: dict[str, Any]
    problem: str = ""

    @property
    def truncated(self) -> bool:
        """True if the token limit cut the answer off."""
        return self.finish_reason.lower() in _AT_THE_LIMIT

    @property
    def broken_off(self) -> bool:
        """True if something other than the model or the token limit ended the answer, such as a filter."""
        return bool(self.problem) and not self.truncated


class BadStatus(Exception):
    """The endpoint answered with an error status, or with an error that names one.

    Attributes:
        status: HTTP status.
        body: of the response.
        retry_after: header `Retry-After`; None where it is absent.
        location: header `Location`; "" where it is absent.
    """

    def __init__(self, status: int, body: bytes, retry_after: str | None = None, location: str = "") -> None:
        super().__init__(f"status {status}: {shown(body)}")
        self.status, self.body, self.retry_after, self.location = status, body, retry_after, location


class NoReply(Exception):
    """No reply arrived.

    Attributes:
        connected: whether the request reached the endpoint, so that the model may have written an answer.
    """

    def __init__(self, problem: str, *, connected: bool) -> None:
        super().__init__(problem)
        self.connected = connected


class UnreadableReply(Exception):
    """A reply that holds no answer of the API, such as a web page.

    Attributes:
        usage: what the reply says was used; None where it does not.
        foreign: whether the reply has nothing of the API, so that the address may be wrong.
    """

    def __init__(self, problem: str, usage: Usage | None = None, *, foreign: bool = True) -> None:
        super().__init__(problem)
        self.usage, self.foreign = usage, foreign


class TryFailed(Exception):
    """A failed try that another may fix.

    Attributes:
        busy: the endpoint asks for patience (429).
        wait: seconds that the endpoint asks to wait.
        lost: whether the model may have written an answer all the same, which is paid for.
        used: what the try cost, where the endpoint said so.
        lasting: the refusal that it is if it lasts.
        wrong_address: the fix, where the failure is that of a wrong address; "" for others.
        began: when the request was sent, on the monotonic clock.
    """

    def __init__(
        self,
        problem: str,
        *,
        busy: bool = False,
        wait: float | None = None,
        lost: bool = False,
        used: Usage | None = None,
        lasting: StatusRefused | None = None,
        wrong_address: str = "",
    ) -> None:
        super().__init__(problem)
        self.busy, self.wait, self.lost, self.used = busy, wait, lost, used
        self.lasting, self.wrong_address = lasting, wrong_address
        self.began = math.inf


class StatusRefused(Exception):
    """A status with which a request is refused, whatever the cause."""

    def __init__(self, status: int, said: str, *, account: bool = False) -> None:
        super().__init__(f"status {status}: {said}")
        self.status, self.said = status, said
        self.account = account or status == 402


_TRANSIENT = frozenset({408, 409, 425, 429})
"""Statuses below 500 that another try may fix."""

_OF_GATEWAYS = frozenset({502, 504})
"""With these a gateway reports a lost answer; with other statuses nothing was written."""


def meaning_of(error: BadStatus) -> TryFailed | StatusRefused:
    """Return what an error status means for its request."""
    status, data, wait = error.status, error.body, retry_after(error.retry_after)
    if status == 429 and (about := too_many(data)) != "busy":
        if about == "request":
            return StatusRefused(status, shown(data))
        refusal = StatusRefused(status, shown(data), account=True)
        return TryFailed(str(refusal), busy=True, wait=wait, lasting=refusal)
    if status in _TRANSIENT or status >= 500:
        return TryFailed(str(error), busy=status == 429, wait=wait, lost=status in _OF_GATEWAYS)
    if 300 <= status < 400:
        said = f"it sends us to {error.location[:200]!r}; give that as base_url if you trust it"
        return StatusRefused(status, said)
    return StatusRefused(status, shown(data), account=_without_credit(data))


def end_problem(reason: str, limit: int, *, field: str = "finish_reason") -> str:
    """Return why an answer with this finish reason is not whole; "" where it is.

    Args:
        reason: the finish reason; "": the endpoint gave none.
        limit: `max_tokens` of the request, for the message.
        field: name of the finish reason in the API.
    """
    word = reason.lower()
    if word in _AT_THE_LIMIT:
        return f"cut off at max_tokens={limit}"
    return "" if word in _COMPLETE or not word else f"broken off by the endpoint ({field}={reason!r:.80})"


def error_problem(*levels: Any) -> tuple[str, int | None] | None:
    """Return the error that a reply with HTTP status 200 carries, and its status; None where it carries none.

    Args:
        levels: the objects of the reply where services put errors: the reply, its first choice, the message.
    """
    for level in levels:
        if not isinstance(level, Mapping):
            continue
        if level.get("type") == "error" or level.get("object") == "error":
            return shown(msgspec.json.encode(level)), _status_of(level)
        base = level.get("base_resp")  # MiniMax
        if isinstance(base, Mapping) and not _is_no_error(base.get("status_code")):
            return f"base_resp: {shown(msgspec.json.encode(base))}", None
        for name, value in level.items():
            if isinstance(name, str) and _ERROR_FIELD.search(name) and not _is_no_error(value):
                return f"{name}: {shown(msgspec.json.encode(value))}", _status_of(value)
    return None


def _is_no_error(value: Any) -> bool:
    """Return whether an error field says that there is no error: some gateways send one with every reply."""
    if isinstance(value, Mapping):
        return all(_is_no_error(one) for one in value.values())
    if isinstance(value, str):
        return value.strip().lower() in ("", "0", "200", "ok", "success", "none", "null")
    return not value or value == 200


def _status_of(error: Any) -> int | None:
    code = error.get("code", error.get("status")) if isinstance(error, Mapping) else error
    code = int(code) if isinstance(code, str) and code.isdigit() and len(code) == 3 else code
    return code if isinstance(code, int) and 400 <= code < 600 else None


def token_count(value: Any) -> int | None:
    """Return a count of tokens, which some servers send as a float or as text; None where it is none."""
    if isinstance(value, str):
        value = value.strip()
        value = float(value) if re.fullmatch(r"\d{1,15}(\.\d{1,3})?", value) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return int(value)


def too_many(data: bytes) -> Literal["busy", "account", "request"]:
    """Return what a 429 with this body is about: the moment, an empty account, or a request that never fits."""
    for error in _errors(data):
        if any(error.get(name) in _EMPTY_ACCOUNT for name in ("code", "type") if isinstance(error.get(name), str)):
            return "account"
        message = error.get("message")
        if not isinstance(message, str):
            continue
        if _TOO_LARGE.search(message):
            return "request"
        if found := _PER_MINUTE.search(message):
            limit, requested = (int(one.replace(",", "") or 0) for one in found.groups())
            return "request" if requested > limit else "busy"
    return "busy"


def _without_credit(data: bytes) -> bool:
    """Return whether an error is about an account without money, whatever its status."""
    return any(_NO_CREDIT.search(str(error.get("message"))[:1_000]) for error in _errors(data))


def _errors(data: bytes) -> Iterator[Mapping[str, Any]]:
    """Yield the error that a body holds, as services nest it."""
    try:
        given = decode_any_json(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    given = given[0] if isinstance(given, list) and given else given
    error = given.get("error", given) if isinstance(given, dict) else None
    yield error if isinstance(error, dict) else {"message": error}


def shown(data: bytes) -> str:
    """Return the beginning of a body, for a person."""
    return " ".join(data[:500].decode(errors="replace").split())
