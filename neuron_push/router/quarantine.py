"""Pairs that keep failing rest for a while; engines do not.

A failure between two engines says little about either: the path, the handshake or the layout
may be at fault. So only that pair is left out, for a time that doubles while it goes on. When
every pair rests, the one that is due first is tried all the same: a fleet never locks itself
out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from neuron_push.router.engines import Engine

Key = tuple[Engine, Engine]

# Failures in a row before a pair rests.
TOLERATED: Final = 2
# Seconds of the first rest, and the longest.
FIRST: Final = 1.0
LONGEST: Final = 60.0


@dataclass
class _Record:
    failures: int = 0
    until: float = 0.0
    reason: str = ""


class Quarantine:
    """What is known against pairs."""

    def __init__(self, tolerated: int = TOLERATED) -> None:
        self._tolerated = tolerated
        self._records: dict[Key, _Record] = {}

    def __bool__(self) -> bool:
        return bool(self._records)

    def failed(self, pair: Key, reason: str, now: float) -> bool:
        """A request failed between the two, by no fault of its own; True if a rest begins."""
        record = self._records.setdefault(pair, _Record())
        record.failures += 1
        record.reason = reason
        extra = record.failures - self._tolerated
        if extra < 0:
            return False
        record.until = now + min(LONGEST, FIRST * 2.0 ** min(extra, 16))
        return True

    def worked(self, pair: Key) -> None:
        """A request was served between the two."""
        self._records.pop(pair, None)

    def until(self, pair: Key) -> float:
        """When the pair may be used again; 0 for one that never failed."""
        record = self._records.get(pair)
        return record.until if record else 0.0

    def objection(self, pair: Key, now: float) -> str:
        """Why the pair rests; empty when it does not."""
        record = self._records.get(pair)
        if record is None or record.until <= now:
            return ""
        return (
            f"quarantined for {record.until - now:.1f} s more after {record.failures} failures,"
            f" the last: {record.reason}"
        )

    def forget(self, engine: Engine) -> None:
        """The engine is gone or another one: nothing is known of its pairs."""
        for pair in [pair for pair in self._records if engine in pair]:
            del self._records[pair]

    def resting_by_decode(self, now: float) -> Counter[Engine]:
        """With how many prefill engines each decode engine is resting now."""
        return Counter(pair[1] for pair, record in self._records.items() if record.until > now)

    def resting(self, now: float) -> int:
        """Pairs that rest now."""
        return sum(record.until > now for record in self._records.values())
