"""One HTTP leg of a dispatch each: send, wait, and say clearly how it failed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ssl import SSLContext
from typing import Final

import aiohttp

from neuron_push.router.bodies import error_body, reason_in, unfinished_prefill
from neuron_push.router.engines import Engine, Leg

# Most of an engine's error body that is read: enough for any message.
MOST_ERROR: Final = 64 << 10
CHUNK: Final = 64 << 10
# Statuses that blame nobody: another engine may have time.
BUSY: Final = (408, 429)


class LegFailed(Exception):
    """One leg failed. `status` is the engine's HTTP status, 0 when it sent none."""

    def __init__(
        self,
        leg: Leg,
        engine: Engine,
        reason: str,
        *,
        status: int = 0,
        body: bytes = b"",
        content_type: str = "application/json",
    ) -> None:
        super().__init__(f"the {leg} leg failed on engine {engine.name}: {reason}")
        self.leg = leg
        self.engine = engine
        self.status = status
        self._body = body
        self._content_type = content_type

    @property
    def clients_fault(self) -> bool:
        """The engine blames the request: it would fail on every engine alike."""
        return 400 <= self.status < 500 and self.status not in BUSY

    @property
    def breaks(self) -> bool:
        """Whether it speaks against the pair: neither the client's fault nor mere business."""
        return not self.clients_fault and self.status not in BUSY

    def answer(self) -> tuple[int, bytes, str]:
        """Status, body and content type for the client."""
        if self.clients_fault or self.status in BUSY:
            return self.status, self._body, self._content_type
        details = {"leg": self.leg, "engine": self.engine.place.url}
        body = error_body(502, str(self), "upstream_error", **details)
        return 502, body, "application/json"


@dataclass(frozen=True)
class Limits:
    """How long a leg may take, in seconds."""

    connect: float = 5.0
    # For the whole prefill leg, queueing included.
    prefill: float = 600.0
    # Between two pieces of the decode leg's answer; the first waits for prefill.
    silence: float = 600.0
    # For the prompt's KV to reach the decode engine; None leaves that to the engine.
    kv: float | None = None
    # From a request's arrival to its first byte, retries included; None: no such limit.
    first_byte: float | None = None


@dataclass(frozen=True)
class Answer:
    """The head of the decode leg's answer and its first bytes. Its owner must close it."""

    engine: Engine
    response: aiohttp.ClientResponse
    first: bytes

    async def pieces(self) -> AsyncIterator[bytes]:
        """The whole body as it arrives; raises LegFailed where it breaks off."""
        yield self.first
        with _mapped("decode", self.engine, "broke off"):
            async for piece in self.response.content.iter_any():
                yield piece

    def close(self) -> None:
        """Close the connection, unless the answer was read to its end."""
        self.response.close()


class Legs:
    """Sends legs over one client session. Cancelling a call closes its connection."""

    def __init__(
        self, session: aiohttp.ClientSession, limits: Limits, ssl: SSLContext | None = None
    ) -> None:
        self._session = session
        self._limits = limits
        self._ssl: SSLContext | bool = ssl or True

    @property
    def limits(self) -> Limits:
        """What it was made with."""
        return self._limits

    async def prefill(
        self, engine: Engine, path: str, headers: Mapping[str, str], body: bytes
    ) -> bytes:
        """Run the prefill leg to its end, and return its answer; raises LegFailed."""
        limits = aiohttp.ClientTimeout(
            total=self._limits.prefill, sock_connect=self._limits.connect
        )
        response = await self._send("prefill", engine, path, headers, body, limits)
        try:
            with _mapped("prefill", engine, "broke off"):
                raw = await response.read()
        finally:
            response.close()
        trouble = unfinished_prefill(raw)
        if trouble:
            raise LegFailed("prefill", engine, trouble, status=response.status)
        return raw

    async def decode(
        self, engine: Engine, path: str, headers: Mapping[str, str], body: bytes
    ) -> Answer:
        """The decode leg's answer once its first bytes have come; raises LegFailed."""
        limits = aiohttp.ClientTimeout(
            total=None, sock_read=self._limits.silence, sock_connect=self._limits.connect
        )
        response = await self._send("decode", engine, path, headers, body, limits)
        try:
            with _mapped("decode", engine, "broke off before its first byte"):
                first = await response.content.read(CHUNK)
            if not first:
                raise LegFailed("decode", engine, "its answer is empty", status=response.status)
        except BaseException:
            response.close()
            raise
        return Answer(engine, response, first)

    async def _send(
        self,
        leg: Leg,
        engine: Engine,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        limits: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        with _mapped(leg, engine, "no answer"):
            response = await self._session.post(
                engine.place.url + path, data=body, headers=headers, timeout=limits, ssl=self._ssl
            )
            if response.status < 400:
                return response
            try:
                raise await _refused(leg, engine, response)
            finally:
                response.close()


@contextmanager
def _mapped(leg: Leg, engine: Engine, what: str) -> Iterator[None]:
    """Turn what the HTTP client raises into LegFailed, the original chained as the cause."""
    try:
        yield
    except TimeoutError as error:
        raise LegFailed(leg, engine, f"{what}: timed out") from error
    except (aiohttp.ClientError, OSError) as error:
        raise LegFailed(leg, engine, f"{what}: {error or type(error).__name__}") from error


async def _refused(leg: Leg, engine: Engine, response: aiohttp.ClientResponse) -> LegFailed:
    body = b""
    async for piece in response.content.iter_chunked(CHUNK):
        body += piece
        if len(body) >= MOST_ERROR:
            break
    return LegFailed(
        leg,
        engine,
        f"HTTP {response.status}: {reason_in(body)}",
        status=response.status,
        body=body,
        content_type=response.content_type,
    )
