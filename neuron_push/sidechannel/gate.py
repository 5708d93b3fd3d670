"""Who may ask a server: the keys on its socket, and why peers were turned away.

Without keys everybody may ask. With keys libzmq's CURVE does the work: a connection is encrypted
for the server's key, and the one who opens it must prove to hold a key of the ring.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from neuron_push.sidechannel.keys import Keyring

__all__ = ["FAILURES", "MECHANISM_MISMATCH", "Gate"]

logger = logging.getLogger(__name__)

FAILURES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# Value of a failed handshake in which one side has a key and the other has none.
MECHANISM_MISMATCH: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_DOMAIN: Final = "neuron-push"
# A reason is logged once in this time, however many peers knock.
_QUIET: Final = 60.0
_BINDS: Final = 100


class Gate:
    """Guards a ROUTER socket that is not bound yet. Belongs to the socket's thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        ring: Keyring | None,
    ) -> None:
        # Connections that were turned away in the handshake.
        self.refused = 0
        self._ring = ring
        self._router = router
        self._bound = True  # but for a moment in which the key changes
        self._logged: dict[str, float] = {}
        self._authenticator: ThreadAuthenticator | None = None
        if ring is not None:
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(_DOMAIN, _Members(ring))
            router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
            self._use(ring)
        self.monitor: zmq.Socket[bytes] = router.get_monitor_socket(FAILURES)

    def poll(self) -> None:
        """Note who was turned away."""
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            self.refused += 1
            self._log(self._reason(int(event["event"]), int(event["value"])))

    def follow(self, endpoint: str) -> None:
        """Answer with the key that is first in the file now; `endpoint` is the bound one.

        What a socket is bound with stays, so it is bound anew, and open connections end.
        """
        if self._ring is not None and self._ring.keys[0].public != self._answers_as:
            self._use(self._ring)
            self._router.unbind(endpoint)
            self._bound = False
        for _ in range(_BINDS):
            if self._bound:
                return
            try:
                self._router.bind(endpoint)
                self._bound = True
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
                time.sleep(0.001)  # libzmq's own thread closes the old socket
        logger.error("side channel: %s is still taken; trying again", endpoint)

    def close(self) -> None:
        """Before the context ends. Idempotent."""
        if not self._router.closed:
            self._router.disable_monitor()
        self.monitor.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None

    def _use(self, ring: Keyring) -> None:
        key = ring.keys[0]
        self._answers_as = key.public
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
        self._router.setsockopt(zmq.CURVE_SECRETKEY, key.secret)

    def _reason(self, event: int, value: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "it holds none of our side_channel_keys"
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return "it broke off the handshake, as probes do, and peers with other keys or none"
        if value == MECHANISM_MISMATCH:
            keyed = self._ring is not None
            return "it has no side_channel_keys" if keyed else "it has side_channel_keys, we do not"
        if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return "its key is not the one we answer with"
        return "it does not speak as a side channel does"

    def _log(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._logged.get(reason, float("-inf")) >= _QUIET:
            self._logged[reason] = now
            logger.warning("side channel: a peer was turned away: %s", reason)


class _Members:
    """What the authenticator asks, on its own thread."""

    def __init__(self, ring: Keyring) -> None:
        self._ring = ring

    def callback(self, domain: str, public: bytes) -> bool:
        """Whether a public key may enter."""
        return self._ring.knows(public)
