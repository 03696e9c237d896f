"""So many requests at once, leased to the processes that make them: by what they want, and never more in all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Holder:
    """One process.

    Attributes:
        held: slots that it may use.
        wanted: that it could use at the moment, those in use among them.
        turn: since when it wants more than it holds; earlier ones are served first.
    """

    held: int = 0
    wanted: int = 0
    turn: int = 0

    @property
    def short(self) -> bool:
        return self.wanted > self.held


class SlotPool:
    """The slots of one endpoint.

    A holder has as many as it wants while there are enough; else each has its share, and who has more is told to give
    back what it does not use, and what is above its share as requests end. With fewer slots than holders each is used
    for one request and given on.

    Args:
        size: of all slots.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._holders: dict[str, _Holder] = {}
        self._turns = 0

    @property
    def free(self) -> int:
        """Held by nobody."""
        return self.size - sum(one.held for one in self._holders.values())

    def held(self, name: str) -> int:
        """By one holder."""
        return self._holders.get(name, _Holder()).held

    def want(self, name: str, slots: int) -> None:
        """A holder could use so many, those that it uses among them."""
        one = self._holders.setdefault(name, _Holder())
        was_short = one.short
        one.wanted = slots
        self._queue(one, was_short)

    def give_back(self, name: str, slots: int) -> None:
        """A holder has so many fewer.

        Raises:
            ValueError: it has less than that.
        """
        one = self._holders.get(name, _Holder())
        if slots > one.held:
            raise ValueError(f"{name} gives back {slots} slots, and holds {one.held}")
        was_short = one.short
        one.held -= slots
        self._queue(one, was_short)

    def lose(self, name: str) -> None:
        """A holder is no more: what it held is free."""
        self._holders.pop(name, None)

    def deal(self) -> dict[str, int]:
        """Lease what is free to those that want more than they hold, who holds least first; how many more each has."""
        given: dict[str, int] = {}
        free = self.free
        while free and (short := [name for name, one in self._holders.items() if one.short]):
            name = min(short, key=lambda name: (self._holders[name].held, self._holders[name].turn))
            self._holders[name].held += 1
            given[name] = given.get(name, 0) + 1
            free -= 1
        return given

    def recalls(self) -> dict[str, int]:
        """Who is to give back slots since others want them, and how many it may keep; what is unused goes at once."""
        if not any(one.short for one in self._holders.values()):
            return {}
        share = self.size // sum(one.wanted > 0 or one.held > 0 for one in self._holders.values())
        starving = any(one.short and one.held < max(share, 1) for one in self._holders.values())
        found: dict[str, int] = {}
        for name, one in self._holders.items():
            most = min(share, one.held) if starving else one.held
            if one.held > min(most, one.wanted):
                found[name] = most
        return found

    def _queue(self, one: _Holder, was_short: bool) -> None:
        if one.short and not was_short:
            self._turns += 1
            one.turn = self._turns
