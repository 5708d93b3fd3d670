"""The side channel of one rank: its own server, and questions to other engines and its own."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from neuron_push.config import Config
from neuron_push.errors import TransportError
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
)
from neuron_push.rendezvous import Identity
from neuron_push.rendezvous.events import (
    EngineFound,
    EngineMissing,
    Event,
    FindEngine,
    Greet,
    Greeted,
    HelloArrived,
)
from neuron_push.sidechannel import Client, Keyring, Server
from neuron_push.tracing import Ring, batch_of

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
    asking: bool = True
    again: float = 0.0  # when an engine that is still starting is asked again

    @property
    def complete(self) -> bool:
        return self.info is not None and len(self.info.ranks) >= self.info.world


class SideChannel:
    """What a driver does over the side channel; outcomes are appended to `events`."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        listener: Address,
        trace: Ring | None,
        events: deque[Event],
    ) -> None:
        self._config = config
        self._identity = identity
        self._listener = listener
        self._trace = trace
        self._events = events
        ring = Keyring.of(config.side_channel_keys)
        self.server = Server(config.side_channel_host, 0, ring, config.limits)
        self.client = Client(ring, config.limits)
        # Whether the server's socket may hold questions; looked at now and then in any case,
        # since a busy thread does not wait for its descriptor.
        self.asked = True
        self.announced = False
        self._rounds = 0
        self._searches: dict[Address, Search] = {}
        self._own: EngineInfo | None = None
        self._asking_own = False
        self._retry_at = 0.0

    def poll(self, now: float) -> None:
        """Collect questions and answers."""
        self._poll_server()
        self._poll_client(now)

    def close(self) -> None:
        """Close both sockets."""
        self.client.close()
        self.server.close()

    def find(self, action: FindEngine, now: float) -> None:
        """Ask a prefill engine who it is; `seek` answers."""
        deadline = now + self._config.greeting_timeout
        search = self._searches.get(action.address)
        if search is not None:  # asked already, and not answered yet
            search.deadline = deadline
            return
        self._searches[action.address] = Search(action.address, deadline)
        self._ask(("find", action.address), action.address, Who(), now)

    def greet(self, action: Greet, now: float) -> None:
        """Say hello to a prefill rank."""
        self._ask(("greet", action.link), action.address, action.hello, now)

    def _ask(
        self, key: tuple[str, object], address: Address, message: SideChannelMessage, now: float
    ) -> None:
        try:
            self.client.ask(key, address, message, self._config.greeting_timeout, now)
        except TransportError as error:
            self._on_answer(key, error)

    def _poll_server(self) -> None:
        self._rounds += 1
        if not self.asked and self._rounds % ROUNDS:
            return
        requests = self.server.poll()
        self.asked = bool(requests)
        for request in requests:
            if isinstance(request.message, Hello):
                self._events.append(HelloArrived(request, request.message))
            elif isinstance(request.message, Events):
                source = f"{self._identity.engine} rank {self._identity.rank}"
                request.answer(batch_of(self._trace, source, request.message.after))
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
                search = self._searches[subject]
                search.info, search.asking = outcome, False
            else:
                self._searches.pop(subject, None)
                self._events.append(EngineMissing(subject, clip(f"prefill engine: {reason}")))
        elif kind == "greet":
            assert isinstance(subject, int)
            answer = outcome if isinstance(outcome, Welcome) else Refusal(clip(reason))
            self._events.append(Greeted(subject, answer))
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

    def seek(self, now: float) -> None:
        """Announce this rank until heard, learn our own engine's ranks, finish searches."""
        self._ask_own(now)
        for search in list(self._searches.values()):
            late = now >= search.deadline
            if search.info and self._own and (search.complete or late):
                del self._searches[search.address]
                self.client.forget(("find", search.address))
                self._events.append(EngineFound(search.address, search.info, self._own))
            elif search.info and not search.asking and not search.complete and now >= search.again:
                search.asking, search.again = True, now + RETRY
                self._ask(("find", search.address), search.address, Who(), now)
            elif late:
                del self._searches[search.address]
                self.client.forget(("find", search.address))
                reason = "not all ranks of the decode engine are up"
                self._events.append(EngineMissing(search.address, reason))

    def _ask_own(self, now: float) -> None:
        """Announce this rank until heard; then ask for the others' while a search needs them."""
        if self._asking_own or now < self._retry_at:
            return
        self._retry_at = now + RETRY
        if not self.announced:
            self._asking_own = True
            me = self._identity
            slabs = (me.slabs.slab_bytes, me.slabs.sole) if me.slabs else ()
            info = RankInfo(me.rank, me.incarnation, self.server.address, me.geometry, *slabs)
            announce = Announce(me.engine, info, me.semantics)
            self._ask(("announce", 0), self._listener, announce, now)
        elif self._searches and self._own is None:
            self._asking_own = True
            self._ask(("own", 0), self._listener, Who(), now)
