"""ASGI middleware for vLLM's API server: failed transfers answer with their reason.

vLLM reports a failed KV load to its client as "Internal server error". Started with
`--middleware neuron_push.vllm.explain.Explain`, a server checks `kv_transfer_params` before
the engine sees them (400, saying what is wrong), and asks the engine's listener why a
transfer failed (502, with the reason). Everything else passes through untouched.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from neuron_push.config import Config
from neuron_push.errors import NeuronPushError
from neuron_push.protocol import Address, Because, Why
from neuron_push.sidechannel import Keyring, ask_async
from neuron_push.vllm.params import Leg, ParamsError, parse

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# Bodies beyond this are not looked into; vLLM has its own limits.
MOST_BODY = 64 << 20
ASK_TIMEOUT = 2.0


class Explain:
    """Wraps the server's application."""

    def __init__(self, app: App) -> None:
        self._app = app
        settings = Config.parse({}, os.environ)
        self._ring = Keyring.of(settings.side_channel_keys)
        self._listener = Address(settings.side_channel_host, settings.side_channel_port)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection; only POST requests are looked at."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, replay = await _read(receive)
        try:
            leg = _leg(body)
        except ParamsError as error:
            await _answer(send, 400, f"kv_transfer_params: {error}", "BadRequestError")
            return
        if leg is None:
            await self._app(scope, replay, send)
            return
        request = _request_id(scope)
        await self._app(scope, replay, _Explaining(send, request, self._why).send)

    async def _why(self, request: str) -> str:
        try:
            answer = await ask_async(self._listener, Why(request), ASK_TIMEOUT, self._ring)
        except NeuronPushError:
            return ""
        return answer.reason if isinstance(answer, Because) else ""


class _Explaining:
    """Holds back a status 500 until the reason is known."""

    def __init__(self, send: Send, request: str, why: Callable[[str], Awaitable[str]]) -> None:
        self._send, self._request, self._why = send, request, why
        self._held: Message | None = None

    async def send(self, message: Message) -> None:
        """Pass on one message of the response."""
        if message["type"] == "http.response.start" and message["status"] == 500:
            self._held = message
            return
        if self._held is None:
            await self._send(message)
            return
        if message.get("more_body"):
            return
        reason = await self._why(self._request)
        if reason:
            await _answer(self._send, 502, f"KV transfer failed: {reason}", "KVTransferError")
        else:
            await self._send(self._held)
            await self._send(message)


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """The whole request body, and a `receive` that hands it out again."""
    messages: list[Message] = []
    size = 0
    while True:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if not message.get("more_body") or size > MOST_BODY:
            break
    waiting = iter(messages)

    async def replay() -> Message:
        return next(waiting, None) or await receive()

    whole = b"" if size > MOST_BODY else b"".join(m.get("body", b"") for m in messages)
    return whole, replay


def _leg(body: bytes) -> Leg | None:
    """The transfer leg in a request body, if any; raises ParamsError."""
    if b"kv_transfer_params" not in body:
        return None
    try:
        value = json.loads(body)
    except ValueError:
        return None  # the server says so better
    # The role decides nothing about what is well-formed; the engine checks it.
    return parse(value.get("kv_transfer_params"), "kv_both") if isinstance(value, dict) else None


def _request_id(scope: Message) -> str:
    """The request's id as a client gave it, or one that is added for this purpose."""
    for name, value in scope["headers"]:
        if name.lower() == b"x-request-id":
            return str(value.decode("latin-1"))
    request = uuid.uuid4().hex
    scope["headers"] = [*scope["headers"], (b"x-request-id", request.encode())]
    return request


async def _answer(send: Send, status: int, text: str, kind: str) -> None:
    body = json.dumps(
        {"error": {"message": text, "type": kind, "param": None, "code": status}}
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
