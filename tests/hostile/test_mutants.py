"""The same falls with the fence weakened: what corrupts then, and what the real one holds back.

Each case replaces one step of this process's driver or core. "none" is the control: with the
fence merely late, the pin is late as well and nothing is harmed.
"""

from __future__ import annotations

import threading

import pytest

from neuron_push.rendezvous.core import Core
from neuron_push.rendezvous.events import Closed
from neuron_push.rendezvous.fence import Generations
from neuron_push.transfer.agents import Agents
from tests.hostile.scene import HIT, LARGE, half_landed, transfer

pytestmark = pytest.mark.real_nixl

SETTINGS = {"silence": 1.5, "alive_interval": 0.25}


@pytest.fixture
def late_fence(monkeypatch):
    """Rotations wait until this event is set."""
    may = threading.Event()
    start = Generations._start
    monkeypatch.setattr(
        Generations, "_start", lambda self, now: start(self, now) if may.is_set() else None
    )
    return may


def deregister_only(monkeypatch):
    """The old generation gives its memory back, and its agent lives on."""

    def close(self, action, now):
        transport = self._transports[action.generation]
        transport._deregister(transport._agent)
        self._events.append(Closed(action.generation))

    monkeypatch.setattr(Agents, "close", close)


def unpin_at_loss(monkeypatch):
    """A lost link counts as fenced at once."""
    lose = Core._lose

    def lose_and_unpin(self, link, reason, now):
        lose(self, link, reason, now)
        self.consumer.fenced([link])
        self.producer.fenced([link])

    monkeypatch.setattr(Core, "_lose", lose_and_unpin)


def prefill_hangs(stage):
    """P hangs with a WRITE half landed, and D has told of it."""
    scene = stage(LARGE, **SETTINGS)
    p, d = scene.child("P", "producer"), scene.rank("D", "consumer")
    transfer(scene, p, d, "warm")
    p.call("arm", "posted", "stop", "D")
    p.call("offer", "hit", HIT, 1)
    attempt = d.want("hit", HIT, p.address)
    p.wait_until("T")
    scene.hears(d, "ReceiveFailed", attempt)
    return scene, p, d, attempt


def test_deregistering_memory_instead_of_closing_the_agent_corrupts(stage, monkeypatch):
    deregister_only(monkeypatch)
    scene, p, d, attempt = prefill_hangs(stage)
    scene.hears(d, "Unpinned", attempt)
    d.paint(HIT)
    p.go_on()
    scene.until(lambda: d.differing(HIT) > LARGE.block_bytes, what="the canary is overwritten")


def test_dropping_the_pin_when_the_link_is_lost_corrupts(stage, monkeypatch, late_fence):
    unpin_at_loss(monkeypatch)
    scene, p, d, attempt = prefill_hangs(stage)
    scene.hears(d, "Unpinned", attempt)
    d.paint(HIT)
    p.go_on()
    scene.until(lambda: d.differing(HIT) > LARGE.block_bytes, what="the canary is overwritten")


def test_the_pin_waits_for_a_late_fence(stage, late_fence):
    scene, p, d, attempt = prefill_hangs(stage)
    p.go_on()
    # All of it lands, late, in blocks that are still the attempt's own.
    scene.until(lambda: d.exact(HIT, 1), what="the rest lands")
    assert not d.has("Unpinned", attempt)
    late_fence.set()
    scene.hears(d, "Unpinned", attempt)
    d.paint(HIT)
    transfer(scene, p, d, "again")
    assert d.differing(HIT) == 0


def decode_hangs(stage):
    """D hangs with a WRITE half landed, and P has given it up."""
    scene = stage(LARGE, **SETTINGS)
    d, p = scene.child("D", "consumer"), scene.rank("P", "producer")
    transfer(scene, p, d, "warm")
    half_landed(p, d, "stop")
    source = p.offer("hit", HIT, 1)
    attempt = d.call("want", "hit", HIT, p.address)
    d.wait_until("T")
    scene.until(lambda: p.tally("links_lost") > 0, what="P gives D up")
    return scene, p, d, source, attempt


def test_dropping_the_source_when_the_link_is_lost_hands_out_anothers_kv(
    stage, monkeypatch, late_fence
):
    unpin_at_loss(monkeypatch)
    for _ in range(4):  # how much is still to be read when decode stops is the socket's choice
        scene, p, d, source, attempt = decode_hangs(stage)
        scene.hears(p, "Unpinned", source)
        p.fill(HIT, 2)
        d.go_on()
        scene.hears(d, "Received", attempt)  # with a valid Done
        if d.call("foreign", HIT, 1) > 0:
            return
    raise AssertionError("decode never received another prompt's bytes")


def test_the_source_waits_for_a_late_fence(stage, late_fence):
    scene, p, d, source, _ = decode_hangs(stage)
    d.go_on()
    scene.until(lambda: d.call("exact", HIT, 1), what="the rest lands")
    assert not p.has("Unpinned", source)
    late_fence.set()
    scene.hears(p, "Unpinned", source)
    p.fill(HIT, 2)
    transfer(scene, p, d, "again")
    assert d.call("foreign", HIT, 1) == 0
