"""Policy on external vLLM servers, whose weights follow the trainer's.

    async with VLLMSampler(VLLMConfig(urls=("http://a:8000", "http://b:8000")), publisher, vocabulary=...) as policy:
        await policy.update(params, 1)
        completion = await policy.generate(token_ids, sampling, session="group3.1")

The interface is tokens in, tokens out, without text. An episode stays on its server for its prefix cache, and a request
waits until a server has room (`routing.py`). Servers can join and leave during a run (`addresses.py`).

A failed server is taken out of service, and its requests go to another. Nothing is lost, since a turn is a function of
its token ids. The server returns once it has the current weights. Tokens sampled by other weights are discarded and
counted. With `most_age`, a completion that spans an update is used, each token with its own version.

`fleet.py` decides which servers serve, `server.py` is one server's HTTP, `sync.py` replaces its weights; see
docs/vllm.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit

import aiohttp
import jax
from absl import logging

from astra_jax.base.access import trusting
from astra_jax.base.terminal import printable
from astra_jax.models.model import Params
from astra_jax.rollout.sampler import Completion, Sampling
from astra_jax.rollout.vllm.config import VLLMConfig
from astra_jax.rollout.vllm.fleet import Fleet
from astra_jax.rollout.vllm.publishing import PublishError
from astra_jax.rollout.vllm.server import FAILURES, PolicyError, RolloutServer, ServerCounts, why
from astra_jax.rollout.vllm.sync import AnyPublisher, sync_way
from astra_jax.run.hosts import is_first

__all__ = ["PolicyError", "VLLMConfig", "VLLMSampler"]


class VLLMSampler:
    """Samples from vLLM servers, and keeps their weights at the last `update`. Implements `TrainableSampler`.

    Each host creates one. All publish weights; only the first talks to the servers.

    Args:
        publisher: writes the weights of `update`. Its folder must be readable by the servers under the same path. A
            `Publisher` for `sync="plugin"`, a `DirectPublisher` for `"direct"`, a `FolderPublisher` for `"reload"`.
        vocabulary: digest of the tokenizer's vocabulary, from `tokenizer.vocabulary_digest`.
        max_length: tokens of the longest sequence that will be requested.

    Raises:
        ValueError: the publisher does not match `sync`, or the model cannot be synced in this way.
    """

    def __init__(self, config: VLLMConfig, publisher: AnyPublisher, *, vocabulary: str, max_length: int) -> None:
        self.config = config
        self._sync_way = sync_way(
            config.sync, publisher, vocabulary, config.sync_key, config.run_id, config.lease_seconds
        )
        self.fleet = Fleet(config, self._sync_way, max_length)
        self._session: aiohttp.ClientSession | None = None
        self._published: int | None = None

    async def __aenter__(self) -> VLLMSampler:
        """Connect, and check that each server fits this policy.

        Raises:
            PolicyError: too few are reachable, or a server cannot be synced as configured, or has another model,
                tokenizer or context length.
        """
        if not is_first():
            return self
        headers = {"Authorization": f"Bearer {self.config.api_key}"} if self.config.api_key else {}
        # One connection per request, which costs far less than sampling. A server short of CPU closes idle
        # connections during a request, and aiohttp does not repeat a POST, so a healthy server would be taken out of
        # service.
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=trusting(self.config.ca_file) or True)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        try:
            await self.fleet.open(self._session)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def aliases_params(self) -> bool:
        """False: `update` publishes the arrays first."""
        return False

    @property
    def stats(self) -> ServerCounts:
        """Counts summed over all servers since the policy was opened."""
        return self.fleet.counts

    def metrics(self) -> dict[str, float]:
        """Return `TrainableSampler.metrics`: state and counts of each server, requests placed with a cached
        prefix (`Router`), and requests waiting for a server."""
        router = self.fleet.router
        return {
            f"servers/{urlsplit(url).netloc}/{name}": value
            for url, row in self.fleet.rows().items()
            for name, value in row.items()
        } | {
            "routing/servers": float(len(self.fleet.serving)),
            "routing/waiting": float(router.waiting),
            "routing/placed": float(router.placed),
            "routing/stayed": float(router.stayed),
            "routing/moved": float(router.moved),
        }

    async def close(self) -> None:
        """Close the connections; the servers keep running."""
        await self.fleet.close()
        if self._session is not None:
            await self._session.close()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        """See `Sampler.generate`.

        Raises:
            ValueError: the servers refuse the request, for instance because it exceeds their context.
            PolicyError: before the first `update`; or no server was available for `patience_seconds`; or `attempts`
                failed.
        """
        if self.fleet.version is None:
            raise PolicyError("the servers have no weights yet; await update(params, version) first")
        reasons: list[str] = []
        failed: list[RolloutServer] = []
        while len(reasons) < self.config.attempts:
            if failed:  # give an overloaded or stopping server a moment
                await asyncio.sleep(min(self.config.check_seconds, 0.05 * 2 ** len(failed)))
            place = await self.fleet.place(session, len(token_ids), sampling.max_tokens, failed)
            server, drawn = place.server, None
            try:
                async with server.asking():
                    if not server.serving:
                        continue
                    version, label, syncs = self.fleet.version, self.fleet.label, server.syncs
                    draw = await server.draw(token_ids, sampling, self.config.request_seconds)
                    drawn = len(draw.token_ids)
                    labels = draw.labels or [await self._sync_way.version(server)] * drawn
            except (*FAILURES, PolicyError) as error:
                server.counts.failures += 1
                # A refused connection never delivered the request.
                if not isinstance(error, aiohttp.ClientConnectorError):
                    reasons.append(f"{server.url}: {why(error)}")
                failed.append(server)
                await self.fleet.suspect(server, why(error))
                continue
            finally:
                place.leave(drawn)
            synced, drew = server.syncs != syncs, set(labels)
            spans = self.config.most_age > 0 and draw.labels is not None and all(map(self.fleet.still_counts, drew))
            if not (synced and spans) and (drew != {label} or (synced and draw.labels is None)):
                server.counts.stale += 1
                if not synced:
                    reasons.append(f"{server.url}: weights {', '.join(sorted(drew))} drew it, not {label}")
                    await self.fleet.suspect(server, reasons[-1])
                continue
            server.counts.completions += 1
            server.counts.tokens += len(draw.token_ids)
            server.counts.spanning += len(drew) > 1
            stopped = draw.token_ids[-1] in sampling.stop_ids
            versions = [self.fleet.versions.get(one, version) for one in labels]
            return Completion(draw.token_ids, draw.logprobs, versions, "stop" if stopped else "length")
        raise PolicyError(
            f"a request of {len(token_ids)} tokens was sent {len(reasons)} times and no completion of it counts: "
            + "; ".join(dict.fromkeys(reasons))
        )

    def release(self, session: str) -> None:
        """Forget the server of a session."""
        self.fleet.release(session)

    async def prepare(self, params: Params, version: int) -> None:
        """Publish the weights, see `TrainableSampler.prepare`. Failed writes are retried, since a full disk may get
        room.

        Raises:
            PublishError: they could not be written within `patience_seconds`; on several hosts, at once.
        """
        self._published = None
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self.config.patience_seconds, self.config.check_seconds
        while True:
            try:
                await self._sync_way.publish(params, version)
            except PublishError as error:
                left = until - loop.time()
                if left <= 0 or jax.process_count() > 1:  # several hosts would have to try again together
                    raise
                logging.warning("%s; it is tried again for %.0f s", printable(str(error)), left)
            else:
                self._published = version
                return
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, 60.0)

    async def update(self, params: Params, version: int) -> None:
        """Publish weights and load them on every available server. Servers that fail are taken out of service.

        Raises:
            PublishError: as in `prepare`, which is called if it was not yet.
            PolicyError: no server loaded them within `patience_seconds`; the message lists every reason.
        """
        if self._published != version:
            await self.prepare(params, version)
        self._published = None
        if is_first():
            await self.fleet.update(version)

    async def sleep(self) -> None:
        """See `TrainableSampler.sleep`. Nothing is freed: the servers have their own memory."""
