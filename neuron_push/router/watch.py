"""Keeps what the router knows of each engine current, by asking its side channel."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from ssl import SSLContext
from typing import Final

import aiohttp

from neuron_push.errors import NeuronPushError
from neuron_push.protocol import Address, EngineInfo, SideChannelMessage, Who
from neuron_push.router.engines import Engine, Leg, Mode
from neuron_push.router.fleet import Fleet
from neuron_push.router.metrics import Metrics
from neuron_push.router.places import Listing, Place

log = logging.getLogger(__name__)

# As neuron_push.sidechannel.ask_async; tests put a fake in its place.
Ask = Callable[[Address, SideChannelMessage, float], Awaitable[SideChannelMessage]]

# First wait before an engine that did not answer is asked again; it doubles up to the period.
RETRY: Final = 0.2
# Engines asked per second at most, however large the fleet: each question costs a connection.
MOST_ASKED: Final = 100.0


class Watch:
    """One task per engine that asks `Who` every `period` seconds, or sooner when told to."""

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        ask: Ask,
        metrics: Metrics,
        *,
        period: float,
        timeout: float,
        mode: Mode = "push",
        ssl: SSLContext | None = None,
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._ask = ask
        self._metrics = metrics
        self._period = period
        self._timeout = timeout
        self._mode: Mode = mode
        self._ssl: SSLContext | bool = ssl or True
        self._wake: dict[int, asyncio.Event] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # Set after each answer or failure, for whoever waits for the fleet to change.
        self.changed = asyncio.Event()

    def start(self) -> None:
        """Begin asking the engines that the fleet has already."""
        for engine in self._fleet.engines:
            self._begin(engine)

    def apply(self, listing: Listing) -> None:
        """Take in engines that are new in a listing, and give those that left no more work."""
        legs: tuple[tuple[Leg, Sequence[Place]], ...] = (
            ("prefill", listing.prefill),
            ("decode", listing.decode),
        )
        for leg, places in legs:
            new, gone = self._fleet.compare(leg, places)
            for place in new:
                log.info("%s engine at %s is listed", leg, place.url)
                engine = Engine(leg, place)
                self._fleet.add(engine)
                self._begin(engine)
            for engine in gone:
                log.info("%s engine %s is not listed any more", leg, engine.name)
                self._fleet.remove(engine)
                self._tasks.pop(id(engine)).cancel()
                del self._wake[id(engine)]
                self._count_ready(engine.leg)
        self.changed.set()

    async def stop(self) -> None:
        """Stop asking; returns when every task has ended."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def suspect(self, engine: Engine) -> None:
        """A request to this engine failed: ask it at once instead of in its turn."""
        if wake := self._wake.get(id(engine)):
            wake.set()

    def _begin(self, engine: Engine) -> None:
        self._wake[id(engine)] = asyncio.Event()
        self._tasks[id(engine)] = asyncio.create_task(self._follow(engine))

    async def _follow(self, engine: Engine) -> None:
        retry = RETRY
        wake = self._wake[id(engine)]
        while True:
            await self.refresh(engine)
            period = max(self._period, len(self._fleet.engines) / MOST_ASKED)
            pause = period if not engine.trouble else min(retry, period)
            retry = RETRY if not engine.trouble else retry * 2
            # Spread, so that a thousand engines are not asked in one breath.
            pause *= random.uniform(0.9, 1.1)
            # Not wait_for: on Python 3.11 that swallows a cancellation that comes with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await wake.wait()
                wake.clear()

    async def refresh(self, engine: Engine) -> None:
        """Ask one engine once, and record what it says or why it does not."""
        before = engine.trouble
        try:
            await self._refresh(engine)
        except NeuronPushError as error:
            engine.lost(f"side channel {_show(engine.place.side)}: {error}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            engine.lost(f"server {engine.place.url}: {error or type(error).__name__}")
        if engine.trouble != before:
            log.info("%s engine %s: %s", engine.leg, engine.name, engine.trouble or "ready")
        self._count_ready(engine.leg)
        self.changed.set()

    def _count_ready(self, leg: Leg) -> None:
        of_leg = [engine for engine in self._fleet.engines if engine.leg == leg]
        metrics = self._metrics
        metrics.engines_ready.labels(leg).set(sum(not engine.trouble for engine in of_leg))
        metrics.engines_known.labels(leg).set(len(of_leg))
        metrics.pairs_usable.set(self._fleet.usable_pairs())

    async def _refresh(self, engine: Engine) -> None:
        engine.begin_asking()
        answer = await self._ask(engine.place.side, Who(), self._timeout)
        if not isinstance(answer, EngineInfo):
            engine.lost(f"side channel answered {type(answer).__name__} to Who")
            return
        # The listener is up before the server is, and may outlive it.
        limit = aiohttp.ClientTimeout(total=self._timeout)
        url = f"{engine.place.url}/health"
        async with self._session.get(url, timeout=limit, ssl=self._ssl) as health:
            status = health.status
        if engine.seen(answer, self._mode):
            log.warning("%s engine at %s was restarted", engine.leg, engine.place.url)
            self._metrics.restarts.labels(engine.leg).inc()
            self._fleet.quarantine.forget(engine)
        if status != 200:
            engine.lost(f"{engine.place.url}/health answered {status}")


def _show(address: Address) -> str:
    return f"{address.host}:{address.port}"
