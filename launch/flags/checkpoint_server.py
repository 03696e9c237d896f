"""A model of `--weights` behind OpenAI's API for as long as a program needs it: `astra serve` as a child process."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from astra_jax.base.terminal import say
from launch.flags import cli, engines, policies
from launch.flags.children import ChildServer, ChildServers, free_ports, make_key

T = TypeVar("T")
_READY_SECONDS = 3600.0
"""Time limit to read weights and compile the first programs."""
_PASSED_ON = (*policies.FLAGS, engines.SLOTS, engines.LENGTH, engines.WEIGHT_QUANTIZATION)
CHANGES_RESULTS = (policies.TOKENIZER, policies.DTYPE, engines.LENGTH, engines.WEIGHT_QUANTIZATION)
"""Flags on which answers depend, beside the weights."""


def is_given() -> bool:
    """Return whether --weights is given. Raises `UsageError`: it is not, but a flag that belongs to it is."""
    if policies.WEIGHTS.value is None:
        cli.refuse_unused(_PASSED_ON, "is for a model that is served here; give --weights too")
        return False
    return True


class CheckpointServer:
    """`astra serve` with the flags of this program, which `serving` starts and stops.

    Attributes:
        endpoint: its address and the model's name.
        weights: `{"folder", "step", "sha256"}` of the served weights; `step` is None for a Hugging Face folder.

    Raises:
        UsageError, WeightsError, TokenizerError: the weights or the tokenizer cannot be read.
    """

    def __init__(self, log: Path) -> None:
        from astra_jax.evaluation.suite import ModelEndpoint

        policies.read()  # errors before the server starts
        port, name = free_ports(1)[0], policies.name()
        key = make_key(log.with_suffix(".key"))
        self.endpoint = ModelEndpoint(f"http://127.0.0.1:{port}/v1", name, cli.token_in(str(key), "--workdir"))
        given = [f"--{flag.name}={flag.value}" for flag in _PASSED_ON if flag.value != flag.default]
        given = [one for one in given if not one.startswith("--step=")]
        if policies.step() is not None:
            given.append(f"--step={policies.step()}")  # a run that still trains may save a newer one
        given += [f"--port={port}", f"--served_model_name={name}", f"--key_file={key}"]
        command = [sys.executable, "-P", "-m", "launch.serve", *given]
        paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths)}  # -P: a `launch/` of the user's is not taken for ours
        self._server = ChildServer(f"the server of {name}", command, f"http://127.0.0.1:{port}/health", log, own)

    @functools.cached_property
    def weights(self) -> dict[str, Any]:
        """Read the identity of the weights. Raises as `policies.digest`."""
        return {"folder": str(policies.source()), "step": policies.step(), "sha256": policies.digest()}

    async def serving(self, work: Coroutine[Any, Any, T]) -> T:
        """Start the server, return the result of `work`, and stop the server.

        Raises:
            ServerFailed: the server ended before `work`, or did not get ready.
        """
        say(f"serving {self.endpoint.model} on {self.endpoint.url}; log in {self._server.log}", file=sys.stderr)
        started = time.monotonic()
        task: asyncio.Task[T] | None = None
        try:
            with ChildServers([self._server]) as children:
                await asyncio.to_thread(children.wait, _READY_SECONDS)
                say(f"{self.endpoint.model} is ready after {time.monotonic() - started:.0f} s", file=sys.stderr)
                task = asyncio.create_task(work)
                while not (await asyncio.wait([task], timeout=1.0))[0]:
                    self._server.check()
                return task.result()
        finally:
            if task is None:
                work.close()
            elif not task.done():
                task.cancel()
                await asyncio.wait([task])
