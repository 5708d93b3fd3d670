"""The agents of one rank, one transport per generation, and what passes through them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from neuron_push.errors import NeuronPushError, PeerError, PlanError, TransportError
from neuron_push.limits import LIMITS, Limits
from neuron_push.plan import StagedPlan
from neuron_push.protocol import (
    Failed,
    Register,
    decode_notification,
    encode,
)
from neuron_push.rendezvous import Identity
from neuron_push.rendezvous.events import (
    Check,
    Close,
    Closed,
    Event,
    Fetch,
    Forget,
    Garbage,
    Load,
    Notified,
    Notify,
    Open,
    Opened,
    Post,
    ReadEnded,
    Unpack,
    Unpacked,
    Unreachable,
    WriteEnded,
)
from neuron_push.transfer.complaints import Complaints
from neuron_push.transfer.digest import Hashing, complaint, demand_host_memory, seal
from neuron_push.transfer.stager import Stager, bound, bound_read, failed
from neuron_push.transfer.tally import Tally
from neuron_push.transport import AgentName, Transport, TransportFactory, WriteId

logger = logging.getLogger(__name__)


class Agents:
    """What a driver does through NIXL; outcomes are appended to `events`."""

    def __init__(
        self,
        identity: Identity,
        open_transport: TransportFactory,
        stager: Stager,
        tally: Tally,
        events: deque[Event],
        *,
        digests: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        self._identity = identity
        self._open_transport = open_transport
        self._stager = stager
        self._tally = tally
        self._events = events
        self._digests = digests
        self._limits = limits
        self._complaints = Complaints(logger)
        if digests:
            demand_host_memory(identity)
        self.hashing = Hashing(identity, events)
        self._transports: dict[int, Transport] = {}
        self._writes: dict[WriteId, Transport] = {}
        self._reads: dict[WriteId, tuple[Transport, int]] = {}  # and its bytes

    def poll(self) -> None:
        """Collect messages and what has ended."""
        self.progress()
        self._poll_writes()
        self._poll_reads()
        self._poll_stager()
        self.hashing.step()

    def destroy(self) -> None:
        """Close every generation."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    # ------------------------------------------------------------------ generations

    def open(self, action: Open, now: float) -> None:
        """A new generation: an agent of its own."""
        name = self._identity.agent(action.generation)
        me = self._identity
        regions = (*me.geometry.regions, *([me.slabs.region] if me.slabs else []))
        transport = self._open_transport(name, regions)
        self._transports[action.generation] = transport
        self._events.append(Opened(action.generation, name, transport.metadata()))

    def close(self, action: Close, now: float) -> None:
        """A generation ends: nothing passes through its agent when this returns."""
        transport = self._transports.pop(action.generation)
        self._stager.finish(action.generation)
        transport.close()
        for write in [w for w, through in self._writes.items() if through is transport]:
            del self._writes[write]
        for read in [r for r, (through, _) in self._reads.items() if through is transport]:
            del self._reads[read]
        self._events.append(Closed(action.generation))

    def load(self, action: Load, now: float) -> None:
        """Make a generation know a peer's agent; a peer that cannot be known is unreachable."""
        try:
            self.add_peer(action.generation, action.agent, action.metadata)
        except NeuronPushError as error:
            self._events.append(Unreachable(action.agent, str(error)))

    def add_peer(self, generation: int, agent: AgentName, metadata: bytes) -> None:
        """Make a generation know a peer's agent; raises NeuronPushError if it cannot."""
        transport = self._transports.get(generation)
        if transport is None:
            raise TransportError(f"generation {generation} is closed")
        name = transport.add_peer(metadata)
        if name != agent:
            transport.remove_peer(name)
            raise PeerError(f"the metadata of {agent} names {name}")

    def forget(self, action: Forget, now: float) -> None:
        """A generation need not know a peer's agent any more."""
        transport = self._transports.get(action.generation)
        if transport is not None:
            try:
                transport.remove_peer(action.agent)
            except TransportError as error:
                logger.debug("forgetting %s: %s", action.agent, error)

    # ------------------------------------------------------------------ messages

    def notify(self, action: Notify, now: float) -> None:
        """Send one message."""
        transport = self._transports.get(action.generation)
        if transport is None:
            return
        payload = encode(action.message)
        if len(payload) > self._limits.notification:
            self._too_long(action, len(payload))
            return
        try:
            transport.notify(action.agent, payload)
        except TransportError as error:
            self._events.append(Unreachable(action.agent, str(error)))

    def _too_long(self, action: Notify, nbytes: int) -> None:
        """The peer would not read it. A registration fails as if the peer had said so."""
        message, most = action.message, self._limits.notification
        kind = type(message).__name__
        reason = (
            f"{kind} takes {nbytes} bytes; limits.notification is {most} (set it on both engines)"
        )
        logger.warning("to %s: %s", action.agent, reason)
        if isinstance(message, Register):
            self._events.append(Notified(action.agent, Failed(message.attempt, reason)))

    def progress(self) -> None:
        """Let the transports move bytes that peers send, and take their messages."""
        for transport in list(self._transports.values()):
            for agent, payload in transport.notifications():
                try:
                    self._events.append(Notified(agent, decode_notification(payload, self._limits)))
                except PeerError as error:
                    self._complaints.warn("from %s: %s", agent, error)
                    self._events.append(Garbage(agent, str(error)))

    # ------------------------------------------------------------------ WRITEs

    def post(self, action: Post, now: float) -> None:
        """Start a WRITE, packed first if its plan says so."""
        if isinstance(action.plan, StagedPlan) and action.plan.packs:
            self._move(self._stager.pack, action)
        else:
            self._write(action)

    def unpack(self, action: Unpack, now: float) -> None:
        """Bring a piece from its slab to its blocks, if it is what was sent."""
        wrong = complaint(action, self._identity)
        if wrong:
            self._events.append(Unpacked(action.job, wrong, corrupt=True))
        else:
            self._move(self._stager.unpack, action)

    def check(self, action: Check, now: float) -> None:
        """Compare what has landed in blocks with what was sent."""
        if action.source_blocks:
            self.hashing.check(action)
            return
        wrong = complaint(action, self._identity)
        self._events.append(Unpacked(action.job, wrong, corrupt=bool(wrong)))

    def _move(self, start: Callable[[Any], None], action: Post | Unpack) -> None:
        """Start packing or unpacking; what cannot be started fails its own transfer."""
        try:
            start(action)
        except Exception as error:  # noqa: BLE001  a device's runtime may raise anything
            self._events.append(failed(action, error))
        self._poll_stager()

    def _poll_stager(self) -> None:
        for ended in self._stager.poll():
            if isinstance(ended, Post):
                self._write(ended)
            else:
                self._events.append(ended)

    def _write(self, action: Post) -> None:
        done, transport = action.done, self._transports.get(action.generation)
        try:
            if transport is None:
                raise PlanError(f"generation {action.generation} is closed")
            copies, source, destination = bound(action, self._identity.geometry)
        except NeuronPushError as error:
            self._events.append(WriteEnded(action.write, "unposted", str(error)))
            return
        done = msgspec.structs.replace(done, nbytes=copies.nbytes, copies=len(source))
        if self._digests:
            done = msgspec.structs.replace(done, digest=seal(source, destination))
        self._tally.add("bytes", copies.nbytes)
        self._tally.add("copies", len(source))
        self._tally.add("transfer_copies_size", len(source))
        payload = encode(done)
        try:
            if not len(source):  # a window that holds none of these tokens
                transport.notify(action.agent, payload)
                self._events.append(WriteEnded(action.write, "done"))
                return
            memory = (
                self._identity.geometry.regions[0].memory,
                action.destination.regions[0].memory,
            )
            transport.post(action.write, action.agent, source, destination, memory, payload)
        except PlanError as error:
            self._events.append(WriteEnded(action.write, "unposted", str(error)))
            return
        except TransportError as error:
            self._events.append(WriteEnded(action.write, "broken", str(error)))
            return
        self._writes[action.write] = transport

    def _poll_writes(self) -> None:
        for write, transport in list(self._writes.items()):
            try:
                if transport.poll(write) == "pending":
                    continue
            except PlanError as error:
                self._events.append(WriteEnded(write, "unposted", str(error)))
            except TransportError as error:
                self._events.append(WriteEnded(write, "broken", str(error)))
            else:
                self._events.append(WriteEnded(write, "done"))
            del self._writes[write]

    # ------------------------------------------------------------------ READs

    def fetch(self, action: Fetch, now: float) -> None:
        """Start a READ, into our blocks or a slab of ours."""
        transport = self._transports.get(action.generation)
        try:
            if transport is None:
                raise PlanError(f"generation {action.generation} is closed")
            copies, source, destination = bound_read(action, self._identity.geometry)
        except NeuronPushError as error:
            self._events.append(ReadEnded(action.read, "unposted", str(error)))
            return
        self._tally.add("copies", len(source))
        self._tally.add("transfer_copies_size", len(source))
        if not len(source):  # other replicas, or a window, have all of these tokens
            self._events.append(ReadEnded(action.read, "done"))
            return
        memory = action.source.regions[0].memory, self._identity.geometry.regions[0].memory
        try:
            transport.fetch(action.read, action.agent, source, destination, memory)
        except TransportError as error:
            self._events.append(ReadEnded(action.read, "broken", str(error)))
            return
        self._reads[action.read] = transport, copies.nbytes

    def _poll_reads(self) -> None:
        for read, (transport, nbytes) in list(self._reads.items()):
            try:
                if transport.poll(read) == "pending":
                    continue
            except TransportError as error:
                self._events.append(ReadEnded(read, "broken", str(error)))
            else:
                self._events.append(ReadEnded(read, "done", nbytes=nbytes))
            del self._reads[read]
