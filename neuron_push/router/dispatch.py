"""One request, its legs, one outcome.

Until the first byte of the decode leg's answer nothing goes to the client, so a failure of
either leg can still become one clear error, or another attempt on other engines under another
transfer id. Whatever ends the request - a failed leg, the client leaving, a deadline, a bug
here - ends the other leg by closing its connection, which is how an engine learns that a
request was given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from aiohttp import web

from neuron_push.router.drains import Drains
from neuron_push.router.engines import Engine, Mode
from neuron_push.router.fleet import Fleet, NoPair, NoRoom
from neuron_push.router.flights import SHOWN, Flight, Flights, Route
from neuron_push.router.legs import Answer, LegFailed, Legs
from neuron_push.router.metrics import Metrics
from neuron_push.router.modes import Modes, Opened, Prefill
from neuron_push.router.relay import CutShort, relay
from neuron_push.router.watch import Watch

log = logging.getLogger(__name__)

# How long a prefill leg may go on after its request has been answered. A decode engine that
# held the whole prompt answers first; prefill then still warms its own cache.
LINGER: Final = 10.0
# How often the first in the queue looks for room: engines answer in their own time.
LOOK: Final = 0.02
T = TypeVar("T")


@dataclass(frozen=True)
class Rules:
    """How requests are served."""

    mode: Mode = "push"
    # "prefer": a decode engine serves alone when no pair is usable, and the answer says so.
    disaggregation: Literal["require", "prefer"] = "require"
    # Prompts of fewer tokens than this are served by a decode engine alone, under "prefer".
    local_below: int = 0
    # More attempts after the first, each on other engines if there are any.
    retries: int = 1
    # Seconds that a request waits for free KV blocks before it is turned away.
    room: float = 30.0


class Late(Exception):
    """The request's deadline passed before its first byte."""


class Dispatcher:
    """Serves completions through pairs of engines."""

    def __init__(
        self, fleet: Fleet, legs: Legs, watch: Watch, metrics: Metrics, flights: Flights,
        drains: Drains, rules: Rules,
    ) -> None:  # fmt: skip
        self._fleet = fleet
        self._watch = watch
        self._metrics = metrics
        self._flights = flights
        self._drains = drains
        self._rules = rules
        self.modes = Modes(legs, flights, self.note)
        # First come, first served, where several wait for free KV blocks.
        self._queue = asyncio.Lock()
        # Prefill legs that outlived their request; also keeps them from being collected.
        self._lingering: set[Prefill] = set()
        # When a pair last served a request, on the monotonic clock.
        self.last_worked = float("-inf")

    async def serve(self, request: web.Request, flight: Flight) -> web.StreamResponse:
        """Answer one completion request.

        Raises NoPair, Late, or LegFailed of the leg to blame, while nothing was sent to the
        client; CutShort afterwards.
        """
        while True:
            try:
                return await self._attempt(request, flight)
            except LegFailed as failure:
                if not self._may_retry(flight, failure):
                    raise
                flight.job.excluded |= {failure.engine}
                self._metrics.retries.labels(failure.leg).inc()
                self._flights.mark(flight, "retried", str(failure))

    async def close(self) -> None:
        """End the prefill legs that are still running."""
        for task in self._lingering:
            task.cancel()
        await asyncio.gather(*self._lingering, return_exceptions=True)
        await self._drains.close()

    def _may_retry(self, flight: Flight, failure: LegFailed) -> bool:
        if failure.clients_fault or flight.attempts > self._rules.retries:
            return False
        return flight.deadline is None or time.monotonic() < flight.deadline

    # ------------------------------------------------------------------ choice

    async def _with_room(self, flight: Flight, pick: Callable[[], T]) -> T:
        """What `pick` chooses, once a decode engine has room; raises NoPair or NoRoom."""
        if not self._queue.locked():
            with suppress(NoRoom):
                return pick()
        limit = flight.budget(self._rules.room)
        reason = NoRoom(f"no engine had room within {limit:.3g} s")
        self._metrics.waiting.inc()
        try:
            async with asyncio.timeout(limit), self._queue:
                while True:
                    try:
                        return pick()
                    except NoRoom as error:
                        reason = error
                    await asyncio.sleep(LOOK)
        except TimeoutError:
            raise reason from None
        finally:
            self._metrics.waiting.dec()

    def _route(self, flight: Flight) -> Route:
        rules, job = self._rules, flight.job
        prefer = rules.disaggregation == "prefer"
        if prefer and job.prompt_tokens < rules.local_below:
            return Route("local", None, self._fleet.choose_local(job))
        try:
            if rules.mode == "pull":
                return Route("pull", self._fleet.choose_prefill(job), None)
            pair = self._fleet.choose(job)
            return Route("push", pair.prefill, pair.decode)
        except NoRoom:
            raise
        except NoPair:
            if not prefer:
                raise
            return Route("local", None, self._fleet.choose_local(job))

    # ------------------------------------------------------------------ one attempt

    async def _attempt(self, request: web.Request, flight: Flight) -> web.StreamResponse:
        """One attempt from the choice of engines to the last byte."""
        flight.route = route = await self._with_room(flight, lambda: self._route(flight))
        flight.attempts += 1
        self._flights.chosen(flight)
        drained = False
        if route.kind != "local":
            flight.moves(route.prefill)
            flight.moves(route.decode)
        if route.decode is not None:
            self._take(route.decode, flight)
        opened: Opened | None = None
        try:
            opened = await self._open(flight)
            flight.moved()
            response = await self._relay(flight, request, opened.answer)
            drained = True
        except LegFailed as failure:
            self._failed(flight, failure)
            raise
        finally:
            flight.moved()
            if opened is not None:
                opened.answer.close()
            if route.decode is not None:
                self._give_back(route.decode, flight, drained)
            if not drained:
                self._metrics.cancellations.labels(flight.phase).inc()
                if opened is not None and opened.prefill is not None:
                    opened.prefill.cancel()
        self._worked(flight)
        if opened.prefill is not None:
            self._let_linger(opened.prefill)
        return response

    async def _open(self, flight: Flight) -> Opened:
        """The first byte of an answer, within the deadline."""
        try:
            async with asyncio.timeout_at(self._loop_time(flight.deadline)):
                opened = await self._by_mode(flight)
        except TimeoutError:
            raise Late("no first byte before the request's deadline") from None
        flight.phase = "decode"
        flight.first_byte = time.monotonic() - flight.arrived
        assert flight.route is not None
        shown = SHOWN[flight.route.kind]
        self._metrics.first_byte.labels(shown).observe(flight.first_byte)
        self._metrics.modes.labels(shown).inc()
        self._flights.mark(flight, "first byte")
        return opened

    async def _by_mode(self, flight: Flight) -> Opened:
        def sent() -> None:
            self._metrics.overhead.observe(time.monotonic() - flight.arrived)
            self._flights.mark(flight, "sent")

        route = flight.route
        assert route is not None
        if route.kind == "push":
            return await self.modes.push(flight, sent)
        if route.kind == "local":
            return await self.modes.local(flight, sent)
        sent()
        return await self.modes.pull(flight, lambda: self._late(flight))

    async def _late(self, flight: Flight) -> Engine:
        """The decode engine of a pull, by what is free once prefill is done."""
        route, job = flight.route, flight.job
        assert route is not None and route.prefill is not None
        prefill = route.prefill
        pair = await self._with_room(flight, lambda: self._fleet.choose_decode(job, prefill))
        route.decode = pair.decode
        flight.moves(pair.decode)
        self._take(pair.decode, flight)
        return pair.decode

    @staticmethod
    def _loop_time(deadline: float | None) -> float | None:
        if deadline is None:
            return None
        return asyncio.get_running_loop().time() + deadline - time.monotonic()

    def _take(self, decode: Engine, flight: Flight) -> None:
        decode.in_flight += 1
        assert flight.route is not None
        decode.promise(flight.route.transfer, flight.job)

    def _give_back(self, decode: Engine, flight: Flight, drained: bool) -> None:
        decode.in_flight -= 1
        route = flight.route
        assert route is not None
        if drained or route.kind == "local":
            decode.forgive(route.transfer)
        else:
            self._drains.watch(decode, route.transfer)

    async def _relay(
        self, flight: Flight, request: web.Request, answer: Answer
    ) -> web.StreamResponse:
        try:
            return await relay(flight, request, answer)
        except CutShort as cut:
            if isinstance(cut.__cause__, LegFailed):
                self._failed(flight, cut.__cause__)
            raise

    # ------------------------------------------------------------------ consequences

    def _worked(self, flight: Flight) -> None:
        route = flight.route
        if route and route.prefill and route.decode:
            self.pair_worked(route.prefill, route.decode)

    def _failed(self, flight: Flight, failure: LegFailed) -> None:
        """An attempt failed: that counts against its pair, unless the client is to blame."""
        if failure.leg == "decode":
            self.note(failure)
        route = flight.route
        if failure.breaks and route and route.prefill and route.decode:
            self.pair_failed(route.prefill, route.decode, str(failure))

    def pair_worked(self, prefill: Engine, decode: Engine) -> None:
        """A request was served between the two."""
        self.last_worked = time.monotonic()
        if self._fleet.quarantine:
            self._fleet.quarantine.worked((prefill, decode))
            self._metrics.pairs_resting.set(self._fleet.quarantine.resting(self.last_worked))

    def pair_failed(self, prefill: Engine, decode: Engine, reason: str) -> None:
        """A request failed between the two, by no fault of its own."""
        quarantine, now = self._fleet.quarantine, time.monotonic()
        if quarantine.failed((prefill, decode), reason, now):
            log.warning("pair %s -> %s is quarantined: %s", prefill.name, decode.name, reason)
            self._metrics.quarantines.inc()
        self._metrics.pairs_resting.set(quarantine.resting(now))

    def note(self, error: BaseException) -> None:
        """Log a failed leg and have its engine asked whether it is still the same."""
        if not isinstance(error, LegFailed):
            log.error("a leg ended unexpectedly", exc_info=error)
        elif not error.clients_fault:
            log.warning("%s", error)
            self._metrics.leg_failures.labels(error.leg, error.engine.place.url).inc()
            self._watch.suspect(error.engine)

    def _let_linger(self, prefill: Prefill) -> None:
        if prefill.done():
            return
        self._lingering.add(prefill)
        prefill.add_done_callback(self._lingering.discard)
        asyncio.get_running_loop().call_later(LINGER, prefill.cancel)


__all__ = ["Dispatcher", "Late", "Rules"]
