"""Every exception that this package raises on purpose.

    NeuronPushError
    |-- ConfigError            a setting, an environment variable or an installation is wrong
    |   `-- UnsupportedVersion an installed vllm or nixl lies outside the tested range
    |-- ProtocolError          our own caller misused an interface: a defect on this side
    |-- PeerError              the other engine, or a message from it, is at fault
    |   `-- Refused            the other engine answered, and the answer is no
    |-- PlanError              no plan of copies exists for what was asked
    |   `-- IncompatiblePair   two geometries or semantics differ in a way that cannot be copied
    |       `-- NeedsStaging   they hold the same elements in orders that have no long common run
    |-- TransportError         NIXL, the side channel or the network failed
    |   `-- Disconnected       the connection to one peer is gone
    `-- DeadlineExceeded       something did not happen within its stated bound

Who is at fault decides what happens next: a PeerError fails that peer or that one request, a
ProtocolError is a defect to be fixed. Errors of vendor libraries are turned into these at the
edge, with the original chained as the cause.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ConfigError",
    "DeadlineExceeded",
    "Disconnected",
    "IncompatiblePair",
    "NeedsStaging",
    "NeuronPushError",
    "PeerError",
    "PlanError",
    "ProtocolError",
    "Refused",
    "TransportError",
    "UnsupportedVersion",
]


class NeuronPushError(Exception):
    """Base of everything below, for callers that only need to know it came from here."""


class ConfigError(NeuronPushError):
    """A setting, an environment variable or an installation is wrong; the text says which."""


class UnsupportedVersion(ConfigError):
    """An installed vllm or nixl lies outside the range that is tested."""


class ProtocolError(NeuronPushError):
    """An interface was misused by our own code; never the peer's fault."""


class PeerError(NeuronPushError):
    """The peer, or a message from it, is at fault; fails that peer or request only."""

    def __init__(self, message: str, *, peer: str = "") -> None:
        super().__init__(message)
        # Engine id or address of the peer; empty when the sender is not known yet.
        self.peer = peer

    def __str__(self) -> str:
        message = super().__str__()
        return f"{self.peer}: {message}" if self.peer else message


class Refused(PeerError):
    """The peer understood and declined. `reason` is its own text, safe to show to a user."""

    def __init__(self, reason: str, *, peer: str = "") -> None:
        super().__init__(reason, peer=peer)
        self.reason = reason


class PlanError(NeuronPushError):
    """The copies that were asked for cannot be planned."""


class IncompatiblePair(PlanError):
    """Two engines cannot exchange KV; `differences` holds one readable line per reason."""

    def __init__(self, message: str = "", *, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)

    def __str__(self) -> str:
        return ": ".join(filter(None, (super().__str__(), "; ".join(self.differences))))


class NeedsStaging(IncompatiblePair):
    """Copies would be too short: one of the sides has to bring bytes into the other's order."""


class TransportError(NeuronPushError):
    """NIXL, the side channel or the network failed; the vendor's error is the cause."""


class Disconnected(TransportError):
    """The connection to one peer is gone. Says nothing about WRITEs posted before: no fence."""


class DeadlineExceeded(NeuronPushError):
    """Something did not happen within its stated bound."""
