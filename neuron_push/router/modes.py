"""The three ways in which a request's KV comes to its decode engine, up to the first byte."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from neuron_push.router import bodies
from neuron_push.router.engines import Engine
from neuron_push.router.flights import Flight, Flights
from neuron_push.router.legs import Answer, LegFailed, Legs

Prefill = asyncio.Task[bytes]


@dataclass
class Opened:
    """A decode leg that answers, and the prefill leg beside it, which may still run."""

    answer: Answer
    prefill: Prefill | None = None


class Modes:
    """Opens attempts. Whatever it raises, no leg of the attempt runs on, but for `prefill`."""

    def __init__(
        self, legs: Legs, flights: Flights, failed: Callable[[BaseException], None]
    ) -> None:
        self._legs = legs
        self._flights = flights
        # Told of every prefill leg that fails, whenever that is.
        self._failed = failed

    async def push(self, flight: Flight, sent: Callable[[], None]) -> Opened:
        """Both legs at once; LegFailed of whichever is to blame if one fails before a byte."""
        route = flight.route
        assert route is not None and route.prefill is not None and route.decode is not None
        prefill = self._start_prefill(flight, route.prefill)
        try:
            info = route.prefill.info
            assert info is not None, "a usable engine has answered"
            body = bodies.decode_body(
                flight.body, info, route.prefill.place.side, flight.request, route.transfer,
                flight.budget(self._legs.limits.kv),
            )  # fmt: skip
            sent()
            return Opened(await self._first_bytes(flight, route.decode, body, prefill), prefill)
        except LegFailed as failure:
            raise self.blame(failure, prefill) from failure.__cause__
        except BaseException:
            prefill.cancel()
            raise

    async def pull(self, flight: Flight, late: Callable[[], Awaitable[Engine]]) -> Opened:
        """Prefill first; then the decode engine, chosen by what is free by then, READs."""
        route = flight.route
        assert route is not None and route.prefill is not None
        prefill = self._start_prefill(flight, route.prefill)
        try:
            raw = await prefill
        except BaseException:
            prefill.cancel()
            raise
        params = bodies.coordinates(raw)
        if params is None:
            raise LegFailed("prefill", route.prefill, "its answer does not say where the KV is")
        flight.phase = "transfer"
        decode = await late()
        body = bodies.pull_body(flight.body, params, flight.budget(self._legs.limits.kv))
        return Opened(await self._first_bytes(flight, decode, body, None))

    async def local(self, flight: Flight, sent: Callable[[], None]) -> Opened:
        """The decode engine computes the prompt itself."""
        route = flight.route
        assert route is not None and route.decode is not None
        sent()
        body = bodies.local_body(flight.body)
        return Opened(await self._first_bytes(flight, route.decode, body, None))

    @staticmethod
    def blame(failure: LegFailed, prefill: Prefill) -> LegFailed:
        """The failure to report, when the decode leg may have failed because prefill did."""
        if failure.leg == "decode":
            ended = prefill.done() and not prefill.cancelled()
            cause = prefill.exception() if ended else None
            if isinstance(cause, LegFailed) and not failure.clients_fault:
                return cause
        prefill.cancel()
        return failure

    # ------------------------------------------------------------------ inside

    def _start_prefill(self, flight: Flight, engine: Engine) -> Prefill:
        route = flight.route
        assert route is not None and engine.info is not None
        # The identity asked for is that of one data-parallel rank: prefill must run there.
        headers = {**flight.headers, "X-data-parallel-rank": str(engine.info.data_rank)}
        budget = flight.budget(self._legs.limits.kv)
        mode: Literal["push", "pull"] = "pull" if route.kind == "pull" else "push"
        body = bodies.prefill_body(flight.body, flight.chat, route.transfer, budget, mode)
        task = asyncio.create_task(self._legs.prefill(engine, flight.path, headers, body))
        # Counted from here, not from the task's first step, for choices made in between.
        tokens = flight.job.prompt_tokens
        engine.in_flight += 1
        engine.tokens += tokens
        flight.phase = "prefill"

        def ended(task: Prefill) -> None:
            engine.in_flight -= 1
            engine.tokens -= tokens
            if task.cancelled():
                return
            if error := task.exception():
                self._failed(error)
                return
            if flight.phase == "prefill":
                flight.phase = "transfer"
            self._flights.mark(flight, "prefill answered")

        task.add_done_callback(ended)
        return task

    async def _first_bytes(
        self, flight: Flight, engine: Engine, body: bytes, prefill: Prefill | None
    ) -> Answer:
        """The decode leg's answer, or LegFailed of whichever leg fails before it begins."""
        headers = flight.headers
        if engine.place.ranks > 1:
            headers = {**headers, "X-data-parallel-rank": str(engine.place.rank)}
        leg = self._legs.decode(engine, flight.path, headers, body)
        if prefill is None:
            return await leg
        opening = asyncio.create_task(leg)
        try:
            await asyncio.wait({opening, prefill}, return_when=asyncio.FIRST_COMPLETED)
            if prefill.done():
                prefill.result()
            return await opening
        except BaseException:
            opening.add_done_callback(_close_unused)
            opening.cancel()
            raise


def _close_unused(opening: asyncio.Task[Answer]) -> None:
    """A decode answer that came while its request was being given up."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
