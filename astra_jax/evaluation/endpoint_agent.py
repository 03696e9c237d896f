"""Agent of the agent loop that is a model behind an OpenAI-compatible endpoint: messages in, messages out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from astra_jax.evaluation.suite import Decoding, EvaluationError, ModelEndpoint
from synthesis.core.chat_format import Call, MalformedCall, escape_tags, parse_arguments
from synthesis.core.endpoint import Endpoint, RequestRefused
from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.core.records import ToolCall
from synthesis.core.stages import Transient, rng_for

_TOO_LONG = re.compile(
    r"context.{0,20}(length|window|size)|max(imum)?.model.len|too long|reduce the length|token count"
)
"""Error texts for a conversation that does not fit, of vLLM, SGLang, hosted services and our server."""
_OF_LENGTH = frozenset({400, 413, 422})
"""Statuses of such errors. With other statuses a gateway may report that an answer took too long."""
_COMPLETION = re.compile(r"max_(?:completion_|new_|output_)?tokens|completion")
_CONTEXT = re.compile(r"context (?:length|window|size)(?: is| of)? (\d{1,9})\b")
_PROMPT = re.compile(
    r"\b(\d{1,9}) (?:tokens )?(?:in the (?:messages|prompt|functions|tools)|input tokens|from the input)\b"
)


def room_left(status: int | None, said: str, max_tokens: int | None) -> int | None:
    """Return how many tokens a refusal leaves for a completion.

    Args:
        status: status of the refusal, or None.
        said: text of the refusal.
        max_tokens: limit in the request; None: the endpoint's own.

    Returns:
        Number of tokens. 0: the conversation itself is too long. None: the refusal has another reason.

    Raises:
        EvaluationError: conversation and `max_tokens` together are too long, and the refusal does not say how much
            fits.
    """
    said = said.lower()
    if status not in _OF_LENGTH or not _TOO_LONG.search(said):
        return None
    if max_tokens is None or not _COMPLETION.search(said):
        return 0
    context, prompt = _CONTEXT.search(said), sum(map(int, _PROMPT.findall(said)))
    room = int(context[1]) - prompt if context and prompt else max_tokens
    if room >= max_tokens:
        raise EvaluationError(
            f"--max_tokens={max_tokens} and a conversation do not fit into the endpoint's context ({said:.300}); give "
            "a smaller --max_tokens, or leave it out"
        )
    return max(room, 0)


def endpoint_of(served: ModelEndpoint, *, concurrency: int, timeout_seconds: float) -> Endpoint:
    """Return a client of an endpoint, with retries, back-off and a limit on requests in flight."""
    return Endpoint(
        OpenAITeacherConfig(
            served.url, served.model, served.key, concurrency=concurrency, timeout_seconds=timeout_seconds
        )
    )


class EndpointAgent:
    """A conversation with a model that may call tools. Implements `Agent`.

    The endpoint's own messages are sent back unchanged, with the reasoning if the endpoint returns it. The endpoint's
    chat template decides how much of its past the model sees, as when it is served. The exception are arguments that
    are not a JSON object: servers refuse a conversation with them (vLLM parses the arguments of past calls). They are
    sent as `{}`, and the call's output names the fault.

    Args:
        endpoint: client, shared by all conversations.
        served: the model, with its served name and supported fields.
        decoding: sampling parameters.
        seed: seed of all turns; turn t is sampled with `rng_for(seed, t)`.
        messages: start of the conversation, in OpenAI's format.
        tools: tools in OpenAI's format; may be replaced between turns.

    Attributes:
        messages: all messages so far.
        reply: the model's last message unchanged; it may differ in `messages` as described above.
        overflowed: True if the endpoint refused the conversation because of its length.
        steps: number of completions so far.
        calls: number of tool calls so far.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        served: ModelEndpoint,
        decoding: Decoding,
        *,
        seed: int,
        messages: Sequence[Mapping[str, Any]] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.messages = [dict(message) for message in messages]
        self.tools = list(tools)
        self.reply: dict[str, Any] = {}
        self.overflowed = False
        self.steps = self.calls = self.prompt_tokens = self.completion_tokens = 0
        self._endpoint, self._served, self._decoding, self._seed = endpoint, served, decoding, seed
        self._pending: list[str] = []

    def ask(self, text: str) -> None:
        """Add a user message."""
        self.messages.append({"role": "user", "content": text})

    async def act(self) -> Sequence[Call] | None:
        """Sample the model's next turn, and append it to `messages`.

        A turn that the token limit truncated may have calls, which must not be executed. To continue such a
        conversation, `observe` an output for each of them.

        If the endpoint has no room for `max_tokens`, the request is repeated with as many as fit.

        Raises:
            Transient: the endpoint does not answer this request for another reason than its length; or neither the
                model nor the token limit ended the turn.
            AbortRun: the endpoint answers no request.
            EvaluationError: see `room_left`.
        """
        rng = rng_for(self._seed, self.steps)
        body: dict[str, Any] = {"model": self._served.model, "messages": self.messages}
        body |= self._decoding.request(rng.getrandbits(31), self._served.limit)
        if self.tools:
            body["tools"] = self.tools
        limit = self._decoding.max_tokens
        while True:
            try:
                reply = await self._endpoint.complete_turn("turn", body, rng)
                break
            except RequestRefused as refusal:
                limit = room_left(refusal.status, refusal.said, limit)  # which is less each time
                if limit is None:
                    raise Transient(str(refusal)) from None
                if limit == 0:
                    self.overflowed = True
                    return None
                body[self._served.limit] = limit
        if reply.broken_off and not reply.message.get("refusal"):  # a refusal is an answer, and a wrong one
            raise Transient(f"{self._served.model}: a turn was {reply.problem}")
        self.steps += 1
        self.prompt_tokens += reply.usage.prompt
        self.completion_tokens += reply.usage.completion
        self.reply = reply.message
        message = {**reply.message, "content": reply.message["content"] or ""}
        given = message.get("tool_calls") or []
        if not isinstance(given, list) or not all(isinstance(call, Mapping) for call in given):
            raise Transient(f"{self._served.model}: tool_calls is not a list of calls: {str(given):.80}")
        written = [{**call, "function": call.get("function") or {}} for call in given]
        if written:
            message["tool_calls"] = written
        self.messages.append(message)
        self._pending = [call["id"] for call in written]
        self.calls += len(written)
        calls = [_call(call) for call in written]
        for call, parsed in zip(written, calls, strict=True):
            if isinstance(parsed, MalformedCall) or not parsed.arguments:
                call["function"] = {**call["function"], "arguments": "{}"}
        return None if reply.truncated else calls

    async def observe(self, outputs: Sequence[str]) -> bool:
        """Add the outputs of calls. Tags in them are escaped, since some servers' templates do not. Always returns
        True."""
        for call_id, output in zip(self._pending, outputs, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": escape_tags(output)})
        return True


def spoken(agent: EndpointAgent) -> str:
    """Return the last message without reasoning; "" if the reasoning is not finished."""
    _, ended, rest = (text := str(agent.messages[-1]["content"])).rpartition("</think>")
    # Not what follows a reply: ACEBench's harness takes a call with a blank behind it as no call.
    return "" if "<think>" in text and not ended else rest.lstrip()


def _call(written: Mapping[str, Any]) -> Call:
    function = written["function"]
    text = function.get("arguments")
    text = text if isinstance(text, str) else json.dumps(text)
    try:
        arguments = parse_arguments("{}" if text.strip() in ("", "null") else text)
    except ValueError as error:
        return MalformedCall(str(text), str(error))
    return ToolCall(written["id"], str(function.get("name") or ""), arguments)
