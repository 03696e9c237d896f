"""A model behind an OpenAI-compatible endpoint as an agent of the agent loop: messages in, messages out."""

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
"""What servers say of a conversation that does not fit: vLLM, SGLang, hosted services, ours."""
_OF_LENGTH = frozenset({400, 413, 422})
"""The statuses with which they say it. With others a gateway may say that an answer took too long."""
_COMPLETION = re.compile(r"max_(?:completion_|new_|output_)?tokens|completion")
_CONTEXT = re.compile(r"context (?:length|window|size)(?: is| of)? (\d{1,9})\b")
_PROMPT = re.compile(
    r"\b(\d{1,9}) (?:tokens )?(?:in the (?:messages|prompt|functions|tools)|input tokens|from the input)\b"
)


def room_left(status: int | None, said: str, max_tokens: int | None) -> int | None:
    """What a refusal leaves a completion.

    Args:
        status: of the refusal; None: it had none.
        said: with it.
        max_tokens: that the request asked for; None: it left it to the endpoint.

    Returns:
        Tokens; 0: the conversation itself is too long. None: it was refused for something else.

    Raises:
        EvaluationError: the conversation and `max_tokens` together are too long, and how much would fit is not said.
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
            "less, or leave it out"
        )
    return max(room, 0)


def endpoint_of(served: ModelEndpoint, *, concurrency: int, timeout_seconds: float) -> Endpoint:
    """The client of an endpoint: retries, back-off, a bound on what is in flight."""
    return Endpoint(
        OpenAITeacherConfig(
            served.url, served.model, served.key, concurrency=concurrency, timeout_seconds=timeout_seconds
        )
    )


class EndpointAgent:
    """A conversation with a model that may call tools. Implements `Agent`.

    The endpoint's own messages are sent back as they came (with the reasoning, where the endpoint gives it): what the
    model is shown of its past is the endpoint's chat template's affair, as it is when the model is served. Arguments
    that are no JSON object are the exception: servers refuse a conversation that holds them (vLLM parses the arguments
    of past calls), so it holds `{}`, and the call's output is there to say what was wrong.

    Args:
        endpoint: shared by all conversations.
        served: who is asked, for the served name and the fields that it takes.
        decoding: how to sample.
        seed: of all turns; turn t is drawn with `rng_for(seed, t)`.
        messages: in OpenAI's form; what the conversation begins with.
        tools: in OpenAI's form; may be replaced between turns.

    Attributes:
        messages: all so far.
        reply: the last message of the model as it came; what is in `messages` may differ in the ways said above.
        overflowed: whether the endpoint refused the conversation for its length.
        steps: completions so far.
        calls: tool calls so far.
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
        """Say something as the user."""
        self.messages.append({"role": "user", "content": text})

    async def act(self) -> Sequence[Call] | None:
        """The model's next turn, appended to `messages`.

        A turn that the token limit cut off may hold calls, which are not to be carried out: a conversation that goes on
        has to `observe` an output for each all the same.

        Where the endpoint has no room for as many tokens as `max_tokens`, it is asked for those that it has room for.

        Raises:
            Transient: the endpoint will not answer this request, and it is not for its length; or something else than
                the model or the token limit ended the turn.
            AbortRun: it answers nothing at all.
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
        """Take the outputs; tags in them are escaped, as not every server's template does so. There is always room."""
        for call_id, output in zip(self._pending, outputs, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": escape_tags(output)})
        return True


def spoken(agent: EndpointAgent) -> str:
    """The last message without reasoning; "" where that never came to an end."""
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
