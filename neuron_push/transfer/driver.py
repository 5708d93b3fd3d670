"""Carries the core's actions out: transports, side channel, plans.

Belongs to the transfer thread. Every action ends in an event or nothing; an action that
fails becomes the event that fails its own transfer or peer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from neuron_push.commands import Report
from neuron_push.config import Config
from neuron_push.errors import NeuronPushError
from neuron_push.protocol import Address, Hello, Refusal, Welcome, clip
from neuron_push.rendezvous import Identity
from neuron_push.rendezvous.events import (
    Action,
    Answer,
    Check,
    Close,
    Count,
    Event,
    Fetch,
    FindEngine,
    Forget,
    Greet,
    Load,
    Note,
    Notify,
    Open,
    Post,
    Seal,
    Tell,
    Unpack,
    Unreachable,
)
from neuron_push.sidechannel import Request
from neuron_push.transfer.agents import Agents
from neuron_push.transfer.complaints import Complaints
from neuron_push.transfer.sidechannel import SideChannel
from neuron_push.transfer.stager import Stager
from neuron_push.transfer.tally import Tally
from neuron_push.transfer.tracer import Tracer
from neuron_push.transform import Mover
from neuron_push.transport import AgentName, TransportFactory

logger = logging.getLogger(__name__)


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
        self.events: deque[Event] = deque()
        ring = tracer.ring if tracer else None
        self.side = SideChannel(config, identity, listener, ring, self.events)
        stager = Stager(identity.slabs, make_mover)
        self._agents = Agents(
            identity, open_transport, stager, tally, self.events, digests=config.kv_digest,
            limits=config.limits,
        )  # fmt: skip
        side, agents, complaints = self.side, self._agents, Complaints(logger)
        self._actions: dict[type, Callable[..., None]] = {
            FindEngine: side.find, Greet: side.greet, Answer: self._answer,
            Open: agents.open, Close: agents.close, Load: agents.load, Forget: agents.forget,
            Notify: agents.notify, Post: agents.post, Fetch: agents.fetch, Unpack: agents.unpack,
            Check: agents.check, Seal: agents.hashing.seal,
            Tell: lambda action, now: tell(action.report),
            Note: lambda action, now: complaints.warn("%s", action.text),
            Count: lambda action, now: tally.add(action.name, action.value, action.label),
        }  # fmt: skip

    def carry_out(self, action: Action, now: float) -> None:
        """Do what the core asked for."""
        self._actions[type(action)](action, now)

    def poll(self, now: float) -> bool:
        """Collect events from peers and transports; whether there was any."""
        before = len(self.events)
        self.side.poll(now)
        self._agents.poll()
        self.side.seek(now)
        return len(self.events) > before

    def progress(self) -> None:
        """Let the transports move bytes that peers send."""
        self._agents.progress()

    def close(self) -> None:
        """Destroy every agent, then the side channel. Memory may be freed afterwards."""
        self._agents.destroy()
        self.side.close()

    def _answer(self, action: Answer, now: float) -> None:
        """Answer a hello; its agent is known here before it hears that it is welcome."""
        assert isinstance(action.token, Request)
        message = action.message
        if isinstance(message, Welcome):
            assert isinstance(action.token.message, Hello)
            agent = AgentName(action.token.message.agent)
            try:
                self._agents.add_peer(action.generation, agent, action.metadata)
            except NeuronPushError as error:
                self.events.append(Unreachable(agent, str(error)))
                message = Refusal(clip(str(error)))
        action.token.answer(message)


__all__ = ["Driver"]
