"""Finished prompts whose blocks vLLM keeps until this rank reports them sent.

A rank hears of such a prompt with its last tokens, so before the request has left the engine, and
vLLM asks not to hear of it earlier: it is reported once its pin is quiet *and* vLLM has told that
the request is finished, in whichever order. Until then the scheduler half may take it back, as
when vLLM preempts the request although all of it is computed.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["Handovers"]


class Handovers:
    """What one rank knows of them. Lives on the engine's main loop."""

    def __init__(self) -> None:
        self._named: dict[int, str] = {}  # requests by pin
        self._here: dict[str, int] = {}  # pins of requests that have not left the engine
        self._quiet: set[int] = set()  # pins of such requests that are quiet already

    def __len__(self) -> int:
        return len(self._named)

    def add(self, pin: int, request: str) -> None:
        """vLLM is going to keep the blocks of `pin` for a request."""
        self._named[pin] = request
        self._here[request] = pin

    def take_back(self, pin: int) -> bool:
        """The pin's end is to be told as any other's; whether it has ended already."""
        request = self._named.pop(pin, None)
        if request is None or self._here.pop(request, None) is None or pin not in self._quiet:
            return False
        self._quiet.remove(pin)
        return True

    def left(self, requests: Collection[str]) -> list[str]:
        """These requests have left the engine; those of them that are sent by now."""
        sent = []
        for request in requests:
            pin = self._here.pop(request, None)
            if pin in self._quiet:
                self._quiet.remove(pin)
                sent.append(self._named.pop(pin))
        return sent

    def ended(self, pin: int) -> str | None:
        """A pin is quiet. None if it is none of these, "" if its request is to leave first."""
        request = self._named.get(pin)
        if request is None:
            return None
        if request in self._here:
            self._quiet.add(pin)
            return ""
        del self._named[pin]
        return request
