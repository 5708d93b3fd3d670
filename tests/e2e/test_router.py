"""The router in front of two real engines: as clients, probes and operators see it."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from neuron_push.ports import free_ports
from neuron_push.processes import Server
from tests.e2e.fleet import MODEL, Fleet
from tests.e2e.lossy import Loss, lossy

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]


@asynccontextmanager
async def routing(
    fleet: Fleet, folder: Path, prefill: str, decode: str, mode: str = "push"
) -> AsyncIterator[Server]:
    """A router in front of the fleet, whose engines it finds at these URLs."""
    (port,) = free_ports(1)
    words = [sys.executable, "-m", "neuron_push.cli", "router", "--port", str(port)]
    words += ["--mode", mode]
    for engine, url in ((fleet.prefill, prefill), (fleet.decode, decode)):
        words += [f"--{engine.name}", f"{url}#side={engine.side_port}"]
    server = Server("router", words, port, folder / "router.log")
    with server:
        await asyncio.to_thread(server.wait_ready, 60)
        yield server


@pytest.fixture(params=["push"])
async def router(
    request: pytest.FixtureRequest, fleet: Fleet, tmp_path: Path
) -> AsyncIterator[Server]:
    urls = fleet.prefill.url, fleet.decode.url
    async with routing(fleet, tmp_path, *urls, request.param) as server:
        yield server


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        yield session


def prompt(tokens: int = 200) -> list[int]:
    return [random.randrange(32, 127) for _ in range(tokens)]


async def metric(client: aiohttp.ClientSession, router: Server, line: str) -> float:
    async with client.get(f"{router.url}/metrics") as answer:
        for each in (await answer.text()).splitlines():
            if each.startswith(line + " "):
                return float(each.rpartition(" ")[2])
    return 0.0


async def test_a_real_token_makes_the_router_ready(router, client):
    async with client.get(f"{router.url}/ready") as answer:
        assert answer.status == 200, await answer.text()


@pytest.mark.parametrize(
    ("router", "shown"), [("push", "disagg"), ("pull", "pull")], indirect=["router"]
)
async def test_answers_are_those_of_one_engine_and_say_how_they_came(fleet, router, client, shown):
    tokens = prompt()
    lent = await fleet.metric(fleet.prefill, "neuron_push_sends_total", outcome="lent")
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    async with client.post(f"{router.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["x-neuron-push-mode"] == shown
        found = (await answer.json())["choices"][0]["text"]
    read = await fleet.metric(fleet.prefill, "neuron_push_sends_total", outcome="lent") - lent
    assert read == (shown == "pull")
    async with client.post(f"{fleet.prefill.url}/v1/completions", json=body) as answer:
        assert (await answer.json())["choices"][0]["text"] == found


async def test_free_blocks_and_pairs_are_shown(router, client):
    async with client.get(f"{router.url}/pairs") as answer:
        report = await answer.json()
    assert report["usable_pairs"] == 1
    assert 0 < report["decode"][0]["free_blocks"] <= report["decode"][0]["total_blocks"]


async def test_a_client_that_leaves_is_drained_and_the_engine_says_so(router, client):
    body = {"model": MODEL, "prompt": prompt(1500), "max_tokens": 64, "ignore_eos": True}
    task = asyncio.ensure_future(client.post(f"{router.url}/v1/completions", json=body))
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(60):
        name = "neuron_push_router_drain_seconds_count"
        while await metric(client, router, name) < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert await metric(client, router, "neuron_push_router_undrained_total") == 0


async def test_a_bad_request_is_the_clients_alone(router, client):
    for _ in range(4):
        body = {"model": "nobody", "prompt": "a"}
        async with client.post(f"{router.url}/v1/completions", json=body) as answer:
            assert answer.status == 404
    assert await metric(client, router, "neuron_push_router_quarantines_total") == 0


# Of the requests below, by number: which leg's first answer is lost, and how.
LOSSES = [
    ("decode", Loss(after=0.0, goes_on=False)),
    ("decode", Loss(after=0.1, goes_on=True)),
    ("decode", Loss(after=0.4, goes_on=False)),
    ("decode", Loss(after=0.4, goes_on=True)),
    ("prefill", Loss(after=0.0, goes_on=False)),
    ("prefill", Loss(after=0.0, goes_on=True)),
    ("prefill", Loss(after=0.05, goes_on=True)),
]


@pytest.mark.fire
async def test_what_the_router_sends_again_under_the_same_id_is_exact(fleet, client, tmp_path):
    def lost(leg: str):
        return lambda name: next((each for at, each in [LOSSES[int(name[-1])]] if at == leg), None)

    async def one(number: int) -> None:
        tokens = prompt(1000 + 100 * number)
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 8, "temperature": 0}
        body["ignore_eos"] = True
        async with client.post(
            f"{router.url}/v1/completions", json=body, headers={"X-Request-Id": f"again-{number}"}
        ) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["X-Request-Id"] == f"again-{number}"
            found = (await answer.json())["choices"][0]["text"]
        assert found == await fleet.reference(tokens)

    async with (
        lossy(fleet.prefill, lost("prefill")) as prefill,
        lossy(fleet.decode, lost("decode")) as decode,
        routing(fleet, tmp_path, prefill, decode) as router,
    ):
        await asyncio.gather(*(one(number) for number in range(len(LOSSES))))
        again = [
            await metric(client, router, f'neuron_push_router_retries_total{{leg="{leg}"}}')
            for leg in ("prefill", "decode")
        ]
        assert sum(again) == len(LOSSES) and all(again), again
    await fleet.settles()


async def doctor(*words: str) -> tuple[int, list[dict[str, str]]]:
    """`neuron-push doctor` as an operator runs it: exit status, findings."""
    command = [sys.executable, "-m", "neuron_push.cli", "doctor", "--json", "--peer-only", *words]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    text, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(text)["findings"]


async def test_the_doctor_says_that_two_live_engines_can_talk_and_how(fleet: Fleet) -> None:
    here, there = (f"127.0.0.1:{engine.side_port}" for engine in (fleet.decode, fleet.prefill))
    status, findings = await doctor("--engine", here, "--peer", there)
    by_check = {finding["check"]: finding for finding in findings}
    (pair,) = [finding for check, finding in by_check.items() if check.startswith("peer.pair.")]
    assert pair["level"] == "ok" and "direct" in pair["seen"], findings
    assert "producer" in by_check["peer.answers"]["seen"]
    assert by_check["peer.reachable"]["level"] == "ok"
    assert status == 0, findings


async def test_the_doctor_says_why_two_live_engines_cannot_talk(fleet: Fleet) -> None:
    here = f"127.0.0.1:{fleet.prefill.side_port}"
    status, findings = await doctor("--engine", here, "--peer", here)
    assert status == 2
    assert "peer.roles" in {f["check"] for f in findings if f["level"] == "error"}
    (port,) = free_ports(1)
    status, findings = await doctor("--engine", here, "--peer", f"127.0.0.1:{port}")
    assert status == 2
    assert [f["check"] for f in findings] == ["peer.answers"]
