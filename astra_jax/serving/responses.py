"""JSON of answers: one class per endpoint, which turns the parts of choices into a whole body or stream chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from astra_jax.rollout.sampler import Alternatives
from astra_jax.serving.messages import TurnDeltas, message_of, offers_tools, thought_length
from astra_jax.serving.protocol import ChatRequest, CompletionRequest
from astra_jax.serving.sampled import Detokenizer, Part
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chat_format import ChatFormat

Request = TypeVar("Request", bound=CompletionRequest | ChatRequest)


@dataclass
class Choice:
    """Choice that grows by parts."""

    index: int
    prompt: Sequence[int]
    parts: list[Part] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def tokens(self) -> int:
        return sum(len(part.token_ids) for part in self.parts)

    def thought_tokens(self, chat_format: ChatFormat, *, form: bool) -> int:
        """Return the number of tokens of its thought, tags included; for `form` see `message_of`."""
        end = thought_length(self.text, chat_format, form=form)
        return sum(offset < end for part in self.parts for offset in part.offsets)

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were reused from an earlier sequence."""
        return self.parts[0].cached if self.parts else 0


class Response(Generic[Request]):
    """Base of all endpoints' answers."""

    prefix: str
    kind: str
    chunk_kind: str
    end = b"data: [DONE]\n\n"
    """End of a stream."""
    bytes_prefix = ""
    """Prefix of tokens that are shown as bytes."""

    def __init__(self, request: Request, model: str, tokenizer: ChatTokenizer, prompts: Sequence[list[int]]) -> None:
        """
        Args:
            prompts: token ids; each has `request.n` choices, one prompt after the other.
        """
        self.request: Request = request
        self.choices = [Choice(i, prompts[i // request.n]) for i in range(len(prompts) * request.n)]
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the request's fields that did not change the answer."""
        thinks = bool(self._tokenizer.format.thought_start)
        return self.request.ignored if thinks else (*self.request.ignored, *self.request.thinking_fields)

    def whole(self) -> dict[str, Any]:
        """Return the body, once all choices have finished."""
        choices = [self.choice(choice) for choice in self.choices]
        return {**self._head, "object": self.kind, **self.prompt_ids(), "choices": choices, "usage": self.usage()}

    def framed(self, chunk: dict[str, Any]) -> bytes:
        """Return a chunk as an event of the stream."""
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def frames(self, choice: Choice, part: Part) -> bytes:
        """Return the events of `chunks`."""
        return b"".join(map(self.framed, self.chunks(choice, part)))

    def failure(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk that ends a stream with an error, given the error's body."""
        return body

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield chunks before the first token."""
        return iter(())

    def chunks(self, choice: Choice, part: Part) -> Iterator[dict[str, Any]]:
        """Yield chunks of a stream for a part that was just added to its choice."""
        raise NotImplementedError

    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return a finished choice."""
        raise NotImplementedError

    def closing(self) -> Iterator[dict[str, Any]]:
        """Yield chunks after the last token."""
        if self._includes_usage:
            yield {**self._head, "object": self.chunk_kind, "choices": [], "usage": self.usage()}

    def prompt_ids(self) -> dict[str, Any]:
        return {}

    def usage(self) -> dict[str, Any]:
        """Return the usage; a prompt counts once, however many choices it has."""
        # All but the first of a prompt's choices reuse its computation.
        n = self.request.n
        cached = sum(min(one.cached for one in self.choices[i : i + n]) for i in range(0, len(self.choices), n))
        return {**self._counts(), "prompt_tokens_details": {"cached_tokens": cached}}

    def _counts(self) -> dict[str, int]:
        prompt, completion = sum(map(len, self._prompts)), sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @property
    def _includes_usage(self) -> bool:
        return self.request.stream_options is not None and self.request.stream_options.include_usage

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        options = self.request.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self._counts() if options.continuous_usage_stats else None
        return chunk

    def _token(self, token_id: int) -> str:
        """Return a token's text. A token that is a part of a character is shown as its bytes, as OpenAI does."""
        if self.request.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return self.bytes_prefix + "".join(f"\\x{byte:02x}" for byte in data)

    def logprobs_of(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Return logprobs in the form of chats: each token with its logprob, bytes and the likeliest tokens there."""
        content = []
        for part in parts:
            shown = part.alternatives or [()] * len(part.token_ids)
            for token_id, value, best in zip(part.token_ids, part.logprobs, shown, strict=True):
                likeliest = [self._logprob(one, logprob) for one, logprob in best]
                content.append({**self._logprob(token_id, value), "top_logprobs": likeliest})
        return content

    def _logprob(self, token_id: int, value: float) -> dict[str, Any]:
        data = list(self._tokenizer.token_bytes(token_id))
        return {"token": self._token(token_id), "logprob": value, "bytes": data}

    def _ids(self, parts: Sequence[Part]) -> dict[str, Any]:
        return {"token_ids": [i for part in parts for i in part.token_ids]} if self.request.return_token_ids else {}


class Echo:
    """Prompt as text.

    Attributes:
        text: the prompt, special tokens included.
        offsets: start of each token's text.
    """

    def __init__(self, tokenizer: ChatTokenizer, prompt: Sequence[int]) -> None:
        text, pieces = Detokenizer(tokenizer, skip_special=False), list[str]()
        self.offsets = []
        for token_id in prompt:
            self.offsets.append(text.length)
            pieces.append(text.push(token_id))
        self.text = "".join([*pieces, text.finish()])


class CompletionResponse(Response[CompletionRequest]):
    """Response of `/v1/completions`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    bytes_prefix = "bytes:"

    def __init__(
        self, request: CompletionRequest, model: str, tokenizer: ChatTokenizer, prompts: Sequence[list[int]]
    ) -> None:
        super().__init__(request, model, tokenizer, prompts)
        self._echoes = [Echo(tokenizer, prompt) for prompt in prompts] if request.echo else []

    def choice(self, choice: Choice) -> dict[str, Any]:
        return self._body(choice, choice.parts, choice.text, first=True)

    def chunks(self, choice: Choice, part: Part) -> Iterator[dict[str, Any]]:
        yield self._chunk(self._body(choice, [part], part.text, first=len(choice.parts) == 1))

    def _body(self, choice: Choice, parts: Sequence[Part], text: str, *, first: bool) -> dict[str, Any]:
        echo = self._echoes[choice.index // self.request.n] if self._echoes else None
        body: dict[str, Any] = {"index": choice.index, "text": text, "logprobs": None}
        if echo is not None and first:
            body["text"] = echo.text + text
        if self.request.wants_logprobs:
            start = 0 if echo is None else len(echo.text)
            ids = [i for part in parts for i in part.token_ids]
            logprobs: list[float | None] = [value for part in parts for value in part.logprobs]
            offsets = [start + offset for part in parts for offset in part.offsets]
            best: list[Any] = [one for part in parts for one in part.alternatives]
            if echo is not None and first:  # nothing precedes the first token, so it has no logprob
                ids = [*choice.prompt, *ids]
                logprobs = [None, *parts[0].prompt_logprobs, *logprobs]
                offsets = [*echo.offsets, *offsets]
                best = [None, *parts[0].prompt_alternatives, *best]
            body["logprobs"] = {
                "tokens": [self._token(i) for i in ids],
                "token_logprobs": logprobs,
                "text_offset": offsets,
                "top_logprobs": self._likeliest(ids, logprobs, best) if self.request.alternatives else None,
            }
        body |= self._ids(parts)
        if self.request.return_token_ids and first:
            body["prompt_token_ids"] = list(choice.prompt)
        return body | {"finish_reason": parts[-1].finish, "stop_reason": parts[-1].stop_reason}

    def _likeliest(
        self, ids: Sequence[int], logprobs: Sequence[float | None], best: Sequence[Alternatives | None]
    ) -> list[dict[str, float] | None]:
        """Return the likeliest tokens at each position, plus the actual one."""
        return [
            None
            if likely is None or logprob is None
            else {self._token(i): value for i, value in (*likely, (token_id, logprob))}
            for token_id, logprob, likely in zip(ids, logprobs, best, strict=True)
        ]


class ChatResponse(Response[ChatRequest]):
    """Response of `/v1/chat/completions`."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, request: ChatRequest, model: str, tokenizer: ChatTokenizer, prompts: Sequence[list[int]]
    ) -> None:
        super().__init__(request, model, tokenizer, prompts)
        self._tools = offers_tools(request)
        self._format = tokenizer.format
        self._form = request.response_format != {"type": "text"}
        self._deltas = [TurnDeltas(self._format, self._tools, self._form) for _ in self.choices]

    def choice(self, choice: Choice) -> dict[str, Any]:
        message = message_of(choice.text, self._format, tools=self._tools, form=self._form)
        finish = self._finish(choice.parts[-1], called="tool_calls" in message)
        body = {"index": choice.index, "message": message, "logprobs": self._logprobs(choice.parts)}
        return {**body, "finish_reason": finish, "stop_reason": choice.parts[-1].stop_reason, **self._ids(choice.parts)}

    def opening(self) -> Iterator[dict[str, Any]]:
        for choice in self.choices:
            delta = {"role": "assistant", "content": ""}
            yield self._chunk({"index": choice.index, "delta": delta, "finish_reason": None}) | self.prompt_ids()

    def chunks(self, choice: Choice, part: Part) -> Iterator[dict[str, Any]]:
        deltas = self._deltas[choice.index]
        made = list(deltas.push(part.text))
        if part.finish is not None:
            made += deltas.finish()
        # Logprobs and ids are sent with the tokens, whose text may follow later.
        extra = {"logprobs": self._logprobs([part]), **self._ids([part])}
        if not made and (self.request.logprobs or self.request.return_token_ids):
            made = [{}]
        for delta in made:
            yield self._chunk({"index": choice.index, "delta": delta, "finish_reason": None, **extra})
            extra = {"logprobs": None}
        if part.finish is not None:
            finish = {"finish_reason": self._finish(part, called=deltas.called), "stop_reason": part.stop_reason}
            yield self._chunk({"index": choice.index, "delta": {}, **finish})

    def usage(self) -> dict[str, Any]:
        thought = sum(choice.thought_tokens(self._format, form=self._form) for choice in self.choices)
        return {**super().usage(), "completion_tokens_details": {"reasoning_tokens": thought}}

    def prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._prompts[0])} if self.request.return_token_ids else {}

    def _finish(self, part: Part, *, called: bool) -> str | None:
        return "tool_calls" if called and part.finish == "stop" else part.finish

    def _logprobs(self, parts: Sequence[Part]) -> dict[str, Any] | None:
        return {"content": self.logprobs_of(parts), "refusal": None} if self.request.wants_logprobs else None
