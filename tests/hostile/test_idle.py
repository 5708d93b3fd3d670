"""A pair that nobody uses for an hour is kept, and costs nothing more."""

from __future__ import annotations

import time

import pytest

from tests.hostile.scene import nothing_left, transfer

pytestmark = pytest.mark.real_nixl

HOUR = 3600.0
RATE = 900


def hasten(rank, rate):
    """Let a rank's clock run at this rate from now on."""
    then, began = rank.thread._clock(), time.monotonic()
    rank.thread._clock = lambda: then + (time.monotonic() - began) * rate


def test_the_first_request_after_an_idle_hour_succeeds_over_the_same_link(stage):
    scene = stage()
    p, d = scene.rank("P", "producer"), scene.rank("D", "consumer")
    transfer(scene, p, d, "before")
    before = d.state()
    asleep = p.thread._clock()
    for rank in (p, d):
        hasten(rank, RATE)
    scene.until(lambda: p.thread._clock() - asleep > HOUR, 2 * HOUR / RATE + 30)
    for rank in (p, d):
        hasten(rank, 1)
    transfer(scene, p, d, "after")
    assert p.tally("links_lost") == d.tally("links_lost") == 0
    after = d.state()
    for key, most in (("threads", 0), ("descriptors", 4), ("rss_kib", 8192)):
        assert after[key] - before[key] <= most, (key, before, after)
    nothing_left(scene, p)
    nothing_left(scene, d)
