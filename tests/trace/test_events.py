"""Where events come from: rings, the transfer thread, the scheduler, the router; and collecting."""

from __future__ import annotations

import asyncio
import threading

import pytest

from neuron_push.commands import Offer, Receive, Received, Retire, Settle
from neuron_push.errors import TransportError
from neuron_push.protocol import Address, Done, Events, Match, Register, TraceEvent
from neuron_push.rendezvous.events import Fetch, Notified, Notify, ReadEnded, Tell, WriteEnded
from neuron_push.sidechannel import Listener, ask
from neuron_push.trace.collect import collect, side_channel
from neuron_push.trace.command import table
from neuron_push.trace.phases import requests, summary
from neuron_push.tracing import MOST_BATCH, Ring, batch_of
from neuron_push.transfer import tracer as tracer_module
from neuron_push.transfer.tracer import Tracer
from tests.router.fleet import routed

MATCH = Match("T", "base", b"", 100)


def names(ring):
    return [(e.name, e.transfer) for e in ring.batch().events]


def test_a_ring_keeps_the_newest_and_says_how_many_are_lost():
    ring = Ring(3, "here")
    for number in range(5):
        ring.add(f"e{number}", "t")
    batch = ring.batch()
    assert [e.name for e in batch.events] == ["e2", "e3", "e4"] and batch.lost == 2
    assert ring.batch(batch.next).events == ()
    ring.add("e5", "t")
    assert [e.name for e in ring.batch(batch.next).events] == ["e5"]
    assert ring.batch(1 << 62).events == () and ring.batch(-5).events


def test_answers_are_bounded_and_continue():
    ring = Ring(MOST_BATCH * 2, "here")
    for number in range(MOST_BATCH + 7):
        ring.add(str(number), "t")
    first = ring.batch()
    assert len(first.events) == MOST_BATCH
    assert [e.name for e in ring.batch(first.next).events][0] == str(MOST_BATCH)  # noqa: RUF015


def test_a_process_that_does_not_trace_says_so():
    batch = batch_of(None, "here", 0)
    assert (batch.size, batch.events, batch.source) == (0, (), "here")


def test_many_threads_may_add():
    ring = Ring(10_000, "here")
    threads = [
        threading.Thread(target=lambda: [ring.add("e", "t") for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ring.batch().next == 2000


def post(attempt, write):
    from neuron_push.rendezvous.events import Post

    return Post(write, 1, "D:0", None, None, (), (), Done(attempt, 0, 64))


def test_the_tracer_follows_a_transfer_on_the_prefill_side():
    tracer = Tracer(Ring(100, "P"))
    tracer.saw(Offer(1, "r", MATCH), 1.0)
    tracer.saw(Settle(1, 64, (0,), (b"",), 1, False), 2.0)
    tracer.saw(Notified("D:0", Register(9, 0, MATCH, 0, 100, (), 1000)), 2.5)
    tracer.saw(Settle(1, 100, (0,), (b"",), 1, True), 3.0)
    tracer.did(post(9, 77), 3.1, 3.3)
    tracer.saw(WriteEnded(77, "done"), 4.0)
    tracer.saw(Retire(1, "finished"), 5.0)
    tracer.saw(WriteEnded(77, "done"), 6.0)
    assert names(tracer.ring) == [
        (name, "T")
        for name in ("offered", "settled", "registered", "settled last", "posted", "landed")
    ]
    posted = tracer.ring.batch().events[4]
    assert (posted.at, posted.seconds, posted.value) == (3.1, pytest.approx(0.2), 64)


def test_the_tracer_follows_a_transfer_on_the_decode_side():
    tracer = Tracer(Ring(100, "D"))
    where = Address("h", 1)
    tracer.saw(Receive(4, "r", where, "P", MATCH, 0, 99, (0,), (b"",), 1, 9.0), 1.0)
    tracer.did(Notify(1, "P:0", Register(8, 0, MATCH, 0, 99, (), 1000)), 1.1, 1.2)
    tracer.saw(Notified("P:0", Done(8, 0, 99, nbytes=5)), 2.0)
    tracer.did(Tell(Received(4, "r")), 2.1, 2.1)
    assert [n for n, _ in names(tracer.ring)] == ["wanted", "register sent", "notified", "received"]


def test_the_tracer_follows_a_pull_on_the_decode_side():
    tracer = Tracer(Ring(100, "D"))
    receive = Receive(4, "r", Address("h", 1), "P", MATCH, 0, 99, (0,), (b"",), 1, 9.0, True)
    tracer.saw(receive, 1.0)
    tracer.did(Fetch(7, 4, 1, "P:0", None, None, (), (), 0, 64), 2.0, 2.5)
    tracer.did(Fetch(8, 4, 1, "P:0", None, None, (), (), 64, 99), 2.5, 2.6)
    tracer.saw(ReadEnded(7, "done", nbytes=640), 3.0)
    tracer.saw(ReadEnded(8, "broken", "gone"), 4.0)
    tracer.saw(ReadEnded(8, "done"), 5.0)  # of nobody any more
    events = tracer.ring.batch().events
    kinds = ["wanted", "read posted", "read posted", "read", "read broken"]
    assert [e.name for e in events] == kinds and {e.transfer for e in events} == {"T"}
    assert (events[1].at, events[1].seconds, events[1].value) == (2.0, 0.5, 64)
    assert (events[3].value, events[4].detail) == (640, "gone")


def test_the_tracers_tables_are_bounded(monkeypatch):
    monkeypatch.setattr(tracer_module, "MOST", 10)
    tracer = Tracer(Ring(10, "P"))
    for number in range(100):
        tracer.saw(Offer(number, "r", MATCH), 1.0)
        tracer.saw(Notified("D:0", Register(number, 0, MATCH, 0, 1, (), 1)), 1.0)
        tracer.did(post(number, number), 1.0, 1.0)
        where = Address("h", 1)
        tracer.saw(Receive(number, "r", where, "P", MATCH, 0, 1, (0,), (b"",), 1, 9.0), 1.0)
        tracer.did(Fetch(number, number, 1, "P", None, None, (), (), 0, 1), 1.0, 1.0)
    tables = tracer._sources, tracer._registered, tracer._writes, tracer._reads
    assert max(map(len, tables)) <= 10 and all(tables)


def test_the_scheduler_half_adds_when_requests_arrive_and_run():
    pytest.importorskip("vllm")
    from neuron_push.vllm.moments import Moments
    from neuron_push.vllm.params import PrefillLeg

    moments = Moments(Ring(100, "P"))
    moments.arrived("r1", PrefillLeg("T"))
    moments.arrived("r2", PrefillLeg(""))
    moments.step({"other": 3})
    moments.step({"r1": 5, "r2": 1})
    moments.step({"r1": 5})
    moments.mark("r1", "decode loaded")
    moments.finished("r1")
    moments.finished("r1")
    assert [n for n, _ in names(moments.ring)] == [
        "prefill arrived", "prefill scheduled", "decode loaded", "prefill finished",
    ]  # fmt: skip


def test_events_travel_over_the_side_channel_and_clocks_are_laid_over_each_other():
    ahead = 1000.0
    import time

    ring = Ring(10, "P scheduler", clock=lambda: time.monotonic() + ahead)
    ring.add("prefill arrived", "T", "r")
    before = time.monotonic()
    listener = Listener("P", "127.0.0.1", 0, lambda: None, ring=ring)
    try:
        assert ask(listener.address, Events(), 5.0).events[0].name == "prefill arrived"

        def dead(after):
            raise TransportError("nobody there")

        (track,), complaints = collect([side_channel(listener.address), dead])
    finally:
        listener.close()
    assert complaints == ["nobody there"]
    assert track.clock.offset == pytest.approx(-ahead, abs=0.5)
    assert abs(track.clock.offset + ahead) <= track.clock.error + 0.001
    assert track.events[0].at == pytest.approx(before, abs=0.5)


async def test_the_router_traces_its_part():
    async with routed(trace_events=100, refresh=3600.0) as f:
        async with f.post(headers={"X-Request-Id": "mine"}) as answer:
            assert answer.status == 200
        await f.idle()
        call = await f.d.next_call()
        from neuron_push.trace.collect import router

        (track,), complaints = await asyncio.to_thread(collect, [router(f.url(""))])
        assert not complaints
        names_seen = [e.name for e in track.events]
        assert names_seen[:4] == ["arrived", "chosen", "trace context", "sent"]
        assert names_seen[-1] == "ended"
        (each,) = requests([track])
        assert each.request == "mine" and each.transfer == call.params["transfer_id"]
        assert {p.name for p in each.phases} >= {"router", "first step"}
        assert "push" in table(summary([each]))[0]


async def test_a_router_that_does_not_trace_says_so():
    async with routed(refresh=3600.0) as f:
        from neuron_push.trace.collect import router

        (track,), _ = await asyncio.to_thread(collect, [router(f.url(""))])
        assert not track.tracing


def test_events_are_small():
    import msgspec

    raw = msgspec.msgpack.encode(TraceEvent(1.0, "registered", "x" * 32, "agent", 0.1, 5.0))
    assert len(raw) < 100
