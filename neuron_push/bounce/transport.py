"""WRITEs that are sent from slots of host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from neuron_push.bounce.copies import HostCopies
from neuron_push.errors import PlanError, ProtocolError
from neuron_push.geometry import Region
from neuron_push.transport import (
    AgentName,
    Descriptors,
    Transport,
    Wrapped,
    WriteId,
    WriteState,
)

__all__ = ["Slots", "StagedTransport"]


@dataclass
class Slots:
    """Equal pieces of host memory that WRITEs are sent from; shared by all generations."""

    region: Region
    size: int
    free: list[int] = field(default_factory=list)  # addresses

    @classmethod
    def make(cls, copies: HostCopies, number: int, size: int) -> Slots:
        """So many slots of this size."""
        base = copies.host(number * size).base
        return cls(Region(base, number * size, "DRAM", 0), size,
                   [base + index * size for index in range(number)])  # fmt: skip


@dataclass
class _Post:
    """A WRITE on its way through a slot: parts not sent yet, and the one that is."""

    peer: AgentName
    memory: tuple[str, str]
    payload: bytes
    parts: deque[tuple[Descriptors, Descriptors]]
    slot: int = 0
    inner: WriteId | None = None


class StagedTransport(Wrapped):
    """Sends what lies on the device from slots on the host, as many bytes at once as one holds.

    The notification leaves with the last part, once the others have landed. `post` and `poll` raise
    PlanError, with nothing in flight, if bytes cannot be copied.
    """

    def __init__(self, inner: Transport, copies: HostCopies, slots: Slots) -> None:
        super().__init__(inner)
        self._copies = copies
        self._slots = slots
        self._posts: dict[WriteId, _Post] = {}
        self._reads: dict[WriteId, WriteId] = {}  # and their numbers inside
        self._numbers = count(1)

    def post(
        self,
        write: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
        payload: bytes,
    ) -> None:
        """Start a WRITE; it waits for a slot if there is none."""
        if write in self._posts:
            raise ProtocolError(f"WRITE {write} was posted before")
        parts = deque(_parts(source, destination, self._slots.size))
        self._posts[write] = _Post(peer, memory, payload, parts)
        self._advance(write)

    def fetch(
        self,
        read: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
    ) -> None:
        """Start a READ, which goes to host memory: into a slab."""
        number = self._reads[read] = WriteId(next(self._numbers))
        self._inner.fetch(number, peer, source, destination, memory)

    def poll(self, write: WriteId) -> WriteState:
        """Drive one WRITE or READ; a slot that it has is free once it is done."""
        if write not in self._reads:
            return self._advance(write)
        state = self._inner.poll(self._reads[write])
        if state == "done":
            del self._reads[write]
        return state

    def close(self) -> None:
        """Destroy the agent; its slots are free afterwards."""
        self._inner.close()
        for post in self._posts.values():
            self._give(post)
        self._posts.clear()

    def _advance(self, write: WriteId) -> WriteState:
        post = self._posts.get(write)
        if post is None:
            raise ProtocolError(f"WRITE {write} is not in flight")
        if post.inner is not None:
            if self._inner.poll(post.inner) == "pending":
                return "pending"
            post.inner = None
        if not post.parts:
            self._give(post)
            del self._posts[write]
            return "done"
        if post.slot or self._slots.free:
            try:
                self._send(post)
            except PlanError:  # nothing of it is in flight
                self._give(post)
                del self._posts[write]
                raise
        return "pending"

    def _send(self, post: _Post) -> None:
        source, destination = post.parts[0]
        if not self._copies.on_host(int(source[0, 0])):
            post.slot = post.slot or self._slots.free.pop()
            source = self._stage(source, post.slot)
        post.parts.popleft()
        number = WriteId(-next(self._numbers))  # beside the core's own, which are positive
        payload = b"" if post.parts else post.payload
        self._inner.post(number, post.peer, source, destination, post.memory, payload)
        post.inner = number

    def _stage(self, source: Descriptors, slot: int) -> Descriptors:
        """Copy rows to a slot, one behind the other; where they are there."""
        lengths = source[:, 1].astype(np.int64)
        places = slot + np.concatenate(([0], np.cumsum(lengths)[:-1]))
        addresses = source[:, 0].astype(np.int64)
        breaks = np.flatnonzero(addresses[:-1] + lengths[:-1] != addresses[1:]) + 1
        starts = np.concatenate(([0], breaks, [len(lengths)]))
        for low, high in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            run = int(lengths[low:high].sum())
            self._copies.copy(int(places[low]), int(addresses[low]), run)
        staged = source.copy()
        staged[:, 0], staged[:, 2] = places, 0
        return staged

    def _give(self, post: _Post) -> None:
        if post.slot:
            self._slots.free.append(post.slot)
            post.slot = 0


def _parts(
    source: Descriptors, destination: Descriptors, most: int
) -> Iterator[tuple[Descriptors, Descriptors]]:
    """Rows in groups of at most `most` bytes; longer rows are cut."""
    rows: list[tuple[int, int, int, int, int]] = []
    room = most
    for (one, length, device), (two, _, theirs) in zip(
        source.tolist(), destination.tolist(), strict=True
    ):
        done = 0
        while done < length:
            piece = min(length - done, room)
            rows.append((one + done, two + done, piece, device, theirs))
            done, room = done + piece, room - piece
            if not room:
                yield _arrays(rows)
                rows, room = [], most
    if rows:
        yield _arrays(rows)


def _arrays(rows: list[tuple[int, int, int, int, int]]) -> tuple[Descriptors, Descriptors]:
    table = np.array(rows, np.uint64)
    return table[:, [0, 2, 3]], table[:, [1, 2, 4]]
