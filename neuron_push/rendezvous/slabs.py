"""Staging slabs of this rank: who has one, who waits for one.

A slab is asked for only when there are bytes to put into it at once, and is given back when
nothing reads or writes it any more, so whoever has one goes on and the queue always moves. Prefill
(packing) and decode (unpacking) share one queue, in order of asking; each transfer has a few
requests in it at most, which makes the order fair.

A slab granted to a peer that must first have one of its own is *promised*. Two engines that serve
each other could promise all they have and then wait for each other, so one slab never is.
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
        self._promised: set[int] = set()
        self._most_promised = count - 1
        self._queue: dict[Hashable, tuple[Serve, bool]] = {}

    @property
    def used(self) -> frozenset[int]:
        """Slabs that somebody has."""
        return frozenset(self._used)

    @property
    def waiting(self) -> int:
        """Requests that no slab was given to."""
        return len(self._queue)

    def ask(self, key: Hashable, serve: Serve, *, promise: bool = False) -> None:
        """Call `serve` with a slab in its turn; asking again under the same key changes nothing."""
        self._queue.setdefault(key, (serve, promise))

    def drop(self, key: Hashable) -> None:
        """Take a request back."""
        self._queue.pop(key, None)

    def give(self, slab: int) -> None:
        """Nothing reads or writes a slab any more."""
        if slab not in self._used:
            raise ProtocolError(f"staging slab {slab} was given back twice")
        self._used.remove(slab)
        self._promised.discard(slab)
        self._free.append(slab)

    def serve(self, now: float) -> None:
        """Give free slabs to those who wait."""
        while self._free and (key := self._next()) is not None:
            serve, promise = self._queue.pop(key)
            slab = self._free.pop(0)
            self._used.add(slab)
            if promise:
                self._promised.add(slab)
            if not serve(slab, now):
                self.give(slab)

    def _next(self) -> Hashable | None:
        """Whose turn it is; the last slab that may be promised passes nobody else by."""
        full = len(self._promised) >= self._most_promised
        turns = (key for key, (_, promise) in self._queue.items() if not (promise and full))
        return next(turns, None)
