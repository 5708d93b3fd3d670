"""What the engine hands to the transfer thread, and how the thread rests between two looks.

It rests by how soon something may happen. A busy thread looks again at once some times and then
sleeps ever longer, a fraction of a millisecond at most. Any other waits for a command, a
side-channel message, or the time that its tempo allows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue

import zmq

from neuron_push.accelerator import Fence
from neuron_push.config import Config
from neuron_push.rendezvous import Tempo
from neuron_push.transfer.bell import Bell
from neuron_push.transfer.driver import Driver
from neuron_push.transfer.sidechannel import SideChannel
from neuron_push.waiting import take

# While a WRITE is in flight: look again at once some times, then sleep ever longer.
EAGER = 20
LONGEST_BUSY_SLEEP = 0.0002
# Progress calls per wake-up while bytes arrive, so that a socket is emptied and not sipped.
BURST = 16
# Idle rounds in which nothing happened before the thread looks half as often, and those before it
# sleeps, if it has no prompt that a peer may ask for: then a peer that is already linked waits for
# this engine's own leg of the request. Peers that connect wake it through the side channel.
ROUNDS_AWAKE = 10
ROUNDS_DROWSY = 40
ASLEEP = 5  # times as long
# Longest sleep while questions of ours are open, which is rare.
ASKING = 0.001

# Packed commands, and the fence of the step that makes them true.
Handed = tuple[bytes, Fence | None]


class Pause:
    """Rests on the transfer thread until something is handed over; `put` and `end` are others'."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._handed: deque[Handed] = deque()
        # A put wakes the thread without giving up the interpreter lock, which the engine's main
        # loop would have to win back.
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._asleep = False  # whatever is handed over wakes it
        self._asked = False  # somebody asks over the side channel
        self._side: SideChannel | None = None
        self._bell: Bell | None = None
        self._rung = False  # and to be armed when the server's socket is empty

    # ------------------------------------------------------------------ main loop's side

    def put(self, commands: bytes, fence: Fence | None, wake: bool) -> None:
        """Hand packed commands over; they end this rest, or wait for its end if it is short."""
        self._handed.append((commands, fence))
        if wake or self._asleep:
            self._wakes.put(None)

    def ring(self) -> None:
        """Somebody asks over the side channel, or the thread is to stop: end this rest."""
        self._asked = True
        self._wakes.put(None)

    # ------------------------------------------------------------------ thread's side

    def watch(self, side: SideChannel) -> None:
        """Wake for questions to this rank's server."""
        self._side = side
        self._bell = Bell(int(side.server.socket.get(zmq.FD)), self.ring)

    def close(self) -> None:
        """Watch no more: the side channel may be closed."""
        if self._bell is not None:
            self._bell.close()

    def handed(self) -> Iterator[Handed]:
        """What was handed over, in order."""
        while not self._wakes.empty():  # before a look at what they were for
            self._wakes.get_nowait()
        if self._asked:
            self._asked = False
            self._rung = True
            if self._side is not None:
                self._side.asked = True
        while self._handed:
            yield self._handed.popleft()

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
        elif tempo == "waiting":
            self._sleep(driver.side, config.waiting_poll)
        elif tempo == "empty" and idle > ROUNDS_DROWSY:
            self._asleep = True
            if not self._handed:  # a moment ago it would not have woken this thread
                self._sleep(driver.side, config.idle_poll * ASLEEP)
            self._asleep = False
        else:
            self._sleep(driver.side, config.idle_poll * (2 if idle > ROUNDS_AWAKE else 1))

    def _sleep(self, side: SideChannel, seconds: float) -> None:
        """Sleep until a command, a side-channel message or the time is up."""
        if self._rung and self._bell is not None and not side.asked:
            # ZeroMQ's descriptor stays readable until the server's socket has been emptied.
            self._rung = False
            self._bell.arm()
        if side.client.sockets:
            seconds = min(seconds, ASKING)
        with suppress(Empty):
            take(self._wakes, seconds)


__all__ = ["Handed", "Pause"]
