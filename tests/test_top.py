"""What the terminal view shows of a router and its engines."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from rich.console import Console

from neuron_push.errors import TransportError
from neuron_push.top import Look, look, main, rate, render, totals
from tests.router import fleet
from tests.router.fleet import routed

METRICS = """# TYPE neuron_push_pinned_blocks gauge
neuron_push_pinned_blocks{engine="0"} 7.0
neuron_push_pinned_blocks{engine="1"} 5.0
# TYPE neuron_push_sends counter
neuron_push_sends_total{outcome="sent"} 3.0
neuron_push_sends_total{outcome="failed"} 1.0
"""


def shown(now, before):
    console = Console(width=220, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(now, before))
    return console.export_text()


def test_samples_are_summed_over_labels_and_kept_by_value():
    found = totals(METRICS)
    assert found["neuron_push_pinned_blocks"] == 12
    assert found["neuron_push_sends_total"] == 4
    assert found["neuron_push_sends_total{failed}"] == 1


def test_rates_are_per_second():
    before, now = Look(1.0, router={"x": 10.0}), Look(3.0, router={"x": 16.0})
    assert rate(now, before, "x") == 3.0 and rate(now, now, "x") == 0.0


async def test_the_view_shows_engines_pinned_blocks_pairs_and_requests():
    async with routed(1, 2, refresh=3600.0) as f:

        async def metrics(_):
            return web.Response(text=METRICS)

        f.prefill[0].server.app.router._frozen = False
        f.prefill[0].server.app.router.add_get("/metrics", metrics)
        f.router.fleet.decode[1].lost("gone for a walk")
        f.decode[0].script = fleet.stepwise_stream
        task = asyncio.ensure_future(f.post(headers={"X-Request-Id": "the-slow-one"}))
        call = await f.decode[0].next_call()
        before = await asyncio.to_thread(look, f.url(""))
        now = await asyncio.to_thread(look, f.url(""))
        text = shown(now, before)
        call.proceed(9)
        await (await task).read()
    assert "prefill-0" in text and "decode-100" in text
    assert " 12 " in text, "pinned blocks, summed over data-parallel ranks"
    assert "gone for a walk" in text and "the-slow-one" in text
    assert "1 in flight" in text and "usable pairs 1" in text


async def test_one_look_can_be_printed(capsys):
    import argparse

    async with routed(refresh=3600.0) as f:
        args = argparse.Namespace(router=f.url(""), key_file=None, once=True, every=1.0)
        assert await asyncio.to_thread(main, args) == 0
    assert "usable pairs" in capsys.readouterr().out


def test_a_router_that_is_not_there_is_named():
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:1"):
        look("http://127.0.0.1:1")
