"""The side channel without sockets: the real messages, the real listener, slow delivery."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

from neuron_push.errors import Disconnected, PeerError, ProtocolError, Refused, TransportError
from neuron_push.protocol import Address, Refusal, decode_side_channel, encode
from neuron_push.sidechannel import Listener
from neuron_push.sidechannel.server import Request

Outcome = object  # a message, or an exception


class Wire:
    """Who listens where, and what is on its way."""

    def __init__(self, world) -> None:
        self.world = world
        self.servers: dict[Address, Endpoint] = {}
        self.ports = itertools.count(20_000)

    def ask(self, address: Address, frame: bytes, answered: Callable[[Outcome], None]) -> None:
        """Carry a question; `answered` hears of its answer or of the end of the connection."""
        clock, weather = self.world.clock, self.world.weather
        if clock.chance(weather.mute):
            return  # the asker's own time-out ends it

        def arrive() -> None:
            server = self.servers.get(address)
            if server is None:
                self._back(answered, Disconnected(f"{address.host} refused the connection"))
            else:
                server.hear(Question(frame, answered, self))

        clock.at(clock.wait(weather.side), "side channel", arrive)

    def _back(self, answered: Callable[[Outcome], None], outcome: Outcome) -> None:
        clock = self.world.clock
        clock.at(clock.wait(self.world.weather.side), "side channel", lambda: answered(outcome))


@dataclass(eq=False)
class Question:
    """A question at its server; also what `Request` takes for the server it answers through."""

    frame: bytes
    answered: Callable[[Outcome], None]
    wire: Wire
    over: bool = False

    def request(self) -> Request:
        return Request(decode_side_channel(self.frame), b"", self)  # type: ignore[arg-type]

    def reply(self, _: bytes, frame: bytes) -> None:
        if not self.over:
            self.over = True
            self.wire._back(self.answered, read(frame))

    def lost(self) -> None:
        if not self.over:
            self.over = True
            self.wire._back(self.answered, Disconnected("closed the connection"))


def read(frame: bytes) -> Outcome:
    try:
        message = decode_side_channel(frame)
    except PeerError as error:
        return error
    return Refused(message.reason) if isinstance(message, Refusal) else message


class Endpoint:
    """What listens at an address. `when_awake` runs what its process does, once it may."""

    def __init__(self, wire: Wire, address: Address, when_awake: Callable) -> None:
        self.address = address
        self._wire, self._when_awake = wire, when_awake
        self._open: list[Question] = []
        wire.servers[address] = self

    def hear(self, question: Question) -> None:
        self._open.append(question)
        self._when_awake(lambda: self.take(question))

    def take(self, question: Question) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self._wire.servers.get(self.address) is self:
            del self._wire.servers[self.address]
        for question in self._open:
            question.lost()


class RankServer(Endpoint):
    """In place of a transfer thread's `Server`."""

    def __init__(self, wire: Wire, host: str, when_awake: Callable, nudge: Callable) -> None:
        super().__init__(wire, Address(host, next(wire.ports)), when_awake)
        self._inbox: list[Question] = []
        self._nudge = nudge

    def take(self, question: Question) -> None:
        self._inbox.append(question)
        self._nudge()

    def poll(self) -> list[Request]:
        inbox, self._inbox = self._inbox, []
        return [question.request() for question in inbox]


class MemoryListener(Listener):
    """The engine's listener, asked directly instead of through its thread."""

    def __init__(
        self, engine, host, port, describe, explain, holds, ring, keys, limits, *, process
    ):
        self._engine, self._describe = engine, describe
        self._explain, self._holds, self._ring, self._keys = explain, holds, ring, keys
        self._limits = limits
        self._lock = threading.Lock()
        self._announced = {}
        self.address = Address(host, port)
        self.endpoint = _ListenerEndpoint(process.world.wire, self.address, process.when_awake)
        self.endpoint.listener = self

    def close(self) -> None:
        self.endpoint.close()


class _ListenerEndpoint(Endpoint):
    listener: MemoryListener

    def take(self, question: Question) -> None:
        self.listener._serve(question.request())


class MemoryClient:
    """In place of a transfer thread's `Client`."""

    sockets = ()

    def __init__(self, wire: Wire, nudge: Callable) -> None:
        self._wire, self._nudge = wire, nudge
        self._deadlines: dict[object, float] = {}
        self._serials: dict[object, int] = {}
        self._ended: list[tuple[object, Outcome]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._deadlines)

    def ask(self, key, address, message, timeout, now) -> None:
        if key in self._deadlines:
            raise ProtocolError(f"question {key!r} is still open")
        self._deadlines[key] = now + timeout
        serial = self._serials[key] = next(self._count)

        def answered(outcome: Outcome) -> None:
            if self._serials.get(key) == serial:
                self._ended.append((key, outcome))
                del self._deadlines[key], self._serials[key]
                self._nudge()

        self._wire.ask(address, encode(message), answered)

    def poll(self, now):
        for key, deadline in list(self._deadlines.items()):
            if now >= deadline:
                self.forget(key)
                self._ended.append((key, TransportError("no answer in time")))
        ended, self._ended = self._ended, []
        return ended

    def forget(self, key) -> None:
        self._deadlines.pop(key, None)
        self._serials.pop(key, None)
        self._ended = [each for each in self._ended if each[0] != key]

    def close(self) -> None:
        for key in list(self._deadlines):
            self.forget(key)
