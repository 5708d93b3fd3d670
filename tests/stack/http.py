"""HTTP without sockets: the engines' servers, and a client session for the router."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import aiohttp
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import FinishReason

from tests.stack.engine import Call


class Exchange:
    """One request and its answer, on the asker's event loop."""

    def __init__(self, session, url, headers, body) -> None:
        self.session, self.headers, self.body = session, headers, body
        host, _, path = url.removeprefix("http://").partition("/")
        self.host, self.path = host.partition(":")[0], "/" + path
        self.pieces: asyncio.Queue = asyncio.Queue()
        self.head: asyncio.Future = session.world.loop.create_future()
        self.over = False
        self.left = lambda: None  # what the server does when the asker goes away
        self._last = 0.0

    def later(self, action) -> None:
        """A connection keeps the order of what it carries."""
        world = self.session.world
        when = world.clock.now + world.clock.wait(world.weather.http)
        self._last = when = max(when, self._last)
        world.clock.at(when - world.clock.now, "http", action)

    def start(self) -> None:
        self.later(lambda: self.session.world.doors.arrive(self))

    # ------------------------------------------------------------------ server's side

    def begin(self, status: int) -> None:
        self.later(lambda: self.head.done() or self.head.set_result(status))

    def send(self, piece: bytes | None) -> None:
        """Send a piece of the body, or its end."""
        if piece is None:
            self.over = True
        self.later(lambda: self.pieces.put_nowait(piece))

    def answer(self, status: int, value) -> None:
        self.begin(status)
        self.send(json.dumps(value).encode())
        self.send(None)

    def broken(self) -> None:
        """The connection ends in the middle."""
        if self.over:
            return
        self.over = True

        def tell() -> None:
            error = aiohttp.ClientConnectionError("connection reset")
            if not self.head.done():
                self.head.set_exception(error)
                self.head.exception()  # may have nobody who asks
            self.pieces.put_nowait(error)

        self.later(tell)

    # ------------------------------------------------------------------ asker's side

    def close(self) -> None:
        if not self.over:
            self.over = True
            self.later(lambda: self.left())


class Body:
    """The content of an answer."""

    def __init__(self, exchange: Exchange, patience: float | None) -> None:
        self._exchange, self._patience, self._ended = exchange, patience, False

    async def piece(self) -> bytes:
        if self._ended:
            return b""
        async with asyncio.timeout(self._patience):
            piece = await self._exchange.pieces.get()
        if isinstance(piece, Exception):
            raise piece
        self._ended = piece is None
        return piece or b""

    async def read(self, most: int = -1) -> bytes:
        return await self.piece()

    async def iter_any(self):
        while piece := await self.piece():
            yield piece

    def iter_chunked(self, size: int):
        return self.iter_any()


class Response:
    """What the router's client library would have made of an answer."""

    def __init__(self, exchange: Exchange, status: int, patience: float | None) -> None:
        self.status = status
        self.headers = {"Content-Type": "application/json"}
        self.content_type = "application/json"
        self.content = Body(exchange, patience)
        self.close = exchange.close

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.content.iter_any()])

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_) -> None:
        self.close()


class Asking:
    """Awaited, or entered, as aiohttp's requests are."""

    def __init__(self, coroutine) -> None:
        self._coroutine = coroutine

    def __await__(self):
        return self._coroutine.__await__()

    async def __aenter__(self):
        self._response = await self._coroutine
        return self._response

    async def __aexit__(self, *_) -> None:
        self._response.close()


class Session:
    """In place of the router's aiohttp.ClientSession."""

    def __init__(self, world) -> None:
        self.world = world

    def post(self, url, *, data, headers, timeout, ssl=None) -> Asking:
        return Asking(self._send(url, headers, data, timeout))

    def get(self, url, *, timeout, headers=None, ssl=None) -> Asking:
        return Asking(self._send(url, headers or {}, None, timeout))

    async def _send(self, url, headers, data, limits) -> Response:
        exchange = Exchange(self, url, headers, data)
        exchange.start()
        patience = limits.total or limits.sock_read
        try:
            async with asyncio.timeout(patience):
                return Response(exchange, await exchange.head, patience)
        except BaseException:
            exchange.close()
            raise


class Doors:
    """The servers of all engines: what vLLM's does with a completion request, in short."""

    def __init__(self, world) -> None:
        self._world = world
        self._open: dict[str, list[Exchange]] = {}

    def arrive(self, exchange: Exchange) -> None:
        engine = self._world.engines.get(exchange.host)
        if exchange.over:
            return
        if engine is None or not engine.up:
            exchange.broken()
            return
        self._open.setdefault(exchange.host, []).append(exchange)
        engine.when_awake(lambda: self._serve(engine, exchange))

    def crash(self, name: str) -> None:
        for exchange in self._open.pop(name, []):
            exchange.broken()

    def _serve(self, engine, exchange: Exchange) -> None:
        if exchange.over:
            return
        if exchange.body is None:
            exchange.answer(200, {})
            return
        body = json.loads(exchange.body)
        name = (
            f"cmpl-{exchange.headers['X-Request-Id']}-0-{self._world.clock.rng.getrandbits(32):08x}"
        )
        exchange.left = lambda: engine.when_awake(lambda: engine.abort(name))
        reply = (_Stream if body.get("stream") else _Whole)(exchange)
        call = Call(name, body["prompt"], body["max_tokens"], body.get("kv_transfer_params"), reply)
        try:
            call.sampling()
        except (
            VLLMValidationError
        ) as error:  # vLLM's own answer to numbers that no engine can be sent
            exchange.answer(400, {"error": {"message": str(error)}})
            return
        reply.start()
        engine.submit(call)


class _Whole:
    """Answers at the end."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._tokens = exchange, []

    def start(self) -> None: ...

    def __call__(self, tokens, reason, params) -> None:
        self._tokens += tokens
        if reason is None:
            return
        if reason == FinishReason.ERROR:
            self._exchange.answer(500, {"error": {"message": "KV load failed", "code": 500}})
            return
        choice = {"tokens": self._tokens, "finish_reason": str(reason)}
        answer = {"choices": [choice], "kv_transfer_params": params}
        self._exchange.answer(200, answer)


class _Stream:
    """Answers token by token; the head goes out at once."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def start(self) -> None:
        self._exchange.begin(200)

    def __call__(self, tokens, reason, params) -> None:
        if reason == FinishReason.ERROR:
            self._exchange.send(b'data: {"error": {"message": "KV load failed"}}\n\n')
        else:
            choice = {"tokens": tokens, "finish_reason": None if reason is None else str(reason)}
            self._exchange.send(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        if reason is not None:
            self._exchange.send(None)


def tokens_in(raw: bytes) -> tuple[list[int], str]:
    """(tokens, how it ended: a finish reason, an error's text, or "") of either kind of answer."""
    tokens, ended = [], ""
    for line in raw.split(b"\n\n") if raw.startswith(b"data: ") else [raw]:
        with suppress(ValueError):
            value = json.loads(line.removeprefix(b"data: "))
            if "error" in value:
                return tokens, "error: " + str(value["error"].get("message"))
            for choice in value.get("choices", ()):
                tokens += choice["tokens"]
                ended = choice["finish_reason"] or ended
    return tokens, ended
