"""Passes a decode engine's answer on to the client, byte for byte."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from aiohttp import web

from neuron_push.router.flights import SHOWN, Flight
from neuron_push.router.legs import Answer, LegFailed

MODE_HEADER: Final = "x-neuron-push-mode"
# What travels back from the decode engine.
RETURNED: Final = ("Content-Type", "Content-Length", "Content-Encoding", "Cache-Control")


class CutShort(Exception):
    """An answer had begun and did not reach its end; the client's connection is closed.

    `response` is what was begun, for the server to account for.
    """

    def __init__(self, outcome: str, response: web.StreamResponse) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.response = response


async def relay(flight: Flight, request: web.Request, answer: Answer) -> web.StreamResponse:
    """Send the whole answer; raises CutShort where it breaks off or the client leaves."""
    assert flight.route is not None
    upstream = answer.response.headers
    response = web.StreamResponse(status=answer.response.status)
    response.headers.update({name: upstream[name] for name in RETURNED if name in upstream})
    response.headers[MODE_HEADER] = SHOWN[flight.route.kind]
    response.headers["X-Request-Id"] = flight.request
    try:
        await response.prepare(request)
        async for piece in answer.pieces():
            await response.write(piece)
    except LegFailed as failure:
        await _break_off(request, response, failure)
        raise CutShort("decode_broke_off", response) from failure
    except ConnectionError as error:
        raise CutShort("client_left", response) from error
    return response


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
