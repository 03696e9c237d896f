"""The HTTP side: `POST /v1/policy/lease`, `POST /v1/policy/sync` and `GET /v1/policy/version`, behind the server's own
API key.

A lease says whose weights the server has (`lease.py`), and a sync is of the run that holds it. Both have a key besides;
a sync takes checkpoints below one root alone (`access.py`); pausing and resuming are parts of it, and no endpoints of
their own.

Weights are read from a checkpoint's files (`checkpoint.py`) or out of the trainer's memory (`stream.py`), and checked
whole before anything is touched: every name, shape and dtype against the served model,
and every byte into shared memory, from which the workers then copy. Only that copy happens while generation is paused,
with requests kept: they go on afterwards, their caches computed anew, and their tokens labelled with the version that
drew them. A load that fails half-way leaves the server paused, never serving half a model; the next good sync mends it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from vllm import platforms

from astra_vllm.access import PROTOCOL, NotTaken, SyncAccess
from astra_vllm.checkpoint import PolicyCheckpoint
from astra_vllm.handover import Handover, WeightTransfer, WorkerExtension
from astra_vllm.layout import PolicyCheckpointError
from astra_vllm.lease import MOST_SECONDS, Held, Lease, is_run, run_of
from astra_vllm.memory import Place, SharedMemory
from astra_vllm.model import Shapes, described, expected_tensors, vocabulary_digest
from astra_vllm.stream import SCHEME, PolicyStream

_MOST_BYTES = 64 << 10
"""Of a request."""


class PolicyEndpoint:
    """A `vllm.endpoint_plugins` entry point."""

    name = "astra_sync"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._lock = asyncio.Lock()
        self._lease = Lease()
        self._half_loaded = False
        self._memory: SharedMemory | None = None  # kept: new memory costs as much time as reading into it
        self._handover: Handover
        self._access: SyncAccess
        self._dtype = ""
        self._description: dict[str, Any] = {}

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Called by vLLM once the engine is there.

        Raises:
            RuntimeError: whoever samples could replace the weights, or the server's workers cannot take any over; it
                does not start.
        """
        keys = [*(args.api_key or ()), *filter(None, [os.environ.get("VLLM_API_KEY")])]
        self._access = SyncAccess.of(os.environ, host=args.host, socket=args.uds, api_keys=keys)
        self._engine = engine_client
        on_tpus = platforms.current_platform.is_tpu()
        if on_tpus:
            self._handover = await WorkerExtension.of(engine_client, self._expected[0])
        else:
            self._handover = WeightTransfer(engine_client)
        config = engine_client.model_config
        vocabulary = None
        if not config.skip_tokenizer_init:
            from vllm.tokenizers import cached_tokenizer_from_config

            vocabulary = vocabulary_digest(cached_tokenizer_from_config(config).get_vocab())
        self._description = {
            "model_type": config.hf_config.model_type,
            "vocab_size": config.get_vocab_size(),
            "max_model_len": config.max_model_len,
            "vocabulary": vocabulary,
            "logprobs_mode": str(config.logprobs_mode),
            "on_tpus": on_tpus,
            "config": described(config.hf_config),
            "dtype": str(config.dtype).removeprefix("torch."),
            "sampling": config.get_diff_sampling_param(),
            "protocol": PROTOCOL,
            "wants_key": self._access.key is not None,
        }
        self._dtype = self._description["dtype"]

    def attach_router(self, app: FastAPI) -> None:
        """Called by vLLM when it builds its routes."""
        router = APIRouter()
        router.add_api_route("/v1/policy/lease", self._lent, methods=["POST"])
        router.add_api_route("/v1/policy/sync", self._sync, methods=["POST"])
        router.add_api_route("/v1/policy/version", self._version, methods=["GET"])
        app.include_router(router)

    async def _version(self, request: Request) -> JSONResponse:
        if refused := self._access.refusal(request.headers, syncs=False):
            return _refused(*refused)
        return JSONResponse(await self._state() | self._description)

    async def _state(self) -> dict[str, Any]:
        version = await self._engine.get_weight_version()
        return {"version": version, "half_loaded": self._half_loaded, "lease": self._lease.state}

    async def _lent(self, request: Request) -> JSONResponse:
        body = await self._body(request, {"run": "the run's id", "seconds": "from now on"})
        if isinstance(body, JSONResponse):
            return body
        run, seconds = body["run"], body["seconds"]
        if not is_run(run) or isinstance(seconds, bool) or not isinstance(seconds, int | float):
            return _refused(400, f"send a run's id (up to 64 letters, digits, - _ .) and seconds, not {run!r:.80}")
        if not 0 < seconds <= MOST_SECONDS:
            return _refused(400, f"send seconds of up to {MOST_SECONDS:g}, not {seconds}")
        try:
            self._lease.take(run, seconds)
        except Held as error:
            return _refused(409, str(error))
        return JSONResponse(await self._state())

    async def _body(self, request: Request, wanted: dict[str, str]) -> dict[str, Any] | JSONResponse:
        """The JSON object of these names that who may sync has sent; or what is answered instead."""
        if refused := self._access.refusal(request.headers, syncs=True):
            return _refused(*refused)
        sent = b""
        async for part in request.stream():
            sent += part
            if len(sent) > _MOST_BYTES:
                return _refused(413, f"the body is larger than {_MOST_BYTES} bytes")
        try:
            body = json.loads(sent)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or body.keys() != wanted.keys():
            return _refused(400, f"send {json.dumps(wanted)}")
        return body

    async def _sync(self, request: Request) -> JSONResponse:
        wanted = {
            "item": "the published params folder or URL, or the trainer's tcp://HOST:PORT",
            "version": "RUN:UPDATE",
        }
        body = await self._body(request, wanted)
        if isinstance(body, JSONResponse):
            return body
        item, version = body["item"], body["version"]
        if not isinstance(item, str) or (run := run_of(version)) is None:
            return _refused(400, f"send {json.dumps(wanted)}; a trainer that sends a number is older than this plugin")
        try:
            with self._lease.syncing(run):
                return await self._taken_over(item, version, run)
        except Held as error:
            return _refused(409, str(error))

    async def _taken_over(self, item: str, version: str, run: str) -> JSONResponse:
        async with self._lock:
            self._lease.check(run)  # another's sync may have been waited for
            clock = _Clock()
            try:
                source = await asyncio.to_thread(self._checked, item, version)
                clock.lap("check")
                if self._memory is None or self._memory.size != source.bytes:
                    self._memory = SharedMemory(source.bytes)
                await asyncio.to_thread(source.read, self._memory.view, self._memory.parts)
                places = [(span.name, span.shape, span.dtype, span.start) for span in source.spans]
                await asyncio.to_thread(self._handover.prepare, self._memory, places)
                clock.lap("read")
            except (NotTaken, PolicyCheckpointError) as error:
                return _refused(403 if isinstance(error, NotTaken) else 400, str(error))
            try:
                await self._load(self._memory, places, version, clock)
            except Exception as error:
                text = f"{item} could not be loaded ({error!r}); generation stays paused until a sync succeeds"
                return _refused(500, text)
            read = {"bytes": source.bytes, "read_bytes": source.read_bytes}
            return JSONResponse({"version": version, **read, "seconds": clock.seconds})

    def _checked(self, item: str, version: str) -> PolicyCheckpoint | PolicyStream:
        source: PolicyCheckpoint | PolicyStream
        if item.startswith(SCHEME):
            source = PolicyStream(item, version, self._access.key_of_streams(item))
        else:
            source = PolicyCheckpoint(item, self._access.below(item))
        source.compare(*self._expected, self._dtype)
        return source

    @functools.cached_property
    def _expected(self) -> tuple[Shapes, Shapes]:
        """Does not change while the server runs; for a large model it takes seconds."""
        return expected_tensors(self._engine.model_config.hf_config)

    async def _load(self, memory: SharedMemory, places: Sequence[Place], version: str, clock: _Clock) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=True)
        clock.lap("pause")
        self._half_loaded = True
        await self._handover.load(memory, places, version)
        self._half_loaded = False
        clock.lap("load")
        await self._engine.resume_generation()
        clock.lap("resume")


class _Clock:
    """Seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now


def _refused(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status_code=status)
