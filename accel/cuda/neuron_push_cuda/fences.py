"""CUDA events as fences."""

from __future__ import annotations

import time
from typing import Any, Final

__all__ = ["EventFence"]

# How long a waiting thread sleeps between two looks at an event. Far below the milliseconds of
# a decode step, far above the microsecond that a look costs.
POLL_S: Final = 50e-6


class EventFence:
    """A recorded CUDA event.

    It is made only around an event that was recorded: an event that was not says that it is done
    (CUDA driver API, cuEventQuery). It is polled and never synchronised with:
    cudaEventSynchronize cannot be given a deadline.
    """

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True
