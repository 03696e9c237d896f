"""HTTP endpoints `POST /v1/policy/lease`, `POST /v1/policy/sync` and `GET /v1/policy/version`, behind the server's API
key.

A lease reserves the server for a run (`lease.py`), and a sync must be of that run. Both also require the sync key, and
a sync loads checkpoints only below one root (`access.py`). Pausing and resuming are parts of a sync without endpoints
of their own.

Weights are read from a checkpoint's files (`checkpoint.py`) or from the trainer's memory (`stream.py`). They are
checked completely before any weight is replaced: every name, shape and dtype against the served model, and every byte
by reading it into shared memory. The workers copy from that memory.

Only this copy pauses generation. Running requests are kept and resume afterwards with recomputed caches; each token is
labelled with the version that sampled it. A load that fails halfway leaves the server paused, so it never serves a
partial model. The next successful sync fixes it.
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
"""Size limit of a request."""


class PolicyEndpoint:
    """A `vllm.endpoint_plugins` entry point."""

    name = "astra_sync"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._lock = asyncio.Lock()
        self._lease = Lease()
        self._half_loaded = False
        self._memory: SharedMemory | None = None  # reused: allocating takes as long as reading into it
        self._handover: Handover
        self._access: SyncAccess
        self._dtype = ""
        self._description: dict[str, Any] = {}

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Initialise the endpoint; vLLM calls this once the engine exists.

        Raises:
            RuntimeError: anybody who may sample could replace the weights, or the workers cannot load new ones. The
                server does not start.
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
        """Add the routes; called by vLLM when it builds its own."""
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
        """Return the JSON object with these fields from an authorised request, or the error response."""
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
            self._lease.check(run)  # another run's sync may have finished before
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
        """Expected tensors of the model, constant for the server. Computing them takes seconds for a large model."""
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
    """Timer with the seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now


def _refused(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status_code=status)
