"""Mock engines and a router over them, on loopback."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from neuron_push.errors import TransportError
from neuron_push.geometry import Geometry, Semantics
from neuron_push.protocol import Address, EngineInfo, Holds, RankInfo, Refusal
from neuron_push.router.app import ROUTER, make_app
from neuron_push.router.legs import Limits
from neuron_push.router.places import Place
from neuron_push.router.settings import Settings

SEMANTICS = Semantics(
    model="tiny", layers=2, kv_heads=2, head_size=32, dtype="float32", groups=("full",)
)
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}
# Bytes that no re-encoding of an event stream would keep.
STREAM = [b'data: {"text":', b' "\xc3', b'\xa4"}\n\n', b"data:  odd \r\n\r\n", b"data: [DONE]\n\n"]


# Never looked at by the router.
NO_GEOMETRY = Geometry(regions=(), groups=(), element_bytes=4)


def who(engine, **changes):
    """An engine of one rank."""
    values = {
        "engine": engine,
        "incarnation": 1,
        "role": "kv_producer",
        "world": 1,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "data_rank": 0,
        "modes": ("push",),
        "semantics": SEMANTICS,
        "ranks": (RankInfo(0, 1, Address("127.0.0.1", 1), NO_GEOMETRY),),
    }
    return EngineInfo(**(values | changes))


class Call:
    """One request that a mock engine received."""

    def __init__(self, request, body):
        self.path = request.path
        self.headers = request.headers
        self.body = body
        self.params = body.get("kv_transfer_params", {})
        self.cancelled = asyncio.Event()
        # The test says when the engine may go on, one release per step.
        self.steps = asyncio.Semaphore(0)

    def proceed(self, steps=1):
        for _ in range(steps):
            self.steps.release()


class MockEngine:
    """An OpenAI server that answers as its `script` says, and its side channel's answer."""

    def __init__(self, leg, number):
        self.leg = leg
        self.side = Address("127.0.0.1", 5600 + number)
        self.info = who(f"{leg}-{number}", role=ROLES[leg])
        # Called per request: async (call, request) -> response.
        self.script = answer_json
        self.calls = asyncio.Queue()
        self.healthy = True
        # What it says to `Holds`; by default as an engine that does not know the question.
        self.held = lambda question: Refusal("malformed message")
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", self._serve)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        self.server = TestServer(app, host="127.0.0.1")

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.port}"

    async def start(self):
        await self.server.start_server()

    async def next_call(self):
        return await asyncio.wait_for(self.calls.get(), 10)

    async def _serve(self, request):
        call = Call(request, await request.json())
        self.calls.put_nowait(call)
        try:
            return await self.script(call, request)
        except asyncio.CancelledError:
            call.cancelled.set()
            raise

    async def _health(self, _):
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, _):
        return web.json_response({"object": "list", "data": [{"id": self.info.engine}]})


async def answer_json(call, request):
    return web.json_response({"choices": [{"text": "x", "finish_reason": "length"}]})


async def answer_stream(call, request):
    response = web.StreamResponse(headers=EVENT_STREAM)
    await response.prepare(request)
    for piece in STREAM:
        await response.write(piece)
    return response


async def stepwise_stream(call, request):
    """Each piece, the head included, after one `proceed`."""
    await call.steps.acquire()
    response = web.StreamResponse(headers=EVENT_STREAM)
    await response.prepare(request)
    for piece in STREAM:
        await call.steps.acquire()
        await response.write(piece)
    return response


async def never(call, request):
    await asyncio.Event().wait()


async def head_only(call, request):
    """As vLLM: the head of a stream goes out long before its first token."""
    response = web.StreamResponse(headers=EVENT_STREAM)
    await response.prepare(request)
    await asyncio.Event().wait()


def fails(status, message, kind="BadRequestError"):
    async def script(call, request):
        error = {"error": {"message": message, "type": kind, "param": None, "code": status}}
        return web.json_response(error, status=status)

    return script


async def breaks_off(call, request):
    """Two pieces, then the connection is gone."""
    response = web.StreamResponse(headers=EVENT_STREAM)
    await response.prepare(request)
    for piece in STREAM[:2]:
        await response.write(piece)
    await call.steps.acquire()
    request.transport.abort()
    return response


async def until(condition):
    """Wait for something that tells nobody when it happens."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Routed:
    """A router over mock engines, and a client session to it."""

    who = staticmethod(who)

    def __init__(self, prefill, decode, server, session, by_side):
        # Side channels that answer, by address.
        self.by_side = by_side
        self.prefill = prefill
        self.decode = decode
        self.server = server
        self.session = session
        self.router = server.app[ROUTER]

    @property
    def p(self):
        return self.prefill[0]

    @property
    def d(self):
        return self.decode[0]

    def url(self, path):
        return str(self.server.make_url(path))

    def post(self, body=None, path="/v1/completions", **options):
        body = {"prompt": "hello", "max_tokens": 5} if body is None else body
        return self.session.post(self.url(path), json=body, **options)

    async def settled(self, condition):
        """Wait until the router's view of the fleet fulfils `condition`."""
        async with asyncio.timeout(10):
            while not condition():
                self.router.watch.changed.clear()
                await self.router.watch.changed.wait()

    async def all_ready(self):
        """Ask every engine at once, and wait until the router can use all of them."""
        known = self.router.fleet.engines
        for engine in known:
            self.router.watch.suspect(engine)
        await self.settled(lambda: not any(engine.trouble for engine in known))

    async def idle(self):
        """Wait until no leg is in flight."""
        async with asyncio.timeout(10):
            # Counts drop in callbacks of the loop itself: there is no event to wait for.
            while any(engine.in_flight for engine in self.router.fleet.engines):  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def counts(self):
        """Requests by outcome."""
        async with self.session.get(self.url("/metrics")) as answer:
            lines = (await answer.text()).splitlines()
        found = {}
        for line in lines:
            if line.startswith("neuron_push_router_requests_total{"):
                labels, _, value = line.rpartition(" ")
                found[labels.split('"')[1]] = int(float(value))
        return found


@asynccontextmanager
async def routed(prefill=1, decode=1, limits=None, ready=True, **settings):
    """Start engines and a router, and wait until it has found all of them ready."""
    engines = [MockEngine("prefill", n) for n in range(prefill)]
    engines += [MockEngine("decode", 100 + n) for n in range(decode)]
    by_side = {engine.side: engine for engine in engines}

    async def ask(address, message, patience):
        engine = by_side[address]
        if isinstance(message, Holds):
            return engine.held(message)
        if engine.info is None:
            raise TransportError(f"nobody answers at {address.host}:{address.port}")
        return engine.info

    for engine in engines:
        await engine.start()
    places = [Place(engine.url, engine.side) for engine in engines]
    config = Settings(places[:prefill], places[prefill:], limits=limits or Limits(), **settings)
    server = TestServer(make_app(config, ask), host="127.0.0.1")
    await server.start_server()
    async with ClientSession() as session:
        fleet = Routed(engines[:prefill], engines[prefill:], server, session, by_side)
        known = fleet.router.fleet.engines
        try:
            if ready:
                await fleet.settled(lambda: not any(engine.trouble for engine in known))
            yield fleet
        finally:
            await server.close()
            for engine in engines:
                await engine.server.close()


def error_in(raw):
    return json.loads(raw)["error"]
