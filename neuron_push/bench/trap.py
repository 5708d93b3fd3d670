"""Traps: a rank that stops, dies or falls silent at a named point of a transfer.

On a prefill rank:
    registered               its `Registered` has left
    matched                  a WRITE is about to be posted
    posted                   a WRITE has been posted
    before the notification  a WRITE is never looked at again: its bytes travel, its `Done` does not
On a decode rank:
    registered               its `Register` has left
    matched                  `Soon` has come
    half landed              the first of the watched blocks begins to fill
    before the notification  the watched blocks are full
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from neuron_push.errors import PeerError
from neuron_push.geometry import Region
from neuron_push.nixl import NixlTransport
from neuron_push.protocol import Register, Registered, Soon, decode_notification
from neuron_push.transport import AgentName, Descriptors, WriteId, WriteState

__all__ = ["Trap", "Trapping"]

Bytes = npt.NDArray[np.uint8]
Act = Callable[[], None]


def _signal_this_thread(number: int) -> Callable[[], None]:
    # To the thread itself, so that it does not run on until another one has taken the signal.
    return lambda: signal.pthread_kill(threading.get_ident(), number)


class Trap:
    """Acts once, when its point is reached. Set from any thread, sprung on the transfer thread."""

    SIGNALS: Final = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}

    def __init__(self) -> None:
        self.holding = ""  # WRITEs to this engine are not looked at
        self.running = threading.Event()  # cleared: the transfer thread stands still
        self.running.set()
        self.closed: list[float] = []  # when agents were destroyed
        self.outgoing: list[tuple[AgentName, bytes]] = []  # notifications to send as they are
        self._loses: Callable[[bytes], bool] = lambda payload: False
        self._point = ""
        self._peer = ""
        self._act: Act | None = None
        self._watched: list[Bytes] = []

    def arm(self, point: str, act: str | Act, peer: str, watched: Sequence[Bytes] = ()) -> None:
        """Act when `point` is reached in a transfer with an engine.

        "stop" and "kill" are signals to this process; "hold" leaves WRITEs alone and "freeze"
        the transport. `watched` are the blocks that a decode rank receives into.
        """
        self._point, self._peer, self._watched = point, f"{peer}/", list(watched)
        if not isinstance(act, str):
            self._act = act
        elif act in self.SIGNALS:
            number = self.SIGNALS[act]
            # To the thread itself, which would run on until another one has taken the signal.
            self._act = lambda: signal.pthread_kill(threading.get_ident(), number)
        else:
            self._act = self.running.clear if act == "freeze" else self._hold

    def disarm(self) -> None:
        """Let go of what is held, and do not act any more."""
        self._act = None
        self.holding = ""

    def lose(self, which: Callable[[bytes], bool]) -> None:
        """Lose notifications for which this is true."""
        self._loses = which

    def loses(self, payload: bytes) -> bool:
        """Whether a notification is lost."""
        return self._loses(payload)

    def reached(self, point: str, peer: str) -> None:
        """The transfer with this peer is at this point."""
        if point == self._point and peer.startswith(self._peer) and self._act is not None:
            act, self._act = self._act, None
            act()

    def _hold(self) -> None:
        self.holding = self._peer

    def look(self) -> None:
        """Compare the watched blocks with what the point asks for."""
        if self._act is None or not self._watched:
            return
        first = self._watched[0].any()
        full = all(part[..., -1].all() for part in self._watched)
        if first and (self._point == "half landed" or full):
            self.reached(self._point, self._peer)

    def holds(self, peer: str) -> bool:
        """Whether a WRITE to this peer is to be left alone."""
        return bool(self.holding) and peer.startswith(self.holding)


class Trapping:
    """A transport factory whose transports share a trap."""

    def __init__(self, trap: Trap) -> None:
        self._trap = trap

    def __call__(self, name: AgentName, regions: Sequence[Region]) -> _Trapped:
        return _Trapped(name, regions, self._trap)


class _Trapped(NixlTransport):
    def __init__(self, name: AgentName, regions: Sequence[Region], trap: Trap) -> None:
        super().__init__(name, regions)
        self._trap = trap

    def notify(self, peer: AgentName, payload: bytes) -> None:
        if self._trap.loses(payload):
            return
        super().notify(peer, payload)
        if isinstance(decode_notification(payload), Register | Registered):
            # Sent is not gone: the socket takes it when the agent works.
            self._trap.reached("registered", peer)

    def notifications(self) -> list[tuple[AgentName, bytes]]:
        self._trap.running.wait()
        while self._trap.outgoing:
            super().notify(*self._trap.outgoing.pop(0))
        taken = super().notifications()
        self._trap.look()
        for sender, payload in taken:
            try:
                soon = isinstance(decode_notification(payload), Soon)
            except PeerError:
                continue
            if soon:
                self._trap.reached("matched", sender)
        return taken

    def post(
        self,
        write: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
        payload: bytes,
    ) -> None:
        self._trap.reached("matched", peer)
        super().post(write, peer, source, destination, memory, payload)
        self._trap.reached("posted", peer)

    def poll(self, write: WriteId) -> WriteState:
        posted = self._posted.get(write)
        peer = posted.peer if posted else ""
        self._trap.reached("before the notification", peer)
        return "pending" if self._trap.holds(peer) else super().poll(write)

    def close(self) -> None:
        open_before = self._agent is not None
        super().close()
        if open_before:
            self._trap.closed.append(time.monotonic())
