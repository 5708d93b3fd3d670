"""Asks questions, without waiting or with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

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
from neuron_push.protocol import (
    MAX_SIDE_CHANNEL,
    Address,
    Refusal,
    SideChannelMessage,
    decode_side_channel,
    encode,
)
from neuron_push.sidechannel.sockets import endpoint, limit

__all__ = ["MAX_QUESTIONS", "Client", "ask", "ask_async"]

# Questions that one client may have open; a greeting of the largest engine (64 ranks) fits.
MAX_QUESTIONS: Final = 256
_LOST: Final = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass
class _Question:
    key: Hashable
    where: str
    deadline: float
    timeout: float
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    connected: bool = False


class Client:
    """Asks questions without waiting. Belongs to the thread that opened it."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._questions: dict[Hashable, _Question] = {}

    def __len__(self) -> int:
        return len(self._questions)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to wait on until `poll` may have news; deadlines aside."""
        return [s for question in self._questions.values() for s in _both(question)]

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
        if len(self._questions) >= MAX_QUESTIONS:
            raise TransportError(f"{MAX_QUESTIONS} questions are open already")
        frame = encode(message)
        if len(frame) > MAX_SIDE_CHANNEL:
            raise ProtocolError(f"a question of {len(frame)} bytes exceeds {MAX_SIDE_CHANNEL}")
        where = endpoint(address)
        dealer = self._context.socket(zmq.DEALER)
        limit(dealer)
        monitor = dealer.get_monitor_socket(_LOST | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            dealer.connect(f"tcp://{where}")
            dealer.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _close(dealer, monitor)
            raise TransportError(f"cannot ask {where}: {error}") from error
        self._questions[key] = _Question(key, where, now + timeout, timeout, dealer, monitor)

    def poll(self, now: float) -> list[tuple[Hashable, SideChannelMessage | Exception]]:
        """What became of questions since the last call.

        A refusal is a `Refused`, an answer that cannot be read a PeerError, silence or a lost
        connection a TransportError.
        """
        ended = []
        for question in list(self._questions.values()):
            outcome = _outcome(question, now)
            if outcome is not None:
                del self._questions[question.key]
                _close(question.socket, question.monitor)
                ended.append((question.key, outcome))
        return ended

    def forget(self, key: Hashable) -> None:
        """Drop a question; it will not appear in `poll`."""
        question = self._questions.pop(key, None)
        if question is not None:
            _close(question.socket, question.monitor)

    def close(self) -> None:
        """Drop all questions. Idempotent."""
        for key in list(self._questions):
            self.forget(key)
        self._context.destroy(linger=0)


def ask(address: Address, message: SideChannelMessage, timeout: float) -> SideChannelMessage:
    """Ask and wait. Raises TransportError, Refused or PeerError."""
    client = Client()
    try:
        client.ask(0, address, message, timeout, time.monotonic())
        poller = zmq.Poller()
        for each in client.sockets:
            poller.register(each, zmq.POLLIN)
        deadline = time.monotonic() + timeout
        while not (ended := client.poll(time.monotonic())):
            poller.poll(int(max(0.0, deadline - time.monotonic()) * 1000 + 1))
        return _result(ended[0][1])
    finally:
        client.close()


async def ask_async(
    address: Address,
    message: SideChannelMessage,
    timeout: float,  # noqa: ASYNC109  the text of the error names it
) -> SideChannelMessage:
    """The same for an event loop."""
    client = Client()
    try:
        client.ask(0, address, message, timeout, time.monotonic())
        poller = zmq.asyncio.Poller()
        for each in client.sockets:
            poller.register(each, zmq.POLLIN)
        deadline = time.monotonic() + timeout
        while not (ended := client.poll(time.monotonic())):
            await poller.poll(int(max(0.0, deadline - time.monotonic()) * 1000 + 1))
        return _result(ended[0][1])
    finally:
        # A cancelled poll leaves its callbacks to the next turn of the loop.
        await asyncio.sleep(0)
        client.close()


def _result(outcome: SideChannelMessage | Exception) -> SideChannelMessage:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _outcome(question: _Question, now: float) -> SideChannelMessage | Exception | None:
    answer = _answer(question)
    if answer is not None:
        return answer
    lost = _lost(question)
    if lost is not None:
        # The answer may have come between the two looks, with the end of the connection.
        return _answer(question) or lost
    if now < question.deadline:
        return None
    return TransportError(
        f"no answer from {question.where} within {question.timeout:g} s: "
        "is the engine up, and is the port its side-channel port?"
    )


def _answer(question: _Question) -> SideChannelMessage | Exception | None:
    try:
        frames = question.socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    try:
        if len(frames) != 1:
            raise PeerError(f"answered {len(frames)} frames instead of one")
        message = decode_side_channel(frames[0])
    except PeerError as error:
        return PeerError(str(error), peer=question.where)
    if isinstance(message, Refusal):
        return Refused(message.reason, peer=question.where)
    return message


def _lost(question: _Question) -> Disconnected | None:
    while True:
        try:
            event: int = recv_monitor_message(question.monitor, zmq.NOBLOCK)["event"]
        except zmq.Again:
            return None
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            question.connected = True
        elif question.connected:
            return Disconnected(f"{question.where} closed the connection without an answer")
        elif event == zmq.EVENT_CLOSED:
            return Disconnected(f"{question.where} refused the connection: is the engine up?")
        else:
            return Disconnected(f"what listens at {question.where} is not a side channel")


def _both(question: _Question) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    return question.socket, question.monitor


def _close(dealer: zmq.Socket[Any], monitor: zmq.Socket[Any]) -> None:
    dealer.disable_monitor()
    monitor.close(linger=0)
    dealer.close(linger=0)
