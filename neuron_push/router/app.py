"""The router's HTTP face."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from ssl import SSLContext
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

from neuron_push.router import bodies, policies
from neuron_push.router.answers import as_error, as_json
from neuron_push.router.canary import Canary
from neuron_push.router.discovery import Source
from neuron_push.router.dispatch import Dispatcher, Late
from neuron_push.router.drains import Drains
from neuron_push.router.engines import Engine
from neuron_push.router.fleet import Fleet, NoPair, NoRoom
from neuron_push.router.flights import FORWARDED, Flight, Flights
from neuron_push.router.ingress import Gate, Refused
from neuron_push.router.jobs import Job
from neuron_push.router.legs import LegFailed, Legs
from neuron_push.router.metrics import Metrics
from neuron_push.router.relay import CutShort
from neuron_push.router.settings import Settings
from neuron_push.router.watch import Ask, Watch
from neuron_push.tracing import Ring, batch_of

# vLLM closes idle connections after 5 s; one that is being closed must not be picked up.
KEEP_ALIVE: Final = 3.0
# How long a client may ask for: longer than any request's natural end.
MOST_DEADLINE_MS: Final = 86_400_000
DEADLINE_HEADER: Final = "X-Neuron-Push-Deadline-Ms"


class Router:
    """Handlers of one router, over the parts that they share."""

    def __init__(
        self, settings: Settings, ask: Ask, source: Source | None, metrics: Metrics
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        preferred = settings.preferred
        self.fleet = Fleet(
            prefill=[Engine("prefill", place) for place in settings.prefill],
            decode=[Engine("decode", place) for place in settings.decode],
            prefill_policy=policies.make(settings.prefill_policy, preferred),
            decode_policy=policies.make(settings.decode_policy, preferred),
            incast=settings.incast,
        )
        size = settings.trace_events
        self.flights = Flights(Ring(size, "router") if size else None)
        self._gate = Gate(settings.keys, settings.most_in_flight, settings.most_per_tenant)
        self._ask = ask
        self._source = source
        # Made in `lifetime`, inside the event loop.
        self.session: aiohttp.ClientSession
        self.watch: Watch
        self.dispatcher: Dispatcher
        self.canary: Canary

    # ------------------------------------------------------------------ beside the handlers

    async def lifetime(self, _: web.Application) -> AsyncIterator[None]:
        """Start what runs beside the handlers, and stop it when the application ends."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
        async with aiohttp.ClientSession(
            connector=connector, auto_decompress=False, skip_auto_headers=["Accept-Encoding"]
        ) as self.session:
            self._assemble()
            self.watch.start()
            tasks = [asyncio.create_task(task) for task in self._background()]
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.watch.stop()
            await self.dispatcher.close()

    def _assemble(self) -> None:
        settings, metrics = self.settings, self.metrics
        tls = settings.engine_tls
        self.watch = Watch(
            self.fleet, self.session, self._ask, metrics, period=settings.refresh,
            timeout=settings.ask_timeout, mode=settings.rules.mode, ssl=tls,
        )  # fmt: skip
        legs = Legs(self.session, settings.limits, tls)
        drains = Drains(self._ask, metrics)
        self.dispatcher = Dispatcher(
            self.fleet, legs, self.watch, metrics, self.flights, drains, settings.rules
        )
        self.canary = Canary(
            self.fleet, self.dispatcher, self.session, metrics, fresh=settings.canary_fresh,
            timeout=settings.canary_timeout, headers=self._engine_headers({}),
        )  # fmt: skip

    def _background(self) -> list[Any]:
        tasks: list[Any] = []
        if self._source is not None:
            tasks.append(self._follow(self._source))
        if self.settings.canary_period:
            tasks.append(self.canary.run(self.settings.canary_period))
        return tasks

    async def _follow(self, source: Source) -> None:
        async for listing in source.listings():
            self.watch.apply(listing)

    # ------------------------------------------------------------------ completions

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        arrived = time.monotonic()
        outcome = "router_failed"
        self.metrics.in_flight.inc()
        try:
            outcome, response = await self._complete(request, arrived)
            return response
        except asyncio.CancelledError:
            outcome = "client_left"
            raise
        finally:
            self.metrics.in_flight.dec()
            self.metrics.requests.labels(outcome).inc()

    async def _complete(
        self, request: web.Request, arrived: float
    ) -> tuple[str, web.StreamResponse]:
        try:
            return await self._admitted(request, arrived)
        except web.HTTPRequestEntityTooLarge:
            most = self.settings.most_body
            reason = f"the body is longer than this router's limit of {most} bytes"
            return "bad_request", as_error(413, reason, "invalid_request_error")
        except bodies.BadBody as error:
            return "bad_request", as_error(400, str(error), "invalid_request_error")
        except Refused as refusal:
            if refusal.status == 429:
                self.metrics.limited.labels(refusal.outcome).inc()
            outcome = "limited" if refusal.status == 429 else refusal.outcome
            return outcome, as_error(refusal.status, str(refusal), refusal.kind)
        except NoRoom as error:
            return "no_room", as_error(503, str(error), "no_room")
        except NoPair as error:
            return "no_pair", as_error(503, str(error), "no_usable_pair")
        except Late as error:
            return "late", as_error(504, str(error), "deadline_exceeded")
        except LegFailed as failure:
            status, raw, content_type = failure.answer()
            response = web.Response(status=status, body=raw, content_type=content_type)
            return f"{failure.leg}_failed", response
        except CutShort as cut:
            return cut.outcome, cut.response

    async def _admitted(
        self, request: web.Request, arrived: float
    ) -> tuple[str, web.StreamResponse]:
        tenant = self._gate.who(request.headers)
        with self._gate.inside(tenant):
            flight = self._flight(request, await request.read(), arrived, tenant)
            self.flights.begin(flight)
            try:
                return "ok", await self.dispatcher.serve(request, flight)
            finally:
                self.flights.end(flight)

    def _flight(self, request: web.Request, raw: bytes, arrived: float, tenant: str) -> Flight:
        body = bodies.parse(raw)
        given = request.headers
        headers = {key: given[key] for key in FORWARDED if key in given}
        name = bodies.request_id(given.get("X-Request-Id"))
        headers = self._engine_headers(headers)
        headers |= {"X-Request-Id": name, "Content-Type": "application/json"}
        session = given.get(self.settings.session_header, "")
        job = Job.of(body, len(raw), session)
        deadline = self._deadline(given.get(DEADLINE_HEADER, ""), arrived)
        return Flight(request.path, body, job, name, headers, arrived, tenant, deadline)

    def _engine_headers(self, headers: dict[str, str]) -> dict[str, str]:
        """The client's key is ours to check and not the engines' to see."""
        if self._gate.guarded:
            headers.pop("Authorization", None)
        if self.settings.engine_key:
            headers["Authorization"] = f"Bearer {self.settings.engine_key}"
        return headers

    def _deadline(self, asked: str, arrived: float) -> float | None:
        most = self.settings.limits.first_byte
        if not asked:
            return None if most is None else arrived + most
        digits = asked.isdecimal() and len(asked) <= len(str(MOST_DEADLINE_MS))
        if not digits or not 0 < int(asked) <= MOST_DEADLINE_MS:
            raise bodies.BadBody(f"{DEADLINE_HEADER} is not a whole number of milliseconds")
        budget = int(asked) / 1000
        return arrived + (budget if most is None else min(budget, most))

    # ------------------------------------------------------------------ the rest

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models, as the first decode engine that answers has it."""
        reasons = []
        headers = {key: request.headers[key] for key in FORWARDED if key in request.headers}
        headers = self._engine_headers(headers)
        tls: SSLContext | bool = self.settings.engine_tls or True
        for engine in sorted(self.fleet.decode, key=lambda engine: bool(engine.trouble)):
            timeout = aiohttp.ClientTimeout(total=self.settings.ask_timeout)
            url = f"{engine.place.url}/v1/models"
            try:
                async with self.session.get(
                    url, timeout=timeout, headers=headers, ssl=tls
                ) as answer:
                    raw = await answer.read()
                    return web.Response(
                        status=answer.status, body=raw, content_type=answer.content_type
                    )
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reasons.append(f"{engine.name}: {error or type(error).__name__}")
        return as_error(502, "no decode engine answers: " + "; ".join(reasons), "upstream_error")

    async def health(self, _: web.Request) -> web.StreamResponse:
        """GET /health: 200 when at least one pair is usable, by what engines say."""
        usable = self.fleet.usable_pairs()
        status = {"status": "ok" if usable else "unavailable", "usable_pairs": usable}
        return as_json(status | {"reasons": self.fleet.reasons()}, 200 if usable else 503)

    async def ready(self, _: web.Request) -> web.StreamResponse:
        """GET /ready: 200 when a real token has come through a pair."""
        reason = await self.canary.ready()
        return as_json({"ready": not reason, "reason": reason or None}, 503 if reason else 200)

    async def live(self, _: web.Request) -> web.StreamResponse:
        """GET /live: 200 while the process serves at all; what to restart it by."""
        return as_json({"status": "ok"})

    async def pairs(self, _: web.Request) -> web.StreamResponse:
        """GET /pairs: every engine and pair, and what stands against it."""
        return as_json(self.fleet.report())

    async def requests(self, _: web.Request) -> web.StreamResponse:
        """GET /requests: what is under way, and what was slow."""
        return as_json(self.flights.report())

    async def trace(self, request: web.Request) -> web.StreamResponse:
        """GET /trace?after=N: the router's own trace events."""
        after = 0
        with suppress(ValueError):
            after = int(request.query.get("after", "0"))
        batch = batch_of(self.flights.ring, "router", after)
        return web.Response(body=msgspec.msgpack.encode(batch), content_type="application/msgpack")

    async def render_metrics(self, _: web.Request) -> web.StreamResponse:
        """GET /metrics."""
        self.metrics.pairs_resting.set(self.fleet.quarantine.resting(time.monotonic()))
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self.metrics.render(), headers=headers)

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Ask for a key where an answer shows or changes something. POSTs ask themselves."""
        if request.path not in OPEN and request.method != "POST":
            try:
                self._gate.who(request.headers)
            except Refused as refusal:
                return as_error(refusal.status, str(refusal), refusal.kind)
        response: web.StreamResponse = await handler(request)
        return response


# Probes and scrapers carry no key.
OPEN: Final = frozenset({"/health", "/ready", "/live", "/metrics"})
ROUTER: Final = web.AppKey("router", Router)


def make_app(
    settings: Settings, ask: Ask, source: Source | None = None, metrics: Metrics | None = None
) -> web.Application:
    """The router as an aiohttp application.

    Run it with handler_cancellation=True, or clients that leave are not noticed.
    """
    router = Router(settings, ask, source, metrics or Metrics())
    guards = [router.guard] if settings.keys else []
    app = web.Application(client_max_size=settings.most_body, middlewares=guards)
    app[ROUTER] = router
    app.cleanup_ctx.append(router.lifetime)
    app.router.add_post("/v1/completions", router.complete)
    app.router.add_post("/v1/chat/completions", router.complete)
    app.router.add_get("/v1/models", router.models)
    for name in ("health", "ready", "live", "pairs", "requests", "trace"):
        app.router.add_get(f"/{name}", getattr(router, name))
    app.router.add_get("/metrics", router.render_metrics)
    return app
