"""How a server's weights are made the trainer's: our plugin, or vLLM's own reload of a folder.

Both publish a version as files, check a server before it is used, tell which version it has, and have it take one over.
A sync that returns has put exactly those weights in service; one that raises leaves the server paused or on its old
weights, never labelled with the new version.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from astra_jax.head import token_logprobs
from astra_jax.models.model import Model, Params
from astra_jax.rollout.vllm.publishing import FolderPublisher, Publisher
from astra_jax.rollout.vllm.server import FAILURES, NotServing, PolicyError, RolloutServer
from synthesis.core.refusals import InputError
from synthesis.core.stages import rng_for

Way = Literal["plugin", "reload"]

PROBE_TOKENS = 64
PROBE_TOLERANCE = 0.5
"""Nats, the mean over the probe of how far a server's logprobs may be from the trainer's. bfloat16 alone makes 0.04
(443 million parameters) to 0.14 (a tiny model with wide weights), half the rotary base 1.1, other weights several."""


PLUGIN = "astra_jax/rollout/vllm/plugin"
"""The distribution that servers have installed, in our checkout (docs/vllm.md)."""
KEY_HEADER = "X-Astra-Sync-Key"
PROTOCOL = 2
"""Of the plugin's endpoints: the trainer shows a key of its own, and a server takes checkpoints below one root."""
_DESCRIBED = {
    "protocol",
    "wants_key",
    "version",
    "vocab_size",
    "vocabulary",
    "max_model_len",
    "logprobs_mode",
    "on_tpus",
}
"""What the plugin says of its server."""


class WeightSync(Protocol):
    """One way."""

    async def publish(self, params: Params, version: int) -> None:
        """Write a version where the servers read it; it is whole when this returns, and what `sync` hands over."""
        ...

    async def check(self, server: RolloutServer, max_length: int) -> None:
        """Raises `PolicyError`: the server cannot be used in this way, or for this policy."""
        ...

    async def version(self, server: RolloutServer) -> str:
        """Of the weights in service. Raises `PolicyError`: it does not answer."""
        ...

    async def sync(self, server: RolloutServer, version: int, seconds: float) -> dict[str, float]:
        """Have a server take the published version over.

        Returns:
            seconds of each stage.

        Raises:
            ValueError, PolicyError, FAILURES: it did not; the message says why.
        """
        ...


def sync_way(way: Way, publisher: Publisher | FolderPublisher, vocabulary: str, key: str | None) -> WeightSync:
    """The way of a name.

    Args:
        key: of syncs, for the plugin.

    Raises:
        ValueError: the publisher writes what the other way reads, or the model cannot be synced in this way.
    """
    if way == "plugin" and isinstance(publisher, Publisher):
        return PluginSync(publisher, vocabulary, key)
    if way == "reload" and isinstance(publisher, FolderPublisher):
        return ReloadSync(publisher)
    wanted = {"plugin": Publisher, "reload": FolderPublisher}[way]
    raise InputError(f"VLLMConfig.sync is {way!r}, which reads what a {wanted.__name__} writes; give one")


def _check_context(server: RolloutServer, found: int, wanted: int) -> None:
    if found < wanted:
        raise PolicyError(
            f"{server.url} has a context of {found} tokens, episodes may have {wanted}: "
            f"start it with --max-model-len={wanted}"
        )


class PluginSync:
    """Through our plugin: from an Orbax checkpoint, checked whole before anything is touched."""

    def __init__(self, publisher: Publisher, vocabulary: str, key: str | None) -> None:
        self._publisher, self._vocabulary = publisher, vocabulary
        self._headers = {} if key is None else {KEY_HEADER: key}
        self._item = ""

    async def publish(self, params: Params, version: int) -> None:
        """See `WeightSync.publish`."""
        item = self._publisher.publish(params, version)
        await asyncio.to_thread(self._publisher.wait)
        self._item = str(item)

    async def check(self, server: RolloutServer, max_length: int) -> None:
        """See `WeightSync.check`."""
        found, model, url = await self._state(server), self._publisher.model, server.url
        if missing := sorted(_DESCRIBED - found.keys()):
            raise PolicyError(
                f"{url} does not say its {missing[0]}: its plugin is older than this trainer; install this "
                f"version's {PLUGIN} there, and start it again"
            )
        if found["protocol"] != PROTOCOL:
            raise PolicyError(
                f"{url} has a plugin of protocol {found['protocol']}, this trainer speaks {PROTOCOL}: install this "
                f"version's {PLUGIN} there, and start it again"
            )
        if found["wants_key"] and not self._headers:
            raise PolicyError(
                f"{url} takes weights from who shows the key of its ASTRA_SYNC_KEY_FILE: give VLLMConfig.sync_key, "
                "with --rollout_sync_key_file"
            )
        server.on_tpus = found["on_tpus"]
        if found["vocab_size"] != model.vocab_size:
            raise PolicyError(f"{url} serves a vocab_size of {found['vocab_size']}, the policy's is {model.vocab_size}")
        if found["vocabulary"] not in (None, self._vocabulary):
            raise PolicyError(f"{url} serves another tokenizer; start it from the folder with the policy's own")
        _check_context(server, found["max_model_len"], max_length)
        if "processed" not in found["logprobs_mode"]:
            raise PolicyError(
                f"{url} returns {found['logprobs_mode']}, not those of the distribution it samples from: start it with "
                "--logprobs-mode processed_logprobs"
            )

    async def version(self, server: RolloutServer) -> str:
        """See `WeightSync.version`."""
        return (await self._state(server))["version"]

    async def sync(self, server: RolloutServer, version: int, seconds: float) -> dict[str, float]:
        """See `WeightSync.sync`; stages as the plugin names them."""
        body = {"item": self._item, "version": str(version)}
        return (await server.post("/v1/policy/sync", body, seconds, self._headers))["seconds"]

    async def _state(self, server: RolloutServer) -> dict[str, Any]:
        remedy = f"install {PLUGIN} there, name it in VLLM_PLUGINS"
        return await server.get("/v1/policy/version", remedy, self._headers)


class ReloadSync:
    """Through vLLM's development endpoints: each server reloads a Hugging Face folder.

    vLLM does not check what it reloads: a tensor that is missing keeps its old values. So the first thing that a server
    is asked after a reload is the logprobs of a probe, which must be the trainer's; until then its weights are labelled
    as unchecked, and no completion counts that they drew. That tells a model that is clearly another from the policy's,
    not one version from the next; which is why tied models are refused, whose head vLLM 0.32 leaves behind on CPUs.

    Raises:
        ValueError: the model's embeddings are tied.
    """

    def __init__(self, publisher: FolderPublisher) -> None:
        if publisher.model.tie_embeddings:
            raise InputError(
                "VLLMConfig.sync='reload' of a model with tied embeddings: vLLM's reload leaves the head of such a "
                "model at its old weights on some backends (CPU, 0.32), which nothing tells from outside; use "
                f"sync='plugin' with {PLUGIN} on the servers"
            )
        self._publisher = publisher
        model = publisher.model
        draws = rng_for(0, "probe")
        self._probe = [draws.randrange(model.vocab_size) for _ in range(PROBE_TOKENS)]
        self._wanted = np.empty(0)
        self._folder = ""

    async def publish(self, params: Params, version: int) -> None:
        """See `WeightSync.publish`."""
        folder = self._publisher.publish(params, version)
        self._wanted = np.asarray(_logprobs(params, jnp.asarray([self._probe]), model=self._publisher.model)[0])
        await asyncio.to_thread(self._publisher.wait)
        self._folder = str(folder)

    async def check(self, server: RolloutServer, max_length: int) -> None:
        """See `WeightSync.check`; what is not said here is seen in the probe after a sync."""
        await self.version(server)
        (model, *_) = (await server.get("/v1/models", "is it vLLM?"))["data"]
        _check_context(server, model["max_model_len"], max_length)

    async def version(self, server: RolloutServer) -> str:
        """See `WeightSync.version`."""
        remedy = "start it with VLLM_SERVER_DEV_MODE=1, or use sync='plugin'"
        return (await server.get("/weight_info", remedy))["weight_version"]

    async def sync(self, server: RolloutServer, version: int, seconds: float) -> dict[str, float]:
        """See `WeightSync.sync`; stages are pause, load, resume, probe."""
        stages: dict[str, float] = {}
        last = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal last
            now = time.perf_counter()
            stages[name], last = now - last, now

        pause = "/pause?mode=keep&clear_cache=true"
        await server.post(pause, None, seconds)
        lap("pause")
        reload = {"method": "reload_weights", "kwargs": {"weights_path": self._folder}}
        await server.post("/collective_rpc", reload, seconds)
        await server.post("/update_weight_version", {"new_version": f"{version}, unchecked"}, seconds)
        lap("load")
        await server.post("/resume", None, seconds)
        lap("resume")
        try:
            await self._check_probe(server, seconds)
        except BaseException:
            with contextlib.suppress(*FAILURES):  # of a server that is gone, nobody draws
                await server.post(pause, None, seconds)
            raise
        await server.post("/update_weight_version", {"new_version": str(version)}, seconds)
        lap("probe")
        return stages

    async def _check_probe(self, server: RolloutServer, seconds: float) -> None:
        # One token is allowed, so that its logprob is 0 in the distribution that is sampled from.
        allowed = self._probe[0]
        body = {
            "prompt": self._probe,
            "prompt_logprobs": 0,
            "max_tokens": 1,
            "logprobs": 0,
            "temperature": 1.0,
            "allowed_token_ids": [allowed],
        }
        choice = (await server.post("/v1/completions", body, seconds))["choices"][0]
        prompt = zip(self._probe[1:], choice["prompt_logprobs"][1:], strict=True)
        found = np.asarray([one[str(token)]["logprob"] for token, one in prompt])
        off = float(np.mean(np.abs(found - self._wanted)))
        if not off <= PROBE_TOLERANCE:
            raise NotServing(
                f"its logprobs of the probe are off by {off:.2g} nats in the mean (up to {PROBE_TOLERANCE} is "
                "rounding): it serves another model than the policy's; start it from the policy's own folder"
            )
        if choice["logprobs"]["token_logprobs"][0] < -1e-3:
            raise NotServing(
                "its logprobs are not those of the distribution it samples from: start it with "
                "--logprobs-mode processed_logprobs"
            )


@partial(jax.jit, static_argnames="model")
def _logprobs(params: Params, ids_bt: jax.Array, *, model: Model) -> jax.Array:
    """[B, T - 1], of each token but the first."""
    positions_bt = jnp.broadcast_to(jnp.arange(ids_bt.shape[1]), ids_bt.shape)
    x_btd, _ = model.forward(params, ids_bt, positions_bt, jnp.ones_like(ids_bt), backend="blockwise")
    logps_bt, _ = token_logprobs(x_btd[:, :-1], model.head_kernel(params), ids_bt[:, 1:])
    return logps_bt
