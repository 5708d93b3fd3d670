"""The fabric and the agents on it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from neuron_push.errors import Disconnected, ProtocolError, TransportError
from neuron_push.geometry import Region
from neuron_push.memory.space import AddressSpace, Bytes
from neuron_push.transport import AgentName, Descriptors, WriteId, WriteState

__all__ = ["Letter", "MemoryFabric", "MemoryTransport", "PostedWrite"]


@dataclass(eq=False)
class PostedWrite:
    """One WRITE or READ, from `post` until it is done or one of its agents is closed.

    `source` is the agent that posted it, `target` its peer; of a READ, the bytes are the peer's.
    """

    id: WriteId
    source: MemoryTransport
    target: MemoryTransport
    # (source address, destination address, length) per row.
    rows: list[tuple[int, int, int]]
    payload: bytes
    reads: bool = False
    # What has landed, in bytes from the first row on.
    landed: int = 0
    # Set when the sender's process died: what it had sent, wherever that is on its way.
    sent: bytes | None = None
    done: bool = False
    broken: bool = False

    @property
    def nbytes(self) -> int:
        return sum(length for _, _, length in self.rows)


@dataclass(eq=False)
class Letter:
    """One notification on its way."""

    source: AgentName
    target: MemoryTransport
    payload: bytes


@dataclass(eq=False)
class MemoryFabric(AddressSpace):
    """All memory, agents, WRITEs and notifications of one test. Any thread may call."""

    auto_land: bool = True
    auto_deliver: bool = True
    # WRITEs that may still move bytes, in order of posting.
    writes: list[PostedWrite] = field(default_factory=list)
    # Notifications that have not been delivered, in order of sending.
    letters: list[Letter] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._serials = itertools.count(1)
        self._agents: dict[bytes, MemoryTransport] = {}

    def open(self, name: AgentName, regions: Sequence[Region]) -> MemoryTransport:
        """A `TransportFactory`."""
        with self.lock:
            transport = MemoryTransport(self, name, regions, next(self._serials))
            self._agents[transport.metadata()] = transport
            return transport

    def land(self, write: PostedWrite, nbytes: int | None = None) -> int:
        """Move the next bytes of a WRITE (None: all that is left); returns how many landed.

        A live sender's bytes are read now, as an RDMA engine does, not when it posted.
        """
        with self.lock:
            if write not in self.writes:
                return 0
            stop = write.nbytes if nbytes is None else min(write.nbytes, write.landed + nbytes)
            before = write.landed
            offset = 0
            for source, destination, length in write.rows:
                low, high = max(before - offset, 0), min(stop - offset, length)
                if low < high:
                    self.view(destination + low, high - low)[:] = self._outgoing(
                        write, source + low, offset + low, high - low
                    )
                offset += length
            write.landed = stop
            return stop - before

    def deliver(self, index: int = 0) -> None:
        """Hand over one letter; one to an agent that was closed is lost."""
        with self.lock:
            letter = self.letters.pop(index)
            if not letter.target.closed:
                letter.target.inbox.append((letter.source, letter.payload))

    def drop(self, index: int = 0) -> Letter:
        """Lose one letter."""
        with self.lock:
            return self.letters.pop(index)

    def duplicate(self, index: int = 0) -> None:
        """Copy one letter to the end of the queue."""
        with self.lock:
            self.letters.append(self.letters[index])

    def reorder(self, order: Sequence[int]) -> None:
        """Put the letters in another order, given as a permutation of their indices."""
        with self.lock:
            self.letters = [self.letters[index] for index in order]

    def disconnect(self, one: AgentName, other: AgentName) -> None:
        """Break the connection both ways; it lasts until a peer is added again.

        Letters on their way are lost. WRITEs on their way report an error, and their bytes may
        land all the same.
        """
        with self.lock:
            pair = {one, other}
            for agent in self._agents.values():
                if agent.name in pair:
                    agent.lost.update(pair - {agent.name})
            self.letters = [x for x in self.letters if {x.source, x.target.name} != pair]
            for write in self.writes:
                if {write.source.name, write.target.name} == pair:
                    write.broken = True

    def kill(self, name: AgentName) -> None:
        """End an agent as the death of its process does: what it had posted may still land."""
        with self.lock:
            for agent in [a for a in self._agents.values() if a.name == name and not a.closed]:
                for write in self.writes:
                    if write.source is agent and write.sent is None and not write.reads:
                        write.sent = b"".join(
                            self.view(source, length).tobytes() for source, _, length in write.rows
                        )
                agent.closed = True
                self.writes = [
                    w
                    for w in self.writes
                    if w.target is not agent and not (w.reads and w.source is agent)
                ]

    def _outgoing(self, write: PostedWrite, address: int, offset: int, length: int) -> Bytes:
        if write.sent is not None:
            return np.frombuffer(write.sent, np.uint8)[offset : offset + length]
        return self.view(address, length)

    def _find(self, metadata: bytes) -> MemoryTransport:
        agent = self._agents.get(metadata)
        if agent is None:
            raise TransportError("the peer's agent metadata is malformed")
        if agent.closed:
            raise TransportError(f"cannot load the metadata of {agent.name}: nobody listens there")
        return agent


class MemoryTransport:
    """One agent on a `MemoryFabric`; made by `MemoryFabric.open`."""

    def __init__(
        self, fabric: MemoryFabric, name: AgentName, regions: Sequence[Region], serial: int
    ) -> None:
        self._fabric = fabric
        self._name = name
        self._regions = tuple(regions)
        self._serial = serial
        self._peers: dict[AgentName, MemoryTransport] = {}
        self._posted: dict[WriteId, PostedWrite] = {}
        # Delivered notifications that have not been taken.
        self.inbox: list[tuple[AgentName, bytes]] = []
        # Peers whose connection was broken since they were added.
        self.lost: set[AgentName] = set()
        self.closed = False

    @property
    def name(self) -> AgentName:
        """Unique name of the agent."""
        return self._name

    def metadata(self) -> bytes:
        """Differs between two agents of one name, as NIXL's does."""
        self._check_open()
        return f"{self._serial}:{self._name}".encode()

    def add_peer(self, metadata: bytes) -> AgentName:
        """Load a peer; mends a broken connection."""
        with self._fabric.lock:
            self._check_open()
            peer = self._fabric._find(metadata)
            if peer.name == self._name:
                raise TransportError(f"the peer's agent has our own name {peer.name!r}")
            self._peers[peer.name] = peer
            self.lost.discard(peer.name)
            return peer.name

    def remove_peer(self, peer: AgentName) -> None:
        """Forget a peer; WRITEs posted before go on."""
        with self._fabric.lock:
            self._check_open()
            self._peers.pop(peer, None)

    def notify(self, peer: AgentName, payload: bytes) -> None:
        """Send a notification."""
        with self._fabric.lock:
            self._send(self._reach(peer), payload)

    def notifications(self) -> list[tuple[AgentName, bytes]]:
        """Take what has been delivered."""
        with self._fabric.lock:
            self._check_open()
            taken, self.inbox = self.inbox, []
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
        """Start a WRITE; nothing lands before `poll` or the fabric's `land`."""
        with self._fabric.lock:
            target = self._reach(peer)
            rows = _rows(source, destination)
            self._start(PostedWrite(write, self, target, rows, payload), (self, target), memory)

    def fetch(
        self,
        read: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
    ) -> None:
        """Start a READ; nothing lands before `poll` or the fabric's `land`."""
        with self._fabric.lock:
            owner = self._reach(peer)
            posted = PostedWrite(read, self, owner, _rows(source, destination), b"", reads=True)
            self._start(posted, (owner, self), memory)

    def poll(self, write: WriteId) -> WriteState:
        """Drive one WRITE; sends its notification once all bytes have landed."""
        with self._fabric.lock:
            self._check_open()
            posted = self._posted.get(write)
            if posted is None:
                raise ProtocolError(f"WRITE {write} is not in flight")
            if posted.target.closed or posted.broken:
                posted.broken = True
                raise Disconnected(f"lost a WRITE to {posted.target.name}")
            if self._fabric.auto_land:
                self._fabric.land(posted)
            if posted.landed < posted.nbytes:
                return "pending"
            posted.done = True
            del self._posted[write]
            self._fabric.writes.remove(posted)
            if not posted.reads:
                self._send(posted.target, posted.payload)
            return "done"

    def close(self) -> None:
        """Nothing from or to this agent lands afterwards."""
        with self._fabric.lock:
            self.closed = True
            self._posted.clear()
            self._peers.clear()
            self.inbox.clear()
            self._fabric.writes = [
                write for write in self._fabric.writes if self not in (write.source, write.target)
            ]

    def _start(
        self,
        posted: PostedWrite,
        ends: tuple[MemoryTransport, MemoryTransport],
        memory: tuple[str, str],
    ) -> None:
        """Post what goes from one of `ends` to the other, if both registered its memory."""
        if posted.id in self._posted:
            kind = "READ" if posted.reads else "WRITE"
            raise ProtocolError(f"{kind} {posted.id} was posted before")
        for *addresses, length in posted.rows:
            for end, address, kind in zip(ends, addresses, memory, strict=True):
                end._check_registered(address, length, kind)
        self._posted[posted.id] = posted
        self._fabric.writes.append(posted)

    def _send(self, target: MemoryTransport, payload: bytes) -> None:
        self._fabric.letters.append(Letter(self._name, target, bytes(payload)))
        if self._fabric.auto_deliver:
            self._fabric.deliver(len(self._fabric.letters) - 1)

    def _check_open(self) -> None:
        if self.closed:
            raise TransportError(f"agent {self._name} is closed")

    def _reach(self, peer: AgentName) -> MemoryTransport:
        self._check_open()
        target = self._peers.get(peer)
        if target is None:
            raise TransportError(f"peer {peer!r} is not loaded")
        if target.closed or peer in self.lost:
            raise Disconnected(f"{peer} is gone")
        return target

    def _check_registered(self, address: int, length: int, memory: str) -> None:
        for region in self._regions:
            inside = region.base <= address and address + length <= region.base + region.length
            if inside and region.memory == memory:
                return
        raise TransportError(f"{memory} at {address:#x} + {length} is not registered")


def _rows(source: Descriptors, destination: Descriptors) -> list[tuple[int, int, int]]:
    if source.shape != destination.shape or source.ndim != 2 or not len(source):
        raise ProtocolError(f"descriptors of shapes {source.shape} and {destination.shape}")
    if (source[:, 1] != destination[:, 1]).any():
        raise TransportError("source and destination rows differ in length")
    return [(int(s[0]), int(d[0]), int(s[1])) for s, d in zip(source, destination, strict=True)]
