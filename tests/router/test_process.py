"""The router as a process: TLS at its door, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import signal
import ssl
import sys

import aiohttp
import pytest

from neuron_push.ports import free_ports
from neuron_push.sidechannel import Listener
from tests.router import fleet
from tests.router.fleet import STREAM, MockEngine
from tests.router.test_ingress import certificate  # noqa: F401  a fixture


class Process:
    """A router of its own, over mock engines whose side channels are real."""

    def __init__(self, *words):
        self.words = words
        self.engines = [MockEngine("prefill", 0), MockEngine("decode", 1)]

    async def __aenter__(self):
        (self.port,) = free_ports(1)
        words = [sys.executable, "-m", "neuron_push.cli", "router", "--port", str(self.port)]
        self.listeners = []
        for engine in self.engines:
            await engine.start()
            info = engine.info
            listener = Listener(info.engine, "127.0.0.1", 0, lambda info=info: info)
            listener._announced = {0: type("A", (), {"info": info.ranks[0]})}
            self.listeners.append(listener)
            words += [f"--{engine.leg}", f"{engine.url}#side={listener.address.port}"]
        self.process = await asyncio.create_subprocess_exec(*words, *self.words)
        return self

    async def __aexit__(self, *_):
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        for engine, listener in zip(self.engines, self.listeners, strict=True):
            listener.close()
            await engine.server.close()

    async def healthy(self, session, scheme="http"):
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        async with asyncio.timeout(30):
            while True:
                try:
                    async with session.get(self.url + "/health") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientConnectorError:
                    pass
                await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_router_that_is_told_to_stop_finishes_what_it_has_begun():
    async with Process("--drain", "20") as router, aiohttp.ClientSession() as session:
        await router.healthy(session)
        decode = router.engines[1]
        decode.script = fleet.stepwise_stream
        asked = asyncio.ensure_future(
            session.post(router.url + "/v1/completions", json={"prompt": "a", "stream": True})
        )
        call = await decode.next_call()
        call.proceed(2)
        answer = await asked
        await answer.content.readexactly(len(STREAM[0]))
        router.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while True:  # new connections are refused while the old one is served
                try:
                    async with aiohttp.ClientSession() as other, other.get(router.url + "/live"):
                        await asyncio.sleep(0.02)
                except aiohttp.ClientConnectorError:
                    break
        assert router.process.returncode is None
        call.proceed(9)
        assert await answer.read() == b"".join(STREAM[1:])
        assert await asyncio.wait_for(router.process.wait(), 15) == 0


@pytest.mark.slow
async def test_the_router_serves_tls(certificate):  # noqa: F811
    cert, key = certificate
    context = ssl.create_default_context(cafile=str(cert))
    connector = aiohttp.TCPConnector(ssl=context)
    async with (
        Process("--tls-cert", str(cert), "--tls-key", str(key)) as router,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        await router.healthy(session, "https")
        async with session.post(router.url + "/v1/completions", json={"prompt": "a"}) as answer:
            assert answer.status == 200
