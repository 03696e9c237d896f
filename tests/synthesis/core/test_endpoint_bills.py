"""What is booked for requests that go wrong: never less than the endpoint has done for them."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from aiohttp import web
from flaky_endpoint import Flaky

from synthesis.core.endpoint import Endpoint, EndpointUnusable
from synthesis.core.endpoint_limits import BYTES_PER_TOKEN
from synthesis.core.endpoint_settings import OpenAITeacherConfig

NOTHING_WRITTEN = ("429", "500", "503")
LOST = ("stall", "drop", "cut_body")


class Billing(Flaky):
    """Notes for how many requests its model wrote an answer (60 tokens read, 40 written), delivered or not."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.written = 0

    @property
    def refused(self) -> int:
        return sum(self.went_wrong.get(kind, 0) for kind in NOTHING_WRITTEN)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        refused = self.refused
        try:
            return await super().answer(request)
        finally:
            self.written += self.refused == refused


def endpoint_at(url: str, **config: Any) -> Endpoint:
    options = {"model": "m", "backoff_seconds": 0.01, "timeout_seconds": 0.3, "failures": 50, **config}
    return Endpoint(OpenAITeacherConfig(url, **options))


def asked(number: int, limit: int = 50) -> bytes:
    messages = [{"role": "user", "content": f"Question {number}. " + "Please. " * 40}]
    return json.dumps({"model": "m", "messages": messages, "seed": number, "max_tokens": limit}).encode()


@pytest.mark.parametrize("kind", [*LOST, *NOTHING_WRITTEN, "cut_answer", "no_json"])
async def test_never_less_is_booked_than_was_spent(kind: str) -> None:
    """Under faults 5 to 9 % less was. Statuses that say that nothing was written cost nothing."""
    service = Billing(bad=0.3, kinds=(kind,), seed=3, stall=0.6)
    async with service as url:
        endpoint = endpoint_at(url)
        for number in range(12):
            await endpoint.complete("answer", asked(number), random.Random(0))
        await endpoint.close()
    spent, staged = endpoint.spent, endpoint.spent_by_stage[""]
    assert (spent.requests, spent.prompt_tokens, spent.completion_tokens) == (
        staged.requests,
        staged.prompt_tokens,
        staged.completion_tokens,
    )
    wrong = service.went_wrong[kind]
    lost = wrong if kind in LOST else 0
    answered = len(service.requests) - lost - service.refused
    assert wrong > 1 and spent.requests == answered + lost
    assert spent.completion_tokens == 40 * answered + 50 * lost >= 40 * service.written
    assert spent.prompt_tokens >= 60 * service.written


class Odd(Flaky):
    """Answers its first request with a body that is no completion and says what it cost; a gateway loses the second."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = await super().answer(request)
        usage = {"prompt_tokens": 60, "completion_tokens": 3}
        odd = [web.json_response({"choices": [], "usage": usage}), web.json_response({}, status=504)]
        return odd[len(self.requests) - 1] if len(self.requests) <= len(odd) else response


async def test_what_an_unusable_body_says_was_used_is_believed() -> None:
    async with Odd() as url:
        endpoint = endpoint_at(url, timeout_seconds=5.0)
        await endpoint.complete("answer", asked(0), random.Random(0))
        await endpoint.close()
    assert (endpoint.spent.requests, endpoint.spent.completion_tokens) == (3, 3 + 50 + 40)


async def test_a_request_that_is_stopped_is_booked_and_one_that_reached_nobody_is_not() -> None:
    slow = Flaky(latency=30.0)
    async with slow as url:
        endpoint = endpoint_at(url, timeout_seconds=60.0)
        asking = asyncio.create_task(endpoint.complete("answer", asked(0, limit=77), random.Random(0)))
        async with asyncio.timeout(30):
            while not slow.requests:
                await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await endpoint.close()
        assert (endpoint.spent.requests, endpoint.spent.completion_tokens) == (1, 77)
    nobody = endpoint_at("http://127.0.0.1:9/v1", max_unavailable_seconds=0.1)
    with pytest.raises(
        EndpointUnusable, match="does not answer as a model endpoint .*see that the endpoint is running"
    ):
        await nobody.complete("answer", asked(0), random.Random(0))
    await nobody.close()
    assert nobody.spent.requests == 0


async def test_prompts_of_which_a_byte_is_many_tokens_are_estimated_as_such() -> None:
    """What was answered tells how dense the prompts of an endpoint are; a quarter of a token a byte is for English."""
    service = Billing(bad=0.5, kinds=("drop",), seed=1)
    async with service as url:
        endpoint = endpoint_at(url)
        small = json.dumps({"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": 50}).encode()
        assert len(small) // BYTES_PER_TOKEN < 60  # what the service counts for it
        for _ in range(12):
            await endpoint.complete("answer", small, random.Random(0))
        await endpoint.close()
    first = next(iter(service.went_wrong.values()))
    assert first > 2 and endpoint.spent.prompt_tokens >= 60 * service.written
