"""Rollout servers that say what vLLM with our plugin says, and fail as a test tells them to."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from rollout_world import tiny_model

from astra_jax.rollout.vllm.config import VLLMConfig
from astra_jax.rollout.vllm.publishing import Publisher
from astra_jax.rollout.vllm.sampler import VLLMSampler

PLUGIN = Path(__file__).resolve().parents[2] / "astra_jax" / "rollout" / "vllm" / "plugin"
sys.path.insert(0, str(PLUGIN))  # a distribution of its own, which this environment does not have

from astra_vllm.lease import Held, Lease, run_of  # noqa: E402

RUN = "r1"


class EmulatedServer:
    """One server.

    Attributes:
        version: label of the weights in service.
        lease: of the run whose they are, as the plugin has it.
        syncs: labels of versions that it was told to take over.
        items: where their weights were said to be.
        bodies: of the requests for completions that reached it.
        answers: what it says instead of a completion, in turn: a body of text, a status, or a dict that is merged into
            the choice; then completions again.
        hangs: requests for completions wait until this is set.
        sync_hangs: a sync waits until this is set.
        metrics_hang: `/metrics` wait until this is set.
        sync_status: of the answer to a sync; 200 takes the weights over.
        silent: it answers no look.
        stands: it draws no tokens, though requests are in flight.
        config: of the model that it serves, as `config.json` has it.
        cache: tokens that its KV cache has room for; None: it does not say.
        most_asked: requests for completions that were there at once.
        tries: requests for one token, which is how it is seen whether it draws; they are in no other count.
    """

    def __init__(self) -> None:
        self.config = tiny_model(640, 4096).to_hf()
        self.version, self.lease = "none", Lease()
        self.syncs: list[str] = []
        self.items: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[Any] = []
        self.hangs, self.sync_hangs = asyncio.Event(), asyncio.Event()
        self.hangs.set()
        self.sync_hangs.set()
        self.metrics_hang = asyncio.Event()
        self.metrics_hang.set()
        self.metrics_asked = 0
        self.sync_status = 200
        self.silent = self.stands = False
        self.tries = self.asked = self.looks = self.tokens = self.here = self.most_asked = 0
        self.cache: int | None = None
        self.described: dict[str, Any] = {}
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/policy/version", self._version),
                web.post("/v1/policy/lease", self._lent),
                web.post("/v1/policy/sync", self._sync),
                web.post("/inference/v1/generate", self._generate),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    async def _lent(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        answer = await self._version(request)
        try:
            self.lease.take(body["run"], body["seconds"])
        except Held as error:
            return web.json_response({"error": str(error)}, status=409)
        return answer

    async def _version(self, _: web.Request) -> web.StreamResponse:
        self.looks += 1
        if self.silent:
            await asyncio.sleep(3600)
        described = {
            "version": self.version,
            "vocab_size": 640,
            "vocabulary": None,
            "max_model_len": 4096,
            "logprobs_mode": "processed_logprobs",
            "protocol": 4,
            "wants_key": False,
            "on_tpus": False,
            "config": self.config,
            "dtype": "float32",
            "sampling": {},
        }
        return web.json_response(described | self.described)

    async def _sync(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        version = body["version"]
        self.items.append(body["item"])
        self.syncs.append(version)
        try:
            with self.lease.syncing(run_of(version) or ""):
                await self.sync_hangs.wait()
        except Held as error:
            return web.json_response({"error": str(error)}, status=409)
        if self.sync_status != 200:
            return web.json_response({"error": "a full disk"}, status=self.sync_status)
        self.version = version
        return web.json_response({"seconds": {"read": 0.5}})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not (body := await request.json()):
            return web.json_response({}, status=400)
        if body["sampling_params"]["max_tokens"] == 1:
            self.tries += 1
            await self.hangs.wait()
            return web.json_response({"choices": [ONE_TOKEN]})
        self.asked += 1
        self.bodies.append(body)
        begun = self.version
        self.here += 1
        self.most_asked = max(self.most_asked, self.here)
        try:
            await self.hangs.wait()
        finally:
            self.here -= 1
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, int):
            return web.json_response({"error": "busy"}, status=answer)
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type="application/json")
        choice = {
            "token_ids": [5, 6],
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
            "weight_versions": spans([begun, self.version]),
            "finish_reason": "length",
        }
        return web.json_response({"choices": [choice | answer]})

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        self.metrics_asked += 1
        await self.metrics_hang.wait()
        self.tokens += not self.stands
        text = f'vllm:generation_tokens_total{{engine="0"}} {self.tokens}\n'
        if self.cache is not None:
            text += f'vllm:cache_config_info{{block_size="16",engine="0",kv_cache_size_tokens="{self.cache}"}} 1.0\n'
        return web.Response(text=text)


ONE_TOKEN = {
    "token_ids": [5],
    "logprobs": {"content": [{"logprob": -0.5}]},
    "weight_versions": [{"version": "any", "start": 0, "end": 1}],
    "finish_reason": "length",
}


def spans(labels: list[str]) -> list[dict[str, Any]]:
    """What vLLM says of tokens that weights of these labels drew."""
    starts = [at for at, label in enumerate(labels) if at == 0 or label != labels[at - 1]]
    ends = [*starts[1:], len(labels)]
    return [{"version": labels[at], "start": at, "end": end} for at, end in zip(starts, ends, strict=True)]


@contextlib.asynccontextmanager
async def emulated(count: int) -> AsyncIterator[list[EmulatedServer]]:
    """So many servers; each is stopped in the end."""
    servers = [EmulatedServer() for _ in range(count)]
    for server in servers:
        await server.start()
    try:
        yield servers
    finally:
        for server in servers:
            server.hangs.set()
            server.sync_hangs.set()
            server.metrics_hang.set()
            await server.stop()


async def until(holds: Callable[[], Any]) -> None:
    """Fails by the test's own time limit where it never does."""
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def policy_on(
    servers: list[EmulatedServer], model: Any, folder: Path, *, kind: type[VLLMSampler] = VLLMSampler, **config: Any
) -> VLLMSampler:
    """A policy whose looks are a moment apart."""
    quick = dict(check_seconds=0.05, answer_seconds=0.3, patience_seconds=20.0, grace_seconds=0.2)
    config.setdefault("run_id", RUN)
    urls = config.pop("urls", tuple(server.url for server in servers))
    options = VLLMConfig(urls, **{**quick, **config})
    publisher = Publisher(folder / "policy", model, dtype="float32")
    return kind(options, publisher, vocabulary="", max_length=2048)
