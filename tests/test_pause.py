"""What the engine hands over is seen in order, and only some of it ends the thread's rest."""

import time
from types import SimpleNamespace

from neuron_push.config import Config
from neuron_push.transfer.pause import Pause


def resting(seconds):
    """A pause whose thread would rest so long, and what ends one rest."""
    pause = Pause(Config(accelerator="cpu", idle_poll=seconds))
    driver = SimpleNamespace(side=SimpleNamespace(client=SimpleNamespace(sockets=()), asked=False))

    def rest():
        began = time.monotonic()
        pause.rest(driver, "idle", 1, urgent=False)
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
