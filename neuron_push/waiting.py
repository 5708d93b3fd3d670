"""Waiting for the next item of a queue, at most for a time."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["take"]

T = TypeVar("T")


def take(queue: SimpleQueue[T], timeout: float) -> T:
    """The next item, by the one thread that takes; raises Empty after `timeout` seconds.

    CPython before 3.13 may wait for ever in SimpleQueue.get(timeout=...). An item that is there
    when it is taken leaves the queue's lock open. The next wait finds it open, closes it and waits
    anew for what is left of its time: without end if none is left, as for a thread that did not run
    meanwhile. A look that finds nothing closes the lock as well, and has no time to lose.
    """
    try:
        return queue.get_nowait()
    except Empty:
        return queue.get(timeout=timeout)
