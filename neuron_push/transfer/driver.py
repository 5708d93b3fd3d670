"""Carries the core's actions out: transports, side channel, plans.

Belongs to the transfer thread. Every action ends in an event or nothing; an action that
fails becomes the event that fails its own transfer or peer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from neuron_push.commands import Report
from neuron_push.config import Config
from neuron_push.errors import NeuronPushError, PeerError, PlanError, TransportError
from neuron_push.protocol import (
    Address,
    Announce,
    Announced,
    EngineInfo,
    Events,
    Hello,
    RankInfo,
    Refusal,
    SideChannelMessage,
    Welcome,
    Who,
    clip,
    decode_notification,
    encode,
)
from neuron_push.rendezvous import Identity
from neuron_push.rendezvous.events import (
    Action,
    Answer,
    Close,
    Closed,
    Count,
    EngineFound,
    EngineMissing,
    Event,
    FindEngine,
    Forget,
    Garbage,
    Greet,
    Greeted,
    HelloArrived,
    Load,
    Note,
    Notified,
    Notify,
    Open,
    Opened,
    Post,
    Tell,
    Unpack,
    Unreachable,
    WriteEnded,
)
from neuron_push.sidechannel import Client, Request, Server
from neuron_push.tracing import batch_of
from neuron_push.transfer.stager import Stager, bound, failed
from neuron_push.transfer.tally import Tally
from neuron_push.transfer.tracer import Tracer
from neuron_push.transform import Mover
from neuron_push.transport import AgentName, Transport, TransportFactory, WriteId

logger = logging.getLogger(__name__)

# How long to wait before the own listener is asked again while the engine starts.
RETRY = 0.2
# Rounds of the loop between two looks at the server's socket when nothing says it was asked.
ROUNDS = 8


@dataclass(slots=True)
class Search:
    """A prefill engine being looked for: its answer, and our own engine's."""

    address: Address
    deadline: float
    info: EngineInfo | None = None


class Driver:
    """The hands of one rank's core."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        open_transport: TransportFactory,
        listener: Address,
        tally: Tally,
        tell: Callable[[Report], None],
        tracer: Tracer | None = None,
        make_mover: Callable[[], Mover] | None = None,
    ) -> None:
        self._tracer = tracer
        self._config = config
        self._identity = identity
        self._open_transport = open_transport
        self._listener = listener
        self._tally = tally
        self._tell = tell
        self.events: deque[Event] = deque()
        self.server = Server(config.side_channel_host, 0)
        self.client = Client()
        self._stager = Stager(identity.slabs, make_mover)
        self._transports: dict[int, Transport] = {}
        self._writes: dict[WriteId, Transport] = {}
        self._searches: dict[Address, Search] = {}
        self._own: EngineInfo | None = None
        # Whether the server's socket may hold questions; looked at now and then in any case,
        # since a busy thread does not wait for its descriptor.
        self.asked = True
        self._rounds = 0
        self._asking_own = False
        self._retry_at = 0.0
        self.announced = False
        self._actions: dict[type, Callable[..., None]] = {
            Open: self._open, Close: self._close, FindEngine: self._find, Greet: self._greet,
            Answer: self._answer, Load: self._load, Forget: self._forget, Notify: self._notify,
            Post: self._post, Unpack: self._unpack,
            Tell: lambda action, now: self._tell(action.report),
            Note: lambda action, now: logger.warning("%s", action.text),
            Count: lambda action, now: tally.add(action.name, action.value, action.label),
        }  # fmt: skip

    def carry_out(self, action: Action, now: float) -> None:
        """Do what the core asked for."""
        self._actions[type(action)](action, now)

    def poll(self, now: float) -> bool:
        """Collect events from peers and transports; whether there was any."""
        before = len(self.events)
        self._poll_server()
        self._poll_client(now)
        self._poll_transports()
        self._poll_writes()
        self._poll_stager()
        self._poll_own(now)
        return len(self.events) > before

    def progress(self) -> None:
        """Let the transports move bytes that peers send."""
        self._poll_transports()

    def close(self) -> None:
        """Destroy every agent, then the side channel. Memory may be freed afterwards."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        self.client.close()
        self.server.close()

    # ------------------------------------------------------------------ generations

    def _open(self, action: Open, now: float) -> None:
        name = self._identity.agent(action.generation)
        me = self._identity
        regions = (*me.geometry.regions, *([me.slabs.region] if me.slabs else []))
        transport = self._open_transport(name, regions)
        self._transports[action.generation] = transport
        self.events.append(Opened(action.generation, name, transport.metadata()))

    def _close(self, action: Close, now: float) -> None:
        transport = self._transports.pop(action.generation)
        self._stager.finish(action.generation)
        transport.close()
        for write in [w for w, through in self._writes.items() if through is transport]:
            del self._writes[write]
        self.events.append(Closed(action.generation))

    def _load(self, action: Load, now: float) -> None:
        try:
            self._add_peer(action.generation, action.agent, action.metadata)
        except NeuronPushError as error:
            self.events.append(Unreachable(action.agent, str(error)))

    def _add_peer(self, generation: int, agent: AgentName, metadata: bytes) -> None:
        transport = self._transports.get(generation)
        if transport is None:
            raise TransportError(f"generation {generation} is closed")
        name = transport.add_peer(metadata)
        if name != agent:
            transport.remove_peer(name)
            raise PeerError(f"the metadata of {agent} names {name}")

    def _forget(self, action: Forget, now: float) -> None:
        transport = self._transports.get(action.generation)
        if transport is not None:
            try:
                transport.remove_peer(action.agent)
            except TransportError as error:
                logger.debug("forgetting %s: %s", action.agent, error)

    # ------------------------------------------------------------------ side channel

    def _find(self, action: FindEngine, now: float) -> None:
        deadline = now + self._config.greeting_timeout
        self._searches[action.address] = Search(action.address, deadline)
        self._ask(("find", action.address), action.address, Who(), now)

    def _greet(self, action: Greet, now: float) -> None:
        self._ask(("greet", action.link), action.address, action.hello, now)

    def _ask(
        self, key: tuple[str, object], address: Address, message: SideChannelMessage, now: float
    ) -> None:
        try:
            self.client.ask(key, address, message, self._config.greeting_timeout, now)
        except TransportError as error:
            self._on_answer(key, error)

    def _answer(self, action: Answer, now: float) -> None:
        assert isinstance(action.token, Request)
        message = action.message
        if isinstance(message, Welcome):
            assert isinstance(action.token.message, Hello)
            agent = AgentName(action.token.message.agent)
            try:
                self._add_peer(action.generation, agent, action.metadata)
            except NeuronPushError as error:
                self.events.append(Unreachable(agent, str(error)))
                message = Refusal(clip(str(error)))
        action.token.answer(message)

    def _poll_server(self) -> None:
        self._rounds += 1
        if not self.asked and self._rounds % ROUNDS:
            return
        requests = self.server.poll()
        self.asked = bool(requests)
        for request in requests:
            if isinstance(request.message, Hello):
                self.events.append(HelloArrived(request, request.message))
            elif isinstance(request.message, Events):
                ring = self._tracer.ring if self._tracer else None
                source = f"{self._identity.engine} rank {self._identity.rank}"
                request.answer(batch_of(ring, source, request.message.after))
            else:
                kind = type(request.message).__name__
                request.answer(Refusal(f"a worker rank answers Hello and Events only, not {kind}"))

    def _poll_client(self, now: float) -> None:
        for key, outcome in self.client.poll(now):
            assert isinstance(key, tuple)
            self._on_answer(key, outcome)

    def _on_answer(self, key: tuple[str, object], outcome: SideChannelMessage | Exception) -> None:
        kind, subject = key
        reason = str(outcome)
        if kind == "find":
            assert isinstance(subject, Address)
            if isinstance(outcome, EngineInfo):
                self._searches[subject].info = outcome
            else:
                self._searches.pop(subject, None)
                self.events.append(EngineMissing(subject, clip(f"prefill engine: {reason}")))
        elif kind == "greet":
            assert isinstance(subject, int)
            answer = outcome if isinstance(outcome, Welcome) else Refusal(clip(reason))
            self.events.append(Greeted(subject, answer))
        elif kind == "own":
            self._asking_own = False
            if isinstance(outcome, EngineInfo) and len(outcome.ranks) >= outcome.world:
                self._own = outcome
        elif isinstance(outcome, Announced):
            self._asking_own, self.announced = False, True
        else:
            self._asking_own = False
            if self._searches or not isinstance(outcome, TransportError):
                logger.warning("own engine at %s: %s", self._listener, reason)

    def _poll_own(self, now: float) -> None:
        """Announce this rank until heard, learn our own engine's ranks, finish searches."""
        if not self._asking_own and now >= self._retry_at:
            self._retry_at = now + RETRY
            if not self.announced:
                self._asking_own = True
                me = self._identity
                slab_bytes = me.slabs.slab_bytes if me.slabs else 0
                info = RankInfo(
                    me.rank, me.incarnation, self.server.address, me.geometry, slab_bytes
                )
                announce = Announce(me.engine, info, me.semantics)
                self._ask(("announce", 0), self._listener, announce, now)
            elif self._searches and self._own is None:
                self._asking_own = True
                self._ask(("own", 0), self._listener, Who(), now)
        for search in list(self._searches.values()):
            if search.info is not None and self._own is not None:
                del self._searches[search.address]
                self.events.append(EngineFound(search.address, search.info, self._own))
            elif now >= search.deadline:
                del self._searches[search.address]
                self.client.forget(("find", search.address))
                reason = "not all ranks of the decode engine are up"
                self.events.append(EngineMissing(search.address, reason))

    # ------------------------------------------------------------------ transports

    def _notify(self, action: Notify, now: float) -> None:
        transport = self._transports.get(action.generation)
        if transport is None:
            return
        try:
            transport.notify(action.agent, encode(action.message))
        except TransportError as error:
            self.events.append(Unreachable(action.agent, str(error)))

    def _poll_transports(self) -> None:
        for transport in list(self._transports.values()):
            for agent, payload in transport.notifications():
                try:
                    self.events.append(Notified(agent, decode_notification(payload)))
                except PeerError as error:
                    logger.warning("from %s: %s", agent, error)
                    self.events.append(Garbage(agent, str(error)))

    def _post(self, action: Post, now: float) -> None:
        if action.plan.way == "packed":
            self._move(self._stager.pack, action)
        else:
            self._write(action)

    def _unpack(self, action: Unpack, now: float) -> None:
        self._move(self._stager.unpack, action)

    def _move(self, start: Callable[[Any], None], action: Post | Unpack) -> None:
        """Start packing or unpacking; what cannot be started fails its own transfer."""
        try:
            start(action)
        except Exception as error:  # noqa: BLE001  a device's runtime may raise anything
            self.events.append(failed(action, error))
        self._poll_stager()

    def _poll_stager(self) -> None:
        for ended in self._stager.poll():
            if isinstance(ended, Post):
                self._write(ended)
            else:
                self.events.append(ended)

    def _write(self, action: Post) -> None:
        done, transport = action.done, self._transports.get(action.generation)
        try:
            if transport is None:
                raise PlanError(f"generation {action.generation} is closed")
            copies, source, destination = bound(action, self._identity.geometry)
        except NeuronPushError as error:
            self.events.append(WriteEnded(action.write, "unposted", str(error)))
            return
        done = msgspec.structs.replace(done, nbytes=copies.nbytes, copies=len(source))
        self._tally.add("bytes", copies.nbytes)
        self._tally.add("copies", len(source))
        self._tally.add("transfer_copies_size", len(source))
        payload = encode(done)
        try:
            if not len(source):  # a window that holds none of these tokens
                transport.notify(action.agent, payload)
                self.events.append(WriteEnded(action.write, "done"))
                return
            memory = (
                self._identity.geometry.regions[0].memory,
                action.destination.regions[0].memory,
            )
            transport.post(action.write, action.agent, source, destination, memory, payload)
        except TransportError as error:
            self.events.append(WriteEnded(action.write, "broken", str(error)))
            return
        self._writes[action.write] = transport

    def _poll_writes(self) -> None:
        for write, transport in list(self._writes.items()):
            try:
                if transport.poll(write) == "pending":
                    continue
            except TransportError as error:
                self.events.append(WriteEnded(write, "broken", str(error)))
            else:
                self.events.append(WriteEnded(write, "done"))
            del self._writes[write]


__all__ = ["Driver"]
