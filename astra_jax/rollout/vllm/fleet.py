"""Which rollout servers serve: who is there, who has the current weights, who is silent.

A server is looked at every `check_seconds`. One that does not answer several looks in a row, has other weights, or
draws no tokens for `stall_seconds` with requests in flight is left out, and what is in flight there is given up, so
that it is drawn elsewhere. One that was left out comes back by itself: as it is, if it still has the current weights,
else by a sync; and one that drew nothing, only once it has drawn a token, as its looks may be answered all the while.
No server is waited for because of another: each has its own look-out and its own sync.

Where servers are looked up (`addresses.py`), that is done as often. A new one joins as one that comes back does. One
that is named no more is asked no more; what it has in flight goes on to its end, or is drawn elsewhere when it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

import aiohttp
from absl import logging

from astra_jax.rollout.vllm.addresses import Addresses
from astra_jax.rollout.vllm.config import VLLMConfig
from astra_jax.rollout.vllm.routing import Placement, Router
from astra_jax.rollout.vllm.server import FAILURES, PolicyError, RolloutServer, ServerCounts, Unreachable, why
from astra_jax.rollout.vllm.sync import WeightSync
from synthesis.core.refusals import Refusal
from synthesis.core.terminal import printable

LOOKS = 3
"""So many in a row that a server does not answer, and it is left out."""
_OTHER_FORM = (KeyError, IndexError, TypeError, AttributeError, ValueError)
"""What reading an answer raises that is JSON, but not as expected."""


@dataclass(frozen=True)
class Place:
    """A request's, which it holds until it leaves."""

    server: RolloutServer
    _router: Router
    _placement: Placement

    def leave(self, drawn: int | None) -> None:
        """It is over.

        Args:
            drawn: tokens of its completion; None: it came to none.
        """
        self._router.leave(self._placement, drawn)


class Fleet:
    """The servers of a policy.

    Args:
        way: how their weights are replaced.
        max_length: tokens of the longest sequence that will be asked for.

    Attributes:
        version: of the weights that they are to have; None before the first.
        versions: by label, of all that they were to have since the fleet was opened.
        servers: there are none before `open`.
        router: which of them a request goes to.
    """

    def __init__(self, config: VLLMConfig, way: WeightSync, max_length: int) -> None:
        self.config = config
        self.version: int | None = None
        self.versions: dict[str, int] = {}
        self.servers: list[RolloutServer] = []
        self.router = Router(room=config.cache_tokens, requests=config.requests_per_server, slack=config.slack)
        self._addresses = Addresses(config.urls, config.sync)
        self._way, self._max_length = way, max_length
        self._changed = asyncio.Event()
        self._lookouts: dict[RolloutServer, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._gone = ServerCounts()  # of those that are there no more
        self._said = ""

    @property
    def label(self) -> str:
        """What the servers call `version`; those of other runs have others."""
        return f"{self.config.run_id}:{self.version}"

    def still_counts(self, label: str) -> bool:
        """Whether tokens that weights of this label drew are young enough."""
        version = self.versions.get(label)
        return version is not None and self.version is not None and self.version - version <= self.config.most_age

    @property
    def serving(self) -> list[RolloutServer]:
        """Those that can be asked."""
        return [server for server in self.servers if server.serving]

    @property
    def _ready(self) -> list[RolloutServer]:
        return [server for server in self._staying if server.serving and server.sync is None]

    @property
    def _staying(self) -> list[RolloutServer]:
        return [server for server in self.servers if not server.leaving]

    @property
    def counts(self) -> ServerCounts:
        """Of all servers, since the fleet was opened."""
        every = [self._gone, *(server.counts for server in self.servers)]
        return ServerCounts(
            **{one.name: sum(getattr(counts, one.name) for counts in every) for one in fields(ServerCounts)}
        )

    async def open(self, session: aiohttp.ClientSession) -> None:
        """See that each server is one for this policy, and look after them from now on.

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
        """Stop looking; the servers go on."""
        tasks = [*self._lookouts.values(), *(server.sync for server in self.servers if server.sync is not None)]
        tasks += [] if self._following is None else [self._following]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------ come and go

    async def _follow(self) -> None:
        """Look up where the servers are, for ever."""
        while True:
            await asyncio.sleep(self.config.check_seconds)
            try:
                found = await self._addresses.read()
            except Exception as error:  # whatever a name server says: the run goes on with those that there are
                said = str(error) if isinstance(error, Refusal) else why(error)
                if said != self._said:
                    logging.warning("%s; the servers stay those that they are", printable(said))
                self._said = said
                continue
            self._said = ""
            self._now(found)

    def _now(self, named: Mapping[str, str | None]) -> None:
        """These are the servers from now on."""
        for server in self.servers:
            if server.leaving and server.url in named:
                server.leaving = False
                logging.info("rollout server %s is to stay", server.url)
                if server.serving:
                    self.router.open(server.url, server.cache)
            elif not server.leaving and server.url not in named:
                server.leaving = True
                self.router.close(server.url)
                logging.warning("rollout server %s is asked no more: it is not named any more", server.url)
        for url in named.keys() - {server.url for server in self.servers}:
            logging.info("rollout server %s is new", url)
            self._begin_looking(self._add(url, named[url]))
        self._changed.set()

    def _gone_for_good(self, server: RolloutServer) -> None:
        """It is leaving, and has nothing in flight."""
        self.servers.remove(server)
        del self._lookouts[server]
        self.router.forget(server.url)
        for one in fields(ServerCounts):
            setattr(self._gone, one.name, getattr(self._gone, one.name) + getattr(server.counts, one.name))
        logging.info("rollout server %s is left", server.url)

    # ------------------------------------------------------------------------------------------------------ places

    async def place(self, session: str, prompt: int, most: int, avoid: Collection[RolloutServer] = ()) -> Place:
        """A server with room for a request, see `Router`; waits while there is none.

        Args:
            prompt, most: tokens that it has, and that it may draw.
            avoid: servers that have just failed; another one is taken, if there is one.

        Raises:
            PolicyError: none was there for `patience_seconds`.
        """
        clock, patience = asyncio.get_running_loop().time, self.config.patience_seconds
        placed, since = asyncio.Event(), clock()  # since when there is no server
        one = self.router.ask(session, prompt, most, placed.set, [server.url for server in avoid])
        try:
            while not placed.is_set():
                if any(server.serving for server in self._staying):
                    since = clock()
                if (left := since + patience - clock()) <= 0:
                    raise Unreachable(f"no rollout server was there for {patience:g} s: {self._why()}")
                with contextlib.suppress(TimeoutError):  # a tenth: whether there is one is to be seen before it is over
                    await asyncio.wait_for(placed.wait(), min(left, patience / 10))
        except BaseException:
            self.router.leave(one)
            raise
        (server,) = (server for server in self.servers if server.url == one.server)
        return Place(server, self.router, one)

    def release(self, session: str) -> None:
        """Forget where a session was."""
        self.router.release(session)

    async def _change(self, seconds: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    # ------------------------------------------------------------------------------------------------------ weights

    async def update(self, version: int) -> None:
        """Have the servers take a published version over.

        Returns when all have, or `min_servers` have and `grace_seconds` have passed: slower ones serve when they are
        done, or are synced again when there is a newer version by then. While none takes it over, they are tried again
        for `patience_seconds`; but not the first version, whose reason is how they were started.

        Raises:
            PolicyError: not one server took it over in that time; the message has every reason.
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
                if server.sync is not None and (server.serving or not server.reason):  # why it is out says more
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
        """Have a server take the current weights over; why it did not, or ""."""
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
        if version != self.version:  # the look-out sees to it
            self.leave_out(server, f"it has weights {version}, a newer version is there")
        elif server.stalled:  # so does it to this
            self.leave_out(server, "it has the weights, and has not drawn a token since it drew none")
        else:
            self._take_in(server)
        return ""

    # ------------------------------------------------------------------------------------------- who is in service

    def _take_in(self, server: RolloutServer) -> None:
        if not server.serving:
            server.take_in()
            if not server.leaving:
                self.router.open(server.url, server.cache)
            self._changed.set()

    def leave_out(self, server: RolloutServer, reason: str) -> None:
        """Ask this server no more, until it is looked at again."""
        if server.serving:
            server.counts.dropped += 1
            self._say(server, f"is left out: {reason}")
            self.router.close(server.url)
            server.leave_out(reason)
            self._changed.set()
        else:
            self._say(server, f"stays out: {reason}")

    async def suspect(self, server: RolloutServer, reason: str) -> None:
        """After a failed request: look at the server at once. One that answers and has the current weights stays: a
        sync for each lost connection would cost more than the request."""
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
        """Whether what a server has are other weights than it should have; an answer of before a sync tells nothing.

        Args:
            asked: `label` and `syncs` as they were when it was asked.
        """
        now = self.label, server.syncs
        return found != self.label and asked == now and server.sync is None and not server.leaving

    async def _look_after(self, server: RolloutServer) -> None:
        """One look after the other, until it has left."""
        while True:
            await asyncio.sleep(self.config.check_seconds)
            if server.sync is not None:
                server.moves(None)
                continue
            if server.leaving and not self.router.load(server.url).requests:
                self._gone_for_good(server)
                return
            try:
                if self.version is None:  # until the trainer has weights, it is held for this run
                    await self._hold(server)
                else:
                    if server.serving:
                        await self._look(server)
                    elif not server.leaving:
                        await self._bring_back(server)
            except Exception as error:  # whatever it says: without its look-out it would stay as it is for ever
                self._say(server, f"could not be looked at: {why(error)}")

    async def _hold(self, server: RolloutServer) -> None:
        """A look at one that has none of our weights yet."""
        try:
            if server.checked:
                await _read(server, self._way.version(server, self.config.answer_seconds))
            else:
                await self._check(server)
        except PolicyError as error:
            self._say(server, f"is waited for: {error}")

    async def _look(self, server: RolloutServer) -> None:
        """At one that serves."""
        asked = self.label, server.syncs
        try:
            found = await _read(server, self._way.version(server, self.config.answer_seconds))
            still = server.moves((await server.figures(self.config.answer_seconds)).tokens)
        except (*FAILURES, PolicyError) as error:
            server.unanswered += 1
            if server.unanswered >= LOOKS:
                self.leave_out(server, f"{server.unanswered} looks in a row were not answered: {why(error)}")
            return
        server.unanswered = 0
        if not server.leaving and server.serving:
            self.router.open(server.url, server.cache)  # which may be known only now
        if self._has_others(server, found, asked):
            self.leave_out(server, f"it has weights {found}, not {self.label}")
        elif still > self.config.stall_seconds:
            self.leave_out(server, f"it drew no token for {still:.0f} s with {server.asked} requests in flight")
            server.stalled = True

    async def _bring_back(self, server: RolloutServer) -> None:
        """A server that was left out serves again, if it can."""
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
        """See that a server can be used, and how. Raises `PolicyError`."""
        seconds = self.config.answer_seconds
        await _read(server, self._way.check(server, self._max_length, seconds))
        await server.find_route(seconds)
        with contextlib.suppress(*FAILURES):  # it need not say what room it has
            await server.figures(seconds)
        server.checked = True

    # ------------------------------------------------------------------------------------------------- what is told

    def _say(self, server: RolloutServer, what: str) -> None:
        """A line for each change; a server that stays out for the same reason is told once."""
        if what != server.reason:
            logging.warning("rollout server %s %s", server.url, printable(what))
        if not server.serving:
            server.reason = what

    def _why(self) -> str:
        return "; ".join(f"{server.url} {server.reason or 'does not serve'}" for server in self.servers)

    def rows(self) -> dict[str, dict[str, float]]:
        """By server: what it is doing, its counts since the policy was opened, its pace since this was asked before."""
        return {server.url: self._row(server) for server in self.servers}

    def _row(self, server: RolloutServer) -> dict[str, float]:
        load = self.router.load(server.url)
        return {
            "serving": float(server.serving),
            "leaving": float(server.leaving),
            "in_flight": float(server.asked),
            "waiting": float(load.waiting + load.requests - server.asked),
            "tokens_in_flight": float(load.held),
            "cache_tokens": float(load.room),
            "preemptions": server.preemptions,
            "tokens_per_second": server.pace(),
            **{name: float(count) for name, count in asdict(server.counts).items()},
            **{f"sync_{stage}_seconds": seconds for stage, seconds in server.sync_seconds.items()},
        }


T = TypeVar("T")


async def _read(server: RolloutServer, answer: Awaitable[T]) -> T:
    """What a server says. Raises `PolicyError` too where it has another form."""
    try:
        return await answer
    except _OTHER_FORM as error:
        if isinstance(error, Refusal):
            raise
        raise PolicyError(f"{server.url} answers in another form ({why(error)}); is it vLLM?") from error
