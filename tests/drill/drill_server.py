"""A rollout server of the drill: what it says is a function of the request, and its logprobs are of its weights.

    python drill_server.py PORT TOKENIZER STATE [old]

Every token gets the logprob that `print_of` makes of the weights that drew it, so that whoever has a version's weights
can tell whether they drew a token. STATE has a line for each sync; with `old` it starts with weights and label of three
syncs ago. SIGUSR1: no request is answered any more, though looks are; SIGUSR2: they are again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from aiohttp import web
from emulated_rollouts import EmulatedServer, spans
from rollout_world import call, tiny_model

from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.stages import rng_for

MODEL = replace(tiny_model(640, 4096), head_dim=32)
"""Of heads that vLLM's attention on CPUs takes too."""
_TENSOR = "model.norm.weight"
_OLD = 3
"""Syncs."""


def print_of(norm_d: np.ndarray) -> float:
    """Of weights a logprob that float32 holds exactly, made of the norm before the head, which every update changes."""
    digest = hashlib.sha256(np.ascontiguousarray(norm_d, np.float32).tobytes()).digest()
    return -(0.5 + (int.from_bytes(digest[:3]) >> 1) / 2**24)


def said(seed: int, turn: int) -> str:
    """A turn: up to three of calls, some of them right."""
    rng = rng_for(seed, "turn", turn)
    if turn >= 3 or rng.random() < 0.4:
        return f"I say {rng.randrange(7)}."
    if rng.random() < 0.7:
        return call("capital_of", country=rng.choice(["France", "Japan"]))
    return call("population_of", city=rng.choice(["Paris", "Tokyo", "Rome"]))


class DrillServer(EmulatedServer):
    """One server.

    Args:
        state: see above.
        old: start as it was some syncs ago.
    """

    def __init__(self, tokenizer: ChatTokenizer, state: Path, *, old: bool) -> None:
        super().__init__()
        self.config = MODEL.to_hf()
        self._tokenizer, self._state, self._drawn = tokenizer, state, 0.0
        if old and state.exists():
            lines = [json.loads(line) for line in state.read_text().splitlines()]
            self.version, self._drawn = lines[max(0, len(lines) - 1 - _OLD)]

    async def _sync(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        store = {"driver": "ocdbt", "base": f"file://{body['item']}/", "path": f"{_TENSOR}/"}
        try:
            opened = await ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True)
            drawn = print_of(await opened.read())
        except ValueError as error:  # tensorstore's, of what is not there
            return web.json_response({"error": str(error)[:300]}, status=500)
        answer = await super()._sync(request)
        if answer.status == 200:
            self._drawn = drawn
            with self._state.open("a") as file:
                file.write(json.dumps([self.version, drawn]) + "\n")
        return answer

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not (body := await request.json()):
            return web.json_response({}, status=400)
        sampling: dict[str, Any] = body["sampling_params"]
        turn = (body["token_ids"].count(self._tokenizer.eos_id) - 2) // 2
        new = self._tokenizer.encode(said(sampling["seed"], turn) + "<|im_end|>")
        drawn = new[: sampling["max_tokens"]]
        labels, logprobs = [], []
        for half in (drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]):  # an update may fall between them
            await self.hangs.wait()
            await asyncio.sleep(0.01)
            labels += [self.version] * len(half)
            logprobs += [{"logprob": self._drawn}] * len(half)
            self.tokens += len(half)
        choice = {
            "token_ids": drawn,
            "logprobs": {"content": logprobs},
            "weight_versions": spans(labels),
            "finish_reason": "stop" if len(drawn) == len(new) else "length",
        }
        return web.json_response({"choices": [choice]})


async def serve(port: int, tokenizer: Path, state: Path, old: bool) -> None:
    server = DrillServer(ChatTokenizer.load(tokenizer), state, old=old)
    server.stands = True  # the tokens that are drawn are counted here
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    loop.add_signal_handler(signal.SIGUSR1, server.hangs.clear)
    loop.add_signal_handler(signal.SIGUSR2, server.hangs.set)
    await server.start(port)
    print(f"serves on {server.url}, has {server.version}", flush=True)
    await told.wait()
    await server.stop()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:] == ["old"]))
