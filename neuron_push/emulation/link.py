"""The cost model's network under real WRITEs: a WRITE is over when the modelled link is.

Bytes move at once, as fast as this machine can. What tells of them - the notification to the
peer and "done" to the sender - comes when the bytes have landed and the modelled time has passed,
whichever is later. WRITEs of one agent share its link one after the other; their latencies
overlap.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from neuron_push.emulation.cost import Clock, Latencies, RealClock
from neuron_push.geometry import Region
from neuron_push.transport import (
    AgentName,
    Descriptors,
    Transport,
    TransportFactory,
    Wrapped,
    WriteId,
    WriteState,
)

# No message to the peer: it is sent later, by itself.
_SILENT = b""


@dataclass
class _Flight:
    due: float
    peer: AgentName
    payload: bytes | None  # None: nobody is told
    landed: bool = False


class Linked(Wrapped):
    """Wraps a transport."""

    def __init__(self, inner: Transport, costs: Latencies, clock: Clock) -> None:
        super().__init__(inner)
        self._costs = costs
        self._clock = clock
        self._free_at = 0.0  # when the last WRITE has left
        self._flights: dict[WriteId, _Flight] = {}

    def post(
        self,
        write: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
        payload: bytes,
    ) -> None:
        begun = self._clock.now()
        self._inner.post(write, peer, source, destination, memory, _SILENT)
        self._flights[write] = self._flight(begun, source, peer, payload)

    def fetch(
        self,
        read: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
    ) -> None:
        begun = self._clock.now()
        self._inner.fetch(read, peer, source, destination, memory)
        self._flights[read] = self._flight(begun, source, peer, None)

    def _flight(
        self, begun: float, rows: Descriptors, peer: AgentName, payload: bytes | None
    ) -> _Flight:
        latency = self._costs.transfer(0)
        sending = self._costs.transfer(int(rows[:, 1].sum())) - latency
        self._free_at = max(begun, self._free_at) + sending
        return _Flight(self._free_at + latency, peer, payload)

    def poll(self, write: WriteId) -> WriteState:
        flight = self._flights.get(write)
        if flight is None:
            return self._inner.poll(write)  # which knows how to complain
        if not flight.landed:
            flight.landed = self._inner.poll(write) == "done"
        if not flight.landed or self._clock.now() < flight.due:
            return "pending"
        if flight.payload is not None:
            self._inner.notify(flight.peer, flight.payload)
        del self._flights[write]
        return "done"


def linked(
    plain: TransportFactory, costs: Latencies, clock: Clock | None = None
) -> TransportFactory:
    """A factory whose transports have the modelled link."""

    def open_transport(name: AgentName, regions: Sequence[Region]) -> Transport:
        return Linked(plain(name, regions), costs, clock or RealClock())

    return open_transport


def install(costs: Latencies) -> None:
    """Put the link under the connector's transports, in this process."""
    connector: Any = importlib.import_module("neuron_push.vllm.station")
    plain: Callable[..., TransportFactory] = getattr(connector.factory, "plain", connector.factory)

    def factory(*args: Any, **kwargs: Any) -> TransportFactory:
        return linked(plain(*args, **kwargs), costs)

    factory.plain = plain  # type: ignore[attr-defined]
    connector.factory = factory
