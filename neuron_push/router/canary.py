"""Readiness that means something: a real token that came through a pair."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Final

import aiohttp

from neuron_push.router import bodies
from neuron_push.router.dispatch import Dispatcher
from neuron_push.router.engines import Engine
from neuron_push.router.fleet import Fleet, NoPair, Pair
from neuron_push.router.flights import Flight, Route
from neuron_push.router.jobs import Job
from neuron_push.router.legs import LegFailed
from neuron_push.router.metrics import Metrics

log = logging.getLogger(__name__)

PATH: Final = "/v1/completions"
# Pairs tried by one question for readiness, and pairs probed in one round.
MOST_TRIES: Final = 3
MOST_PROBES: Final = 32
# Long enough to fill a block or two, drawn anew each time: a prompt that the decode engine has
# in its cache would need no transfer and prove nothing.
PROMPT_WORDS: Final = 8


class Canary:
    """Sends one-token requests through pairs."""

    def __init__(
        self, fleet: Fleet, dispatcher: Dispatcher, session: aiohttp.ClientSession,
        metrics: Metrics, *, fresh: float, timeout: float, headers: dict[str, str],
    ) -> None:  # fmt: skip
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._session = session
        self._metrics = metrics
        self._fresh = fresh
        self._timeout = timeout
        self._headers = headers
        self._lock = asyncio.Lock()
        self._turn = 0

    async def ready(self) -> str:
        """Why no token comes through; empty when one did within the last `fresh` seconds."""
        async with self._lock:
            if time.monotonic() - self._dispatcher.last_worked < self._fresh:
                return ""
            reasons: list[str] = []
            failed: frozenset[Engine] = frozenset()
            for _ in range(MOST_TRIES):
                try:
                    pair = self._fleet.choose(Job(output_tokens=1, excluded=failed))
                except NoPair as error:
                    return "; ".join([*reasons, str(error)])
                reason = await self.probe(pair)
                if not reason:
                    return ""
                reasons.append(reason)
                failed |= {pair.prefill, pair.decode}
            return "; ".join(reasons)

    async def run(self, period: float) -> None:
        """Probe pairs for ever: idle connections break without telling anybody."""
        while True:
            await asyncio.sleep(period)
            for pair in self._next_pairs():
                await self.probe(pair)

    def _next_pairs(self) -> list[Pair]:
        """Each engine once, next to another partner every time."""
        self._turn += 1
        pairs: list[Pair] = []
        for kind in self._fleet.kinds():
            size = max(len(kind.prefill), len(kind.decode))
            if kind.prefill and kind.decode:
                pairs += [
                    Pair(
                        kind.prefill[(index + self._turn) % len(kind.prefill)],
                        kind.decode[index % len(kind.decode)],
                    )
                    for index in range(size)
                ]
        start = self._turn * MOST_PROBES % len(pairs) if len(pairs) > MOST_PROBES else 0
        return (pairs + pairs)[start : start + min(len(pairs), MOST_PROBES)]

    async def probe(self, pair: Pair) -> str:
        """Send one request through a pair; why it failed, or empty."""
        try:
            async with asyncio.timeout(self._timeout):
                reason = await self._probe(pair)
        except TimeoutError:
            reason = f"no token within {self._timeout:g} s"
        except LegFailed as failure:
            reason = str(failure)
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{pair.decode.name}: {error or type(error).__name__}"
        self._metrics.canaries.labels("failed" if reason else "ok").inc()
        if reason:
            self._dispatcher.pair_failed(pair.prefill, pair.decode, f"canary: {reason}")
        else:
            self._dispatcher.pair_worked(pair.prefill, pair.decode)
        return reason

    async def _probe(self, pair: Pair) -> str:
        model = await self._model(pair.decode)
        prompt = " ".join(uuid.uuid4().hex for _ in range(PROMPT_WORDS))
        body = bodies.canary_body(model, prompt)
        name = f"canary-{uuid.uuid4().hex}"
        flight = Flight(
            PATH, body, Job.of(body, len(prompt)), name,
            {**self._headers, "X-Request-Id": name, "Content-Type": "application/json"},
            time.monotonic(), deadline=time.monotonic() + self._timeout,
        )  # fmt: skip
        flight.route = Route("push", pair.prefill, pair.decode)
        opened = await self._dispatcher.modes.push(flight, lambda: None)
        try:
            raw = b"".join([piece async for piece in opened.answer.pieces()])
        finally:
            opened.answer.close()
            if opened.prefill is not None:
                opened.prefill.cancel()
        return "" if bodies.first_token(raw) else f"{pair.decode.name} answered without a token"

    async def _model(self, engine: Engine) -> str:
        url = f"{engine.place.url}/v1/models"
        async with self._session.get(url, headers=self._headers) as answer:
            models = bodies.parse(await answer.read()).get("data")
        first = models[0] if isinstance(models, list) and models else {}
        return str(first.get("id", "")) if isinstance(first, dict) else ""
