"""Staging slabs of this rank: who has one, who waits for one.

A slab is asked for only when there are bytes to put into it at once, and is given back when
nothing reads or writes it any more, so whoever has one goes on without needing another and the
queue always moves. Prefill (packing) and decode (unpacking) share one queue, in order of asking;
each transfer has a few requests in it at most, which makes the order fair.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from neuron_push.errors import ProtocolError

# Takes a slab and the time; False if it is not needed any more.
Serve = Callable[[int, float], bool]


class SlabPool:
    """`count` slabs, numbered from 0."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._used: set[int] = set()
        self._queue: dict[Hashable, Serve] = {}

    @property
    def used(self) -> frozenset[int]:
        """Slabs that somebody has."""
        return frozenset(self._used)

    @property
    def waiting(self) -> int:
        """Requests that no slab was given to."""
        return len(self._queue)

    def ask(self, key: Hashable, serve: Serve) -> None:
        """Call `serve` with a slab in its turn; asking again under the same key changes nothing."""
        self._queue.setdefault(key, serve)

    def drop(self, key: Hashable) -> None:
        """Take a request back."""
        self._queue.pop(key, None)

    def give(self, slab: int) -> None:
        """Nothing reads or writes a slab any more."""
        if slab not in self._used:
            raise ProtocolError(f"staging slab {slab} was given back twice")
        self._used.remove(slab)
        self._free.append(slab)

    def serve(self, now: float) -> None:
        """Give free slabs to those who wait."""
        while self._free and self._queue:
            key = next(iter(self._queue))
            serve = self._queue.pop(key)
            slab = self._free.pop(0)
            self._used.add(slab)
            if not serve(slab, now):
                self.give(slab)
