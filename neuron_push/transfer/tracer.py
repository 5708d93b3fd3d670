"""Turns what passes through the transfer thread into trace events.

The thread shows it every event it handles and every action it carries out; everything that a
timeline needs is among them, so the core knows nothing of tracing. Names of transfers are
remembered in bounded tables: what falls out is not traced, nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from neuron_push.commands import Offer, Receive, Received, ReceiveFailed, Retire, Settle
from neuron_push.protocol import Done, Register
from neuron_push.rendezvous.attempt import attempt_of
from neuron_push.rendezvous.events import (
    Action,
    Event,
    Fetch,
    Notified,
    Notify,
    Post,
    ReadEnded,
    Tell,
    WriteEnded,
)
from neuron_push.tracing import Ring

__all__ = ["Tracer"]

# Transfers, attempts and WRITEs under way whose names are remembered, each.
MOST: Final = 4096


class _Names(dict[Hashable, str]):
    """The newest MOST names."""

    def note(self, key: Hashable, name: str) -> None:
        """Remember one more."""
        self[key] = name
        if len(self) > MOST:
            del self[next(iter(self))]


class Tracer:
    """Records into a ring; used by the transfer thread alone."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        # Prompts computed here, attempts of this decode rank, registrations, WRITEs, READs.
        self._sources = _Names()
        self._attempts = _Names()
        self._registered = _Names()
        self._writes = _Names()
        self._reads = _Names()

    def saw(self, event: Event, now: float) -> None:
        """An event is about to be handled."""
        match event:
            case Offer():
                self._sources.note(event.source, event.match.transfer)
                self._add("offered", event.match.transfer, now)
            case Settle():
                if name := self._sources.get(event.source):
                    kind = "settled last" if event.last else "settled"
                    self._add(kind, name, now, value=event.stop)
            case Retire():
                self._sources.pop(event.source, None)
            case Receive():
                self._attempts.note(event.attempt, event.match.transfer)
                self._add("wanted", event.match.transfer, now, value=event.stop - event.start)
            case Notified(message=Register() as message):
                self._registered.note((event.agent, message.attempt), message.match.transfer)
                self._add("registered", message.match.transfer, now, str(event.agent))
            case Notified(message=Done() as message):
                name = self._attempts.get(attempt_of(message.attempt), "")
                self._add("notified", name, now, str(event.agent), value=message.nbytes)
            case WriteEnded() | ReadEnded():
                self._ended(event, now)
            case _:
                pass

    def _ended(self, event: WriteEnded | ReadEnded, now: float) -> None:
        """A WRITE or a READ is over."""
        done = event.outcome == "done"
        if isinstance(event, WriteEnded):
            kind = "landed" if done else f"write {event.outcome}"
            self._add(kind, self._writes.pop(event.write, ""), now, event.reason)
        else:
            kind = "read" if done else f"read {event.outcome}"
            name = self._reads.pop(event.read, "")
            self._add(kind, name, now, event.reason, value=event.nbytes)

    def did(self, action: Action, began: float, ended: float) -> None:
        """An action was carried out."""
        match action:
            case Post():
                name = self._registered.get((action.agent, action.done.attempt), "")
                if name:
                    self._writes.note(action.write, name)
                    tokens = action.done.stop - action.done.start
                    self._add("posted", name, began, str(action.agent), ended - began, value=tokens)
            case Fetch():
                if name := self._attempts.get(action.attempt, ""):
                    self._reads.note(action.read, name)
                    self._add("read posted", name, began, str(action.agent), ended - began,
                              value=action.stop - action.start)  # fmt: skip
            case Notify(message=Register() as message):
                self._add("register sent", message.match.transfer, began, str(action.agent))
            case Tell(report=Received() as report):
                self._add("received", self._attempts.pop(report.attempt, ""), began)
            case Tell(report=ReceiveFailed() as report):
                name = self._attempts.pop(report.attempt, "")
                self._add("receive failed", name, began, report.reason)
            case _:
                pass

    def _add(
        self, kind: str, transfer: str, at: float, detail: str = "", seconds: float = 0.0,
        *, value: float = 0.0,
    ) -> None:  # fmt: skip
        if transfer:
            self.ring.add(kind, transfer, detail, at=at, seconds=seconds, value=value)
