"""A peer stopped or killed at each named point of a transfer, on either side."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.hostile.scene import (
    FALLEN,
    HIT,
    LARGE,
    SLACK,
    SMALL,
    half_landed,
    nothing_left,
    transfer,
)

pytestmark = pytest.mark.real_nixl

POINTS = ["registered", "matched", "posted", "half landed", "before the notification"]
FAULTS = ["stop", "kill"]
SETTINGS = {"silence": 1.5, "alive_interval": 0.25, "rotation_interval": 0.2, "lease": 4.0}


# Where the bytes must not be all there, and told, as soon as the WRITE is posted.
LONG = ("half landed", "before the notification")


def fallen(child, fault):
    child.wait_until(FALLEN[fault])
    return time.monotonic()


def ended(scene, d, attempt):
    """Wait until an attempt is over, well or not; when that was told."""
    return scene.until(
        lambda: d.has("ReceiveFailed", attempt) or d.has("Received", attempt),
        what=lambda: f"the end of {attempt} of {d.state()}",
    )


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("point", POINTS)
def test_a_prefill_rank_that_falls(stage, point, fault):
    scene = stage(LARGE if point in LONG else SMALL, **SETTINGS)
    p, q = scene.child("P", "producer"), scene.child("Q", "producer")
    d = scene.rank("D", "consumer")
    transfer(scene, p, d, "warm")
    scene.stream(q, d)
    held = point == "before the notification"
    p.call("arm", "posted" if point == "half landed" else point, "hold" if held else fault, "D")
    source = p.call("offer", "hit", HIT, 1)
    attempt = d.want("hit", HIT, p.address)
    if held:
        scene.until(lambda: d.exact(HIT, 1), what="all has landed")
        p.stop() if fault == "stop" else p.kill()
    fell = fallen(p, fault)

    told = ended(scene, d, attempt) - fell
    assert told < scene.config.silence + SLACK
    scene.hears(d, "Unpinned", attempt)
    if d.has("Received", attempt):  # a short WRITE may be all there, and told, when it is posted
        assert point == "posted" and d.exact(HIT, 1)
    else:
        assert d.heard["Unpinned", attempt] >= d.trap.closed[0]
    d.paint(HIT)
    if fault == "stop":
        p.go_on()
        if held:
            p.call("let_go")
        scene.hears(p, "Unpinned", source)
    else:
        p = scene.again(p)
    transfer(scene, p, d, "again")
    scene.finish()
    assert d.differing(HIT) == 0
    nothing_left(scene, d)
    nothing_left(scene, p)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("point", POINTS)
def test_a_decode_rank_that_falls(stage, point, fault):
    scene = stage(LARGE if point in LONG else SMALL, **SETTINGS)
    d, e = scene.child("D", "consumer"), scene.child("E", "consumer")
    p = scene.rank("P", "producer")
    transfer(scene, p, d, "warm")
    scene.stream(p, e)
    set_traps(p, d, point, fault)
    source = p.offer("hit", HIT, 1)
    d.tell("want", "hit", HIT, p.address)  # it may fall before it can answer
    fell = fallen(d, fault)
    p.let_go()

    back = scene.hears(p, "Unpinned", source) - fell
    assert back < max(scene.config.silence, scene.config.lease) + SLACK
    p.fill(HIT, 2)
    if fault == "stop":
        d.go_on()
        attempt = d.hear()
        ends = ("Received", "ReceiveFailed")
        scene.until(lambda: any(d.call("has", kind, attempt) for kind in ends))
        # Whatever it was told, it holds nothing of the prompt that owns the blocks now.
        assert d.call("foreign", HIT, 1) == 0
        assert d.call("exact", HIT, 1) or not d.call("has", "Received", attempt)
        scene.hears(d, "Unpinned", attempt)
    else:
        d = scene.again(d)
    transfer(scene, p, d, "again")
    scene.finish()
    nothing_left(scene, p)
    nothing_left(scene, d)


def set_traps(p, d, point, fault):
    """Make D fall at a point; where only P knows that it is reached, P strikes."""
    if point == "posted":
        number = signal.SIGSTOP if fault == "stop" else signal.SIGKILL
        p.arm("posted", lambda: os.kill(d.pid, number), "D")
        return
    if point == "half landed":
        half_landed(p, d, fault)
        return
    watched = HIT if point == "before the notification" else []
    if watched:
        p.arm(point, "hold", "D")
    d.call("arm", point, fault, "P", watched)


def test_several_peers_lost_at_once(stage):
    scene = stage(LARGE, **SETTINGS)
    peers = [scene.child(f"P{number}", "producer") for number in range(4)]
    q = scene.child("Q", "producer")
    d = scene.rank("D", "consumer")
    scene.stream(q, d)
    for peer in peers:
        transfer(scene, peer, d, "warm")
        peer.call("arm", "posted", "stop", "D")
    areas = [HIT[4 * number : 4 * number + 4] for number in range(4)]
    attempts = []
    for peer, blocks in zip(peers, areas, strict=True):
        peer.call("offer", "hit", blocks, 1)
        attempts.append(d.want("hit", blocks, peer.address))
    for peer in peers:
        peer.wait_until("T")
    peers[0].kill()
    for attempt in attempts:
        scene.hears(d, "ReceiveFailed", attempt)
        scene.hears(d, "Unpinned", attempt)
    assert 1 <= d.tally("rotations") <= 4
    d.paint(HIT)
    peers[0] = scene.again(peers[0])
    for peer in peers[1:]:
        peer.go_on()
    for peer in peers:
        transfer(scene, peer, d, "again")
    scene.finish()
    assert d.differing(HIT) == 0
    nothing_left(scene, d)
