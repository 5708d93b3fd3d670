"""The middleware that tells clients why a transfer failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from neuron_push.protocol import EngineInfo
from neuron_push.sidechannel import Listener
from neuron_push.vllm.explain import Explain


class Server:
    """An ASGI application that answers what it is told, and what it was asked."""

    def __init__(self, status: int, body: bytes = b'{"error": "Internal server error"}') -> None:
        self.status, self.body = status, body
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": self.body})


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def who() -> EngineInfo:
        raise AssertionError("nobody asks")

    server = Listener("D", "127.0.0.1", 0, who, lambda request: f"{request} had no prefill")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(server.address.port))
    yield
    server.close()


async def ask(server: Server, body: Any, *, pieces: int = 1) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = -(-len(data) // pieces)
    waiting = [data[i : i + size] for i in range(0, len(data), size)]
    messages = [
        {"type": "http.request", "body": part, "more_body": part is not waiting[-1]}
        for part in waiting
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "headers": [(b"X-Request-Id", b"abc")]}
    await Explain(server)(scope, receive, send)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])


DECODE = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1}


async def test_bad_parameters_are_answered_before_the_engine_sees_them(listener: None) -> None:
    server = Server(200)
    status, body = await ask(server, {"kv_transfer_params": {**DECODE, "remote_port": "x"}})
    assert status == 400 and b"remote_port is 'x'" in body and not server.bodies


async def test_a_failed_transfer_answers_with_its_reason(listener: None) -> None:
    status, body = await ask(Server(500), {"kv_transfer_params": DECODE}, pieces=3)
    assert status == 502 and b"abc had no prefill" in body


@pytest.mark.parametrize("status", [200, 400, 503])
async def test_other_answers_pass_through_with_the_body_whole(listener: None, status: int) -> None:
    server = Server(status, b"as it was")
    sent = {"kv_transfer_params": DECODE, "prompt": "x" * 1000}
    assert await ask(server, sent, pieces=7) == (status, b"as it was")
    assert json.loads(server.bodies[0]) == sent


@pytest.mark.parametrize("body", [{"prompt": "x"}, b"kv_transfer_params not json", b"[]"])
async def test_requests_without_a_transfer_keep_their_errors(listener: None, body: Any) -> None:
    server = Server(500, b"its own")
    assert await ask(server, body) == (500, b"its own")


async def test_an_engine_that_cannot_be_asked_leaves_the_answer_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "1")
    assert await ask(Server(500, b"its own"), {"kv_transfer_params": DECODE}) == (500, b"its own")
