"""Keeps what the router knows of each engine current, by asking its side channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import aiohttp

from neuron_push.errors import NeuronPushError
from neuron_push.protocol import Address, EngineInfo, SideChannelMessage, Who
from neuron_push.router.engines import Engine, Fleet
from neuron_push.router.metrics import Metrics

log = logging.getLogger(__name__)

# As neuron_push.sidechannel.ask_async; tests put a fake in its place.
Ask = Callable[[Address, SideChannelMessage, float], Awaitable[SideChannelMessage]]

# First wait before an engine that did not answer is asked again; it doubles up to the period.
RETRY: Final = 0.2


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
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._ask = ask
        self._metrics = metrics
        self._period = period
        self._timeout = timeout
        self._wake = {id(engine): asyncio.Event() for engine in fleet.engines}
        self._tasks: list[asyncio.Task[None]] = []
        # Set after each answer or failure, for whoever waits for the fleet to change.
        self.changed = asyncio.Event()

    def start(self) -> None:
        """Begin asking."""
        self._tasks = [asyncio.create_task(self._follow(engine)) for engine in self._fleet.engines]

    async def stop(self) -> None:
        """Stop asking; returns when every task has ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def suspect(self, engine: Engine) -> None:
        """A request to this engine failed: ask it at once instead of in its turn."""
        self._wake[id(engine)].set()

    async def _follow(self, engine: Engine) -> None:
        retry = RETRY
        while True:
            await self.refresh(engine)
            pause = self._period if not engine.trouble else min(retry, self._period)
            retry = RETRY if not engine.trouble else retry * 2
            wake = self._wake[id(engine)]
            try:
                await asyncio.wait_for(wake.wait(), pause)
                wake.clear()
            except TimeoutError:
                pass

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
        ready = sum(not other.trouble for other in self._fleet.engines if other.leg == engine.leg)
        self._metrics.engines_ready.labels(engine.leg).set(ready)
        self.changed.set()

    async def _refresh(self, engine: Engine) -> None:
        answer = await self._ask(engine.place.side, Who(), self._timeout)
        if not isinstance(answer, EngineInfo):
            engine.lost(f"side channel answered {type(answer).__name__} to Who")
            return
        if engine.seen(answer):
            log.warning("%s engine at %s was restarted", engine.leg, engine.place.url)
            self._metrics.restarts.labels(engine.leg).inc()
        # The listener is up before the server is, and may outlive it.
        limit = aiohttp.ClientTimeout(total=self._timeout)
        async with self._session.get(f"{engine.place.url}/health", timeout=limit) as health:
            if health.status != 200:
                engine.lost(f"{engine.place.url}/health answered {health.status}")


def _show(address: Address) -> str:
    return f"{address.host}:{address.port}"
