"""What the scheduler half adds to a trace: when requests arrive, run, and have been loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from neuron_push.tracing import Ring
from neuron_push.vllm.params import Leg, PrefillLeg

__all__ = ["Moments"]

# Requests under way that are followed; an engine has far fewer.
MOST: Final = 4096


@dataclass(slots=True)
class _Followed:
    transfer: str
    leg: str
    scheduled: bool = False


class Moments:
    """Follows the requests of transfers through the scheduler. Lives on its thread."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._followed: dict[str, _Followed] = {}

    def arrived(self, request: str, leg: Leg) -> None:
        """A leg of a transfer has reached the scheduler."""
        if not leg.transfer:
            return
        name = "prefill" if isinstance(leg, PrefillLeg) else "decode"
        self._followed[request] = _Followed(leg.transfer, name)
        if len(self._followed) > MOST:
            del self._followed[next(iter(self._followed))]
        self.ring.add(f"{name} arrived", leg.transfer, request)

    def mark(self, request: str, name: str) -> None:
        """Something happened to it."""
        if (each := self._followed.get(request)) is not None:
            self.ring.add(name, each.transfer, request)

    def step(self, scheduled: dict[str, int]) -> None:
        """A step computes tokens of these requests."""
        for request in self._followed.keys() & scheduled.keys():
            each = self._followed[request]
            if not each.scheduled:
                each.scheduled = True
                self.ring.add(f"{each.leg} scheduled", each.transfer, request)

    def finished(self, request: str) -> None:
        """It has left the engine."""
        if (each := self._followed.pop(request, None)) is not None:
            self.ring.add(f"{each.leg} finished", each.transfer, request)
