"""Which server a request goes to, and when: decisions alone, without clocks, sockets or tasks.

What a server has room for is tokens of its KV cache, so tokens are what is counted: of a request its sequence and an
allowance for what will be drawn, of a group's prompt, which its episodes share, one. Three rules:

- **Room.** A request is placed where it fits. It waits here rather than there, where it would push out what is under
  way, which is then computed again; a server that has nothing takes anything.
- **Place.** It goes where its prefix is cached: to its episode's server, a first turn to its group's. Unless that one's
  tokens, in flight and waiting for it, are more than `slack` of its room above those of the least loaded server, which
  then is its place. Whoever has no such place goes to the least loaded one.
- **Order.** Whose episode began first is placed first, so that nobody waits for ever. A server that has room left takes
  over what waits at one that is so much fuller.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

_RECENT = 1024
"""Completions whose lengths are remembered."""


@dataclass(eq=False)
class Placement:
    """A request: first it waits for a place, then it holds tokens there.

    Attributes:
        prompt: tokens of its sequence so far.
        most: it may draw.
        avoid: servers that it goes to only where there is no other.
        server: its place; "" while it waits.
        ready: called once, when it has one.
    """

    session: str
    group: str
    prompt: int
    most: int
    order: tuple[int, int]
    ready: Callable[[], None]
    avoid: Collection[str] = ()
    server: str = ""
    _prefix: int = 0  # of the prompt, what its group shares
    _own: int = 0  # tokens beside that
    _queue: str | None = None  # of a server, or None: of nobody's

    def __lt__(self, other: Placement) -> bool:
        return self.order < other.order


@dataclass
class _Seat:
    """What one server holds and what waits for it."""

    room: int
    open: bool = True
    held: int = 0
    requests: int = 0
    groups: dict[str, list[int]] = field(default_factory=dict)  # of each: requests, and the prefix that they share
    waiting: list[Placement] = field(default_factory=list)  # a heap
    queued: int = 0  # tokens of those

    @property
    def load(self) -> float:
        return (self.held + self.queued) / self.room

    def need(self, one: Placement) -> int:
        """Tokens that it would hold more."""
        return one._own + (0 if one.group in self.groups else one._prefix)


@dataclass
class _Group:
    """Sessions that begin alike."""

    prefix: int
    server: str = ""
    sessions: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class ServerLoad:
    """What a server has of the requests; all in tokens but the first.

    Attributes:
        requests: placed there.
        held: by them.
        waiting: requests for which it has no room yet.
        room: that there is in all.
    """

    requests: int
    held: int
    waiting: int
    room: int


class Router:
    """Places requests on servers, which are named.

    A session is an episode; sessions that are alike up to their last dot are of one group, whose prompts begin alike.

    Args:
        room: tokens of a server that does not say its own.
        requests: on a server at once.
        slack: share of a server's room, see above.

    Attributes:
        placed, stayed, moved: requests that got a place; those of them that had a server with their prefix and got it;
            those that got another.
    """

    def __init__(self, *, room: int, requests: int, slack: float) -> None:
        self._room, self._requests, self._slack = room, requests, slack
        self._seats: dict[str, _Seat] = {}
        self._homes: dict[str, str] = {}  # by session
        self._begun: dict[str, int] = {}  # by session: its number
        self._groups: dict[str, _Group] = {}
        self._anywhere: list[Placement] = []  # a heap: those who wait for whoever has room
        self._numbers = itertools.count()
        self._drawn: deque[int] = deque(maxlen=_RECENT)
        self._sum = self._squares = 0
        self.placed = self.stayed = self.moved = 0

    # ---------------------------------------------------------------------------------------------------- servers

    def open(self, server: str, room: int | None = None) -> None:
        """From now on it takes requests.

        Args:
            room: tokens; None: it does not say.
        """
        seat = self._seats.setdefault(server, _Seat(self._room))
        seat.open, seat.room = True, max(1, room or self._room)
        self._fill(server)

    def close(self, server: str) -> None:
        """From now on it takes none; what it has goes on, what waits for it waits for others."""
        seat = self._seats.get(server)
        if seat is not None and seat.open:
            seat.open = False
            waiting, seat.waiting, seat.queued = seat.waiting, [], 0
            for one in sorted(waiting):
                self._enter(one)

    def forget(self, server: str) -> None:
        """It is there no more, and has nothing."""
        self.close(server)
        self._seats.pop(server, None)

    def load(self, server: str) -> ServerLoad:
        """Of a server, also of one that was never opened."""
        seat = self._seats.get(server) or _Seat(self._room)
        return ServerLoad(seat.requests, seat.held, len(seat.waiting), seat.room)

    @property
    def waiting(self) -> int:
        """Requests without a place."""
        return len(self._anywhere) + sum(len(seat.waiting) for seat in self._seats.values())

    # --------------------------------------------------------------------------------------------------- requests

    def ask(
        self, session: str, prompt: int, most: int, ready: Callable[[], None], avoid: Collection[str] = ()
    ) -> Placement:
        """A place for a request; `ready` may be called before this returns.

        Args:
            prompt: tokens of its sequence.
            most: tokens that it may draw.
            ready: called when it has its place.
            avoid: servers that are taken only where no other is open.
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
        """A request is over, or is wanted no more.

        Args:
            drawn: tokens of its completion; None: it came to none.
        """
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
        """An episode is over."""
        self._homes.pop(session, None)
        if self._begun.pop(session, None) is None:
            return
        name = session.rpartition(".")[0]
        if (group := self._groups.get(name)) is not None:
            group.sessions.discard(session)
            if not group.sessions:
                del self._groups[name]

    def allowance(self, most: int) -> int:
        """Tokens that a request is counted with for what it will draw, of those that it may.

        Of what is in flight the long are more than of what ends: their mean length is the second moment over the first,
        and so much, of which half is there in the mean, they are counted with. Of a run's first requests, of which
        little has ended, and that the shortest, it is nearly all that they may draw.
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
        """Queue a request where it belongs, and place whoever can be."""
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
        """The server that it is to wait for; None: any."""
        seats = dict(self._open())
        others = {name: seat for name, seat in seats.items() if name not in one.avoid}
        known = self._known(one, others or seats)
        if known is None and 0 < len(others) < len(seats):
            return min(others, key=lambda name: (others[name].load, name))
        return known

    def _known(self, one: Placement, seats: dict[str, _Seat]) -> str | None:
        """Where its prefix is, if that is not too full beside the least loaded of them."""
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
        return seat.requests < self._requests and seat.held + seat.need(one) <= seat.room

    def _place_anywhere(self) -> bool:
        """Place the first of those who wait for whoever has room, as many as can be; whether any was."""
        any_placed = False
        while self._anywhere:
            one = self._anywhere[0]
            if (known := self._home(one)) is not None:  # since a mate of its group has a place
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
            server = min(fits, key=lambda name: ((fits[name].held + fits[name].need(one)) / fits[name].room, name))
            heapq.heappop(self._anywhere)
            self._place(one, server)
            any_placed = True
        return any_placed

    def _fill(self, server: str) -> None:
        """Place whoever can be, now that a server has room, or somebody waits for it."""
        seat = self._seats[server]
        while seat.open:
            if self._anywhere and not (seat.waiting and seat.waiting[0] < self._anywhere[0]):
                first = self._anywhere[0]
                if not self._place_anywhere() and self._anywhere[:1] == [first]:
                    return  # but not where it went to wait at another server: whoever is next may fit here
            elif seat.waiting:
                if not self._admits(seat, seat.waiting[0]):
                    return
                self._place(self._popped(seat), server)
            elif not self._take_over(server, seat):
                return

    def _take_over(self, server: str, seat: _Seat) -> bool:
        """Place here what waits at a server that is much fuller; whether there was anything."""
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
