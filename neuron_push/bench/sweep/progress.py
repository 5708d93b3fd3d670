"""How far a sweep is, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Runs done and left, by what the ones so far have taken beyond their load."""

    total: int
    seconds: float
    """Of load per run, by its plan."""
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    def step(self) -> None:
        """One run is over."""
        self.done += 1

    @property
    def left(self) -> float:
        """Seconds, as far as one can tell."""
        each = (self.clock() - self.began) / self.done if self.done else self.seconds + 5.0
        return each * (self.total - self.done)

    def line(self, text: str) -> str:
        """`text` behind the count, before the time left."""
        return f"[{self.done + 1}/{self.total}] {text}  {duration(self.left)} left"


def duration(seconds: float) -> str:
    """Such as 1 h 02 min, 12 min or 40 s."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
