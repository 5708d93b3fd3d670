"""What the core needs of a transport.

A `Transport` is one agent of one *generation*: it owns registered memory and its
connections, and every call on it comes from the one thread that opened it. `nixl.py`
implements it over NIXL; `neuron_push.memory` over byte arrays, for tests.

Closing a transport is the only fence there is: neither deregistering memory, removing a
peer, releasing a handle nor a dead connection recalls a WRITE that was posted
(shared/experiments/fence.py, hol.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NewType, Protocol

import numpy as np
import numpy.typing as npt

from neuron_push.geometry import Region

AgentName = NewType("AgentName", str)
WriteId = NewType("WriteId", int)

# Rows of (address, length, device id).
Descriptors = npt.NDArray[np.uint64]
WriteState = Literal["pending", "done"]


class Transport(Protocol):
    """One agent over registered memory.

    Every method may raise `TransportError`; those that reach a peer raise `Disconnected`
    when the transport knows that the peer is gone.
    """

    @property
    def name(self) -> AgentName:
        """Unique name: engine/rank/incarnation/generation."""

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent's memory."""

    def add_peer(self, metadata: bytes) -> AgentName:
        """Load a peer's metadata (again, if it was loaded before) and name the peer."""

    def remove_peer(self, peer: AgentName) -> None:
        """Forget a peer. This is not a fence. Unknown peers are ignored."""

    def notify(self, peer: AgentName, payload: bytes) -> None:
        """Send a notification; it is delivered unless the connection breaks."""

    def notifications(self) -> list[tuple[AgentName, bytes]]:
        """Drive progress, and take what has arrived: (sender, payload) in order per sender."""

    def post(
        self,
        write: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
        payload: bytes,
    ) -> None:
        """Start a WRITE of source rows into the peer's destination rows.

        `memory` names the memory types ("DRAM" or "VRAM") of source and destination.
        `payload` reaches the peer as a notification after the bytes have landed.
        """

    def fetch(
        self,
        read: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
    ) -> None:
        """Start a READ of the peer's source rows into our destination rows; nobody is told.

        `memory` names the memory types of source and destination. Numbers are shared with WRITEs.
        """

    def poll(self, write: WriteId) -> WriteState:
        """Drive one WRITE or READ. "done" is terminal and frees its handle.

        An exception is *not* terminal: bytes may still move until this transport is closed.
        """

    def close(self) -> None:
        """Destroy the agent: after return nothing of it reads or writes memory. Idempotent."""


class TransportFactory(Protocol):
    """Opens a transport per generation, on the calling thread, over fixed regions."""

    def __call__(self, name: AgentName, regions: Sequence[Region]) -> Transport: ...


class Wrapped:
    """A transport that passes everything on; decorators override what they change."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    @property
    def name(self) -> AgentName:
        return self._inner.name

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def add_peer(self, metadata: bytes) -> AgentName:
        return self._inner.add_peer(metadata)

    def remove_peer(self, peer: AgentName) -> None:
        self._inner.remove_peer(peer)

    def notify(self, peer: AgentName, payload: bytes) -> None:
        self._inner.notify(peer, payload)

    def notifications(self) -> list[tuple[AgentName, bytes]]:
        return self._inner.notifications()

    def post(
        self,
        write: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
        payload: bytes,
    ) -> None:
        self._inner.post(write, peer, source, destination, memory, payload)

    def fetch(
        self,
        read: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
    ) -> None:
        self._inner.fetch(read, peer, source, destination, memory)

    def poll(self, write: WriteId) -> WriteState:
        return self._inner.poll(write)

    def close(self) -> None:
        self._inner.close()
