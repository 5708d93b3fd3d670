"""Tells the transfer thread that somebody asks this rank something over the side channel.

The transfer thread waits for its engine's commands, so that waking it costs the engine no system
call in which it would lose the interpreter lock. A thread of its own waits for the descriptor.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Bell"]


class Bell:
    """Calls `ring` once when the descriptor is readable, and again only after `arm`."""

    def __init__(self, descriptor: int, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._armed: SimpleQueue[bool] = SimpleQueue()  # False: stop
        self._poll = select.poll()
        for each in (self._stop, descriptor):
            self._poll.register(each, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="neuron-push-bell", daemon=True)
        self._thread.start()

    def arm(self) -> None:
        """What it rang for has been seen to."""
        self._armed.put(True)

    def close(self) -> None:
        """Stop; the descriptor may be closed after return."""
        self._armed.put(False)
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _run(self) -> None:
        while self._stop not in dict(self._poll.poll()):
            self._ring()
            if not self._armed.get():
                return
