"""Lists of engines: a watched file, and a fake Kubernetes API server."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from neuron_push.errors import ConfigError
from neuron_push.protocol import Address
from neuron_push.router.discovery import File
from neuron_push.router.kubernetes import LEG, Cluster, Endpoints, places_in
from neuron_push.router.metrics import Metrics
from neuron_push.router.places import Listing, Place
from tests.router.fleet import routed


def written(path, prefill, decode):
    path.write_text(json.dumps({"prefill": prefill, "decode": decode}))


async def next_of(listings):
    return await asyncio.wait_for(anext(listings), 10)


async def test_a_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(tmp_path):
    path, metrics = tmp_path / "engines.json", Metrics()
    written(path, ["http://p:1"], ["http://d:2#ranks=2&side=7&weight=2"])
    file = File(path, 5600, metrics, period=0.005)
    listings = file.listings()
    listing = await next_of(listings)
    assert [place.url for place in listing.prefill] == ["http://p:1"]
    assert [(p.side.port, p.rank, p.weight) for p in listing.decode] == [(7, 0, 2.0), (8, 1, 2.0)]
    path.write_text("{")
    task = asyncio.create_task(next_of(listings))
    while not metrics.listings.labels("failed")._value.get():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    written(path, [], ["http://d:2"])
    assert await task == Listing((), (Place("http://d:2", Address("d", 5600)),))


@pytest.mark.parametrize("text", ["{", "[]", '{"prefil": []}', '{"prefill": ["x"]}'])
def test_mistakes_in_a_file_are_named(tmp_path, text):
    path = tmp_path / "engines.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        File(path, 5600, Metrics()).read()


def slice_of(name, leg, addresses, ready=True, **labels):
    return {
        "metadata": {"name": name, "labels": {LEG: leg, **labels}},
        "ports": [{"name": "http", "port": 8000}, {"name": "side-channel", "port": 5600}],
        "endpoints": [{"addresses": [a], "conditions": {"ready": ready}} for a in addresses],
    }


class FakeApi:
    """As much of the API server as a list and a watch need."""

    def __init__(self):
        self.items = []
        self.events = asyncio.Queue()
        self.asked = []
        self.refuse = 0
        app = web.Application()
        path = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"
        app.router.add_get(path, self._answer)
        self.server = TestServer(app, host="127.0.0.1")

    async def _answer(self, request):
        self.asked.append((dict(request.query), request.headers.get("Authorization")))
        if self.refuse:
            return web.json_response({"message": "no"}, status=self.refuse)
        if "watch" not in request.query:
            body = {"items": list(self.items), "metadata": {"resourceVersion": "7"}}
            return web.json_response(body)
        response = web.StreamResponse()
        await response.prepare(request)
        while (event := await self.events.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        return response


@pytest.fixture
async def api(tmp_path):
    fake = FakeApi()
    await fake.server.start_server()
    (tmp_path / "token").write_text("secret\n")
    url = str(fake.server.make_url("")).rstrip("/")
    fake.endpoints = Endpoints(Cluster(url, "serving", tmp_path / "token"), Metrics(), retry=0.01)
    fake.listings = fake.endpoints.listings()
    yield fake
    await fake.listings.aclose()
    fake.events.put_nowait(None)
    await fake.server.close()


def urls(listing):
    return [p.url for p in listing.prefill], [p.url for p in listing.decode]


async def test_kubernetes_lists_then_watches(api):
    api.items = [slice_of("p-1", "prefill", ["10.0.0.1"])]
    assert urls(await next_of(api.listings)) == (["http://10.0.0.1:8000"], [])
    added = slice_of("d-1", "decode", ["10.0.1.1", "10.0.1.2"], **{"neuron-push/device": "p5en"})
    api.events.put_nowait({"type": "ADDED", "object": added})
    listing = await next_of(api.listings)
    assert urls(listing)[1] == ["http://10.0.1.1:8000", "http://10.0.1.2:8000"]
    assert listing.decode[0] == Place(
        "http://10.0.1.1:8000", Address("10.0.1.1", 5600), device="p5en"
    )
    api.events.put_nowait({"type": "DELETED", "object": api.items[0]})
    assert urls(await next_of(api.listings))[0] == []
    assert all(token == "Bearer secret" for _, token in api.asked)
    assert api.asked[1][0]["resourceVersion"] == "7"


async def test_an_expired_watch_is_begun_anew_with_a_list(api):
    await next_of(api.listings)
    api.items = [slice_of("p-1", "prefill", ["10.0.0.9"])]
    api.events.put_nowait({"type": "ERROR", "object": {"code": 410}})
    assert urls(await next_of(api.listings))[0] == ["http://10.0.0.9:8000"]


async def test_engines_stay_while_the_api_server_fails(api):
    api.items = [slice_of("p-1", "prefill", ["10.0.0.1"])]
    await next_of(api.listings)
    api.refuse = 503
    task = asyncio.create_task(next_of(api.listings))
    api.events.put_nowait(None)
    while len(api.asked) < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert urls(api.endpoints.listing())[0] == ["http://10.0.0.1:8000"]
    api.refuse = 0
    assert urls(await task)[0] == ["http://10.0.0.1:8000"]


def test_endpoints_that_terminate_or_make_no_sense_are_left_out():
    each = slice_of("p", "prefill", ["10.0.0.1", "10.0.0.2", "fd00::1"])
    each["endpoints"][0]["conditions"]["terminating"] = True
    each["endpoints"].append({"addresses": []})
    assert [p.url for p in places_in(each)] == ["http://10.0.0.2:8000", "http://[fd00::1]:8000"]
    each["ports"] = [{"name": "other", "port": 1}]
    assert places_in(each) == []


def test_a_pod_finds_its_api_server(tmp_path):
    for name, text in (("token", "t"), ("namespace", "serving")):
        (tmp_path / name).write_text(text)
    cluster = Cluster.inside({"KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path)
    assert (cluster.url, cluster.namespace) == ("https://[fd00::1]:443", "serving")
    with pytest.raises(ConfigError, match="--engines-file"):
        Cluster.inside({}, tmp_path)


async def test_engines_that_are_listed_later_serve_and_those_that_leave_do_not():
    async with routed(prefill=2, decode=1) as f:
        places = [engine.place for engine in f.router.fleet.engines]
        f.router.watch.apply(Listing(places[:1], places[2:]))
        assert [e.place for e in f.router.fleet.prefill] == places[:1]
        for _ in range(3):
            async with f.post() as answer:
                assert answer.status == 200
        assert f.prefill[1].calls.empty()
        f.router.watch.apply(Listing(places[1:2], places[2:]))
        await f.settled(lambda: not f.router.fleet.prefill[0].trouble)
        async with f.post() as answer:
            assert answer.status == 200
        assert f.prefill[1].calls.qsize() == 1


async def test_data_parallel_ranks_are_engines_of_their_own():
    async with routed(decode=2) as f:
        first, second = f.decode
        place = Place(first.url, first.side, ranks=2)
        here = f.router.fleet.prefill[0].place
        one, two = place.each_rank()
        first.info = f.who("d", role="kv_consumer", data_rank=0)
        second.info = f.who("d_dp1", role="kv_consumer", data_rank=1)
        f.by_side[two.side] = second
        f.router.watch.apply(Listing([here], [one, two]))
        await f.settled(lambda: not any(e.trouble for e in f.router.fleet.engines))
        for _ in range(2):
            async with f.post() as answer:
                assert answer.status == 200
        ranks = {(await first.next_call()).headers["X-data-parallel-rank"] for _ in range(2)}
        assert ranks == {"0", "1"}
