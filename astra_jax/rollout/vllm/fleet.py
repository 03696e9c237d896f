"""Health checks and membership of the rollout servers.

Each server is checked every `check_seconds`, by its own task, so no server waits for another. A server is taken out of
service in any of three cases:

- it does not answer several checks in a row;
- it has other weights than the current ones;
- it samples no tokens for `stall_seconds` with requests in flight.

Its requests in flight are aborted and sampled on another server. It rejoins by itself: at once if it still has the
current weights, otherwise after a sync. A stalled server must first sample a token, since it may answer checks while
stalled.

Server addresses are looked up at the same interval (`addresses.py`). A new server joins like a returning one. A server
that is no longer listed gets no new requests; those in flight finish, or move elsewhere if it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

import aiohttp
from absl import logging

from astra_jax.base.errors import UserError
from astra_jax.base.terminal import printable
from astra_jax.rollout.vllm.addresses import Addresses
from astra_jax.rollout.vllm.config import VLLMConfig
from astra_jax.rollout.vllm.routing import Placement, Router
from astra_jax.rollout.vllm.server import FAILURES, PolicyError, RolloutServer, ServerCounts, Unreachable, why
from astra_jax.rollout.vllm.sync import WeightSync

LOOKS = 3
"""Number of unanswered checks in a row after which a server is taken out of service."""
_OTHER_FORM = (KeyError, IndexError, TypeError, AttributeError, ValueError)
"""Errors raised when an answer is JSON of an unexpected form."""


@dataclass(frozen=True)
class Place:
    """Slot of a request on a server, held until `leave`."""

    server: RolloutServer
    _router: Router
    _placement: Placement

    def leave(self, drawn: int | None) -> None:
        """Release the slot. `drawn` is the number of tokens in the completion, or None if there was none."""
        self._router.leave(self._placement, drawn)


class Fleet:
    """The servers of a policy.

    Args:
        way: method of replacing their weights.
        max_length: tokens of the longest sequence that will be asked for.

    Attributes:
        version: the weight version that the servers should have; None before the first.
        versions: by label, every version since the fleet was opened.
        servers: empty before `open`.
        router: assigns requests to servers.
    """

    def __init__(self, config: VLLMConfig, way: WeightSync, max_length: int) -> None:
        self.config = config
        self.version: int | None = None
        self.versions: dict[str, int] = {}
        self.servers: list[RolloutServer] = []
        self.router = Router(capacity=config.cache_tokens, requests=config.requests_per_server, slack=config.slack)
        self._addresses = Addresses(config.urls, config.sync)
        self._way, self._max_length = way, max_length
        self._changed = asyncio.Event()
        self._lookouts: dict[RolloutServer, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._gone = ServerCounts()  # counts of servers that left
        self._said = ""

    @property
    def label(self) -> str:
        """Name of `version` on the servers; unique to this run."""
        return f"{self.config.run_id}:{self.version}"

    def still_counts(self, label: str) -> bool:
        """Return whether tokens sampled by weights of this label are recent enough to train on."""
        version = self.versions.get(label)
        return (
            version is not None
            and self.version is not None
            and self.version - version <= self.config.max_off_policy_steps
        )

    @property
    def serving(self) -> list[RolloutServer]:
        """Servers that accept requests."""
        return [server for server in self.servers if server.serving]

    @property
    def _ready(self) -> list[RolloutServer]:
        return [server for server in self._staying if server.serving and server.sync is None]

    @property
    def _staying(self) -> list[RolloutServer]:
        return [server for server in self.servers if not server.leaving]

    @property
    def counts(self) -> ServerCounts:
        """Counts summed over all servers since the fleet was opened."""
        every = [self._gone, *(server.counts for server in self.servers)]
        return ServerCounts(
            **{one.name: sum(getattr(counts, one.name) for counts in every) for one in fields(ServerCounts)}
        )

    async def open(self, session: aiohttp.ClientSession) -> None:
        """Check that each server fits this policy, and start the periodic checks.

        Raises:
            PolicyError: fewer than `min_servers` answer, or one cannot be synced as configured, or has another model,
                tokenizer or context length; or a name that is looked up has no address.
            InputError: a file of addresses names none.
        """
        self._session = session
        for url, certified in (await self._addresses.read()).items():
            self._add(url, certified)
        found = await asyncio.gather(*(self._check(server) for server in self.servers), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, Unreachable):
                raise error
        away = [error for error in found if isinstance(error, Unreachable)]
        there = len(self.servers) - len(away)
        if there < min(self.config.min_servers, len(self.servers)):
            raise Unreachable(
                f"{there} of {len(self.servers)} rollout servers are there, min_servers is {self.config.min_servers}: "
                + "; ".join(map(str, away))
            )
        for server, error in zip(self.servers, found, strict=True):
            if error is not None:
                self._say(server, f"is waited for: {error}")
        for server in self.servers:
            self._begin_looking(server)
        if self._addresses.change:
            self._following = asyncio.create_task(self._follow(), name="look-out for servers")

    def _add(self, url: str, certified: str | None) -> RolloutServer:
        server = RolloutServer(url, certified)
        server.session = self._session
        self.servers.append(server)
        return server

    def _begin_looking(self, server: RolloutServer) -> None:
        self._lookouts[server] = asyncio.create_task(self._look_after(server), name=f"look-out for {server.url}")

    async def close(self) -> None:
        """Stop the checks; the servers keep running."""
        tasks = [*self._lookouts.values(), *(server.sync for server in self.servers if server.sync is not None)]
        tasks += [] if self._following is None else [self._following]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---------------------------------------------------------------------------------------- joining and leaving

    async def _follow(self) -> None:
        """Look up the server addresses forever."""
        while True:
            await asyncio.sleep(self.config.check_seconds)
            try:
                found = await self._addresses.read()
            except Exception as error:  # any error of a name server: continue with the current servers
                said = str(error) if isinstance(error, UserError) else why(error)
                if said != self._said:
                    logging.warning("%s; the servers stay those that they are", printable(said))
                self._said = said
                continue
            self._said = ""
            self._now(found)

    def _now(self, named: Mapping[str, str | None]) -> None:
        """Replace the set of servers by this one."""
        for server in self.servers:
            if server.leaving and server.url in named:
                server.leaving = False
                logging.info("rollout server %s is to stay", server.url)
                if server.serving:
                    self.router.open(server.url, server.cache)
            elif not server.leaving and server.url not in named:
                server.leaving = True
                self.router.close(server.url)
                logging.warning("rollout server %s gets no more requests: its address is no longer listed", server.url)
        for url in named.keys() - {server.url for server in self.servers}:
            logging.info("rollout server %s is new", url)
            self._begin_looking(self._add(url, named[url]))
        self._changed.set()

    def _gone_for_good(self, server: RolloutServer) -> None:
        """Remove a leaving server that has nothing in flight."""
        self.servers.remove(server)
        del self._lookouts[server]
        self.router.forget(server.url)
        for one in fields(ServerCounts):
            setattr(self._gone, one.name, getattr(self._gone, one.name) + getattr(server.counts, one.name))
        logging.info("rollout server %s is left", server.url)

    # ------------------------------------------------------------------------------------------------------ places

    async def place(self, session: str, prompt: int, most: int, avoid: Collection[RolloutServer] = ()) -> Place:
        """Return a slot for a request on a server with room, see `Router`; waits until there is one.

        Args:
            prompt, most: tokens in the request's sequence, and the most that it may sample.
            avoid: servers that just failed; used only if there is no other.

        Raises:
            PolicyError: no server was available for `patience_seconds`.
        """
        clock, patience = asyncio.get_running_loop().time, self.config.patience_seconds
        placed, since = asyncio.Event(), clock()  # time since which no server is available
        one = self.router.ask(session, prompt, most, placed.set, [server.url for server in avoid])
        try:
            while not placed.is_set():
                if any(server.serving for server in self._staying):
                    since = clock()
                if (left := since + patience - clock()) <= 0:
                    raise Unreachable(f"no rollout server was there for {patience:g} s: {self._why()}")
                with contextlib.suppress(TimeoutError):  # a tenth, to notice a server before patience runs out
                    await asyncio.wait_for(placed.wait(), min(left, patience / 10))
        except BaseException:
            self.router.leave(one)
            raise
        (server,) = (server for server in self.servers if server.url == one.server)
        return Place(server, self.router, one)

    def release(self, session: str) -> None:
        """Forget the server of a session."""
        self.router.release(session)

    async def _change(self, seconds: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    # ------------------------------------------------------------------------------------------------------ weights

    async def update(self, version: int) -> None:
        """Have the servers load a published version.

        Returns when all have loaded it, or when `min_servers` have and `grace_seconds` have passed. Slower servers
        serve when they are done, or sync again if there is a newer version by then. If no server loads it, they retry
        for `patience_seconds`. The first version is not retried, since it then fails because of how the servers were
        started.

        Raises:
            PolicyError: no server loaded it in that time; the message lists every reason.
        """
        loop = asyncio.get_running_loop()
        first, self.version = self.version is None, version
        self.versions[self.label] = version
        until = loop.time() + self.config.patience_seconds
        while True:
            pending = {self._begin_sync(one) for one in self._staying if one.checked and one.sync is None}
            wanted = min(self.config.min_servers, len(self._staying))
            end: float | None = None
            while pending := {task for task in pending if not task.done()}:
                if len(self._ready) >= wanted:
                    end = end or loop.time() + self.config.grace_seconds
                left = None if end is None else max(0.0, end - loop.time())
                if left == 0.0:
                    break
                await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for server in self._staying:
                if server.sync is not None and (server.serving or not server.reason):  # the reason it is out says more
                    self.leave_out(server, f"it has not taken version {version} over yet; the others go on")
            if self._ready:
                return
            if first or loop.time() >= until:
                kind = PolicyError if first else Unreachable
                raise kind(f"no rollout server took version {version} over: {self._why()}")
            await self._change(self.config.check_seconds)

    def _begin_sync(self, server: RolloutServer) -> asyncio.Task[str]:
        server.settled.clear()
        server.sync = asyncio.create_task(self._sync(server), name=f"sync of {server.url}")
        return server.sync

    async def _sync(self, server: RolloutServer) -> str:
        """Have a server load the current weights. Return the reason for a failure, or ""."""
        assert self.version is not None
        version, label = self.version, self.label
        server.syncs += 1
        try:
            server.sync_seconds = await _read(server, self._way.sync(server, label, self.config.sync_seconds))
            server.has = label
        except (*FAILURES, PolicyError, ValueError) as error:
            reason = str(error) if isinstance(error, PolicyError) else why(error)
            self.leave_out(server, reason)
            return reason
        finally:
            server.sync = None
            server.settled.set()
        if version != self.version:  # the periodic check syncs it again
            self.leave_out(server, f"it has weights {version}, a newer version is there")
        elif server.stalled:  # the periodic check handles this too
            self.leave_out(server, "it has the weights, and has not drawn a token since it drew none")
        else:
            self._take_in(server)
        return ""

    # ------------------------------------------------------------------------------------------ servers in service

    def _take_in(self, server: RolloutServer) -> None:
        if not server.serving:
            server.take_in()
            if not server.leaving:
                self.router.open(server.url, server.cache)
            self._changed.set()

    def leave_out(self, server: RolloutServer, reason: str) -> None:
        """Take a server out of service until it passes a check."""
        if server.serving:
            server.counts.dropped += 1
            self._say(server, f"is left out: {reason}")
            self.router.close(server.url)
            server.leave_out(reason)
            self._changed.set()
        else:
            self._say(server, f"stays out: {reason}")

    async def suspect(self, server: RolloutServer, reason: str) -> None:
        """Check a server at once after a failed request. It stays if it answers and has the current weights: a sync for
        each lost connection would cost more than the request."""
        if not server.serving:
            return
        asked = self.label, server.syncs
        try:
            found = await _read(server, self._way.version(server, self.config.answer_seconds))
        except PolicyError as error:
            self.leave_out(server, f"{reason}; then {error}")
            return
        if self._has_others(server, found, asked):
            self.leave_out(server, f"{reason}; it has weights {found}")

    def _has_others(self, server: RolloutServer, found: str, asked: tuple[str, int]) -> bool:
        """Return whether a server has other weights than it should. Answers from before a sync are ignored.

        Args:
            asked: `label` and `syncs` at the time of the request.
        """
        now = self.label, server.syncs
        return found != self.label and asked == now and server.sync is None and not server.leaving

    async def _look_after(self, server: RolloutServer) -> None:
        """Check a server periodically until it has left."""
        while True:
            await asyncio.sleep(self.config.check_seconds)
            if server.sync is not None:
                server.moves(None)
                continue
            if server.leaving and not self.router.load(server.url).requests:
                self._gone_for_good(server)
                return
            try:
                if self.version is None:  # until the trainer has weights, reserve it for this run
                    await self._hold(server)
                else:
                    if server.serving:
                        await self._look(server)
                    elif not server.leaving:
                        await self._bring_back(server)
            except Exception as error:  # any error: without its task the server would never be checked again
                self._say(server, f"could not be looked at: {why(error)}")

    async def _hold(self, server: RolloutServer) -> None:
        """Check a server that has none of our weights yet."""
        try:
            if server.checked:
                await _read(server, self._way.version(server, self.config.answer_seconds))
            else:
                await self._check(server)
        except PolicyError as error:
            self._say(server, f"is waited for: {error}")

    async def _look(self, server: RolloutServer) -> None:
        """Check a server that is in service."""
        asked = self.label, server.syncs
        try:
            found = await _read(server, self._way.version(server, self.config.answer_seconds))
            still = server.moves((await server.fetch_metrics(self.config.answer_seconds)).tokens)
        except (*FAILURES, PolicyError) as error:
            server.unanswered += 1
            if server.unanswered >= LOOKS:
                self.leave_out(server, f"{server.unanswered} looks in a row were not answered: {why(error)}")
            return
        server.unanswered = 0
        if not server.leaving and server.serving:
            self.router.open(server.url, server.cache)  # the cache size may be known only now
        if self._has_others(server, found, asked):
            self.leave_out(server, f"it has weights {found}, not {self.label}")
        elif still > self.config.stall_seconds:
            self.leave_out(server, f"it drew no token for {still:.0f} s with {server.asked} requests in flight")
            server.stalled = True

    async def _bring_back(self, server: RolloutServer) -> None:
        """Return a server to service, if possible."""
        try:
            await self._check(server)
            found = await _read(server, self._way.version(server, self.config.answer_seconds))
            if server.stalled:
                await _read(server, server.try_drawing(self.config.answer_seconds))
                server.stalled = False
        except (*FAILURES, PolicyError) as error:
            said = f"it draws no token ({why(error)})" if isinstance(error, FAILURES) else error
            self._say(server, f"stays out: {said}")
            return
        if server.sync is not None or server.serving:
            return
        if found == self.label == server.has:
            self._take_in(server)
        elif await self._begin_sync(server):
            return
        if server.serving:
            server.unanswered = 0
            server.counts.rejoined += 1
            logging.info("rollout server %s is back", server.url)

    async def _check(self, server: RolloutServer) -> None:
        """Check whether and how a server can be used. Raises `PolicyError`."""
        seconds = self.config.answer_seconds
        await _read(server, self._way.check(server, self._max_length, seconds))
        await server.find_route(seconds)
        with contextlib.suppress(*FAILURES):  # it need not report its cache size
            await server.fetch_metrics(seconds)
        server.checked = True

    # ------------------------------------------------------------------------------------------------------ logging

    def _say(self, server: RolloutServer, what: str) -> None:
        """Log each change once; repeated reasons of a server that stays out are not logged."""
        if what != server.reason:
            logging.warning("rollout server %s %s", server.url, printable(what))
        if not server.serving:
            server.reason = what

    def _why(self) -> str:
        return "; ".join(f"{server.url} {server.reason or 'does not serve'}" for server in self.servers)

    def rows(self) -> dict[str, dict[str, float]]:
        """Return, by server, its state, its counts since the policy was opened, and its pace since the last call."""
        return {server.url: self._row(server) for server in self.servers}

    def _row(self, server: RolloutServer) -> dict[str, float]:
        load = self.router.load(server.url)
        return {
            "serving": float(server.serving),
            "leaving": float(server.leaving),
            "in_flight": float(server.asked),
            "waiting": float(load.waiting + load.requests - server.asked),
            "tokens_in_flight": float(load.held),
            "cache_tokens": float(load.capacity),
            "preemptions": server.preemptions,
            "tokens_per_second": server.pace(),
            **{name: float(count) for name, count in asdict(server.counts).items()},
            **{f"sync_{stage}_seconds": seconds for stage, seconds in server.sync_seconds.items()},
        }


T = TypeVar("T")


async def _read(server: RolloutServer, answer: Awaitable[T]) -> T:
    """Return a server's answer. Raises `PolicyError` also for an unexpected form."""
    try:
        return await answer
    except _OTHER_FORM as error:
        if isinstance(error, UserError):
            raise
        raise PolicyError(f"{server.url} answers in another form ({why(error)}); is it vLLM?") from error
