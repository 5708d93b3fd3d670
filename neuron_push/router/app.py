"""The router's HTTP face."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

from neuron_push.router import bodies
from neuron_push.router.dispatch import CutShort, Dispatcher
from neuron_push.router.engines import Engine, Fleet, NoPair, Place
from neuron_push.router.legs import LegFailed, Legs, Limits
from neuron_push.router.metrics import Metrics
from neuron_push.router.watch import Ask, Watch

# vLLM closes idle connections after 5 s; one that is being closed must not be picked up.
KEEP_ALIVE: Final = 3.0


@dataclass(frozen=True)
class Settings:
    """Settings of one router. Durations are seconds, sizes are bytes."""

    prefill: Sequence[Place]
    decode: Sequence[Place]
    limits: Limits = field(default_factory=Limits)
    most_body: int = 64 << 20
    """Longest request body; longer ones are answered 413."""
    refresh: float = 2.0
    """How often engines are asked who they are; failures are asked about sooner."""
    ask_timeout: float = 5.0
    """How long an engine's side channel and its /health may take to answer."""


class Router:
    """Handlers of one router, over the parts that they share."""

    def __init__(self, settings: Settings, ask: Ask) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.fleet = Fleet(
            prefill=[Engine("prefill", place) for place in settings.prefill],
            decode=[Engine("decode", place) for place in settings.decode],
        )
        self._ask = ask
        # Made in `lifetime`, inside the event loop.
        self.session: aiohttp.ClientSession
        self.watch: Watch
        self.dispatcher: Dispatcher

    async def lifetime(self, _: web.Application) -> AsyncIterator[None]:
        """Start what runs beside the handlers, and stop it when the application ends."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
        async with aiohttp.ClientSession(
            connector=connector, auto_decompress=False, skip_auto_headers=["Accept-Encoding"]
        ) as self.session:
            self.watch = Watch(
                self.fleet,
                self.session,
                self._ask,
                self.metrics,
                period=self.settings.refresh,
                timeout=self.settings.ask_timeout,
            )
            legs = Legs(self.session, self.settings.limits)
            self.dispatcher = Dispatcher(self.fleet, legs, self.watch, self.metrics)
            self.watch.start()
            yield
            await self.watch.stop()
            await self.dispatcher.close()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        outcome = "router_failed"
        self.metrics.in_flight.inc()
        try:
            outcome, response = await self._complete(request)
            return response
        except asyncio.CancelledError:
            outcome = "client_left"
            raise
        finally:
            self.metrics.in_flight.dec()
            self.metrics.requests.labels(outcome).inc()

    async def _complete(self, request: web.Request) -> tuple[str, web.StreamResponse]:
        try:
            body = bodies.parse(await request.read())
            return "ok", await self.dispatcher.serve(request, body)
        except web.HTTPRequestEntityTooLarge:
            most = self.settings.most_body
            reason = f"the body is longer than this router's limit of {most} bytes"
            return "bad_request", _error(413, reason, "invalid_request_error")
        except bodies.BadBody as error:
            return "bad_request", _error(400, str(error), "invalid_request_error")
        except NoPair as error:
            return "no_pair", _error(503, str(error), "no_usable_pair")
        except LegFailed as failure:
            status, raw, content_type = failure.answer()
            response = web.Response(status=status, body=raw, content_type=content_type)
            return f"{failure.leg}_failed", response
        except CutShort as cut:
            return cut.outcome, cut.response

    async def models(self, _: web.Request) -> web.StreamResponse:
        """GET /v1/models, as the first decode engine that answers has it."""
        reasons = []
        for engine in sorted(self.fleet.decode, key=lambda engine: bool(engine.trouble)):
            timeout = aiohttp.ClientTimeout(total=self.settings.ask_timeout)
            url = f"{engine.place.url}/v1/models"
            try:
                async with self.session.get(url, timeout=timeout) as answer:
                    raw = await answer.read()
                    return web.Response(
                        status=answer.status, body=raw, content_type=answer.content_type
                    )
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reasons.append(f"{engine.name}: {error or type(error).__name__}")
        return _error(502, "no decode engine answers: " + "; ".join(reasons), "upstream_error")

    async def health(self, _: web.Request) -> web.StreamResponse:
        """GET /health: 200 when at least one pair is usable."""
        report = [(pair, against) for pair, against in self.fleet.pairs()]
        usable = sum(not against for _, against in report)
        reasons = sorted({line for _, against in report for line in against})
        status = {"status": "ok" if usable else "unavailable", "usable_pairs": usable}
        return _json(status | {"reasons": reasons}, 200 if usable else 503)

    async def pairs(self, _: web.Request) -> web.StreamResponse:
        """GET /pairs: every engine and pair, and what stands against it."""
        return _json(self.fleet.report())

    async def render_metrics(self, _: web.Request) -> web.StreamResponse:
        """GET /metrics."""
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self.metrics.render(), headers=headers)


ROUTER: Final = web.AppKey("router", Router)


def make_app(settings: Settings, ask: Ask) -> web.Application:
    """The router as an aiohttp application.

    Run it with handler_cancellation=True, or clients that leave are not noticed.
    """
    router = Router(settings, ask)
    app = web.Application(client_max_size=settings.most_body)
    app[ROUTER] = router
    app.cleanup_ctx.append(router.lifetime)
    app.router.add_post("/v1/completions", router.complete)
    app.router.add_post("/v1/chat/completions", router.complete)
    app.router.add_get("/v1/models", router.models)
    app.router.add_get("/health", router.health)
    app.router.add_get("/pairs", router.pairs)
    app.router.add_get("/metrics", router.render_metrics)
    return app


def _json(value: Any, status: int = 200) -> web.Response:
    raw = msgspec.json.encode(value)
    return web.Response(body=raw, status=status, content_type="application/json")


def _error(status: int, message: str, kind: str) -> web.Response:
    raw = bodies.error_body(status, message, kind)
    return web.Response(body=raw, status=status, content_type="application/json")
