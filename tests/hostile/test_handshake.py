"""A peer that never answers its handshake: nothing is said to it through NIXL, nobody waits for it.

NIXL's LIBFABRIC backend blocks its caller for up to 60 s toward such a peer, in connect, notify and
post; there is no libfabric here that reaches anybody, so a fake does that to every call that names
the peer. A peer that freezes after it has answered may still block the transfer thread: then its
engine ends what waits for it.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from neuron_push.errors import DeadlineExceeded
from neuron_push.nixl import NixlTransport
from neuron_push.vllm.metadata import StepMeta
from neuron_push.vllm.worker import WorkerHalf
from tests.hostile.scene import FRESH, SLACK, nothing_left, transfer

pytestmark = pytest.mark.real_nixl


class Calls(list):
    """Names of the calls that were made, each of which takes this many seconds."""

    seconds = 60.0

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()  # ends calls early


@pytest.fixture
def calls(monkeypatch):
    """Calls toward agents of engine P, each of which blocks as documented."""
    made = Calls()

    def blocking(name, at):
        original = getattr(NixlTransport, name)

        def call(self, *arguments):
            named = arguments[at] if isinstance(arguments[at], str) else arguments[at].decode("l1")
            if "P/0/" in named:
                made.append(name)
                made.gate.wait(made.seconds)
            return original(self, *arguments)

        monkeypatch.setattr(NixlTransport, name, call)

    for name, at in (("add_peer", 0), ("notify", 0), ("post", 1)):
        blocking(name, at)
    return made


def test_a_peer_that_never_answers_its_handshake_stalls_no_other_session(stage, calls):
    scene = stage(greeting_timeout=2.0)
    p, q = scene.child("P", "producer"), scene.child("Q", "producer")
    d = scene.rank("D", "consumer")
    transfer(scene, q, d, "warm")
    stream = scene.stream(q, d)
    p.stop()
    attempts = [d.want(f"never {number}", FRESH, p.address) for number in range(3)]
    longest, last, done = 0.0, time.monotonic(), stream.done

    def told():
        nonlocal longest, last, done
        if stream.done > done:
            now = time.monotonic()
            longest, last, done = max(longest, now - last), now, stream.done
        return all(d.has("ReceiveFailed", attempt) for attempt in attempts)

    scene.until(told)
    assert "no answer" in d.reason(attempts[0])
    assert not calls
    assert longest < 2.0
    p.kill()
    scene.finish()
    nothing_left(scene, d)


def test_the_fake_is_reached_by_a_peer_that_answers(stage, calls):
    calls.seconds = 0.0
    scene = stage()
    p, d = scene.child("P", "producer"), scene.rank("D", "consumer")
    transfer(scene, p, d, "whole")
    assert {"add_peer", "notify"} <= set(calls)


def engine_over(rank, settings):
    """The worker half of an engine whose transfer thread is the rank's."""
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="D"))
    config.speculative_config = None
    half = WorkerHalf(config, None, settings)
    half._thread = rank.thread
    return half


def test_a_peer_that_freezes_after_its_handshake_holds_no_request_up(stage, calls):
    calls.seconds = 0.0
    scene = stage(stall=0.5, stall_most=5.0)
    p, d = scene.child("P", "producer"), scene.rank("D", "consumer")
    transfer(scene, p, d, "warm")
    half, told, pins = engine_over(d, scene.config), {}, set()

    def steps():
        half.results()
        if meta := half.worker_meta():
            pins.update(pin for pin, _ in meta.unpinned)
            told.update(meta.failures)
        return told

    p.stop()
    p.wait_until("T")
    calls.seconds = 600.0  # or until the gate opens
    wanted = [d.receive(f"hit {number}", FRESH, p.address) for number in range(2)]
    began = time.monotonic()
    half.bind(StepMeta.of(tuple(wanted[:1]), idle=True))
    scene.until(lambda: "hit 0" in steps(), what="the request under way")
    half.bind(StepMeta.of(tuple(wanted[1:]), idle=True))
    scene.until(lambda: "hit 1" in steps(), what="the request that came after it")
    assert time.monotonic() - began < scene.config.stall + SLACK
    assert "in one call" in told["hit 0"] and "P/0/" in told["hit 0"]
    assert not pins  # the call may yet post what it was given

    with pytest.raises(DeadlineExceeded, match="restart this engine"):
        scene.until(lambda: steps() is None)
    calls.gate.set()
    p.go_on()
    scene.until(lambda: steps() and {w.pin for w in wanted} <= pins, what="the blocks are back")
    calls.seconds = 0.0
    transfer(scene, p, d, "after")
    nothing_left(scene, d)
