"""How the transfer thread rests between two looks: by how soon something may happen.

A busy thread looks again at once some times and then sleeps ever longer, a fraction of a
millisecond at most. Any other waits for a descriptor: a command, a side-channel message, or the
time that its tempo allows.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable

import zmq

from neuron_push.config import Config
from neuron_push.rendezvous import Tempo
from neuron_push.transfer.driver import Driver
from neuron_push.transfer.sidechannel import SideChannel

# While a WRITE is in flight: look again at once some times, then sleep ever longer.
EAGER = 20
LONGEST_BUSY_SLEEP = 0.0002
# Progress calls per wake-up while bytes arrive, so that a socket is emptied and not sipped.
BURST = 16
# Idle rounds in which nothing happened before the thread looks half as often. Peers that connect
# wake it through the side channel, and requests of its own engine by a command.
ROUNDS_AWAKE = 10


class Pause:
    """Rests on the transfer thread; `nudge` and `end` are called from others.

    `pending` says whether commands wait. It is asked after `nudge` can see the thread asleep, so
    that no command is slept over.
    """

    def __init__(self, config: Config, pending: Callable[[], bool]) -> None:
        self._config = config
        self._pending = pending
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asleep = False
        self._idle_poll = select.poll()
        self._idle_poll.register(self._wake, select.POLLIN)

    # ------------------------------------------------------------------ main loop's side

    def nudge(self) -> None:
        """A command was appended: wake the thread if it sleeps."""
        if self._asleep:
            self.end()

    def end(self) -> None:
        """End this rest, or the next."""
        os.eventfd_write(self._wake, 1)

    @property
    def closed(self) -> bool:
        """Whether the thread has ended and the descriptor is gone."""
        return self._wake < 0

    def close(self) -> None:
        """Give the descriptor back, once the thread has ended."""
        wake, self._wake = self._wake, -1
        os.close(wake)

    # ------------------------------------------------------------------ thread's side

    def watch(self, side: SideChannel) -> None:
        """Wake for questions to this rank's server."""
        self._idle_poll.register(int(side.server.socket.get(zmq.FD)), select.POLLIN)

    def rest(self, driver: Driver, tempo: Tempo, idle: int, *, urgent: bool) -> None:
        """Rest after `idle` rounds without work; `urgent` while a fence is waited for."""
        if tempo == "busy" or urgent:
            if idle > EAGER:
                time.sleep(min(LONGEST_BUSY_SLEEP, 2e-5 * (idle - EAGER)))
            return
        config = self._config
        if tempo == "announced":
            for _ in range(BURST):
                driver.progress()
                if driver.events:
                    return
            self._sleep(driver.side, config.announced_poll)
        else:
            slower = 2 if idle > ROUNDS_AWAKE else 1
            seconds = config.idle_poll * slower if tempo == "idle" else config.waiting_poll
            self._sleep(driver.side, seconds)

    def _sleep(self, side: SideChannel, seconds: float) -> None:
        """Sleep until a command, a side-channel message or the time is up."""
        self._asleep = True
        try:
            if self._pending():
                return
            self._await(side, max(1, round(seconds * 1000)))
        finally:
            self._asleep = False

    def _await(self, side: SideChannel, milliseconds: int) -> None:
        """Wait for a descriptor. Idle threads wake 25 times a second, so this must be cheap.

        ZeroMQ's descriptor is edge-triggered: `asked` says that the server's socket is to be
        emptied.
        """
        sockets = side.client.sockets
        if sockets:  # questions are open, which is rare
            poller = zmq.Poller()
            for each in (self._wake, side.server.socket, *sockets):
                poller.register(each, zmq.POLLIN)
            woken = bool(poller.poll(milliseconds))
            side.asked = True
        else:
            ready = [descriptor for descriptor, _ in self._idle_poll.poll(milliseconds)]
            woken = self._wake in ready
            side.asked = side.asked or len(ready) > woken
        if woken:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
