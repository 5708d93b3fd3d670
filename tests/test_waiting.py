"""A wait for a queue ends with its time, however late its thread is."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue

import pytest

from neuron_push.waiting import take
from tests.test_pause import resting

# So short that the time is up before the wait begins. SimpleQueue.get hangs within 40,000 of them.
NO_TIME = 1e-6
TIMES = 50_000


def ends(work):
    """Whether work on a thread of its own comes to its end; what waits for ever is released."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_a_wait_without_time_ends_after_an_item_was_taken():
    queue = SimpleQueue()

    def work():
        for _ in range(TIMES):
            queue.put(None)
            queue.get_nowait()
            with pytest.raises(Empty):
                take(queue, NO_TIME)

    assert ends(work)


def test_a_rest_without_time_ends_after_something_was_handed_over():
    pause, rest = resting(NO_TIME)

    def work():
        for _ in range(TIMES):
            pause.put(b"", None, True)
            list(pause.handed())
            rest()

    assert ends(work)


def test_what_is_there_or_comes_in_time_is_taken():
    queue = SimpleQueue()
    queue.put(1)
    assert take(queue, NO_TIME) == 1
    threading.Timer(0.05, queue.put, (2,)).start()
    assert take(queue, 30) == 2
    began = time.monotonic()
    with pytest.raises(Empty):
        take(queue, 0.05)
    assert time.monotonic() - began >= 0.05
