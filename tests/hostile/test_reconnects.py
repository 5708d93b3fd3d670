"""Engines that come and go: on the same port, a thousand times, without growth."""

from __future__ import annotations

import logging
from statistics import median

import pytest

from tests.hostile.scene import FRESH, HIT, Scene, nothing_left, transfer

pytestmark = pytest.mark.real_nixl

# Engines that come and go by turns: while one starts anew, transfers with another go on.
LANES = 3
SWIFT = {"idle_poll": 0.002, "waiting_poll": 0.002}
# What a process may have more after the second half of the reconnects than after the first, in
# which its allocators fill their caches, KiB. One that comes and goes makes all it has anew each
# time, in one process: in half a thousand reconnects 166 times. The one that stays meets them all.
MOST_KIB = {"stays": 4 << 10, "comes and goes": 3 << 10}
# The same over all but the warm-up.
MOST_IN_ALL_KIB = {"stays": 12 << 10, "comes and goes": 24 << 10}
MOST = {"descriptors": 16, "threads": 2}


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_restart_on_the_same_port(stage, side):
    scene = stage(silence=1.5, alive_interval=0.25)
    p, d = scene.child("P", "producer"), scene.child("D", "consumer")
    transfer(scene, p, d, "before")
    for number in range(2):
        p, d = (scene.again(p), d) if side == "prefill" else (p, scene.again(d))
        transfer(scene, p, d, f"the first after {number}")
        transfer(scene, p, d, f"the second after {number}")
    nothing_left(scene, p)
    nothing_left(scene, d)


def test_requests_while_a_prefill_engine_hangs_are_told_and_those_after_it_succeed(stage):
    scene = stage(silence=1.0, alive_interval=0.25, greeting_timeout=2.0)
    p, d = scene.child("P", "producer"), scene.rank("D", "consumer")
    transfer(scene, p, d, "warm")
    p.stop()
    p.wait_until("T")
    for number in range(2):  # the second asks who is there while the first still does
        attempt = d.want(f"during {number}", FRESH, p.address)
        scene.hears(d, "ReceiveFailed", attempt)
        scene.hears(d, "Unpinned", attempt)
    p.go_on()
    transfer(scene, p, d, "after")
    assert d.tally("defects") == 0


def test_engines_that_came_and_went_are_forgotten(stage):
    scene = stage(silence=1.5, alive_interval=0.25)
    p, d = scene.rank("P", "producer"), scene.rank("D", "consumer")
    other_p, other_d = scene.child("P0", "producer"), scene.child("D0", "consumer")
    for number in range(4):
        transfer(scene, other_p, d, f"in {number}", engine=f"P{number}")
        transfer(scene, p, other_d, f"out {number}")
        other_p.call("reborn", f"P{number + 1}")
        other_d.call("reborn", f"D{number + 1}")
    for rank in (p, d):
        scene.until(lambda rank=rank: rank.state()["links"] == 0, what=f"{rank.state()}")
        assert rank.state()["generation"] == 1  # nothing was on its way: nothing to fence
        assert not rank.thread._core._routes._newest and not rank.thread._core._routes._routes


def reconnect(scene: Scene, p, d, number: int) -> None:
    """Use a new engine on an old port, and send it away; every fourth with a transfer under way."""
    p.hear()  # it is there
    transfer(scene, p, d, f"whole {number}", FRESH, number, f"P{number}")
    attempt = None
    if number % 4 == 3:
        p.call("offer", f"half {number}", HIT[:4], number, 2)
        attempt = d.want(f"half {number}", HIT[:4], p.address, f"P{number}")
        scene.until(lambda: d.exact(HIT[:2], number), what="half of it")
    makes_way(p, number + LANES)
    if attempt is not None:
        scene.hears(d, "ReceiveFailed", attempt)
        scene.hears(d, "Unpinned", attempt)


def makes_way(p, successor):
    """Another engine takes its place, while others reconnect."""
    p.tell("reborn", f"P{successor}")


@pytest.fixture
def unlogged():
    """What is logged here is not kept: pytest does, record by record."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def many(stage, times):
    scene = stage(alive_interval=0.05, rotation_interval=0.01, silence=4.0, **SWIFT)
    lanes, d = [scene.child("P", "producer") for _ in range(LANES)], scene.rank("D", "consumer")
    for lane, p in enumerate(lanes):
        makes_way(p, lane)
    warm, half = 4 * LANES, times // 2
    seen = []
    for first, last in ((0, warm), (warm, warm + half), (warm + half, warm + times)):
        for number in range(first, last):
            reconnect(scene, lanes[number % LANES], d, number)
            for kept in (d.heard, d.reasons):  # the test's own growth
                kept.clear()
        seen.append(settled(scene, lanes, d, last))
    assert d.tally("rotations") >= times // 4
    start, middle, end = seen
    nothing_grew(middle, end, MOST_KIB, f"reconnects {half} to {times}")
    nothing_grew(start, end, MOST_IN_ALL_KIB, f"{times} reconnects")


def nothing_grew(before, after, most_kib, what):
    memory = {"stays": [], "comes and goes": []}
    for name, state in after.items():
        grown = {key: state[key] - before[name][key] for key in ("rss_kib", *MOST)}
        print(f"{what}: {name} has grown by {grown}", flush=True)
        memory[name.rstrip(" 0123456789")].append(grown["rss_kib"])
        assert all(grown[key] <= MOST[key] for key in MOST), f"{what}: {name} {grown}"
    # Of those that do the same, the one in the middle: an allocator's step may fall to any of
    # them, what is left behind is left by all.
    for kind, most in most_kib.items():
        assert median(memory[kind]) <= most, f"{what}: {kind} {memory[kind]} KiB"


def settled(scene, lanes, d, number):
    """What each process has, with nothing under way and the dead forgotten.

    `number` is that of the next reconnect.
    """
    for p in lanes:
        p.hear()
    nothing_left(scene, d)
    scene.until(lambda: d.state()["links"] == 0, what=lambda: f"links to the dead: {d.state()}")
    states = {f"comes and goes {lane}": p.call("state") for lane, p in enumerate(lanes)}
    for lane in range(number, number + LANES):
        makes_way(lanes[lane % LANES], lane)
    return {"stays": d.state(), **states}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("unlogged")
def test_a_thousand_reconnects_leave_nothing_behind(stage):
    many(stage, 1000)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("unlogged")
def test_ten_thousand_reconnects_leave_nothing_behind(stage):
    many(stage, 10_000)
