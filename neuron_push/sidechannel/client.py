"""Asks questions, without waiting or with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from neuron_push.errors import (
    Disconnected,
    PeerError,
    ProtocolError,
    Refused,
    TransportError,
)
from neuron_push.limits import LIMITS, Limits
from neuron_push.protocol import (
    Address,
    Refusal,
    SideChannelMessage,
    decode_side_channel,
    encode,
)
from neuron_push.sidechannel.gate import FAILURES, MECHANISM_MISMATCH
from neuron_push.sidechannel.keys import Key, Keyring
from neuron_push.sidechannel.sockets import endpoint, limit

__all__ = ["Client", "ask", "ask_async"]

# How long before the next key is tried, seconds; and how often to look meanwhile.
_AGAIN: Final = 0.02
_LOST: Final = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | FAILURES


@dataclass
class _Question:
    key: Hashable
    where: str
    deadline: float
    timeout: float
    frame: bytes
    keys: list[Key]  # still to be tried
    keyed: bool
    limits: Limits
    socket: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    connected: bool = False
    again: float = 0.0  # when the next key is tried

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Connect with the next key, and send. Raises TransportError."""
        self.close()
        dealer = context.socket(zmq.DEALER)
        limit(dealer, self.limits.side_channel)
        if self.keyed:
            key = self.keys.pop(0)
            dealer.setsockopt(zmq.CURVE_SERVERKEY, key.public)
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        self.socket = dealer
        self.monitor = dealer.get_monitor_socket(_LOST | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            dealer.connect(f"tcp://{self.where}")
            dealer.send(self.frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"cannot ask {self.where}: {error}") from error

    def close(self) -> None:
        """Give the sockets back. Idempotent."""
        if self.socket is not None and self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=0)
        self.socket = self.monitor = None


class Client:
    """Asks questions without waiting, with the keys of a ring if there is one.

    Belongs to the thread that opened it.
    """

    def __init__(self, ring: Keyring | None = None, limits: Limits = LIMITS) -> None:
        self._ring = ring
        self._limits = limits
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._questions: dict[Hashable, _Question] = {}

    def __len__(self) -> int:
        return len(self._questions)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to wait on until `poll` may have news; deadlines aside."""
        both = (each for q in self._questions.values() for each in (q.socket, q.monitor))
        return [each for each in both if each is not None]

    def ask(
        self,
        key: Hashable,
        address: Address,
        message: SideChannelMessage,
        timeout: float,
        now: float,
    ) -> None:
        """Send a question; its answer or failure comes from `poll` under `key`, exactly once.

        Raises ProtocolError for a key that is still open, TransportError for an address that
        cannot be one or if too many questions are open.
        """
        if key in self._questions:
            raise ProtocolError(f"question {key!r} is still open")
        limits = self._limits
        if len(self._questions) >= limits.questions:
            raise TransportError(f"{limits.questions} (limits.questions) are open already")
        frame = encode(message)
        if len(frame) > limits.side_channel:
            raise ProtocolError(
                f"a question of {len(frame)} bytes; limits.side_channel is {limits.side_channel}"
            )
        where = endpoint(address)
        ring = self._ring
        # It may answer with either, and drops connections in the moment in which it changes.
        keys = [*ring.keys, *ring.keys] if ring else []
        question = _Question(
            key, where, now + timeout, timeout, frame, keys, ring is not None, limits
        )
        question.open(self._context)
        self._questions[key] = question

    def poll(self, now: float) -> list[tuple[Hashable, SideChannelMessage | Exception]]:
        """What became of questions since the last call.

        A refusal is a `Refused`, an answer that cannot be read a PeerError, silence or a lost
        connection a TransportError.
        """
        ended = []
        for question in list(self._questions.values()):
            outcome = self._outcome(question, now)
            if outcome is not None:
                del self._questions[question.key]
                question.close()
                ended.append((question.key, outcome))
        return ended

    def forget(self, key: Hashable) -> None:
        """Drop a question; it will not appear in `poll`."""
        question = self._questions.pop(key, None)
        if question is not None:
            question.close()

    def close(self) -> None:
        """Drop all questions. Idempotent."""
        for key in list(self._questions):
            self.forget(key)
        self._context.destroy(linger=0)

    def _outcome(self, question: _Question, now: float) -> SideChannelMessage | Exception | None:
        if question.socket is None:  # between two keys
            return self._reopen(question) if now >= question.again else None
        answer = _answer(question)
        if answer is not None:
            return answer
        lost = _lost(question)
        if lost is not None and question.keys:
            question.close()
            question.again = now + _AGAIN
            return None
        if lost is not None:
            # The answer may have come between the two looks, with the end of the connection.
            return _answer(question) or lost
        if now < question.deadline:
            return None
        return TransportError(
            f"no answer from {question.where} within {question.timeout:g} s: "
            "is the engine up, and is the port its side-channel port?"
        )

    def _reopen(self, question: _Question) -> Exception | None:
        try:
            question.open(self._context)
        except TransportError as error:
            return error
        return None


def ask(
    address: Address, message: SideChannelMessage, timeout: float, ring: Keyring | None = None
) -> SideChannelMessage:
    """Ask and wait. Raises TransportError, Refused or PeerError."""
    client = Client(ring)
    try:
        client.ask(0, address, message, timeout, time.monotonic())
        deadline = time.monotonic() + timeout
        while not (ended := client.poll(time.monotonic())):
            poller = zmq.Poller()
            for each in client.sockets:
                poller.register(each, zmq.POLLIN)
            poller.poll(_milliseconds(client, deadline))
        return _result(ended[0][1])
    finally:
        client.close()


async def ask_async(
    address: Address,
    message: SideChannelMessage,
    timeout: float,  # noqa: ASYNC109  the text of the error names it
    ring: Keyring | None = None,
) -> SideChannelMessage:
    """The same for an event loop."""
    client = Client(ring)
    try:
        client.ask(0, address, message, timeout, time.monotonic())
        deadline = time.monotonic() + timeout
        while not (ended := client.poll(time.monotonic())):
            poller = zmq.asyncio.Poller()
            for each in client.sockets:
                poller.register(each, zmq.POLLIN)
            await poller.poll(_milliseconds(client, deadline))
        return _result(ended[0][1])
    finally:
        # A cancelled poll leaves its callbacks to the next turn of the loop.
        await asyncio.sleep(0)
        client.close()


def _milliseconds(client: Client, deadline: float) -> int:
    """How long to wait for a client's sockets; without one, until it opens the next."""
    left = max(0.0, deadline - time.monotonic())
    return int((left if client.sockets else min(left, _AGAIN)) * 1000 + 1)


def _result(outcome: SideChannelMessage | Exception) -> SideChannelMessage:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _answer(question: _Question) -> SideChannelMessage | Exception | None:
    assert question.socket is not None
    try:
        frames = question.socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    try:
        if len(frames) != 1:
            raise PeerError(f"answered {len(frames)} frames instead of one")
        message = decode_side_channel(frames[0], question.limits)
    except PeerError as error:
        return PeerError(str(error), peer=question.where)
    if isinstance(message, Refusal):
        return Refused(message.reason, peer=question.where)
    return message


def _lost(question: _Question) -> Disconnected | None:
    assert question.monitor is not None
    while True:
        try:
            seen = recv_monitor_message(question.monitor, zmq.NOBLOCK)
        except zmq.Again:
            return None
        event, value = int(seen["event"]), int(seen["value"])
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            question.connected = True
        elif question.connected:
            return Disconnected(f"{question.where} closed the connection without an answer")
        elif event == zmq.EVENT_CLOSED:
            return Disconnected(f"{question.where} refused the connection: is the engine up?")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == MECHANISM_MISMATCH:
            theirs = "has none, but we have" if question.keyed else "has some, but we have none"
            return Disconnected(f"side_channel_keys: {question.where} {theirs}")
        elif question.keyed:
            return Disconnected(
                f"{question.where} has other side_channel_keys or none, or is not a side channel"
            )
        else:
            return Disconnected(
                f"what listens at {question.where} is not a side channel, or has side_channel_keys"
            )
