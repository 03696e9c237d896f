"""Embedded inference engine: continuous batching in JAX, with the same interface as an external server.

A fixed number of *slots* share one KV cache. A slot belongs to a session (an episode) across its turns, so a turn
prefills only new tokens. If a prompt shares a prefix with another slot (as in a group), its keys and values are copied
instead of computed.

The loop is an asyncio task. It admits requests, runs one device step in a thread, and delivers tokens; sandbox calls
run meanwhile. `worker.py` implements the step, and `sampling.py` samples the tokens.

A request cannot end the loop. Arguments are checked in the caller's task (`stream`). If a device step fails, its
sequences are prefilled again and stepped one by one. Only a request that fails alone is aborted. If the engine can no
longer sample even a test token, all requests fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from absl import logging

from astra_jax.models.model import Model
from astra_jax.rollout.engine.slots import CacheSlot, EngineConfig, EngineStats, Request, common_prefix
from astra_jax.rollout.engine.worker import MAX_STOPS, Worker
from astra_jax.rollout.sampler import Completion, PolicyLimits, RequestFailed, Sampling, TokenChunk

MIN_SHARED = 16
"""Shortest prefix to copy; copying a row costs about as much as prefilling a few tokens."""


class EngineError(RuntimeError):
    """The engine's loop failed or is closed. The cause is chained."""


class Engine:
    """Continuous batching over one parameter tree. Implements `StreamingPolicy` and `TrainableSampler`."""

    def __init__(self, params: Any, model: Model, config: EngineConfig | None = None, *, version: int = 0) -> None:
        """
        Args:
            params: the model's parameters on the devices that will also have the cache. Not copied, except for the
                changes of `Model.for_decoding`.
            version: version of the weights until `load_weights`.

        Raises:
            SettingError: the devices do not have enough memory for the cache.
        """
        self.model, self.version, self.stats = model, version, EngineStats()
        self._worker = Worker(params, model, config or EngineConfig(), self.stats)
        self.config, self._slots = self._worker.shapes, self._worker.slots
        self._queue: list[Request] = []
        self._alone: list[CacheSlot] = []  # slots of a failed step, to be stepped one by one
        self._update: tuple[Any, int, asyncio.Future[None]] | None = None
        self._sleep: asyncio.Future[None] | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._compiling = asyncio.Lock()  # during the first programs, which a step would otherwise compile, too
        self._clock = 0

    # ---------------------------------------------------------------------------------------------- public interface

    def metrics(self) -> dict[str, float]:
        return {}

    @property
    def aliases_params(self) -> bool:
        """True: see `TrainableSampler`."""
        return True

    @property
    def limits(self) -> PolicyLimits:
        """See `PolicyLimits`."""
        return PolicyLimits(self.config.slots, self.config.max_length, MAX_STOPS, self.model.vocab_size)

    @property
    def running(self) -> int:
        """Number of requests that have a slot."""
        return sum(slot.request is not None for slot in self._slots)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return sum(not request.dropped for request in self._queue)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the loop, or None."""
        return self._failure

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        """See `Sampler.generate`. Cancelling the awaiting task frees the slot. Raises as `stream` does."""
        tokens, logprobs, versions = list[int](), list[float](), list[int]()
        async for drawn in self.stream(token_ids, sampling, session=session):
            tokens += drawn.token_ids
            logprobs += drawn.logprobs
            versions += drawn.versions
        assert drawn.finish is not None  # a stream that ends without one raises
        return Completion(tokens, logprobs, versions, drawn.finish)

    async def stream(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str = ""
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield the new tokens after each decode chunk. Closing the iterator (`contextlib.aclosing`) frees the slot.

        Raises:
            ValueError: an empty sequence, a sequence that leaves no room in `max_length`, ids outside the vocabulary,
                or too many stop ids.
            EngineError: the loop failed or is closed.
            RequestFailed: this request failed; others can still succeed.
        """
        if not 1 <= len(token_ids) < self.config.max_length:
            raise ValueError(
                f"a sequence of {len(token_ids)} tokens leaves no room to sample: "
                f"EngineConfig.max_length is {self.config.max_length}"
            )
        for wrong in (min(token_ids), max(token_ids)):
            if not 0 <= wrong < self.model.vocab_size:
                raise ValueError(f"the sequence has token id {wrong}; ids are from 0 to {self.model.vocab_size - 1}")
        prompt = np.asarray(token_ids, np.int32)
        if len(sampling.stop_ids) > MAX_STOPS:
            raise ValueError(f"{len(sampling.stop_ids)} stop ids, at most {MAX_STOPS} are supported")
        self._start()
        request = Request(prompt, sampling, session)
        self._queue.append(request)
        self._wake.set()
        shown, finish = 0, None
        try:
            while finish is None:
                await request.news.wait()
                request.news.clear()
                if request.failure is not None:
                    raise request.failure
                part = slice(shown, request.delivered)
                is_first, shown, finish = finish is None and not shown, part.stop, request.finish
                drawn = request.tokens[part], request.logprobs[part], request.versions[part], finish
                of_prompt: dict[str, Any] = {"cached": request.reused} if is_first else {}
                if is_first and (scores := request.scores) is not None:
                    of_prompt["prompt_logprobs"] = scores.logps.tolist()
                    of_prompt["prompt_alternatives"] = await asyncio.to_thread(scores.alternatives)
                yield TokenChunk(*drawn, request.alternatives[part], **of_prompt)
        finally:
            request.dropped = True
            self._wake.set()

    async def warm_up(self, *, options: bool = False) -> AsyncGenerator[tuple[int, int], None]:
        """Compile the programs for requests of any length, before requests need them. Yield (compiled, of) after each.

        Requests wait until the first item: the programs of a short request are compiled by then. All others are
        compiled beside running requests; a request that needs another program before has it compiled first.

        Args:
            options: also compile the programs for requests with more than a temperature and a nucleus
                (`Sampling.needs_logits_processing`); see `Worker.programs`.

        Raises:
            Exception: a program of the first item does not compile. Failures of later ones are logged.
        """
        async with self._compiling:
            first, later = await _whole(partial(self._worker.programs, options=options))
            for compile_program in first:
                await _whole(compile_program)
        count = len(first) + len(later)
        yield len(first), count
        for done, compile_program in enumerate(later, len(first) + 1):
            try:
                await _whole(compile_program)
            except Exception as error:  # any error of the compiler
                logging.warning("a program does not compile, and requests that need it fail: %r", error)
            yield done, count

    def release(self, session: str) -> None:
        """Free a session's slot. Its keys and values can be copied until the slot is reused."""
        for slot in self._slots:
            if session and slot.session == session:
                slot.session = ""

    async def publish_weights(self, params: Any, policy_version: int) -> None:
        """See `TrainableSampler.publish_weights`. Nothing is published."""

    async def load_weights(self, params: Any, policy_version: int) -> None:
        """Replace the weights between two device steps. Running requests continue with the new ones, and all keys and
        values are recomputed."""
        self._start()
        if self._update is not None:
            raise EngineError(f"an update to version {self._update[1]} is still under way; await it first")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._update = (params, policy_version, done)
        self._wake.set()
        await done

    async def sleep(self) -> None:
        """See `TrainableSampler.sleep`: frees cache and weights, unless a request is running. Later requests wait for
        `load_weights`."""
        self._start()
        self._sleep = self._sleep or asyncio.get_running_loop().create_future()
        self._wake.set()
        await self._sleep

    async def close(self) -> None:
        """Stop the loop and free weights and cache. Waiting requests fail with `EngineError`."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._failure = self._failure or EngineError("the engine is closed")
        self._update = None
        self._worker.let_go()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------------------ the loop

    def _start(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine has stopped: {self._failure}") from self._failure
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="engine")

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._drop_cancelled()
                self._alone = [slot for slot in self._alone if slot.request is not None]
                if self._sleep is not None:
                    await self._fall_asleep(self._sleep)
                if self._update is not None:  # after sleep, so that requests arriving now are served
                    self._apply_update()
                if not self._alone and not self._worker.asleep:
                    self._admit()
                if slots := self._alone[:1] or self._active():
                    await self._advance(slots)
                    self._deliver()
                elif self._worker.asleep or not self._queue:
                    self._wake.clear()
        except BaseException as error:
            self._fail(error)
            raise

    def _active(self) -> list[CacheSlot]:
        return [slot for slot in self._slots if slot.request is not None]

    async def _advance(self, slots: list[CacheSlot]) -> None:
        """Run one device step of these slots. A failure affects only the request that caused it."""
        self._alone = [slot for slot in self._alone if slot not in slots]
        try:
            async with self._compiling:
                lost = await _whole(self._worker.step, slots)
        except Exception as error:  # any device error may be caused by one request
            logging.warning("a step of %d requests failed (%r); they are tried one by one", len(slots), error)
            self.stats.failed_steps += 1
            await _whole(self._worker.start_over, error)
            if len(slots) > 1:
                self._alone = slots
            else:
                self._lose(slots[0], error)
        else:
            if any(isinstance(why, ArithmeticError) for _, why in lost):
                # These keys and values must not be reused: a NaN passes the mask (0 x NaN is NaN).
                await _whole(self._worker.start_over)
            for slot, why in lost:
                self._lose(slot, why)

    def _lose(self, slot: CacheSlot, error: Exception) -> None:
        """Abort one request."""
        request = slot.request
        assert request is not None
        n, drawn, seed = len(request.prompt), len(request.tokens), request.sampling.seed
        failure = RequestFailed(f"a request of {n} tokens (seed {seed}) failed after {drawn} new ones: {error!r:.300}")
        failure.__cause__ = error
        logging.error("%s; the engine continues without it", failure)
        self.stats.failed += 1
        request.failure = failure
        request.news.set()
        self._idle(slot)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        for request in [*self._queue, *(slot.request for slot in self._slots if slot.request is not None)]:
            request.failure = _stopped(error)
            request.news.set()
        for done in (self._sleep, None if self._update is None else self._update[2]):
            if done is not None and not done.done():
                done.set_exception(_stopped(error))

    def _apply_update(self) -> None:
        assert self._update is not None
        params, version, done = self._update
        self._worker.replace(params)
        self.version, self._update = version, None
        active = self._active()
        for i, slot in enumerate(active):  # compute what a group's episodes share once
            donor, shared = self._best_donor(slot, slot.ids[: slot.length], active[:i])
            slot.donor = donor if shared >= MIN_SHARED and slot.scores is None else None
        if not active and not any(slot.session for slot in self._slots):
            for slot in self._slots:  # all idle: makes slot choice independent of earlier sampling
                slot.used = 0
        if not done.done():
            done.set_result(None)

    async def _fall_asleep(self, done: asyncio.Future[None]) -> None:
        if not self._queue and not self._active():
            await _whole(self._worker.let_go)
        self._sleep = None
        if not done.done():
            done.set_result(None)

    def _drop_cancelled(self) -> None:
        self._queue = [request for request in self._queue if not request.dropped]
        for slot in self._slots:
            if slot.request is not None and slot.request.dropped:
                self._idle(slot)

    def _idle(self, slot: CacheSlot) -> None:
        slot.length, slot.request, slot.donor = slot.cached, None, None
        self._clock += 1
        slot.used = self._clock

    # ----------------------------------------------------------------------------------------------------- admission

    def _admit(self) -> None:
        """Assign slots to waiting requests in order of arrival. A busy slot delays only its own session."""
        waiting = []
        for request in self._queue:
            slot = self._slot_for(request)
            if slot is None:
                waiting.append(request)
                continue
            n = len(request.prompt)
            own, donor, shared = 0, None, 0
            if request.scores is None:  # otherwise every prompt token must be computed
                own = min(common_prefix(slot.ids[: slot.cached], request.prompt), n - 1)
                donor, shared = self._best_donor(slot, request.prompt, self._slots)
            slot.cached, slot.length, slot.ids[:n] = own, n, request.prompt
            slot.session, slot.request, request.reused = request.session, request, own
            slot.donor = donor if shared - own >= MIN_SHARED else None
            self.stats.requests += 1
            self.stats.prompt_tokens += n
        self._queue = waiting

    def _slot_for(self, request: Request) -> CacheSlot | None:
        if request.session:
            own = next((slot for slot in self._slots if slot.session == request.session), None)
            if own is not None:
                return own if own.request is None else None
        idle = [slot for slot in self._slots if slot.request is None]
        free = [slot for slot in idle if not slot.session]
        if free:
            return min(free, key=lambda slot: slot.used)
        if idle:  # all idle slots have a session: the least recently used one is evicted
            self.stats.evictions += 1
            return min(idle, key=lambda slot: slot.used)
        return None

    def _best_donor(
        self, taker: CacheSlot, prompt: np.ndarray, among: Sequence[CacheSlot]
    ) -> tuple[CacheSlot | None, int]:
        """Return the slot that has or will have the longest prefix of `prompt`, and that prefix's length.

        A slot that itself waits for a donor must be worth waiting for. The prompts of all groups start alike, and a
        group's episodes share far more with its first episode than with another group.
        """
        best, shared, worth = None, 0, 0
        for slot in among:
            held = slot.cached if slot.request is None else slot.length - 1
            common = min(common_prefix(slot.ids[:held], prompt), len(prompt) - 1)
            later = common if slot.donor is None else common - MIN_SHARED
            if later > worth and not _waits_for(slot, taker):
                best, shared, worth = slot, common, later
        return best, shared

    # ------------------------------------------------------------------------------------------------------ delivery

    def _deliver(self) -> None:
        for slot in self._slots:
            request = slot.request
            if request is None:
                continue
            scored = not request.sampling.max_tokens and not slot.prefilling
            if len(request.tokens) == request.delivered and not scored:
                continue
            request.versions += [self.version] * (len(request.tokens) - request.delivered)
            request.delivered = len(request.tokens)
            if request.ended or slot.length >= self.config.max_length:
                request.finish = "stop" if request.stopped else "length"
                self._idle(slot)
            request.news.set()


async def _whole(work: Callable[..., Any], *args: Any) -> Any:
    """Return the result of `work`, run in a thread. It is not cancelled halfway, since host and cache agree only at its
    end."""
    step = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        await asyncio.wait([step])
        raise


def _waits_for(slot: CacheSlot | None, other: CacheSlot) -> bool:
    """Return whether a slot is `other`, or waits for it through donors."""
    while slot is not None and slot is not other:
        slot = slot.donor
    return slot is not None


def _stopped(cause: BaseException) -> EngineError:
    error = EngineError(f"the engine has stopped: {cause!r}")
    error.__cause__ = cause
    return error
