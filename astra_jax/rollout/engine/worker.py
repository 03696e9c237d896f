"""Device side of the engine: chooses the next compiled program and its rows.

It runs in a thread, one caller at a time. All shapes are static. The compiled programs are {prefill, decode, copy} x a
few row counts x a few key windows (`EngineConfig`). Each is compiled when first needed, or before, by a call of
`programs` in another thread. Requests for more than a temperature and a nucleus have separate programs, so they do not
change the sampling of others.

Constrained completions are sampled token by token: the host computes the allowed tokens while the device computes the
logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from astra_jax.attention.cache import Caches
from astra_jax.cpu.memory import give_back
from astra_jax.models.model import Model
from astra_jax.rollout.engine import device_steps
from astra_jax.rollout.engine.cache_memory import (
    check_cache_fits,
    committed,
    empty_cache,
    mesh_of,
    unroll_decode_layers,
)
from astra_jax.rollout.engine.sampling import LogitsProcessing
from astra_jax.rollout.engine.slots import CacheSlot, EngineConfig, EngineStats, Request, common_prefix, padded
from astra_jax.rollout.sampler import MAX_ALTERNATIVES, ConstraintError, Sampling

MAX_STOPS = 4
"""Most stop ids of a request (a static shape)."""

_MUCH = 1 << 30
"""Cache size in bytes above which freed memory is returned to the system, despite the page faults of later allocations.
"""
Placed = list[tuple[int, CacheSlot, Request]]
"""Rows of a program, with their slots and requests."""
Lost = list[tuple[CacheSlot, Exception]]
"""Slots whose request failed, each with its error."""
ParamsAndCache = tuple[Any, Any]
"""Parameters and cache."""


class ProgramCall(NamedTuple):
    """A compiled function with its arguments. `run` executes it; `compile` only compiles it, and accepts
    `jax.ShapeDtypeStruct` for arrays."""

    function: Any
    given: tuple[Any, ...]
    how: dict[str, Any]

    def run(self) -> Any:
        return self.function(*self.given, **self.how)

    def compile(self) -> Any:
        return self.function.lower(*self.given, **self.how).compile()


class Worker:
    """Parameters, cache and slots of one engine.

    Attributes:
        slots: filled by the engine.
        shapes: the configuration with every shape resolved to a number.
    """

    def __init__(self, params: Any, model: Model, config: EngineConfig, stats: EngineStats) -> None:
        """
        Raises:
            SettingError: the devices do not have enough memory for the cache.
        """
        self._mesh = mesh_of(params)
        device = next(iter(jax.tree.leaves(params)[0].devices()))
        self.shapes = config.on(device.platform, weights=sum(model.matmul_parameters()))
        self._weight_quantization = config.weight_quantization
        wanted = (model, self.shapes.slots, self.shapes.max_length, self._mesh, self._weight_quantization)
        check_cache_fits(*wanted)
        self.model, self.stats = model, stats
        self._is_unrolled = unroll_decode_layers(*wanted, device=device)
        self._compiled_for: dict[str, Any] = {"model": model, "platform": device.platform}
        self._params, self._prepared = params, False
        self.cache: Any = self._empty_cache()
        large = sum(x.nbytes for x in jax.tree.leaves(self.cache)) >= _MUCH
        self._give_back = give_back if large and device.platform == "cpu" else lambda: None
        self.slots = [CacheSlot(i, np.zeros(self.shapes.max_length, np.int32)) for i in range(self.shapes.slots)]

    def replace(self, params: Any) -> None:
        """Replace the weights, and discard all keys and values computed by the previous ones."""
        self._params, self._prepared = params, False
        self._forget()

    @property
    def asleep(self) -> bool:
        """True if there are no weights to sample with, until `replace`."""
        return self._params is None

    def let_go(self) -> None:
        """Free the cache and the weights on the devices now. Callers and the engine may form a reference cycle, which
        the garbage collector rarely looks for (2.1 GiB of cache stayed allocated so)."""
        self.cache, self._params = None, None
        self._forget()
        self._give_back()

    def _forget(self) -> None:
        """Discard all keys and values; sequences in progress are prefilled again."""
        for slot in self.slots:
            slot.cached, slot.donor = 0, None
            slot.length = slot.length if slot.request is not None else 0

    def step(self, active: list[CacheSlot]) -> Lost:
        """Prefill until more than half of these slots can decode, then decode one chunk."""
        self._prepare()
        while True:
            self._share()
            pending = [slot for slot in active if slot.prefilling and slot.donor is None]
            ready = [slot for slot in active if not slot.prefilling]
            if not pending or len(ready) > len(active) - len(ready):
                break
            self._prefill(pending)
        if pending:
            self._prefill(pending)
        lost: Lost = []
        for kind in (_plain, _shaped, _constrained):
            if some := [slot for slot in ready if (asked := slot.request) and not asked.ended and kind(asked.sampling)]:
                lost += self._decode_constrained(some) if kind is _constrained else self._decode(some)
        return lost

    def start_over(self, cause: Exception | None = None) -> None:
        """Discard all keys and values, which a failed step may have damaged, then sample one token as a test. Sequences
        in progress are prefilled again.

        Raises:
            Exception: sampling is no longer possible.
        """
        self.cache = None  # freed before there is another
        self.cache = self._empty_cache()
        self._forget()
        trial = Request(np.zeros(1, np.int32), Sampling(max_tokens=1, stop_ids=(), seed=0, temperature=0), "")
        try:
            self._decode([CacheSlot(0, np.zeros(self.shapes.max_length, np.int32), length=1, request=trial)])
        except Exception as error:
            raise error from cause

    def programs(self, *, options: bool) -> tuple[list[Callable[[], Any]], list[Callable[[], Any]]]:
        """Return calls that each compile one program: those of a short request alone, and all others.

        They run nothing, so they may be called in another thread beside `step`, which then finds the program. The
        others start with those of single requests, which a service needs first.

        Args:
            options: also compile the programs of shaped and constrained sampling, three times as many.
        """
        self._prepare()
        held = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (self._params, self.cache)
        )
        shapes, single, others = self.shapes, list[Callable[[], Any]](), list[Callable[[], Any]]()
        kinds = (0, MAX_ALTERNATIVES) if options else ()

        def prefill(rows: int, chunk: int, window: int, alternatives: int | None = None) -> None:
            given = self._prefill_arrays([], rows, chunk)
            self._prefill_program(held, *given, window, alternatives=alternatives).compile()

        def copy(window: int) -> None:
            self._copy_program(held, [], [], shapes.prefill_rows[-1], window).compile()

        def decode(count: int, window: int, **how: Any) -> None:
            self._decode_program(held, count, [], window, **how).compile()

        for window in shapes.windows:
            for count in shapes.decode_rows:
                calls = single if count == shapes.decode_rows[0] else others
                calls += [partial(decode, count, window, nucleus=nucleus) for nucleus in (False, True)]
                for kind in kinds:
                    others.append(partial(decode, count, window, needs_logits_processing=True, alternatives=kind))
                    others.append(partial(self._compile_constrained, held, count, window, kind))
            for rows in shapes.prefill_rows:
                calls = single if rows == shapes.prefill_rows[0] else others
                calls += [partial(prefill, rows, chunk, window) for chunk in shapes.prefill_chunks]
                others += [
                    partial(prefill, rows, chunk, window, kind) for chunk in shapes.prefill_chunks for kind in kinds
                ]
            others.append(partial(copy, window))
        first = [single.pop(0), single.pop(1)]  # decode without a nucleus, prefill of the smallest chunk
        return first, single + others

    def _compile_constrained(self, held: ParamsAndCache, count: int, window: int, alternatives: int) -> None:
        feed = self._feed_program(held, count, [], window).compile()
        logits = jax.ShapeDtypeStruct((count, self.model.vocab_size), np.float32, sharding=feed.output_shardings[1])
        allowed = self._no_tokens(count)
        self._pick_program(logits, self._rows(count, []), count, [], window, allowed, alternatives).compile()

    def _prepare(self) -> None:
        if self.cache is None:
            self._give_back()  # memory freed by an update
            self.cache = self._empty_cache()
        if not self._prepared:
            how: dict[str, Any] = {"unstacked": self._is_unrolled, "weight_quantization": self._weight_quantization}
            self._params, self._prepared = committed(self.model.for_decoding(self._params, **how)), True

    def _empty_cache(self) -> Caches:
        shapes = self.shapes
        return empty_cache(self.model, shapes.slots, shapes.max_length, self._mesh, stacked=not self._is_unrolled)

    # ------------------------------------------------------------------------------------------------ before decoding

    def _share(self) -> None:
        """Copy keys and values to slots whose donor has computed them."""
        takers, donors = [], []
        for slot in self.slots:
            donor = slot.donor
            if donor is None or donor.prefilling:
                continue
            slot.donor = None
            # The donor may have a new request meanwhile, so compare with its current contents.
            shared = min(common_prefix(donor.ids[: donor.cached], slot.ids[: slot.length]), slot.length - 1)
            if shared > slot.cached:
                self.stats.copied_tokens += shared - slot.cached
                slot.cached = shared
                if slot.request is not None and not slot.request.tokens:
                    slot.request.reused = shared
                takers.append(slot)
                donors.append(donor)
        rows = self.shapes.prefill_rows[-1]
        for start in range(0, len(takers), rows):
            some = takers[start : start + rows]
            window = self.shapes.window_for(max(slot.cached for slot in some))
            self._run_copy(donors[start : start + rows], some, rows, window)

    def _run_copy(self, donors: Sequence[CacheSlot], takers: Sequence[CacheSlot], rows: int, window: int) -> None:
        self.cache = self._copy_program((self._params, self.cache), donors, takers, rows, window).run()

    def _copy_program(
        self, held: ParamsAndCache, donors: Sequence[CacheSlot], takers: Sequence[CacheSlot], rows: int, window: int
    ) -> ProgramCall:
        target = padded([slot.index for slot in takers], rows, self.shapes.slots)
        source = padded([slot.index for slot in donors], rows, 0)
        return ProgramCall(device_steps.copy, (held[1], source, target), {"window": window})

    def _prefill(self, pending: list[CacheSlot]) -> None:
        started = time.perf_counter()
        scored = pending[0].scores is not None
        pending = [slot for slot in pending if (slot.scores is not None) == scored]
        rows, chunk = self.shapes.prefill_shape_for([slot.length - 1 - slot.cached for slot in pending])
        pending = pending[:rows]
        alternatives = _alternatives([slot.request.sampling for slot in pending if slot.request]) if scored else None
        window = self.shapes.window_for(max(slot.cached for slot in pending))
        self._run_prefill(pending, rows, chunk, window, alternatives=alternatives)
        self.stats.prefill_seconds += time.perf_counter() - started

    def _run_prefill(
        self, pending: Sequence[CacheSlot], rows: int, chunk: int, window: int, *, alternatives: int | None = None
    ) -> None:
        """Run one prefill. `alternatives` applies to rows whose prompts are scored; None if no prompt is scored."""
        given = self._prefill_arrays(pending, rows, chunk)
        program = self._prefill_program((self._params, self.cache), *given, window, alternatives=alternatives)
        if alternatives is None:
            self.cache = program.run()
        else:
            self.cache, *found = program.run()
            logps, others, positions = np.asarray(found[0]), _on_host(found[1]), given[-1]
            for row, slot in enumerate(pending):
                n = int((positions[row] >= 0).sum())
                if not np.isfinite(logps[row, :n]).all():
                    raise _not_finite()
                if slot.scores is not None:
                    slot.scores.put(int(positions[row, 0]), logps[row, :n], _of_row(others, row))
        jax.block_until_ready(self.cache)

    def _prefill_arrays(
        self, pending: Sequence[CacheSlot], rows: int, chunk: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return (index, tokens, following tokens, positions) of the next chunk, and count it as cached."""
        tokens, following = np.zeros((2, rows, chunk), np.int32)
        positions = np.full((rows, chunk), -1, np.int32)
        for row, slot in enumerate(pending):
            n = min(chunk, slot.length - 1 - slot.cached)
            tokens[row, :n] = slot.ids[slot.cached : slot.cached + n]
            following[row, :n] = slot.ids[slot.cached + 1 : slot.cached + n + 1]
            positions[row, :n] = np.arange(slot.cached, slot.cached + n)
            slot.cached += n
            self.stats.prefilled_tokens += n
        return padded([slot.index for slot in pending], rows, self.shapes.slots), tokens, following, positions

    def _prefill_program(
        self,
        held: ParamsAndCache,
        index: np.ndarray,
        tokens: np.ndarray,
        following: np.ndarray,
        positions: np.ndarray,
        window: int,
        *,
        alternatives: int | None,
    ) -> ProgramCall:
        given, how = (*held, index, tokens, positions), {"window": window, **self._compiled_for}
        if alternatives is None:
            return ProgramCall(device_steps.prefill, given, how)
        return ProgramCall(device_steps.prefill_scored, (*given, following), {**how, "alternatives": alternatives})

    # ------------------------------------------------------------------------------------------------------- decoding

    def _decode(self, ready: list[CacheSlot]) -> Lost:
        """Sample a chunk of tokens for each slot."""
        started = time.perf_counter()
        count, placed = self._placed(ready)
        samplings = [request.sampling for _, _, request in placed]
        program = self._decode_program(
            (self._params, self.cache),
            count,
            placed,
            self.shapes.window_for(max(slot.length for slot in ready) + self.shapes.decode_chunk - 1),
            needs_logits_processing=any(sampling.needs_logits_processing for sampling in samplings),
            alternatives=_alternatives(samplings),
        )
        self.cache, *drawn = program.run()
        tokens, logps, others = np.asarray(drawn[0]), np.asarray(drawn[1]), _on_host(drawn[2])
        lost: Lost = []
        for row, slot, request in placed:
            new = int((tokens[row] >= 0).sum())
            if not self._take(slot, request, tokens[row, :new], logps[row, :new], _of_row(others, row)):
                lost.append((slot, _not_finite()))
        self.stats.decode_seconds += time.perf_counter() - started
        return lost

    def _decode_program(
        self,
        held: ParamsAndCache,
        count: int,
        placed: Placed,
        window: int,
        *,
        nucleus: bool | None = None,
        needs_logits_processing: bool = False,
        alternatives: int = 0,
    ) -> ProgramCall:
        rows = self._rows(count, placed)
        nucleus = bool((rows.top_p_r < 1).any()) if nucleus is None else nucleus
        how = {
            "window": window,
            "steps": self.shapes.decode_chunk,
            "nucleus": nucleus and not needs_logits_processing,
            "whole": count == self.shapes.slots,
            "shaping": _shaping(count, placed, window) if needs_logits_processing else None,
            "alternatives": alternatives,
            **self._compiled_for,
        }
        return ProgramCall(device_steps.decode, (*held, rows), how)

    def _decode_constrained(self, ready: list[CacheSlot]) -> Lost:
        """Sample up to a chunk for each slot, token by token. Completions that end wait for the others."""
        started, lost = time.perf_counter(), Lost()
        for _ in range(self.shapes.decode_chunk):
            count, placed = self._placed(ready)
            if not placed:
                break
            window = self.shapes.window_for(max(slot.length for slot in ready))
            alternatives = _alternatives([request.sampling for _, _, request in placed])
            tokens, logps, others, unsaid = self._run_constrained(count, placed, window, alternatives=alternatives)
            lost += unsaid
            for row, slot, request in placed:
                if any(slot is one for one, _ in unsaid):
                    ready.remove(slot)
                elif not self._take(slot, request, tokens[row, None], logps[row, None], _of_row(others, row, None)):
                    lost.append((slot, _not_finite()))
                    ready.remove(slot)
                elif request.ended or slot.length >= self.shapes.max_length:
                    ready.remove(slot)
        self.stats.decode_seconds += time.perf_counter() - started
        return lost

    def _run_constrained(
        self, count: int, placed: Placed, window: int, *, alternatives: int
    ) -> tuple[np.ndarray, np.ndarray, Any, Lost]:
        feed = self._feed_program((self._params, self.cache), count, placed, window)
        self.cache, logits = feed.run()
        # Compute the allowed tokens while the device computes the logits.
        allowed = self._no_tokens(count)
        lost: Lost = []
        for row, slot, request in placed:
            try:
                assert request.sampling.constraint is not None
                request.sampling.constraint.allow(request.tokens, allowed[row])
                if not allowed[row].any():
                    raise ConstraintError("no token of the vocabulary may follow")
            except ConstraintError as error:
                lost.append((slot, error))
        pick = self._pick_program(logits, feed.given[-1], count, placed, window, allowed, alternatives)
        tokens, logps, others = pick.run()
        return np.asarray(tokens), np.asarray(logps), _on_host(others), lost

    def _no_tokens(self, count: int) -> np.ndarray:
        """Return the bits of allowed tokens of each row, of which none is set."""
        return np.zeros((count, -(-self.model.vocab_size // 32)), np.int32)

    def _feed_program(self, held: ParamsAndCache, count: int, placed: Placed, window: int) -> ProgramCall:
        how = {"window": window, "whole": count == self.shapes.slots, **self._compiled_for}
        return ProgramCall(device_steps.feed, (*held, self._rows(count, placed)), how)

    def _pick_program(
        self,
        logits: Any,
        rows: device_steps.DecodeRows,
        count: int,
        placed: Placed,
        window: int,
        allowed: np.ndarray,
        alternatives: int,
    ) -> ProgramCall:
        given = (logits, rows, _shaping(count, placed, window), allowed)
        return ProgramCall(device_steps.pick, given, {"alternatives": alternatives})

    def _placed(self, ready: list[CacheSlot]) -> tuple[int, Placed]:
        """Return the row count of the program, and the row of each slot."""
        count = self.shapes.decode_rows_for(len(ready)) if ready else 0
        whole = count == self.shapes.slots
        return count, [
            (slot.index if whole else row, slot, slot.request)
            for row, slot in enumerate(ready)
            if slot.request is not None
        ]

    def _rows(self, count: int, placed: Placed) -> device_steps.DecodeRows:
        rows = device_steps.DecodeRows(
            index_r=np.full(count, self.shapes.slots, np.int32),
            last_r=np.zeros(count, np.int32),
            positions_r=np.zeros(count, np.int32),
            budget_r=np.zeros(count, np.int32),
            seeds_r=np.zeros(count, np.uint32),
            temperature_r=np.ones(count, np.float32),
            top_p_r=np.ones(count, np.float32),
            stops_rk=np.full((count, MAX_STOPS), -1, np.int32),
        )
        for row, slot, request in placed:
            sampling = request.sampling
            rows.index_r[row] = slot.index
            rows.last_r[row] = slot.ids[slot.length - 1]
            rows.positions_r[row] = slot.length - 1
            rows.budget_r[row] = min(sampling.max_tokens - len(request.tokens), self.shapes.max_length - slot.length)
            rows.seeds_r[row] = sampling.seed % 2**32
            rows.temperature_r[row] = sampling.temperature
            rows.top_p_r[row] = sampling.top_p
            rows.stops_rk[row, : len(sampling.stop_ids)] = sampling.stop_ids
        return rows

    def _take(self, slot: CacheSlot, request: Request, new: np.ndarray, logps: np.ndarray, others: Any) -> bool:
        """Append sampled tokens to their sequence. Return False if their logits are not finite."""
        if not np.isfinite(logps).all():
            return False
        request.tokens += new.tolist()
        request.logprobs += logps.tolist()
        if count := request.sampling.alternatives:
            for ids, values in zip(*(one[: len(new), :count].tolist() for one in others), strict=True):
                likeliest = zip(ids, values, strict=True)
                request.alternatives.append(tuple(one for one in likeliest if one[1] > -np.inf))
        slot.ids[slot.length : slot.length + len(new)] = new
        slot.length += len(new)
        slot.cached = slot.length - 1
        self.stats.decoded_tokens += len(new)
        return True


def _plain(sampling: Sampling) -> bool:
    return not sampling.needs_logits_processing


def _shaped(sampling: Sampling) -> bool:
    return sampling.needs_logits_processing and sampling.constraint is None


def _constrained(sampling: Sampling) -> bool:
    return sampling.constraint is not None


def _shaping(count: int, placed: Placed, window: int) -> LogitsProcessing:
    shaping = LogitsProcessing(
        top_k_r=np.zeros(count, np.int32),
        min_p_r=np.zeros(count, np.float32),
        presence_r=np.zeros(count, np.float32),
        frequency_r=np.zeros(count, np.float32),
        repetition_r=np.ones(count, np.float32),
        ids_rt=np.full((count, window), -1, np.int32),
        drawn_r=np.zeros(count, np.int32),
    )
    for row, slot, request in placed:
        sampling = request.sampling
        shaping.top_k_r[row] = sampling.top_k
        shaping.min_p_r[row] = sampling.min_p
        shaping.presence_r[row] = sampling.presence_penalty
        shaping.frequency_r[row] = sampling.frequency_penalty
        shaping.repetition_r[row] = sampling.repetition_penalty
        shaping.ids_rt[row, : slot.length] = slot.ids[: slot.length]
        shaping.drawn_r[row] = len(request.prompt)
    return shaping


def _alternatives(samplings: Sequence[Sampling]) -> int:
    """Return the alternatives per program: none, or the maximum, to limit the number of programs."""
    return MAX_ALTERNATIVES if any(sampling.alternatives for sampling in samplings) else 0


def _on_host(others: Any) -> Any:
    return None if others is None else tuple(map(np.asarray, others))


def _of_row(others: Any, *at: Any) -> Any:
    return None if others is None else tuple(one[at] for one in others)


def _not_finite() -> ArithmeticError:
    return ArithmeticError("the model's logits are not finite; look at its weights and dtype")
