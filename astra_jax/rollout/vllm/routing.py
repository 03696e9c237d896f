"""Routing of requests to servers: decisions only, without clocks, sockets or tasks.

A server's capacity is the number of tokens in its KV cache. A request counts with its sequence and an allowance for the
tokens to sample. The prompt of a group is shared by its episodes and counts once. Three rules:

- **Room.** A request is placed where it fits, and otherwise waits here. On a full server it would evict running
  sequences, which then must be recomputed. An empty server accepts any request.
- **Place.** A request prefers the server that caches its prefix: its episode's, or its group's for a first turn. If
  that server's tokens, running and queued, exceed the least loaded server's by `slack` of its room, it goes to the
  latter. Requests without a cached prefix go to the least loaded server.
- **Order.** Requests of the oldest episode are placed first, so none starves. A server with free room takes over the
  queue of a server that is fuller by the same margin.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

_RECENT = 1024
"""Number of completions whose lengths are remembered."""


@dataclass(eq=False)
class Placement:
    """A request, first in a queue, then placed on a server where it occupies tokens.

    Attributes:
        prompt: tokens of its sequence so far.
        most: tokens that it may sample.
        avoid: servers used only if there is no other.
        server: where it is placed; "" while it waits.
        ready: called once, when it is placed.
    """

    session: str
    group: str
    prompt: int
    most: int
    order: tuple[int, int]
    ready: Callable[[], None]
    avoid: Collection[str] = ()
    server: str = ""
    _prefix: int = 0  # tokens of the prompt that its group shares
    _own: int = 0  # tokens in addition to the prefix
    _queue: str | None = None  # server whose queue it is in; None: the common queue

    def __lt__(self, other: Placement) -> bool:
        return self.order < other.order


@dataclass
class _Seat:
    """Requests placed on a server and waiting for it."""

    capacity: int
    open: bool = True
    held: int = 0
    requests: int = 0
    groups: dict[str, list[int]] = field(default_factory=dict)  # by group: number of requests, and the shared prefix
    waiting: list[Placement] = field(default_factory=list)  # a heap
    queued: int = 0  # tokens in `waiting`

    @property
    def load(self) -> float:
        return (self.held + self.queued) / self.capacity

    def need(self, one: Placement) -> int:
        """Return the additional tokens that this request would occupy."""
        return one._own + (0 if one.group in self.groups else one._prefix)


@dataclass
class _Group:
    """Sessions that share a prefix."""

    prefix: int
    server: str = ""
    sessions: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class ServerLoad:
    """Load of a server, in tokens except for the two request counts.

    Attributes:
        requests: placed there.
        held: tokens that they occupy.
        waiting: requests for which there is no room yet.
        capacity: in tokens.
    """

    requests: int
    held: int
    waiting: int
    capacity: int


class Router:
    """Assigns requests to servers, which are identified by name.

    A session is an episode. Sessions whose names are equal up to the last dot form a group and share a prompt prefix.

    Args:
        capacity: in tokens of a server that does not report its own.
        requests: most requests on a server at once.
        slack: share of a server's capacity, see above.

    Attributes:
        placed, stayed, moved: requests placed; those placed on the server with their prefix; those placed on another.
    """

    def __init__(self, *, capacity: int, requests: int, slack: float) -> None:
        self._capacity, self._requests, self._slack = capacity, requests, slack
        self._seats: dict[str, _Seat] = {}
        self._homes: dict[str, str] = {}  # by session
        self._begun: dict[str, int] = {}  # by session: its number
        self._groups: dict[str, _Group] = {}
        self._anywhere: list[Placement] = []  # a heap: requests for any server
        self._numbers = itertools.count()
        self._drawn: deque[int] = deque(maxlen=_RECENT)
        self._sum = self._squares = 0
        self.placed = self.stayed = self.moved = 0

    # ---------------------------------------------------------------------------------------------------- servers

    def open(self, server: str, capacity: int | None = None) -> None:
        """Accept requests on this server from now on.

        Args:
            capacity: in tokens; None if the server does not report it.
        """
        seat = self._seats.setdefault(server, _Seat(self._capacity))
        seat.open, seat.capacity = True, max(1, capacity or self._capacity)
        self._fill(server)

    def close(self, server: str) -> None:
        """Place no more requests on this server. Running ones finish; queued ones are queued for other servers."""
        seat = self._seats.get(server)
        if seat is not None and seat.open:
            seat.open = False
            waiting, seat.waiting, seat.queued = seat.waiting, [], 0
            for one in sorted(waiting):
                self._enter(one)

    def forget(self, server: str) -> None:
        """Remove a server that is gone and has no requests."""
        self.close(server)
        self._seats.pop(server, None)

    def load(self, server: str) -> ServerLoad:
        """Return the load of a server, also of one that was never opened."""
        seat = self._seats.get(server) or _Seat(self._capacity)
        return ServerLoad(seat.requests, seat.held, len(seat.waiting), seat.capacity)

    @property
    def waiting(self) -> int:
        """Number of requests that are not placed."""
        return len(self._anywhere) + sum(len(seat.waiting) for seat in self._seats.values())

    # --------------------------------------------------------------------------------------------------- requests

    def ask(
        self, session: str, prompt: int, most: int, ready: Callable[[], None], avoid: Collection[str] = ()
    ) -> Placement:
        """Queue a request and place it if possible; `ready` may be called before this returns.

        Args:
            prompt: tokens of its sequence.
            most: tokens that it may sample.
            ready: called when it is placed.
            avoid: servers used only if no other is open.
        """
        group = session.rpartition(".")[0]
        if session not in self._begun:
            number = next(self._numbers)
            if session:
                self._begun[session] = number
            if group:
                self._groups.setdefault(group, _Group(prompt)).sessions.add(session)
        else:
            number = self._begun[session]
        one = Placement(session, group, prompt, most, (number, next(self._numbers)), ready, avoid)
        self._enter(one)
        return one

    def leave(self, one: Placement, drawn: int | None = None) -> None:
        """Remove a finished or cancelled request. `drawn` is the number of sampled tokens, or None if there is no
        completion."""
        if drawn is not None:
            self._learn(drawn)
        if one.server:
            seat, server = self._seats[one.server], one.server
            seat.requests -= 1
            seat.held -= one._own
            if one.group:
                shared = seat.groups[one.group]
                shared[0] -= 1
                if not shared[0]:
                    seat.held -= shared[1]
                    del seat.groups[one.group]
            one.server = ""
            self._fill(server)
            return
        if one._queue is None:
            _taken_out(self._anywhere, one)
            self._place_anywhere()
        else:
            _taken_out(self._seats[one._queue].waiting, one)
            self._seats[one._queue].queued -= one._own
            self._fill(one._queue)

    def release(self, session: str) -> None:
        """Forget a finished episode."""
        self._homes.pop(session, None)
        if self._begun.pop(session, None) is None:
            return
        name = session.rpartition(".")[0]
        if (group := self._groups.get(name)) is not None:
            group.sessions.discard(session)
            if not group.sessions:
                del self._groups[name]

    def allowance(self, most: int) -> int:
        """Return the tokens to reserve for what a request will sample, at most `most`.

        Long completions are more frequent among those running than among those finished. The mean length of running
        ones is the ratio of the second to the first moment. That many are reserved; on average half of them are in use.
        Early in a run few completions have ended, the shortest ones, so nearly `most` is reserved.
        """
        return min(most, -(-(self._squares + most * most) // (self._sum + most)))

    def _learn(self, drawn: int) -> None:
        if len(self._drawn) == _RECENT:
            before = self._drawn[0]
            self._sum, self._squares = self._sum - before, self._squares - before * before
        self._drawn.append(drawn)
        self._sum, self._squares = self._sum + drawn, self._squares + drawn * drawn

    # ------------------------------------------------------------------------------------------------------ places

    def _enter(self, one: Placement) -> None:
        """Queue a request at its server, and place requests that fit."""
        group = self._groups.get(one.group)
        one._prefix = 0 if group is None else min(one.prompt, group.prefix)
        one._own = one.prompt - one._prefix + self.allowance(one.most)
        server = self._home(one)
        one._queue = server
        if server is None:
            heapq.heappush(self._anywhere, one)
            self._place_anywhere()
        else:
            seat = self._seats[server]
            heapq.heappush(seat.waiting, one)
            seat.queued += one._own
            self._fill(server)

    def _home(self, one: Placement) -> str | None:
        """Return the server to queue it for; None for any."""
        seats = dict(self._open())
        others = {name: seat for name, seat in seats.items() if name not in one.avoid}
        known = self._known(one, others or seats)
        if known is None and 0 < len(others) < len(seats):
            return min(others, key=lambda name: (others[name].load, name))
        return known

    def _known(self, one: Placement, seats: dict[str, _Seat]) -> str | None:
        """Return the server that caches its prefix, unless it is much fuller than the least loaded one; else None."""
        known = self._homes.get(one.session)
        if known is None and one.group in self._groups:
            known = self._groups[one.group].server
        if known not in seats:
            return None
        least = min(seat.load for seat in seats.values())
        return known if seats[known].load <= least + self._slack else None

    def _open(self) -> Iterator[tuple[str, _Seat]]:
        return ((name, seat) for name, seat in self._seats.items() if seat.open)

    def _admits(self, seat: _Seat, one: Placement) -> bool:
        if not seat.open:
            return False
        if not seat.requests:
            return True
        return seat.requests < self._requests and seat.held + seat.need(one) <= seat.capacity

    def _place_anywhere(self) -> bool:
        """Place requests from the common queue in order, as long as they fit. Return whether any was placed."""
        any_placed = False
        while self._anywhere:
            one = self._anywhere[0]
            if (known := self._home(one)) is not None:  # since another session of its group was placed
                heapq.heappop(self._anywhere)
                one._queue = known
                heapq.heappush(self._seats[known].waiting, one)
                self._seats[known].queued += one._own
                if self._seats[known].waiting[0] is one and self._admits(self._seats[known], one):
                    self._place(self._popped(self._seats[known]), known)
                    any_placed = True
                continue
            fits = {
                name: seat
                for name, seat in self._open()
                if not (seat.waiting and seat.waiting[0] < one) and self._admits(seat, one)
            }
            if not fits:
                break
            server = min(fits, key=lambda name: ((fits[name].held + fits[name].need(one)) / fits[name].capacity, name))
            heapq.heappop(self._anywhere)
            self._place(one, server)
            any_placed = True
        return any_placed

    def _fill(self, server: str) -> None:
        """Place the requests that fit, after a server got room or a request was queued for it."""
        seat = self._seats[server]
        while seat.open:
            if self._anywhere and not (seat.waiting and seat.waiting[0] < self._anywhere[0]):
                first = self._anywhere[0]
                if not self._place_anywhere() and self._anywhere[:1] == [first]:
                    return  # if it moved to another server's queue, the next request may fit here
            elif seat.waiting:
                if not self._admits(seat, seat.waiting[0]):
                    return
                self._place(self._popped(seat), server)
            elif not self._take_over(server, seat):
                return

    def _take_over(self, server: str, seat: _Seat) -> bool:
        """Take over a request queued at a much fuller server. Return whether there was one."""
        fuller = [other for _, other in self._open() if other.waiting and server not in other.waiting[0].avoid]
        if not fuller:
            return False
        other = max(fuller, key=lambda one: one.load)
        if other.load <= seat.load + self._slack or not self._admits(seat, other.waiting[0]):
            return False
        self._place(self._popped(other), server)
        return True

    @staticmethod
    def _popped(seat: _Seat) -> Placement:
        one = heapq.heappop(seat.waiting)
        seat.queued -= one._own
        return one

    def _place(self, one: Placement, server: str) -> None:
        seat = self._seats[server]
        seat.held += seat.need(one)
        seat.requests += 1
        if one.group:
            seat.groups.setdefault(one.group, [0, one._prefix])[0] += 1
        known = self._homes.get(one.session)
        self.placed += 1
        self.stayed += known == server
        self.moved += known is not None and known != server
        if one.session in self._begun:
            self._homes[one.session] = server
            if one.group in self._groups and (known is None or not self._groups[one.group].server):
                self._groups[one.group].server = server
        one.server = server
        one.ready()


def _taken_out(queue: list[Placement], one: Placement) -> None:
    queue.remove(one)
    heapq.heapify(queue)
