"""The proxy between load and engines: the same few lines for every column.

    POST /target    {"dispatch": "push", "prefill": {...}, "decode": {...}}, see `Engine`
    POST /records   what happened since, and forget it
    POST /v1/completions, /v1/chat/completions

It tries nothing twice and chooses nothing: a router's own time is measured by `bench router`.
Each leg has a connection of its own, as engines may have been paused in between.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from contextlib import suppress
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

from neuron_push.bench.sweep.columns import Dispatch
from neuron_push.ports import HOST

PATIENCE: Final = 300.0


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as a leg needs to know it."""

    url: str
    name: str = "prefill"
    """Its engine id."""
    host: str = HOST
    side_port: int = 5600
    tp: int = 1


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go, and how."""

    dispatch: Dispatch
    prefill: Engine | None = None
    decode: Engine | None = None


class Record(msgspec.Struct, kw_only=True):
    """One request. Times are of the monotonic clock, 0 where nothing came."""

    request: str
    """The X-Request-Id that the engines saw."""
    client: str
    """The one that the client sent."""
    arrived: float
    prefilled: float = 0.0
    """The prefill leg was answered."""
    first: float = 0.0
    """The first byte of the answer came."""
    error: str = ""


class Proxy:
    """One target at a time."""

    def __init__(self) -> None:
        self._target: Target | None = None
        self._records: list[Record] = []
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", lambda _: _ok())
        app.router.add_post("/target", self._aim)
        app.router.add_post("/records", self._tell)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        return app

    async def _aim(self, request: web.Request) -> web.Response:
        self._target = msgspec.json.decode(await request.read(), type=Target)
        self._records = []
        return web.Response()

    async def _tell(self, request: web.Request) -> web.Response:
        records, self._records = self._records, []
        return web.Response(body=msgspec.json.encode(records), content_type="application/json")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        target, name = self._target, uuid.uuid4().hex
        if target is None:
            return web.Response(status=503, text="no target")
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=PATIENCE)
            limits = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=limits, timeout=timeout)
        record = Record(
            request=name, client=request.headers.get("X-Request-Id", ""), arrived=time.monotonic()
        )
        self._records.append(record)
        body = msgspec.json.decode(await request.read())
        try:
            return await self._dispatch(target, request, body, record)
        except (aiohttp.ClientError, TimeoutError, _Refused) as error:
            record.error = repr(error)
            return web.Response(status=502, text=record.error)

    async def _dispatch(
        self, target: Target, request: web.Request, body: dict[str, Any], record: Record
    ) -> web.StreamResponse:
        if target.dispatch in ("prefill", "decode"):
            alone = target.prefill if target.dispatch == "prefill" else target.decode
            assert alone is not None
            if target.dispatch == "prefill":
                body["max_tokens"] = 1
            return await self._stream(alone, request, body, record)
        prefill, decode = target.prefill, target.decode
        assert prefill is not None and decode is not None
        first, second = _parameters(prefill, record.request, target.dispatch)
        short = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": first}
        short.pop("stream_options", None)
        leg = asyncio.create_task(self._prefill(prefill, request.path, short, record))
        try:
            if target.dispatch == "pull":
                second = await leg
                if not second:  # decode would compute the prompt itself, and nobody would know
                    raise _Refused("prefill's answer does not say where the KV is")
            answer = await self._stream(
                decode, request, {**body, "kv_transfer_params": second}, record
            )
            await leg
            return answer
        finally:
            leg.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await leg

    async def _prefill(
        self, engine: Engine, path: str, body: dict[str, Any], record: Record
    ) -> dict[str, Any]:
        """The prefill leg; what it says to the decode leg."""
        assert self._session is not None
        async with self._session.post(
            engine.url + path, data=msgspec.json.encode(body), headers=_headers(record)
        ) as answer:
            text = await answer.read()
            record.prefilled = time.monotonic()
            if answer.status != 200:
                raise _Refused(f"prefill: {answer.status} {text[:300]!r}")
        found: dict[str, Any] = msgspec.json.decode(text).get("kv_transfer_params") or {}
        return found

    async def _stream(
        self, engine: Engine, request: web.Request, body: dict[str, Any], record: Record
    ) -> web.StreamResponse:
        """Pass an engine's answer on as it comes."""
        assert self._session is not None
        async with self._session.post(
            engine.url + request.path, data=msgspec.json.encode(body), headers=_headers(record)
        ) as answer:
            if answer.status != 200:
                raise _Refused(f"{answer.status} {(await answer.read())[:300]!r}")
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                if not record.first:
                    record.first = time.monotonic()
                await response.write(piece)
            await response.write_eof()
        return response


class _Refused(Exception):
    """An engine answered with an error."""


def _headers(record: Record) -> dict[str, str]:
    return {"X-Request-Id": record.request, "Content-Type": "application/json"}


def _parameters(
    prefill: Engine, name: str, dispatch: Dispatch
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the two legs of a push carry. Names are vLLM's; each connector takes what it knows."""
    first = {
        "do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name,
        "transfer_mode": dispatch,
    }  # fmt: skip
    second = {
        "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": name,
        "remote_engine_id": prefill.name, "remote_host": prefill.host,
        "remote_port": prefill.side_port, "remote_request_id": name,
        "tp_size": prefill.tp, "pp_size": 1, "transfer_mode": dispatch,
    }  # fmt: skip
    return first, second


async def _ok() -> web.Response:
    return web.Response()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    web.run_app(Proxy().app(), host=HOST, port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
