"""The policy on external vLLM servers, whose weights follow the trainer's.

    async with VLLMPolicy(VLLMConfig(urls=("http://a:8000", "http://b:8000")), publisher, vocabulary=...) as policy:
        await policy.update(params, 1)
        completion = await policy.generate(token_ids, sampling, session="group3.1")

Tokens in, tokens out; text never crosses. An episode stays on its server, for the prefix cache there. A server that
fails is left out, and its requests go to another: a turn is a function of its token ids, so nothing is lost. It serves
again once it has the current weights. What was drawn by any other weights than the expected ones is thrown away and
counted. `server.py` is one server's HTTP, `sync.py` how its weights are replaced; see docs/vllm.md.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
from absl import logging

from astra_jax.models.model import Params
from astra_jax.rollout.policy import Completion, Sampling
from astra_jax.rollout.vllm.publishing import FolderPublisher, Publisher
from astra_jax.rollout.vllm.server import FAILURES, PolicyError, RolloutServer, why
from astra_jax.rollout.vllm.sync import Way, sync_way
from astra_jax.run.hosts import is_first
from sandbox.access import is_loopback, trusting
from sandbox.settings import Count, Seconds, SettingError, Settings

__all__ = ["PolicyError", "VLLMConfig", "VLLMPolicy", "VLLMStats"]


@dataclass(frozen=True)
class VLLMConfig(Settings):
    """How to reach the servers.

    Attributes:
        urls: one for each server, without a path.
        api_key: what they were started with (`--api-key`).
        sync_key: what they take new weights for (`ASTRA_SYNC_KEY_FILE` there), another than `api_key`; None where they
            listen on loopback alone and have none.
        ca_file: PEM file of whoever signed their certificates; by default the system's authorities.
        sync: how weights get there: `plugin` (ours, from Orbax checkpoints), or `reload` (vLLM's development endpoints,
            from Hugging Face folders), for servers on this machine without the plugin.
        requests_per_server: in flight at once; more wait here.
        request_seconds: for one completion.
        sync_seconds: for one server to take new weights over.
        patience_seconds: how long a request waits for any server to be there again.
        check_seconds: between two looks at a server that has failed.
        attempts: how often one request is sent before it is given up: it may be what the servers die of.
    """

    urls: tuple[str, ...]
    api_key: str | None = None
    sync_key: str | None = None
    ca_file: str | None = None
    sync: Way = "plugin"
    requests_per_server: Count = 256
    request_seconds: Seconds = 1800.0
    sync_seconds: Seconds = 1800.0
    patience_seconds: Seconds = 600.0
    check_seconds: Seconds = 2.0
    attempts: Count = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.urls:
            raise SettingError("VLLMConfig.urls is empty; give at least one server, such as http://localhost:8000")
        if len(set(self.urls)) != len(self.urls):
            raise SettingError(f"VLLMConfig.urls names a server twice: {', '.join(self.urls)}")
        trusting(self.ca_file)
        if self.sync_key is not None and self.sync_key == self.api_key:
            raise SettingError(
                "VLLMConfig.sync_key is the api_key too: whoever may sample could replace the weights; give the "
                "servers a key of its own for syncs"
            )
        if self.sync == "reload" and self.sync_key is not None:
            raise SettingError(
                "VLLMConfig.sync_key with sync='reload', whose endpoints ask for no key: leave it out, or use "
                "sync='plugin'"
            )
        if self.sync == "reload" and (
            far := [url for url in self.urls if not is_loopback(urlsplit(url).hostname or "")]
        ):
            raise SettingError(
                f"VLLMConfig.sync='reload' with {far[0]}: vLLM's development endpoints ask for no API key, so that "
                "whoever reaches them can replace the weights; bind that server to 127.0.0.1 and tunnel to it, or use "
                "sync='plugin'"
            )


@dataclass
class VLLMStats:
    """Counts since the policy was opened."""

    completions: int = 0
    stale: int = 0  # completions that other weights drew; thrown away
    failures: int = 0  # requests that a server did not answer; repeated elsewhere
    dropped: int = 0  # times that a server was left out
    rejoined: int = 0


class VLLMPolicy:
    """Samples from vLLM servers, and keeps their weights those of the last `update`. Implements
    `TrainablePolicy`.

    On several hosts each has one: all publish, the first one alone talks to the servers.

    Args:
        publisher: where `update` publishes; its folder must be where the servers can read it, under the same path. A
            `Publisher` for `sync="plugin"`, a `FolderPublisher` for `"reload"`.
        vocabulary: digest of the tokenizer's vocabulary, from `tokenizer.vocabulary_digest`.
        max_length: tokens of the longest sequence that will be asked for.

    Raises:
        ValueError: the publisher is of the other kind, or the model cannot be synced in this way.
    """

    def __init__(
        self, config: VLLMConfig, publisher: Publisher | FolderPublisher, *, vocabulary: str, max_length: int
    ) -> None:
        self.config = config
        self.stats = VLLMStats()
        self.version: int | None = None
        self._sync_way = sync_way(config.sync, publisher, vocabulary, config.sync_key)
        self._max_length = max_length
        self._servers = [RolloutServer(url, config.requests_per_server) for url in config.urls]
        self._places: dict[str, RolloutServer] = {}  # by session
        self._changed = asyncio.Event()
        self._syncing = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> VLLMPolicy:
        """Connect, and see that each server is one for this policy.

        Raises:
            PolicyError: one cannot be reached, cannot be synced as configured, or has another model, tokenizer or
                context length.
        """
        if not is_first():
            return self
        headers = {"Authorization": f"Bearer {self.config.api_key}"} if self.config.api_key else {}
        # A connection for each request. A server that is short of CPU closes idle ones under a request, and a POST is
        # not repeated by aiohttp: a server that is well would be left out. It costs far less than a draw.
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=trusting(self.config.ca_file) or True)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        try:
            for server in self._servers:
                server.session = self._session
                await self._check(server)
        except BaseException:
            await self.close()
            raise
        self._watch = asyncio.get_running_loop().create_task(self._look_after(), name="vllm servers")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def samples_with_given_arrays(self) -> bool:
        """It does not: `update` publishes them first."""
        return False

    async def close(self) -> None:
        """Close the connections; the servers go on."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # ---------------------------------------------------------------------------------------------------- sampling

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        """See `Policy.generate`.

        Raises:
            ValueError: the servers refuse the request: it does not fit their context, for instance.
            PolicyError: before the first `update`, no server was there for `patience_seconds`, or `attempts` failed.
        """
        if self.version is None:
            raise PolicyError("the servers have no weights yet; await update(params, version) first")
        reasons: list[str] = []
        while len(reasons) < self.config.attempts:
            server = await self._place(session)
            server.load += 1
            try:
                async with server.permits:
                    await server.settled.wait()  # what is drawn during a sync is of no version
                    if not server.serving:
                        continue
                    version, syncs = self.version, server.syncs
                    draw = await server.draw(token_ids, sampling, self.config.request_seconds)
                    versions = draw.versions or frozenset({await self._sync_way.version(server)})
            except aiohttp.ClientConnectorError as error:  # it never saw the request
                self._fail(server, error)
                continue
            except (*FAILURES, PolicyError) as error:
                self._fail(server, error)
                reasons.append(f"{server.url}: {why(error)}")
                continue
            finally:
                server.load -= 1
            synced = server.syncs != syncs
            if versions != {str(version)} or (synced and draw.versions is None):
                self.stats.stale += 1
                if not synced:
                    reasons.append(f"{server.url}: weights {', '.join(sorted(versions))} drew it, not {version}")
                    await self._drop_if_other(server, version)
                continue
            self.stats.completions += 1
            stopped = draw.token_ids[-1] in sampling.stop_ids
            return Completion(draw.token_ids, draw.logprobs, version, "stop" if stopped else "length")
        raise PolicyError(
            f"a request of {len(token_ids)} tokens was sent {len(reasons)} times and no completion of it counts: "
            + "; ".join(dict.fromkeys(reasons))
        )

    def release(self, session: str) -> None:
        """Forget where a session was."""
        self._places.pop(session, None)

    async def _place(self, session: str) -> RolloutServer:
        """The session's server, or the least loaded one; waits while there is none."""
        until = asyncio.get_running_loop().time() + self.config.patience_seconds
        while True:
            place = self._places.get(session)
            if place is not None and place.serving:
                return place
            if serving := [server for server in self._servers if server.serving]:
                place = min(serving, key=lambda server: server.load)
                if session:
                    self._places[session] = place
                return place
            left = until - asyncio.get_running_loop().time()
            if left <= 0:
                names = ", ".join(server.url for server in self._servers)
                raise PolicyError(f"no rollout server was there for {self.config.patience_seconds:g} s: {names}")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    # ------------------------------------------------------------------------------------------------------ weights

    async def update(self, params: Params, version: int) -> None:
        """Publish weights and have every server that is there take them over; those that do not are left out.

        Raises:
            PolicyError: not one server took them over; the message has every reason.
        """
        await self._sync_way.publish(params, version)
        if not is_first():
            return
        async with self._syncing:
            self.version = version
            reasons = await asyncio.gather(*(self._sync(server) for server in self._servers))
        if not any(server.serving for server in self._servers):
            each = "; ".join(f"{one.url}: {reason}" for one, reason in zip(self._servers, reasons, strict=True))
            raise PolicyError(f"no rollout server took version {version} over: {each}")

    async def _sync(self, server: RolloutServer) -> str:
        """Have a server take the current weights over; why it did not, or ""."""
        assert self.version is not None
        server.syncs += 1
        server.settled.clear()
        try:
            server.sync_seconds = await self._sync_way.sync(server, self.version, self.config.sync_seconds)
        except (*FAILURES, PolicyError, ValueError) as error:
            self._drop(server, why(error))
            return why(error)
        finally:
            server.settled.set()
        if not server.serving:
            server.serving = True
            self._changed.set()
        return ""

    def _fail(self, server: RolloutServer, error: BaseException) -> None:
        self.stats.failures += 1
        self._drop(server, why(error))

    def _drop(self, server: RolloutServer, reason: str) -> None:
        if server.serving:
            logging.warning("rollout server %s is left out: %s", server.url, reason)
            server.serving = False
            self.stats.dropped += 1
            self._changed.set()

    async def _look_after(self) -> None:
        """Bring servers that were left out back, with the current weights; a restarted one comes with others."""
        while True:
            await asyncio.sleep(self.config.check_seconds)
            for server in self._servers:
                if server.serving or self.version is None:
                    continue
                with contextlib.suppress(PolicyError):
                    await self._check(server)
                    async with self._syncing:
                        if not server.serving and not await self._sync(server):
                            logging.info("rollout server %s is back", server.url)
                            self.stats.rejoined += 1

    async def _drop_if_other(self, server: RolloutServer, version: int) -> None:
        """Leave out a server that says it has other weights, or nothing."""
        try:
            found = await self._sync_way.version(server)
        except PolicyError as error:
            self._drop(server, str(error))
            return
        if version == self.version and found != str(version):
            self._drop(server, f"it has weights {found}")

    async def _check(self, server: RolloutServer) -> None:
        """See that a server can be used, and how. Raises `PolicyError`."""
        await self._sync_way.check(server, self._max_length)
        await server.find_route()
