"""What happens to a dispatch that was given up: its decode engine is asked until it is quiet.

Closing both connections tells the engines; a WRITE that was posted cannot be recalled, so the
decode engine keeps the blocks until the prefill engine has confirmed. Until then they are not
free for another request, and the router goes on counting them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from neuron_push.errors import NeuronPushError, PeerError
from neuron_push.protocol import Address, Held, Holds, SideChannelMessage
from neuron_push.router.engines import Engine
from neuron_push.router.metrics import Metrics

log = logging.getLogger(__name__)

Ask = Callable[[Address, SideChannelMessage, float], Awaitable[SideChannelMessage]]

# An engine learns of a closed connection and drains within milliseconds; asked sooner, it may
# not have heard yet.
FIRST: Final = 0.02
LONGEST: Final = 1.0
# Seconds after which an engine's own bounds (drain_timeout and a fence) must have acted.
BOUND: Final = 60.0
# Dispatches watched at once; of more, the blocks are given back at once.
MOST: Final = 1000


class Drains:
    """Watches dispatches that were given up."""

    def __init__(self, ask: Ask, metrics: Metrics, timeout: float = 2.0) -> None:
        self._ask = ask
        self._metrics = metrics
        self._timeout = timeout
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, decode: Engine, transfer: str) -> None:
        """Count the transfer's blocks as promised until the engine holds none for it."""
        if len(self._tasks) >= MOST:
            self._metrics.undrained.inc()
            decode.forgive(transfer)
            return
        task = asyncio.create_task(self._follow(decode, transfer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop watching."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, decode: Engine, transfer: str) -> None:
        began, pause = time.monotonic(), FIRST
        try:
            while time.monotonic() - began < BOUND:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST)
                try:
                    answer = await self._ask(decode.place.side, Holds(transfer), self._timeout)
                except PeerError:
                    return  # an engine of an older version cannot say
                except NeuronPushError:
                    continue
                if not isinstance(answer, Held):
                    return
                if answer.blocks == 0:
                    self._metrics.drain.observe(time.monotonic() - began)
                    return
            self._metrics.undrained.inc()
            log.warning("engine %s did not confirm the drain of %s", decode.name, transfer)
        finally:
            decode.forgive(transfer)
