"""Answers questions at one address."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import zmq

from neuron_push.errors import PeerError, ProtocolError
from neuron_push.limits import LIMITS, Limits
from neuron_push.protocol import (
    Address,
    Refusal,
    SideChannelMessage,
    clip,
    decode_side_channel,
    encode,
)
from neuron_push.sidechannel.gate import Gate
from neuron_push.sidechannel.keys import Keyring
from neuron_push.sidechannel.sockets import bind, limit

__all__ = ["Request", "Server"]

logger = logging.getLogger(__name__)

# Requests that one `Server.poll` takes, so that its caller returns to its other work.
_REQUESTS_PER_POLL: Final = 64


@dataclass(frozen=True)
class Request:
    """A well-formed message that waits for `answer`."""

    message: SideChannelMessage
    _identity: bytes
    _server: Server

    def answer(self, message: SideChannelMessage) -> None:
        """Send the one answer. If the asker has left, nothing happens."""
        self._server.reply(self._identity, encode(message))


class Server:
    """Answers questions at one address, of holders of a key if there is a ring of them.

    Belongs to the thread that opened it.
    """

    def __init__(
        self, host: str, port: int, ring: Keyring | None = None, limits: Limits = LIMITS
    ) -> None:
        self._limits = limits
        # Frames that were not well-formed messages of this version, each answered by a Refusal.
        self.rejected = 0
        self._waiting: set[bytes] = set()  # who asked and was not answered yet
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        limit(self.socket, limits.side_channel)
        self._gate = Gate(self._context, self.socket, ring)
        try:
            bound, self._endpoint = bind(self.socket, host, port)
        except BaseException:
            self.close()
            raise
        self.address = Address(host, bound)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to wait on until `poll` may have news."""
        return [self.socket, self._gate.monitor]

    @property
    def refused(self) -> int:
        """Connections that were turned away before they could ask."""
        return self._gate.refused

    def poll(self) -> list[Request]:
        """Take what has arrived, without waiting."""
        self._gate.poll()
        if not self._waiting:
            self._gate.follow(self._endpoint)
        requests: list[Request] = []
        if not int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            return requests  # far cheaper than the exception below, and the usual case
        for _ in range(_REQUESTS_PER_POLL):
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                if len(frames) != 1:
                    raise PeerError(f"a message has one frame, not {len(frames)}")
                message = decode_side_channel(frames[0], self._limits)
            except PeerError as error:
                self.rejected += 1
                self.reply(identity, encode(Refusal(clip(str(error)))))
            else:
                self._waiting.add(identity)
                requests.append(Request(message, identity, self))
        return requests

    def close(self) -> None:
        """Stop listening; the port is free after return. Idempotent."""
        self._gate.close()
        self._context.destroy(linger=0)

    def reply(self, identity: bytes, frame: bytes) -> None:
        """Send one frame to an asker; nothing happens if it has left."""
        most = self._limits.side_channel
        if len(frame) > most:
            raise ProtocolError(f"an answer of {len(frame)} bytes; limits.side_channel is {most}")
        self._waiting.discard(identity)
        try:
            self.socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("an answer could not be sent: %s", error)
