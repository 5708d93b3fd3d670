"""Virtual time: what will happen, in order, and the asyncio loop that lives in it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable


class Violation(BaseException):
    """A promise was broken. No handler of defects may take it for one of its own."""


class Clock:
    """Everything that is going to happen. A step is one turn of any actor."""

    def __init__(self, seed: int) -> None:
        self.now = 1.0
        self.rng = random.Random(seed)
        self.steps: Counter[str] = Counter()
        self.trace: deque[tuple[float, str]] = deque(maxlen=3000)
        self._heap: list[tuple[float, int, str, Callable[[], object]]] = []
        self._sequence = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, delay: float, kind: str, action: Callable[[], object]) -> None:
        """Let something happen later. An action that returns False did nothing: no step."""
        when = self.now + max(0.0, delay)
        heapq.heappush(self._heap, (when, next(self._sequence), kind, action))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass; whether `until` came true before it was over."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.now, _, kind, action = heapq.heappop(self._heap)
            if action() is False:
                self.steps["idle"] += 1
                continue
            self.steps[kind] += 1
            if until is not None and until():
                return True
        self.now = max(self.now, end)
        return until is not None and until()

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def wait(self, mean: float) -> float:
        """A random delay."""
        return self.rng.expovariate(1 / mean) if mean else 0.0

    def log(self, text: str) -> None:
        self.trace.append((self.now, text))

    def check(self, held: object, complaint: str) -> None:
        if not held:
            raise Violation(f"at {self.now:.4f}: {complaint}")

    @property
    def counted(self) -> int:
        """Turns in which something was done."""
        return sum(count for kind, count in self.steps.items() if kind != "idle")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is the clock's, and whose turns are steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock_ = clock
        self._due = False
        super().__init__()

    def time(self) -> float:
        return self._clock_.now

    def call_soon(self, callback, *args, context=None):  # type: ignore[no-untyped-def]
        handle = super().call_soon(callback, *args, context=context)
        if not self._due:
            self._due = True
            self._clock_.at(self._clock_.wait(0.0001), "router", self.turn)
        return handle

    def call_at(self, when, callback, *args, context=None):  # type: ignore[no-untyped-def]
        handle = super().call_at(when, callback, *args, context=context)
        self._clock_.at(when - self._clock_.now, "router", self.turn_at)
        return handle

    def turn_at(self) -> bool:
        """A timer fell due, unless it was cancelled; cancelled ones may hide it."""
        timers, now = self._scheduled, self.time() + self._clock_resolution
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1
        return self.turn() if timers and timers[0]._when < now else False

    def turn(self) -> bool:
        """Everything that is ready now, once."""
        self._due = False
        self.stop()
        self.run_forever()
        return True
