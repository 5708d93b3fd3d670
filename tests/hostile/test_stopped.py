"""A peer that hangs or dies with a WRITE half landed: nobody's bytes but its own are lost.

The blocks that come back are given to somebody else at once (a canary), and stay as they are
when the peer wakes up.
"""

from __future__ import annotations

import time

import pytest

from tests.hostile.scene import (
    FALLEN,
    FRESH,
    HIT,
    LARGE,
    SLACK,
    half_landed,
    nothing_left,
    transfer,
)

pytestmark = [pytest.mark.real_nixl, pytest.mark.slow]


def hit(scene, prefill, decode, stamp=1):
    """Start the transfer that will be hit: its source and its attempt."""
    source = prefill.call("offer", "hit", HIT, stamp)
    return source, decode.call("want", "hit", HIT, prefill.address)


def test_a_prefill_rank_that_hangs_for_ten_seconds(stage):
    scene = stage(LARGE)
    p, q = scene.child("P", "producer"), scene.child("Q", "producer")
    d = scene.rank("D", "consumer")
    transfer(scene, p, d, "warm")
    stream = scene.stream(q, d)
    p.call("arm", "posted", "stop", "D")
    source, attempt = hit(scene, p, d)
    p.wait_until("T")
    stopped = time.monotonic()

    told = scene.hears(d, "ReceiveFailed", attempt) - stopped
    assert told < scene.config.silence + SLACK
    assert "silent" in d.reason(attempt)
    assert 0 < d.differing(HIT, 0) < len(HIT) * LARGE.block_bytes
    scene.hears(d, "Unpinned", attempt)
    assert len(d.trap.closed) == 1 and d.heard["Unpinned", attempt] >= d.trap.closed[0]
    assert d.state()["generation"] == 2 and d.tally("rotations") == 1

    d.paint(HIT)
    before = stream.done
    scene.flow(max(0.0, stopped + 10 - time.monotonic()))
    assert stream.done > before
    p.go_on()
    scene.hears(p, "Unpinned", source)
    transfer(scene, p, d, "again")
    scene.finish()
    assert d.differing(HIT) == 0
    nothing_left(scene, d)
    nothing_left(scene, p)


def test_a_prefill_rank_that_dies_while_decode_makes_no_progress(stage):
    # Everybody is patient, or the healthy peer would take this rank for dead.
    scene = stage(LARGE, silence=12.0)
    p, q = scene.child("P", "producer"), scene.child("Q", "producer")
    d = scene.rank("D", "consumer")
    transfer(scene, p, d, "warm")
    scene.stream(q, d)
    p.call("arm", "posted", "kill", "D")
    attempt = d.call("want", "hit", HIT, p.address)
    scene.until(lambda: registered(d, attempt), what="prefill knows the registration")
    d.trap.running.clear()  # what prefill posts from now on stays in the socket
    p.tell("offer", "hit", HIT, 1)
    p.wait_until("Z")
    time.sleep(3)
    before = d.differing(HIT, 0)
    assert before == 0 and not d.has("ReceiveFailed", attempt)
    d.trap.running.set()

    scene.hears(d, "ReceiveFailed", attempt)
    scene.hears(d, "Unpinned", attempt)
    assert d.heard["Unpinned", attempt] >= d.trap.closed[0]
    assert before < d.differing(HIT, 0) < len(HIT) * LARGE.block_bytes  # a dead peer's bytes
    d.paint(HIT)
    p = scene.again(p)
    transfer(scene, p, d, "again")
    scene.finish()
    assert d.differing(HIT) == 0
    nothing_left(scene, d)


def registered(decode, attempt):
    found = decode.thread._core.consumer.attempts.get(attempt)
    return found is not None and any(share.answered for share in found.shares.values())


@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_a_decode_rank_that_hangs_or_dies(stage, fault):
    scene = stage(LARGE, silence=2.0)
    d, e = scene.child("D", "consumer"), scene.child("E", "consumer")
    p = scene.rank("P", "producer")
    transfer(scene, p, d, "warm")
    stream = scene.stream(p, e)
    half_landed(p, d, fault)
    source, attempt = hit(scene, p, d)
    d.wait_until(FALLEN[fault])
    fell = time.monotonic()
    assert not p.has("Unpinned", source)

    back = scene.hears(p, "Unpinned", source) - fell
    assert back < scene.config.silence + SLACK
    assert len(p.trap.closed) == 1 and p.heard["Unpinned", source] >= p.trap.closed[0]
    p.fill(HIT, 2)  # another prompt's KV, in the blocks that came back
    before = stream.done
    if fault == "stop":
        scene.flow(max(0.0, fell + 10 - time.monotonic()))
        d.go_on()
        scene.hears(d, "ReceiveFailed", attempt)
        scene.hears(d, "Unpinned", attempt)
        assert not d.call("has", "Received", attempt)
        assert d.call("foreign", HIT, 1) == 0
    else:
        d = scene.again(d)
    transfer(scene, p, d, "again", FRESH)
    scene.finish()
    assert stream.done > before
    nothing_left(scene, p)
    nothing_left(scene, d)
