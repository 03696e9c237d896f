"""OpenAI's API for a policy, for the `openai` client, evaluation harnesses and synthesis.

- POST /v1/completions: prompt as text or token ids
- POST /v1/chat/completions: messages and tools
- POST /v1/responses: the same as items
- GET /v1/models: the served name and its context length; one model at /v1/models/NAME
- GET /health: {"status", "running", "waiting", "programs"}; 503 until it is ready for a request, while it drains, and
  once the policy has failed
- GET /metrics: Prometheus' text format

With a token, all paths but `/health` need `Authorization: Bearer TOKEN`. A refused request is answered at once:

- 400: a field that the server refuses
- 401: no token or a wrong one
- 403: a page of another site, or a foreign host
- 404: another model, or an unknown path
- 408: a slow body
- 413: a body that is too large
- 415: a body that is not JSON
- 429 with Retry-After: too many requests wait
- 503: the server stops, or the policy has failed

An error is `{"error": {"message", "type", "param", "code"}}`. A failure of the server on one request is answered with
500 and counted, and affects no other request.

Slow work on a body runs in threads beside the event loop. Long bodies wait for each other; short ones do not wait for
long ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from absl import logging
from aiohttp import web
from prometheus_client import exposition

from astra_jax.base import http_service
from astra_jax.base.access import ReachConfig
from astra_jax.base.http_service import HttpService
from astra_jax.base.settings import CountOrZero, Port
from astra_jax.rollout.sampler import ConstraintError, PolicyLimits, RequestFailed, Sampling, StreamingPolicy
from astra_jax.serving.bodies import read_object
from astra_jax.serving.grammars import Grammar, Grammars
from astra_jax.serving.items import ItemsResponse, in_items_words, items_request_of
from astra_jax.serving.messages import FirstCall
from astra_jax.serving.metrics import Metrics
from astra_jax.serving.prompts import prompts_of
from astra_jax.serving.protocol import IGNORED_HEADER, ChatRequest, CompletionRequest, InvalidRequest, parse
from astra_jax.serving.responses import ChatResponse, Choice, CompletionResponse, Request, Response
from astra_jax.serving.sampled import Part, sample, samplings_of
from astra_jax.tokenizer import ChatTokenizer

_LONG = 1 << 18
"""Bytes of a body whose tokenisation takes a quarter of a second or longer."""
_SHORT_AT_ONCE = 2
T = TypeVar("T")


@dataclass(frozen=True)
class ServingConfig(ReachConfig):
    """Settings of the service.

    Attributes:
        model: name of the served model.
        max_waiting: choices that may wait for a slot; a request above this is answered with 429.
        max_body_bytes: bytes of a request; a larger one is answered with 413.
    """

    RISK = "use the model"
    TOKEN_NAME = "API key"

    model: str
    _: KW_ONLY
    port: Port = 8000
    max_waiting: CountOrZero = 1024
    max_body_bytes: CountOrZero = 16 << 20


class OpenAIService(HttpService):
    """HTTP server of a policy.

    Args:
        policy: the policy, which the caller closes.

    Attributes:
        warming: True until the programs of a short request are compiled; requests wait meanwhile. Set by the caller.
        programs: programs compiled so far, and their number; None if none are compiled ahead. Set by the caller.
    """

    config: ServingConfig
    warming: bool = False
    programs: tuple[int, int] | None = None

    def __init__(self, policy: StreamingPolicy, tokenizer: ChatTokenizer, config: ServingConfig) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._turn_ends = tokenizer.end_ids
        self._created = int(time.time())
        self._choices = 0  # accepted and not finished
        self._metrics = Metrics(policy)
        self._grammars = Grammars(tokenizer, policy.limits.vocab_size)
        self._short = ThreadPoolExecutor(_SHORT_AT_ONCE, "short-requests")
        self._long = ThreadPoolExecutor(1, "long-requests")
        routes = [
            web.post("/v1/completions", self._completions),
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/responses", self._items),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{name:.+}", self._one_model),
            web.get("/health", self._health),
            web.get("/metrics", self._show_metrics),
        ]
        super().__init__(config, routes, most_bytes=config.max_body_bytes)

    async def warm_up(self) -> None:
        """Prepare data for the first answer with a form: the tokenizer's vocabulary."""
        await _aside(self._long, self._grammars.warm_up)

    async def stop(self) -> int:
        """See `HttpService.stop`."""
        cut = await super().stop()
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)
        return cut

    # ------------------------------------------------------------------------------------------------------- handlers

    def refusal(self, request: web.Request, refused: http_service.HttpRefusal) -> web.Response:
        """Return the refusal in OpenAI's form."""
        if not isinstance(refused, InvalidRequest):
            refused = InvalidRequest(refused.text, status=refused.status, headers=refused.headers)
        return web.json_response(refused.body(), status=refused.status, headers=refused.headers)

    def finish(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Count the response."""
        self._metrics.requests.labels(self._endpoint(request), str(response.status)).inc()
        return response

    @staticmethod
    def _endpoint(request: web.Request) -> str:
        """Return the route's path. Unknown paths share one label, or a scanner would fill the registry."""
        resource = request.match_info.route.resource
        return resource.canonical if resource is not None else "other"

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, lambda fields: parse(fields, CompletionRequest), CompletionResponse)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, lambda fields: parse(fields, ChatRequest), ChatResponse)

    async def _items(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answered(request, items_request_of, ItemsResponse)
        except InvalidRequest as refused:
            raise in_items_words(refused) from None

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["name"])
        return web.json_response(self._described())

    def _described(self) -> dict[str, Any]:
        model = {"id": self.config.model, "object": "model", "created": self._created, "owned_by": "astra-jax"}
        return {**model, "max_model_len": self._policy.limits.max_length}

    async def _health(self, request: web.Request) -> web.Response:
        failure = self._policy.failure
        status = "ok" if failure is None else f"failed: {failure!r}"
        status = "draining" if self.draining else "warming up" if self.warming else status
        state = {"status": status, "running": self._policy.running, "waiting": self._policy.waiting}
        if self.programs is not None:
            state["programs"] = dict(zip(("compiled", "of"), self.programs, strict=True))
        return web.json_response(state, status=200 if status == "ok" else 503)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        text = exposition.generate_latest(self._metrics.registry)
        return web.Response(body=text, headers={"Content-Type": exposition.CONTENT_TYPE_LATEST})

    # ------------------------------------------------------------------------------------------------------- answering

    async def _answered(
        self,
        request: web.Request,
        read: Callable[[dict[str, Any]], Request],
        response: Callable[[Request, str, ChatTokenizer, Sequence[list[int]]], Response[Request]],
    ) -> web.StreamResponse:
        try:
            body = await request.read()
            threads = self._short if len(body) < _LONG else self._long
            asked = await _aside(threads, lambda: read(read_object(body)))
            self._check_model(asked.model)
            limits = self._policy.limits
            samplings = samplings_of(asked, asked.choices, limits, self._turn_ends)
            with self._admitted(asked.choices):
                answer, grammar = await _aside(threads, lambda: self._read(asked, limits, response))
                if grammar is not None:
                    samplings = [dataclasses.replace(one, constraint=grammar.constraint()) for one in samplings]
                return await self._answer(request, answer, samplings)
        except (http_service.HttpRefusal, web.HTTPException, ConnectionError):
            raise
        except Exception as error:
            raise self._failed(error) from error

    def _read(
        self,
        asked: Request,
        limits: PolicyLimits,
        response: Callable[[Request, str, ChatTokenizer, Sequence[list[int]]], Response[Request]],
    ) -> tuple[Response[Request], Grammar | None]:
        prompts = prompts_of(asked, self._tokenizer, limits)
        answer = response(asked, self.config.model, self._tokenizer, prompts)
        return answer, self._grammars.of(asked) if isinstance(asked, ChatRequest) else None

    def _failed(self, error: Exception) -> InvalidRequest:
        """Return the error for a failure by the server, or for a fault of the request that only sampling shows.

        The policy reports it to every request that waits for it.
        """
        if isinstance(error, RequestFailed) and isinstance(error.__cause__, ConstraintError):
            return InvalidRequest(str(error.__cause__))
        logging.error("a request failed", exc_info=error)
        self._metrics.failures.labels(type(error).__name__).inc()
        if self._policy.failure is not None:
            return InvalidRequest(str(error), status=503)
        text = (
            str(error) if isinstance(error, RequestFailed) else f"{type(error).__name__}; the server's log says where"
        )
        return InvalidRequest(f"the server failed on this request: {text}", status=500)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.config.model):
            text = f"model is {name!r}; {self.config.model!r} is served here"
            raise InvalidRequest(text, status=404, param="model", code="model_not_found")

    async def _answer(
        self, request: web.Request, answer: Response[Any], samplings: Sequence[Sampling]
    ) -> web.StreamResponse:
        async with contextlib.aclosing(self._sampled(answer, samplings)) as parts:
            if answer.request.stream:
                return await self._streamed(request, answer, parts)
            async for choice, part in parts:
                choice.parts.append(part)
        whole = await _aside(self._short, lambda: msgspec.json.encode(answer.whole()))
        return web.Response(body=whole, content_type="application/json", headers=_ignored(answer))

    async def _streamed(
        self, request: web.Request, answer: Response[Any], parts: AsyncGenerator[tuple[Choice, Part], None]
    ) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **_ignored(answer)}
        response = web.StreamResponse(headers=headers)

        async def send(chunk: dict[str, Any]) -> None:
            await response.write(answer.framed(chunk))

        await response.prepare(request)
        try:
            for chunk in answer.opening():
                await send(chunk)
            async for choice, part in parts:
                choice.parts.append(part)
                if part.prompt_logprobs:  # for a long prompt they take seconds to write
                    await response.write(await _aside(self._short, partial(answer.frames, choice, part)))
                    continue
                for chunk in answer.chunks(choice, part):
                    await send(chunk)
            for chunk in answer.closing():
                await send(chunk)
            await response.write(answer.end)
        except ConnectionError:
            pass  # the client went away; closing `parts` frees its slots
        except Exception as error:  # the status line is sent already: only an event can report it
            await send(answer.failure(self._failed(error).body()))
        return response

    @contextlib.contextmanager
    def _admitted(self, choices: int):  # type: ignore[no-untyped-def]
        if self.draining:
            raise InvalidRequest("the server is stopping; ask another one", status=503)
        if self._policy.failure is not None:
            raise InvalidRequest(f"the policy has failed: {self._policy.failure!r}; start the server again", status=503)
        slots = self._policy.limits.slots
        if choices > (most := slots + self.config.max_waiting):
            text = (
                f"{choices} completions are asked for; this server takes {most} at once: ask for a smaller n, in parts"
            )
            raise InvalidRequest(text, param="n")
        if self._choices + choices > most:
            waiting = max(0, self._choices - slots)
            # About half of the waiting choices have finished by then.
            wait = max(1, math.ceil(waiting / 2 * self._metrics.mean_seconds() / slots))
            text = f"{waiting} completions are waiting already, {choices} more are too many; try again later"
            raise InvalidRequest(text, status=429, headers={"Retry-After": str(wait)})
        self._choices += choices
        try:
            yield
        finally:
            self._choices -= choices

    async def _sampled(
        self, answer: Response[Any], samplings: Sequence[Sampling]
    ) -> AsyncGenerator[tuple[Choice, Part], None]:
        """Yield the parts of all choices, in order of arrival."""
        asked, started = answer.request, time.perf_counter()
        ready: asyncio.Queue[tuple[Choice, Part] | BaseException] = asyncio.Queue()

        async def run(choice: Choice, sampling: Sampling) -> None:
            tokens, first = 0, 0.0
            parts = sample(
                self._policy,
                self._tokenizer,
                choice.prompt,
                sampling,
                stops=asked.stops,
                turn_ends=self._turn_ends,
                skip_special=asked.skip_special_tokens,
                first_call=FirstCall(self._tokenizer.format) if asked.one_call else None,
            )
            try:
                async with contextlib.aclosing(parts):
                    async for part in parts:
                        tokens += len(part.token_ids)
                        now = time.perf_counter()
                        first = first or now
                        if part.finish is not None:
                            self._metrics.observe(len(choice.prompt), tokens, started, first, now)
                        ready.put_nowait((choice, part))
            except Exception as error:
                ready.put_nowait(error)

        tasks = [
            asyncio.create_task(run(choice, sampling))
            for choice, sampling in zip(answer.choices, samplings, strict=True)
        ]
        try:
            left = len(tasks)
            while left:
                item = await ready.get()
                if isinstance(item, BaseException):
                    raise item
                left -= item[1].finish is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _ignored(answer: Response[Any]) -> dict[str, str]:
    return {IGNORED_HEADER: ", ".join(answer.ignored)} if answer.ignored else {}


async def _aside(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Return the result of work on a request that runs beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(threads, work)
