"""Engines that come and go: on the same port, a thousand times, without growth."""

from __future__ import annotations

import pytest

from tests.hostile.scene import FRESH, HIT, Scene, nothing_left, transfer

pytestmark = pytest.mark.real_nixl

# What may be left behind for good: caches of allocators. The engine that comes and goes makes
# all it has anew each time, in one process; the one that stays only its agent.
MOST_KIB = {"stays": 12 << 10, "comes and goes": 24 << 10}
MOST = {"descriptors": 16, "threads": 2}
SWIFT = {"idle_poll": 0.002, "waiting_poll": 0.002}


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


def reconnect(scene: Scene, p, d, number: int) -> None:
    """P is a new engine on the old port; every fourth leaves with a transfer under way."""
    p.call("reborn", f"P{number}")
    transfer(scene, p, d, f"whole {number}", FRESH, number, f"P{number}")
    if number % 4 == 3:
        p.call("offer", f"half {number}", HIT[:4], number, 2)
        attempt = d.want(f"half {number}", HIT[:4], p.address, f"P{number}")
        scene.until(lambda: d.exact(HIT[:2], number), what="half of it")
        p.call("reborn", f"P{number} gone")
        scene.hears(d, "ReceiveFailed", attempt)
        scene.hears(d, "Unpinned", attempt)


def grows(before, after, key):
    return after[key] - before[key]


def many(stage, times):
    scene = stage(alive_interval=0.05, rotation_interval=0.01, silence=4.0, **SWIFT)
    p, d = scene.child("P", "producer"), scene.rank("D", "consumer")
    warm = 12
    for number in range(warm):
        reconnect(scene, p, d, number)
    settled(scene, d)
    before = {"stays": d.state(), "comes and goes": p.call("state")}
    for number in range(warm, warm + times):
        reconnect(scene, p, d, number)
        done = number + 1 - warm
        if done % 1000 == 0:
            settled(scene, d)
            nothing_grew(before, {"stays": d.state(), "comes and goes": p.call("state")}, done)
    assert d.tally("rotations") >= times // 4


def nothing_grew(before, after, done):
    """After any number of reconnects: the bounds are those of a thousand."""
    for name, state in after.items():
        grown = {key: grows(before[name], state, key) for key in ("rss_kib", *MOST)}
        print(f"{done} reconnects, the one that {name}: grown by {grown}", flush=True)
        assert grown["rss_kib"] < MOST_KIB[name]
        assert all(grown[key] <= most for key, most in MOST.items())


def settled(scene, d):
    """Nothing under way, and the dead are forgotten."""
    nothing_left(scene, d)
    scene.until(lambda: d.state()["links"] <= 1, what=f"links to the dead: {d.state()}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_reconnects_leave_nothing_behind(stage):
    many(stage, 1000)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_ten_thousand_reconnects_leave_nothing_behind(stage):
    many(stage, 10_000)
