"""What the engine hands over is seen in order, and only some of it ends the thread's rest."""

import threading
import time
from types import SimpleNamespace

from neuron_push.config import Config
from neuron_push.transfer.pause import ASLEEP, ROUNDS_DROWSY, Pause


def resting(seconds):
    """A pause whose thread would rest so long, and what ends one rest."""
    pause = Pause(Config(accelerator="cpu", idle_poll=seconds))
    driver = SimpleNamespace(side=SimpleNamespace(client=SimpleNamespace(sockets=()), asked=False))

    def rest(tempo="idle", idle=1):
        began = time.monotonic()
        pause.rest(driver, tempo, idle, urgent=False)
        return time.monotonic() - began

    return pause, rest


def test_what_was_left_comes_before_what_woke():
    pause, _ = resting(1.0)
    for number, wake in enumerate((False, True, False)):
        pause.put(b"%d" % number, None, wake)
    assert list(pause.handed()) == [(b"0", None), (b"1", None), (b"2", None)]
    assert not list(pause.handed())


def test_a_rest_ends_early_only_for_what_wakes():
    pause, rest = resting(0.25)
    pause.put(b"left", None, False)
    assert rest() >= 0.2
    pause.put(b"urgent", None, True)
    assert rest() < 0.2
    assert len(list(pause.handed())) == 2
    assert rest() >= 0.2  # one wake-up, one look


def test_a_thread_that_sleeps_is_woken_by_whatever_comes():
    pause, rest = resting(0.25)
    later = threading.Timer(0.05, pause.put, (b"left", None, False))
    later.start()
    assert rest("empty", ROUNDS_DROWSY + 1) < 0.25 * ASLEEP
    later.join()
    assert list(pause.handed()) == [(b"left", None)]
    pause.put(b"before it slept", None, False)
    assert rest("empty", ROUNDS_DROWSY + 1) < 0.25
