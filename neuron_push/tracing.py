"""A bounded ring of trace events, for any process of a fleet.

Off by default: whoever may trace holds `Ring | None`, so that being off costs one comparison.
Collecting is a question on the side channel (`Events`) or on the router's /trace; the asker
lays the clocks of all processes over each other.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple

from neuron_push.protocol import EventBatch, TraceEvent

__all__ = ["MOST_BATCH", "Ring", "TraceContext", "batch_of"]

# Events in one answer: about 400 KiB, far below the side channel's limit.
MOST_BATCH: Final = 4096

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class TraceContext(NamedTuple):
    """A span in a trace, as the W3C's traceparent header names it."""

    trace: str  # 32 hexadecimal digits
    span: str  # 16
    flags: str = "01"  # sampled

    @classmethod
    def parse(cls, header: str) -> TraceContext | None:
        """A traceparent header's span; None for one that is malformed or names nothing."""
        found = _TRACEPARENT.match(header.strip().lower())
        if found is None or not int(found[1], 16) or not int(found[2], 16):
            return None
        return cls(*found.groups())

    @classmethod
    def below(cls, parent: TraceContext | None) -> TraceContext:
        """A new span below `parent`, or of a trace of its own."""
        trace = parent.trace if parent else secrets.token_hex(16)
        return cls(trace, secrets.token_hex(8), parent.flags if parent else "01")

    def __str__(self) -> str:
        return f"00-{self.trace}-{self.span}-{self.flags}"


class Ring:
    """The newest `size` events of one process. Any thread may add and ask."""

    def __init__(self, size: int, source: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = size
        self.source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[TraceEvent] = deque(maxlen=size)
        self._count = 0  # events ever added

    def add(
        self, name: str, transfer: str, detail: str = "", *,
        at: float | None = None, seconds: float = 0.0, value: float = 0.0,
    ) -> None:  # fmt: skip
        """Record one event, now or `at` a time of this process's monotonic clock."""
        moment = self._clock() if at is None else at
        event = TraceEvent(moment, name, transfer, detail, seconds, value)
        with self._lock:
            self._events.append(event)
            self._count += 1

    def batch(self, after: int = 0) -> EventBatch:
        """Up to MOST_BATCH events from number `after` on."""
        with self._lock:
            oldest = self._count - len(self._events)
            start = min(max(after, oldest), self._count)
            low = start - oldest
            events = tuple(islice(self._events, low, low + MOST_BATCH))
        lost = max(0, oldest - max(after, 0))
        return EventBatch(
            self.source, self.size, self._clock(), time.time(), start + len(events), lost, events
        )


def batch_of(ring: Ring | None, source: str, after: int) -> EventBatch:
    """The answer to `Events`, of a process that may or may not trace."""
    if ring is not None:
        return ring.batch(after)
    return EventBatch(source, 0, time.monotonic(), time.time(), 0, 0, ())
