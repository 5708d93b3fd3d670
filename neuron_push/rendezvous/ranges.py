"""Sets of token ranges.

What has been posted and what has arrived are sets, never counters: a repeated or reordered
notification cannot complete a transfer (promise 3).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class RangeSet:
    """A set of integers kept as sorted, disjoint, non-touching half-open ranges."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        """Insert [start, stop); empty ranges are ignored."""
        if start >= stop:
            return
        low = bisect_left(self._stops, start)
        high = bisect_right(self._starts, stop)
        if low < high:
            start = min(start, self._starts[low])
            stop = max(stop, self._stops[high - 1])
        self._starts[low:high] = [start]
        self._stops[low:high] = [stop]

    def covers(self, start: int, stop: int) -> bool:
        """Whether every integer of [start, stop) is in the set."""
        if start >= stop:
            return True
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and self._stops[index] >= stop

    def first_gap(self, start: int, stop: int) -> tuple[int, int]:
        """The first maximal range of [start, stop) that is not in the set; (stop, stop) if none."""
        index = bisect_right(self._starts, start) - 1
        if index >= 0 and self._stops[index] > start:
            start = self._stops[index]
        if start >= stop:
            return stop, stop
        index = bisect_right(self._starts, start)
        return start, min(stop, self._starts[index] if index < len(self._starts) else stop)

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any integer of [start, stop) is in the set."""
        return self.first_gap(start, stop) != (start, stop) and start < stop

    def within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are in the set."""
        clipped = ((max(start, low), min(stop, high)) for low, high in self)
        return [(low, high) for low, high in clipped if low < high]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def __len__(self) -> int:
        """How many ranges there are."""
        return len(self._starts)

    def __repr__(self) -> str:
        return "RangeSet(" + ", ".join(f"{a}..{b}" for a, b in self) + ")"


class EndedAttempts:
    """Attempts registered over one link that are over, in bounded memory.

    A late copy of their `Register` must not revive them. Past the bound the lower half of the
    numbers counts as over altogether; attempts that are still live are looked up first.
    """

    LIMIT = 4096

    def __init__(self) -> None:
        self._over = RangeSet()

    def add(self, attempt: int) -> None:
        self._over.add(attempt, attempt + 1)
        if len(self._over) > self.LIMIT:
            ranges = list(self._over)
            self._over.add(0, ranges[len(ranges) // 2][1])

    def __contains__(self, attempt: int) -> bool:
        return self._over.covers(attempt, attempt + 1)
