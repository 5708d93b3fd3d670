"""The router's whole HTTP face, over a socket: whatever a client sends, engines see good legs only.

An input is JSON that says how a request is put together (so that changes stay close to HTTP), or
else the bytes of the connection as they are.
"""

from __future__ import annotations

import asyncio
import atexit
import gzip
import logging
from contextlib import suppress

import msgspec

from neuron_push.router.legs import Limits
from tests.router.fleet import routed, until

MOST_BODY = 4096
PATIENCE = 0.3  # seconds for an answer
OURS = "X-Neuron-Push-Deadline-Ms"
EVIL = "evil.example"
PARAMS = {"do_remote_prefill": True, "remote_host": EVIL, "remote_port": 1, "transfer_id": EVIL}
WELL = {"model": "m", "prompt": "p", "max_tokens": 4, "kv_transfer_params": PARAMS}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 1}
# Refusals of a router whose engines are well; 504 if the client asked for next to no time.
FINE = {400, 401, 404, 405, 411, 413, 414, 415, 417, 429, 431, 501, 504}


class Face:
    """A router over two mock engines, in a loop that runs only while an input is tried."""

    def __init__(self) -> None:
        logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
        self.loop = asyncio.new_event_loop()
        self._fleet = routed(most_body=MOST_BODY, limits=Limits(), keys=())
        self.fleet = self.loop.run_until_complete(self._fleet.__aenter__())
        atexit.register(self.close)

    def close(self) -> None:
        self.loop.run_until_complete(self._fleet.__aexit__(None, None, None))
        self.loop.close()

    def send(self, data: bytes) -> None:
        self.loop.run_until_complete(asyncio.wait_for(self._send(data), 30))

    async def _send(self, data: bytes) -> None:
        answer = b""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.fleet.server.port)
        try:
            writer.write(data)
            async with asyncio.timeout(PATIENCE):  # it may wait for the rest of a body
                while piece := await reader.read(1 << 16):
                    answer += piece
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
        await until(lambda: not self.fleet.router._gate._total)
        await self.fleet.idle()
        self._judge(answer)

    def _judge(self, answer: bytes) -> None:
        """No engine has seen anything of a request that was not served."""
        router, legs = self.fleet.router, []
        for engine in (self.fleet.p, self.fleet.d):
            while not engine.calls.empty():
                legs.append(engine.calls.get_nowait())
        answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        status = int(answer[9:12]) if answer[:5] == b"HTTP/" else 0
        assert status in FINE or not status or status == 200, answer[:500]
        assert status == 200 or status in (0, 504) or not legs, (status, [leg.body for leg in legs])
        for leg in legs:
            assert EVIL not in repr(leg.params), leg.params
            assert leg.params.get("transfer_id"), leg.body
        assert not any(engine.trouble for engine in router.fleet.engines)


FACE: list[Face] = []


def http(data: bytes) -> None:
    """One connection of a client."""
    if not FACE:
        FACE.append(Face())
    with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
        data = assembled(msgspec.json.decode(data, type=Sketch))
    FACE[0].send(data)


NO_JSON = msgspec.Raw(b"null")


class Sketch(msgspec.Struct):
    """How a request is put together; texts are bytes as Latin-1."""

    method: str = "POST"
    path: str = "/v1/completions"
    headers: list[list[str]] = []
    body: str = ""
    chunks: list[int] | None = None
    gzip: bool = False
    times: int = 1
    json: msgspec.Raw = NO_JSON


def assembled(sketch: Sketch) -> bytes:
    """The bytes of a sketch."""
    body = bytes(sketch.json)
    if body == b"null":
        body = sketch.body.encode("latin-1", "replace")
    body *= max(0, min(sketch.times, 20_000))
    body = body[: 1 << 22]
    headers = [header[:2] for header in sketch.headers if len(header) > 1]
    if sketch.gzip:
        body = gzip.compress(body, 1)
        headers.append(["Content-Encoding", "gzip"])
    if sketch.chunks is None:
        headers.append(["Content-Length", str(len(body))])
    else:
        headers.append(["Transfer-Encoding", "chunked"])
        parts = []
        for size in sketch.chunks[:50]:
            part, body = body[: max(0, size)], body[max(0, size) :]
            parts.append(b"%x\r\n%b\r\n" % (size & 0xFFFFFFFFFF, part))
        body = b"".join(parts) + b"0\r\n\r\n"
    lines = [f"{sketch.method} {sketch.path} HTTP/1.1", "Host: r", "Connection: close"]
    lines += [": ".join(header) for header in headers]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body


def seeds() -> list[bytes]:
    """One request of every kind, good and bad."""
    text = msgspec.json.encode
    well = msgspec.Raw(text(WELL))
    length = len(well)
    deep = "[" * 900 + "]" * 900
    nested = f'{{"prompt": "p", "messages": {deep[20:-20]}}}'
    sketches = [
        Sketch(json=well), Sketch(json=msgspec.Raw(text(CHAT)), path="/v1/chat/completions"),
        Sketch(json=well, chunks=[10, length - 10]), Sketch(json=well, chunks=[5]),
        Sketch(json=well, gzip=True), Sketch(body="x", times=5000), Sketch(body=deep),
        Sketch(body='{"a":', times=3000), Sketch(body=nested),
        Sketch(body=nested, path="/v1/chat/completions"),
        Sketch(body=" ", times=20_000, gzip=True), Sketch(body=" ", times=9000, chunks=[4000] * 3),
        Sketch(json=well, headers=[["Content-Type", "text/plain; charset=utf-7"]]),
        Sketch(json=well, headers=[["Content-Encoding", "br"]]),
        Sketch(json=well, headers=[["Content-Length", "-1"]]),
        Sketch(json=well, headers=[["Content-Length", "3"]], chunks=[length]),
        Sketch(json=well, headers=[[OURS, "50"]]), Sketch(json=well, headers=[[OURS, "9" * 5000]]),
        Sketch(json=well, headers=[["X-Request-Id", "i" * 600], ["Authorization", "Bearer x"]]),
        Sketch(json=well, headers=[["Expect", "100-continue"]]),
        Sketch(json=well, path="/v1/completions?transfer_id=evil.example&x=%zz#y"),
        Sketch("GET", "/v1/models"), Sketch("GET", "/requests?since=-1"),
        Sketch("GET", "/trace?a=b"),
        Sketch("GET", "/pairs"), Sketch("GET", "/metrics"), Sketch("GET", "/../../etc/passwd"),
        Sketch("DELETE", "/v1/completions"), Sketch("OPTIONS", "*"), Sketch("GET", "/health"),
    ]  # fmt: skip
    return [text(sketch) for sketch in sketches] + [b"GET\x00 / HTTP/9.9\r\n\r\n", b"\x16\x03\x01"]
