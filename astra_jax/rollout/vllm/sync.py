"""Methods of replacing a server's weights by the trainer's: our plugin, from files or the trainer's memory, or vLLM's
own reload of a folder.

Each method publishes a version, checks a server before use, reports a server's version, and has a server load one. A
sync that returns has put exactly those weights in service. A sync that raises leaves the server paused or on its old
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

from astra_jax.base.errors import InputError
from astra_jax.base.settings import SettingError
from astra_jax.head import token_logprobs
from astra_jax.models.families import differences, from_hf
from astra_jax.models.model import Model, Params
from astra_jax.rollout.vllm.direct import DirectPublisher
from astra_jax.rollout.vllm.publishing import FolderPublisher, Publisher
from astra_jax.rollout.vllm.server import FAILURES, NotServing, PolicyError, RolloutServer
from synthesis.core.stages import rng_for

Way = Literal["plugin", "direct", "reload"]
"""Method by which servers get new weights. Also listed in `--rollout_sync` (`launch/grpo.py`), which makes the
publisher too. Rules for each method are in `config.py` and `addresses.py`."""

PROBE_TOKENS = 64
PROBE_TOLERANCE = 0.5
"""Largest mean difference of logprobs between server and trainer over the probe, in nats. bfloat16 alone causes 0.04
(443 million parameters) to 0.14 (a tiny model with wide weights). Half the rotary base causes 1.1, other weights
several nats."""


PLUGIN = "astra_jax/rollout/vllm/plugin"
"""The distribution to install on servers, in our checkout (docs/vllm.md)."""
_REMEDY = f"install {PLUGIN} there, name it in VLLM_PLUGINS"
KEY_HEADER = "X-Astra-Sync-Key"
PROTOCOL = 4
"""Version of the plugin's endpoints: the trainer shows a sync key, and a server belongs to one run at a time. A server
loads checkpoints below one root, or weights that the trainer serves."""
_DESCRIBED = {
    "protocol",
    "wants_key",
    "version",
    "vocab_size",
    "vocabulary",
    "max_model_len",
    "logprobs_mode",
    "on_tpus",
    "config",
    "dtype",
    "sampling",
}
"""Fields in the plugin's description of its server."""


AnyPublisher = Publisher | DirectPublisher | FolderPublisher


class WeightSync(Protocol):
    """A method of replacing weights."""

    async def publish(self, params: Params, version: int) -> None:
        """Write a version where the servers read it; it is complete when this returns. `sync` may transfer the previous
        version meanwhile. Raises `PublishError` if it cannot be written."""
        ...

    async def check(self, server: RolloutServer, max_length: int, seconds: float) -> None:
        """Check a server. Raises `PolicyError` if it does not answer within `seconds`, or cannot be used with this
        method or policy."""
        ...

    async def version(self, server: RolloutServer, seconds: float = 60.0) -> str:
        """Return the label of the weights in service. Raises `PolicyError` if the server does not answer within
        `seconds`, or belongs to another run."""
        ...

    async def sync(self, server: RolloutServer, label: str, seconds: float) -> dict[str, float]:
        """Have a server load the published version and label it so.

        Returns:
            seconds of each stage.

        Raises:
            ValueError, PolicyError, FAILURES: it did not; the message says why.
        """
        ...


def sync_way(
    way: Way,
    publisher: AnyPublisher,
    vocabulary: str,
    key: str | None,
    run: str = "run",
    lease_seconds: float = 60.0,
) -> WeightSync:
    """Return the sync method of this name.

    Args:
        key: of syncs, for the plugin.
        run, lease_seconds: the run that reserves the servers, and for how long after a check, for the plugin.

    Raises:
        ValueError: the publisher's format is that of another method, or the model cannot be synced in this way.
    """
    reads = {"plugin": Publisher, "direct": DirectPublisher, "reload": FolderPublisher}[way]
    if not isinstance(publisher, reads):
        raise InputError(f"VLLMConfig.sync is {way!r}, which reads what a {reads.__name__} writes; give one")
    if isinstance(publisher, Publisher | DirectPublisher):
        return PluginSync(publisher, vocabulary, key, run, lease_seconds)
    return ReloadSync(publisher)


_SAME = (
    "start it from the folder that `astra grpo --write_serving_folder=DIR`, with the run's other flags, writes for "
    "servers, without --hf-overrides"
)


def _check_model(url: str, found: dict[str, Any], model: Model, published: str) -> None:
    """Check that a server's loaded `config.json` is that of the trained model.

    Raises:
        PolicyError: it is not; names the field and both values.
    """
    config = found["config"]
    try:
        served = from_hf(config)
    except (InputError, SettingError) as error:
        raise PolicyError(f"{url} serves a model that is not trained here: {error}; {_SAME}") from None
    if differs := differences(served, model, stretches=False):
        fields = "; its ".join(f"{name} is {theirs}, the policy's is {ours}" for name, theirs, ours in differs)
        raise PolicyError(f"{url} serves a model whose {fields}; {_SAME}")
    if found["vocab_size"] != model.vocab_size:
        raise PolicyError(
            f"{url} serves a model whose vocab_size is {found['vocab_size']}, the policy's is {model.vocab_size}; "
            f"{_SAME}"
        )
    if found["dtype"] not in (published, "float32"):  # float32 accepts all dtypes
        raise PolicyError(
            f"{url} serves in {found['dtype']}, the weights are published in {published}: start it with "
            f"--dtype={published}, or publish in its own with --publish_dtype"
        )


def _check_generation(url: str, found: Any, max_length: int) -> None:
    """Check that a server's default generation settings do not cut completions; each request sets all others itself.

    Raises:
        PolicyError: they do.
    """
    most = found.get("max_tokens")
    if most is not None and most < max_length:
        raise PolicyError(
            f"{url} has max_new_tokens {most} in its generation_config.json, episodes may have {max_length} tokens: "
            "start it with --generation-config=vllm"
        )


def _check_context(server: RolloutServer, found: int, wanted: int) -> None:
    if found < wanted:
        raise PolicyError(
            f"{server.url} has a context of {found} tokens, episodes may have {wanted}: "
            f"start it with --max-model-len={wanted}"
        )


class PluginSync:
    """Sync by our plugin: from an Orbax checkpoint or our memory, checked completely before any weight is replaced."""

    def __init__(
        self,
        publisher: Publisher | DirectPublisher,
        vocabulary: str,
        key: str | None,
        run: str,
        lease_seconds: float,
    ) -> None:
        self._lease = {"run": run, "seconds": lease_seconds}
        self._publisher, self._vocabulary = publisher, vocabulary
        self._headers = {} if key is None else {KEY_HEADER: key}
        self._items: dict[int, str] = {}  # by version

    async def publish(self, params: Params, version: int) -> None:
        """See `WeightSync.publish`."""

        def write() -> str:
            item = self._publisher.publish(params, version)
            self._publisher.wait()
            return str(item)

        self._items[version] = await asyncio.to_thread(write)

    async def check(self, server: RolloutServer, max_length: int, seconds: float) -> None:
        """See `WeightSync.check`."""
        found, model, url = await self._state(server, seconds), self._publisher.model, server.url
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
        server.seeded = not found["on_tpus"]
        _check_model(url, found, model, self._publisher.dtype)
        _check_generation(url, found["sampling"], max_length)
        if found["vocabulary"] not in (None, self._vocabulary):
            raise PolicyError(
                f"{url} serves another tokenizer (vocabulary {found['vocabulary']}, the policy's is "
                f"{self._vocabulary}); {_SAME}"
            )
        _check_context(server, found["max_model_len"], max_length)
        if "processed" not in found["logprobs_mode"]:
            raise PolicyError(
                f"{url} returns {found['logprobs_mode']}, not those of the distribution it samples from: start it with "
                "--logprobs-mode processed_logprobs"
            )
        await self.version(server, seconds)

    async def version(self, server: RolloutServer, seconds: float = 60.0) -> str:
        """See `WeightSync.version`; also renews the lease."""
        answer = await server.tell("/v1/policy/lease", _REMEDY, self._lease, self._headers, seconds=seconds)
        return str(answer.get("version"))

    async def sync(self, server: RolloutServer, label: str, seconds: float) -> dict[str, float]:
        """See `WeightSync.sync`; stages are named by the plugin."""
        body = {"item": self._items[_update_of(label)], "version": label}
        return _stages((await server.post("/v1/policy/sync", body, seconds, self._headers)).get("seconds"))

    async def _state(self, server: RolloutServer, seconds: float = 60.0) -> dict[str, Any]:
        return await server.get("/v1/policy/version", _REMEDY, self._headers, seconds=seconds)


class ReloadSync:
    """Sync by vLLM's development endpoints: each server reloads a Hugging Face folder.

    vLLM does not check a reload: a missing tensor keeps its old values. So after a reload the server must return the
    trainer's logprobs of a probe. Until then its weights are labelled unchecked, and its completions are discarded. The
    probe detects another model, but not another version of the same model. Tied models are therefore refused, since
    vLLM 0.32 does not update their head on CPUs.

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
        self._published: dict[int, tuple[str, np.ndarray]] = {}  # by version: folder, and the probe's logprobs

    async def publish(self, params: Params, version: int) -> None:
        """See `WeightSync.publish`."""

        def write() -> tuple[str, np.ndarray]:
            folder = self._publisher.publish(params, version)
            wanted = np.asarray(_logprobs(params, jnp.asarray([self._probe]), model=self._publisher.model)[0])
            self._publisher.wait()
            return str(folder), wanted

        self._published[version] = await asyncio.to_thread(write)

    async def check(self, server: RolloutServer, max_length: int, seconds: float) -> None:
        """See `WeightSync.check`; other differences are found by the probe after a sync."""
        await self.version(server, seconds)
        (model, *_) = (await server.get("/v1/models", "is it vLLM?", seconds=seconds))["data"]
        _check_context(server, model["max_model_len"], max_length)

    async def version(self, server: RolloutServer, seconds: float = 60.0) -> str:
        """See `WeightSync.version`."""
        remedy = "start it with VLLM_SERVER_DEV_MODE=1, or use sync='plugin'"
        return str((await server.get("/weight_info", remedy, seconds=seconds)).get("weight_version"))

    async def sync(self, server: RolloutServer, label: str, seconds: float) -> dict[str, float]:
        """See `WeightSync.sync`; stages are pause, load, resume, probe."""
        folder, wanted = self._published[_update_of(label)]
        stages: dict[str, float] = {}
        last = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal last
            now = time.perf_counter()
            stages[name], last = now - last, now

        pause = "/pause?mode=keep&clear_cache=true"
        await server.post(pause, None, seconds)
        lap("pause")
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await server.post("/collective_rpc", reload, seconds)
        await server.post("/update_weight_version", {"new_version": f"{label}, unchecked"}, seconds)
        lap("load")
        await server.post("/resume", None, seconds)
        lap("resume")
        try:
            await self._check_probe(server, wanted, seconds)
        except BaseException:
            with contextlib.suppress(*FAILURES):  # a dead server samples nothing
                await server.post(pause, None, seconds)
            raise
        await server.post("/update_weight_version", {"new_version": label}, seconds)
        lap("probe")
        return stages

    async def _check_probe(self, server: RolloutServer, wanted: np.ndarray, seconds: float) -> None:
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
        off = float(np.mean(np.abs(found - wanted)))
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


def _update_of(label: str) -> int:
    """Return the published version in a label `RUN:UPDATE`."""
    return int(label.rpartition(":")[2])


def _stages(found: Any) -> dict[str, float]:
    """Return a server's seconds per stage of a sync. Raises `NotServing` if they are invalid."""
    if not isinstance(found, dict) or not all(isinstance(one, (int, float)) for one in found.values()):
        raise NotServing(f"/v1/policy/sync answers {str(found)[:200]} for the seconds of its stages")
    return {str(name): float(one) for name, one in found.items()}


@partial(jax.jit, static_argnames="model")
def _logprobs(params: Params, ids_bt: jax.Array, *, model: Model) -> jax.Array:
    """Return [B, T - 1] logprobs of each token but the first."""
    positions_bt = jnp.broadcast_to(jnp.arange(ids_bt.shape[1]), ids_bt.shape)
    x_btd, _ = model.forward(params, ids_bt, positions_bt, jnp.ones_like(ids_bt), backend="blockwise")
    logps_bt, _ = token_logprobs(x_btd[:, :-1], model.head_kernel(params), ids_bt[:, 1:])
    return logps_bt
