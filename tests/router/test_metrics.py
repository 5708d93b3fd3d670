"""Every metric of the router moves, each for its own reason."""

from __future__ import annotations

import asyncio

import pytest

from neuron_push.protocol import Held
from neuron_push.router import drains
from neuron_push.router.dispatch import Rules
from neuron_push.router.metrics import Metrics
from tests.router import fleet
from tests.router.fleet import fails, never, routed, until

CALM = {"refresh": 3600.0}
broken = fails(500, "broken", "InternalServerError")


async def ask(f, status, **options):
    async with f.post(**options) as answer:
        assert answer.status == status
        await answer.read()


async def served(f):
    await ask(f, 200)


async def under_way(f):
    f.d.script = never
    task = asyncio.ensure_future(f.post())
    await f.d.next_call()
    await moved(f, "in_flight")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await f.idle()


async def failing(f):
    f.p.script, f.d.script = broken, never
    f.d.held = lambda question: Held("", 0)
    await ask(f, 502)
    await moved(f, "drain_seconds_count")


async def never_quiet(f):
    f.p.script, f.d.script = broken, never
    f.d.held = lambda question: Held("", 1)
    await ask(f, 502)
    await moved(f, "undrained_total")


async def no_room(f):
    sizes = {"free_blocks": 0, "total_blocks": 99, "block_tokens": 1}
    f.d.info = f.who(f.d.info.engine, role="kv_consumer", **sizes)
    await f.router.watch.refresh(f.router.fleet.decode[0])
    task = asyncio.ensure_future(f.post())
    await moved(f, "waiting_for_room")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def limited(f):
    f.d.script = never
    task = asyncio.ensure_future(f.post())
    await f.d.next_call()
    await ask(f, 429)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def restarted(f):
    f.p.info = f.who("prefill-0", incarnation=9)
    await f.router.watch.refresh(f.router.fleet.prefill[0])


async def canary(f):
    async with f.session.get(f.url("/ready")) as answer:
        assert answer.status == 200


SCENES = {
    served: ["requests_total", "modes_total", "first_byte_seconds_count", "overhead_seconds_count",
             "engines_ready", "engines_known", "pairs_usable"],
    under_way: ["in_flight", "cancellations_total"],
    failing: ["leg_failures_total", "retries_total", "quarantines_total", "pairs_quarantined",
              "drain_seconds_count"],
    never_quiet: ["undrained_total"],
    no_room: ["waiting_for_room"],
    limited: ["limited_total"],
    restarted: ["engine_restarts_total"],
    canary: ["canaries_total"],
}  # fmt: skip
# Shown in tests/router/test_discovery.py, where a source of listings is.
ELSEWHERE = {"listings_total"}


def value(f, name):
    name = f"neuron_push_router_{name}"
    return sum(
        sample.value
        for family in f.router.metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    )


async def moved(f, name):
    await until(lambda: value(f, name) > 0)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
async def test_metrics_move(scene, monkeypatch):
    monkeypatch.setattr(drains, "FIRST", 0.001)
    monkeypatch.setattr(drains, "BOUND", 0.05)
    settings = {"most_in_flight": 1} if scene is limited else {}
    async with routed(rules=Rules(retries=1), **settings, **CALM) as f:
        if scene is canary:
            f.d.script = fleet.answer_json
        before = {name: value(f, name) for name in SCENES[scene]}
        gauges = {"engines_ready", "engines_known", "pairs_usable"}
        assert all(not before[name] or name in gauges for name in before)
        await scene(f)
        late = set(SCENES[scene]) - {"in_flight", "waiting_for_room"}
        assert {name for name in late if value(f, name) > 0} == late


def test_no_metric_is_left_out():
    names = set()
    for collector in Metrics().registry._collector_to_names:
        suffix = {"counter": "_total", "histogram": "_seconds_count"}.get(collector._type, "")
        names.add(collector._name.removesuffix("_seconds" if "count" in suffix else "") + suffix)
    named = {f"neuron_push_router_{name}" for names in SCENES.values() for name in names}
    assert names == named | {f"neuron_push_router_{name}" for name in ELSEWHERE}
