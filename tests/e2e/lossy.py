"""A network between router and engine that loses answers: a proxy in front of a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from neuron_push.engines import Engine


@dataclass(frozen=True)
class Loss:
    """What becomes of a leg that is lost: the router hears after so many seconds of its life."""

    after: float
    # The engine goes on with it, and never learns that nobody listens.
    goes_on: bool


@asynccontextmanager
async def lossy(engine: Engine, loss_of: Callable[[str], Loss | None]) -> AsyncIterator[str]:
    """The proxy's URL; a request's first leg, by its id, is lost as `loss_of` says."""
    async with aiohttp.ClientSession() as session:
        proxy = _Proxy(engine, loss_of, session)
        app = web.Application()
        app.router.add_post("/{path:.*}", proxy.serve)
        app.router.add_get("/{path:.*}", proxy.look)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await asyncio.gather(*proxy.unheard, return_exceptions=True)
            await runner.cleanup()


class _Proxy:
    def __init__(
        self, engine: Engine, loss_of: Callable[[str], Loss | None], session: aiohttp.ClientSession
    ) -> None:
        self._engine, self._loss_of, self._session = engine, loss_of, session
        self._seen: set[str] = set()
        self.unheard: list[asyncio.Task[web.Response]] = []

    async def serve(self, request: web.Request) -> web.Response:
        name, body = request.headers["X-Request-Id"], await request.read()
        first = name not in self._seen
        self._seen.add(name)
        leg = asyncio.create_task(self._pass_on(request.path_qs, request.headers, body))
        loss = self._loss_of(name) if first else None
        if loss is None:
            return await leg  # a router that leaves takes its leg along
        await asyncio.sleep(loss.after)
        if loss.goes_on:
            self.unheard.append(leg)
        else:
            leg.cancel()
            await asyncio.gather(leg, return_exceptions=True)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def look(self, request: web.Request) -> web.Response:
        """Health and metrics."""
        async with self._session.get(self._engine.url + request.path_qs) as answer:
            return web.Response(status=answer.status, body=await answer.read())

    async def _pass_on(self, path: str, headers: Mapping[str, str], body: bytes) -> web.Response:
        kept = {name: headers[name] for name in ("X-Request-Id", "Content-Type")}
        url = self._engine.url + path
        async with self._session.post(url, data=body, headers=kept) as answer:
            return web.Response(
                status=answer.status, body=await answer.read(), content_type=answer.content_type
            )
