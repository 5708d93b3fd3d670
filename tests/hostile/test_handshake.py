"""A peer that never answers its handshake: nothing is said to it through NIXL, nobody waits for it.

NIXL's LIBFABRIC backend blocks its caller for up to 60 s toward such a peer, in connect, notify and
post; there is no libfabric here that reaches anybody, so a fake does that to every call that names
the peer.
"""

from __future__ import annotations

import time

import pytest

from neuron_push.nixl import NixlTransport
from tests.hostile.scene import FRESH, nothing_left, transfer

pytestmark = pytest.mark.real_nixl


class Calls(list):
    """Names of the calls that were made, each of which takes this many seconds."""

    seconds = 60.0


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
                time.sleep(made.seconds)
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
