"""Instant mock engines and a load generator, both lean enough not to be what is measured.

Raw asyncio protocols: they read whole requests of known shape and answer constant bytes, so
that one core can feed and serve a router that has a core of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

BODY: Final = b'{"id":"x","object":"text_completion","choices":[{"index":0,"text":" a"}]}'
STREAM: Final = b'data: {"choices":[{"index":0,"text":" a"}]}\n\ndata: [DONE]\n\n'


def _answer(kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


JSON_ANSWER: Final = _answer("application/json", BODY)
STREAM_ANSWER: Final = _answer("text/event-stream", STREAM)


class MockEngine(asyncio.Protocol):
    """Answers each request the moment it is complete."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every request that is complete by now."""
        self._buffer += data
        while (end := request_end(self._buffer)) > 0:
            self._buffer = self._buffer[end:]
            self._transport.write(self._answer)


def request_end(buffer: bytes) -> int:
    """Where the first message in the buffer ends; 0 if it is not complete."""
    head = buffer.find(b"\r\n\r\n")
    if head < 0:
        return 0
    at = buffer.lower().find(b"content-length:", 0, head)
    length = 0
    if at >= 0:
        length = int(buffer[at + 15 : buffer.index(b"\r\n", at)])
    elif b"chunked" in buffer[:head].lower():
        last = buffer.find(b"0\r\n\r\n", head)
        return last + 5 if last >= 0 else 0
    end = head + 4 + length
    return end if len(buffer) >= end else 0


@dataclass
class Tally:
    """What one run brought: seconds to each first byte, in order, and how long it all took."""

    times: list[float] = field(default_factory=list)
    errors: int = 0
    seconds: float = 0.0

    def percentile(self, share: float) -> float:
        """Seconds."""
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.times) / self.seconds if self.seconds else 0.0


class Client(asyncio.Protocol):
    """One connection that sends its next request when the last one is answered."""

    def __init__(self, request: bytes, take: Callable[[], bool], tally: Tally) -> None:
        self._request = request
        self._take = take
        self._tally = tally
        self._buffer = b""
        self._sent = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        """The server has ended the connection, or we have."""
        if not self.done.done():
            self._tally.errors += 1
            self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Note the first byte; go on after the last."""
        if not self._buffer:
            self._tally.times.append(time.perf_counter() - self._sent)
            if not data.startswith(b"HTTP/1.1 200"):
                self._tally.errors += 1
        self._buffer += data
        if request_end(self._buffer):
            self._buffer = b""
            self._next()

    def _next(self) -> None:
        if self._take():
            self._sent = time.perf_counter()
            self._transport.write(self._request)
        else:
            self.done.set_result(None)
            self._transport.close()


def make_request(port: int, prompt: int, stream: bool) -> bytes:
    """One completion request of `prompt` bytes."""
    text = "x" * prompt
    flag = "true" if stream else "false"
    body = f'{{"model":"m","prompt":"{text}","max_tokens":8,"stream":{flag}}}'.encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def load(port: int, requests: int, concurrency: int, prompt: int, stream: bool) -> Tally:
    """Send `requests` over `concurrency` connections, each one after another."""
    tally, left = Tally(), requests
    request = make_request(port, prompt, stream)

    def take() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    clients = []
    for _ in range(min(concurrency, requests)):
        _, client = await loop.create_connection(
            lambda: Client(request, take, tally), "127.0.0.1", port
        )
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    tally.seconds = time.perf_counter() - began
    return tally
