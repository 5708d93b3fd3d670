"""One request, two legs, one outcome.

Both legs leave at once. Until the first byte of the decode leg's answer nothing goes to the
client, so a failure of either leg can still become one clear error. Whatever ends the request
- a failed leg, the client leaving, a bug here - ends the other leg by closing its connection,
which is how an engine learns that a request was given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from neuron_push.router import bodies
from neuron_push.router.engines import Engine, Fleet, Pair
from neuron_push.router.legs import Answer, LegFailed, Legs
from neuron_push.router.metrics import Metrics
from neuron_push.router.watch import Watch

log = logging.getLogger(__name__)

MODE_HEADER: Final = "x-neuron-push-mode"
# What travels on from the client. The rest is either about its own connection or would steer
# the engine (data-parallel rank, session affinity).
FORWARDED: Final = ("Authorization", "traceparent", "tracestate", "baggage")
# What travels back from the decode engine.
RETURNED: Final = ("Content-Type", "Content-Length", "Content-Encoding", "Cache-Control")
# How long a prefill leg may go on after its request has been answered. A decode engine that
# held the whole prompt answers first; prefill then still warms its own cache.
LINGER: Final = 10.0


@dataclass(frozen=True)
class Dispatch:
    """One attempt to serve a request: its legs' engines and what is sent to each."""

    pair: Pair
    path: str
    request: str
    headers: dict[str, str]
    prefill_body: bytes
    decode_body: bytes
    started: float

    @classmethod
    def make(
        cls, pair: Pair, request: web.Request, body: bodies.Body, kv_deadline: float | None
    ) -> Dispatch:
        """A dispatch under a transfer id of its own."""
        info = pair.prefill.info
        assert info is not None, "a usable pair has answered"
        transfer = bodies.new_transfer_id()
        name = bodies.request_id(request.headers.get("X-Request-Id"))
        headers = {key: request.headers[key] for key in FORWARDED if key in request.headers}
        headers |= {"X-Request-Id": name, "Content-Type": "application/json"}
        chat = request.path.endswith("/chat/completions")
        return cls(
            pair=pair,
            path=request.path,
            request=name,
            headers=headers,
            prefill_body=bodies.prefill_body(body, chat, transfer),
            decode_body=bodies.decode_body(
                body, info, pair.prefill.place.side, name, transfer, kv_deadline
            ),
            started=time.monotonic(),
        )

    @property
    def prefill_headers(self) -> dict[str, str]:
        """The identity asked for is that of one data-parallel rank: prefill must run there."""
        info = self.pair.prefill.info
        rank = info.data_rank if info else 0
        return {**self.headers, "X-data-parallel-rank": str(rank)}


class CutShort(Exception):
    """An answer had begun and did not reach its end; the client's connection is closed.

    `response` is what was begun, for the server to account for.
    """

    def __init__(self, outcome: str, response: web.StreamResponse) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.response = response


class Dispatcher:
    """Serves completions through pairs of engines."""

    def __init__(self, fleet: Fleet, legs: Legs, watch: Watch, metrics: Metrics) -> None:
        self._fleet = fleet
        self._legs = legs
        self._watch = watch
        self._metrics = metrics
        # Prefill legs that outlived their request; also keeps them from being collected.
        self._lingering: set[asyncio.Task[None]] = set()

    async def serve(self, request: web.Request, body: bodies.Body) -> web.StreamResponse:
        """Answer one completion request.

        Raises NoPair, or LegFailed of the leg to blame, while nothing was sent to the client.
        """
        dispatch = Dispatch.make(self._fleet.choose(), request, body, self._legs.limits.kv)
        prefill = self._start_prefill(dispatch)
        try:
            with _counted(dispatch.pair.decode):
                answer = await self._first_bytes(dispatch, prefill)
                try:
                    response = await self._relay(dispatch, request, answer)
                finally:
                    answer.close()
        except LegFailed as failure:
            raise self._blame(failure, prefill) from failure.__cause__
        except BaseException:
            prefill.cancel()
            raise
        self._let_linger(prefill)
        return response

    async def close(self) -> None:
        """End the prefill legs that are still running."""
        for task in self._lingering:
            task.cancel()
        await asyncio.gather(*self._lingering, return_exceptions=True)

    def _start_prefill(self, dispatch: Dispatch) -> asyncio.Task[None]:
        engine = dispatch.pair.prefill
        leg = self._legs.prefill(
            engine, dispatch.path, dispatch.prefill_headers, dispatch.prefill_body
        )
        task = asyncio.create_task(leg)
        # Counted from here, not from the task's first step, for choices made in between.
        engine.in_flight += 1
        task.add_done_callback(lambda _: self._prefill_ended(engine, task))
        return task

    def _prefill_ended(self, engine: Engine, task: asyncio.Task[None]) -> None:
        engine.in_flight -= 1
        if not task.cancelled() and (error := task.exception()):
            self._note(error)

    async def _first_bytes(self, dispatch: Dispatch, prefill: asyncio.Task[None]) -> Answer:
        """The decode leg's answer, or LegFailed of whichever leg fails before it begins."""
        leg = self._legs.decode(
            dispatch.pair.decode, dispatch.path, dispatch.headers, dispatch.decode_body
        )
        opening = asyncio.create_task(leg)
        try:
            await asyncio.wait({opening, prefill}, return_when=asyncio.FIRST_COMPLETED)
            if prefill.done():
                prefill.result()
            answer = await opening
        except BaseException:
            opening.add_done_callback(_close_unused)
            opening.cancel()
            raise
        self._metrics.first_byte.observe(time.monotonic() - dispatch.started)
        return answer

    async def _relay(
        self, dispatch: Dispatch, request: web.Request, answer: Answer
    ) -> web.StreamResponse:
        """Pass the decode leg's answer on byte for byte."""
        upstream = answer.response.headers
        response = web.StreamResponse(status=answer.response.status)
        response.headers.update({name: upstream[name] for name in RETURNED if name in upstream})
        response.headers[MODE_HEADER] = "disagg"
        response.headers["X-Request-Id"] = dispatch.request
        try:
            await response.prepare(request)
            async for piece in answer.pieces():
                await response.write(piece)
        except LegFailed as failure:
            self._note(failure)
            await _break_off(request, response, failure)
            raise CutShort("decode_broke_off", response) from failure
        except ConnectionError as error:
            raise CutShort("client_left", response) from error
        return response

    def _blame(self, failure: LegFailed, prefill: asyncio.Task[None]) -> LegFailed:
        """The failure to report, when the decode leg may have failed because prefill did."""
        if failure.leg == "decode":
            self._note(failure)
            ended = prefill.done() and not prefill.cancelled()
            cause = prefill.exception() if ended else None
            if isinstance(cause, LegFailed) and not failure.clients_fault:
                return cause
        prefill.cancel()
        return failure

    def _note(self, error: BaseException) -> None:
        """Log a failed leg and have its engine asked whether it is still the same."""
        if not isinstance(error, LegFailed):
            log.error("a leg ended unexpectedly", exc_info=error)
        elif not error.clients_fault:
            log.warning("%s", error)
            self._metrics.leg_failures.labels(error.leg, error.engine.place.url).inc()
            self._watch.suspect(error.engine)

    def _let_linger(self, prefill: asyncio.Task[None]) -> None:
        if prefill.done():
            return
        self._lingering.add(prefill)
        prefill.add_done_callback(self._lingering.discard)
        asyncio.get_running_loop().call_later(LINGER, prefill.cancel)


async def _break_off(
    request: web.Request, response: web.StreamResponse, failure: LegFailed
) -> None:
    """End a half-sent answer so that no client takes it for a whole one."""
    if response.content_type == "text/event-stream":
        _, body, _ = failure.answer()
        with suppress(ConnectionError):
            await response.write(b"data: " + body + b"\n\n")
    if request.transport is not None:
        request.transport.close()


@contextmanager
def _counted(engine: Engine) -> Iterator[None]:
    engine.in_flight += 1
    try:
        yield
    finally:
        engine.in_flight -= 1


def _close_unused(opening: asyncio.Task[Answer]) -> None:
    """A decode answer that came while its request was being given up."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
