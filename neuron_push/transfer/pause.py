"""What the engine hands to the transfer thread, and how the thread rests between two looks.

It rests by how soon something may happen. A busy thread looks again at once some times and then
sleeps ever longer, a fraction of a millisecond at most. Any other waits for a command, a
side-channel message, or the time that its tempo allows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import zmq

from neuron_push.accelerator import Fence
from neuron_push.config import Config
from neuron_push.rendezvous import Tempo
from neuron_push.transfer.bell import Bell
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
# Longest sleep while questions of ours are open, which is rare.
ASKING = 0.001

# Packed commands, and the fence of the step that makes them true.
Handed = tuple[bytes, Fence | None]


class Pause:
    """Rests on the transfer thread until something is handed over; `put` and `end` are others'."""

    def __init__(self, config: Config) -> None:
        self._config = config
        # None: look around. A put wakes the thread without giving up the interpreter lock, which
        # the engine's main loop would have to win back.
        self._inbox: SimpleQueue[Handed | None] = SimpleQueue()
        self._taken: deque[Handed] = deque()
        self._side: SideChannel | None = None
        self._bell: Bell | None = None
        self._rung = False  # and to be armed when the server's socket is empty

    # ------------------------------------------------------------------ main loop's side

    def put(self, commands: bytes, fence: Fence | None) -> None:
        """Hand packed commands over; ends this rest."""
        self._inbox.put((commands, fence))

    def end(self) -> None:
        """End this rest, or the next."""
        self._inbox.put(None)

    # ------------------------------------------------------------------ thread's side

    def watch(self, side: SideChannel) -> None:
        """Wake for questions to this rank's server."""
        self._side = side
        self._bell = Bell(int(side.server.socket.get(zmq.FD)), self.end)

    def close(self) -> None:
        """Watch no more: the side channel may be closed."""
        if self._bell is not None:
            self._bell.close()

    def handed(self) -> Iterator[Handed]:
        """What was handed over, in order."""
        while self._taken:
            yield self._taken.popleft()
        while not self._inbox.empty():
            if (item := self._inbox.get_nowait()) is None:
                self._look_around()
            else:
                yield item

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
        if self._rung and self._bell is not None and not side.asked:
            # ZeroMQ's descriptor stays readable until the server's socket has been emptied.
            self._rung = False
            self._bell.arm()
        if side.client.sockets:
            seconds = min(seconds, ASKING)
        try:
            item = self._inbox.get(timeout=seconds)
        except Empty:
            return
        if item is None:
            self._look_around()
        else:
            self._taken.append(item)

    def _look_around(self) -> None:
        self._rung = True
        if self._side is not None:
            self._side.asked = True


__all__ = ["Handed", "Pause"]
