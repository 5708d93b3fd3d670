"""Bytes that are no message, or none that concerns this rank: counted, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from neuron_push.geometry import Region
from neuron_push.limits import LIMITS
from neuron_push.nixl import NixlTransport
from neuron_push.protocol import (
    MAGIC,
    VERSION,
    Alive,
    BlockList,
    Cancel,
    Cancelled,
    Done,
    Failed,
    Match,
    Move,
    Moved,
    Register,
    Soon,
    encode,
)
from neuron_push.rendezvous.attempt import number_of
from tests.hostile.scene import FRESH, HIT, nothing_left, transfer

pytestmark = pytest.mark.real_nixl

HEADER = MAGIC + bytes([VERSION])
ALIVE = encode(Alive(False))[len(HEADER) :]
GARBAGE = {
    "empty": b"",
    "not ours": b"HTTP/1.1 200 OK",
    "cut off": encode(Done(1, 0, 16))[:-1],
    "older version": MAGIC + bytes([VERSION - 1]) + ALIVE,
    "newer version": MAGIC + bytes([VERSION + 1]) + ALIVE,
    "no version": MAGIC,
    "unknown type": HEADER + b"\x91\xa7Nothing",
    "wrong field": HEADER + b"\x92\xa4Soon\xa1x",
    "deeply nested": HEADER + b"\x91" * 100_000,
    "more behind": encode(Soon(1)) + b"\x00",
    "absurd Register": encode(Register(-1, -1, Match("", "", b"", 0), 5, 2, (), -1)),
    "too large": HEADER + bytes(LIMITS.notification),
}


def stranger(name):
    """A NIXL agent that nobody has greeted."""
    memory = np.zeros(4096, np.uint8)
    region = Region(int(memory.ctypes.data), memory.nbytes, "DRAM", 0)
    return NixlTransport(name, [region])


def of_attempt(number):
    """Messages that would change an attempt, from whoever may send them."""
    register = Register(
        1, 1, Match("hit", "hit", b"digest", 256), 0, 256, (BlockList(0, (1, 16)),), 9
    )
    sides = [Move("prefill", "P/0/1/9", b"x"), Moved("prefill", "P/0/1/9")]
    return [
        Soon(number), Done(number, 0, 256), Failed(number, "no"), Cancelled(number),
        Cancel(number, "no"), register, Alive(True), *sides,
    ]  # fmt: skip


def under_way(scene):
    """A transfer of which half has landed, and the wait for the rest."""
    p, d = scene.child("P", "producer"), scene.rank("D", "consumer")
    source = p.call("offer", "hit", HIT, 1, 8)
    attempt = d.want("hit", HIT, p.address)
    scene.until(lambda: d.exact(HIT[:8], 1), what="half of it")
    return p, d, source, attempt


def goes_on(scene, p, d, source, attempt):
    """It completes as if nothing had been, and so does the next."""
    assert not d.has("ReceiveFailed", attempt) and not d.has("Received", attempt)
    p.call("finish", source, 8)
    scene.hears(d, "Received", attempt)
    assert d.exact(HIT, 1)
    transfer(scene, p, d, "next", FRESH)
    assert d.exact(HIT, 1)
    state = d.state()
    assert state["generation"] == 1 and state["links"] == 1
    nothing_left(scene, d)
    nothing_left(scene, p)


def test_garbage_of_a_stranger(stage):
    scene = stage()
    p, d, source, attempt = under_way(scene)
    rogue = stranger("rogue/0/1/1")
    try:
        name = rogue.add_peer(d.thread._core._context.metadata)
        for payload in GARBAGE.values():
            rogue.notify(name, payload)

        def counted():
            rogue.notifications()
            return d.tally("rejected_messages", "garbage") == len(GARBAGE)

        scene.until(counted, what=f"{len(GARBAGE)} rejected; {d.tallies}")
    finally:
        rogue.close()
    goes_on(scene, p, d, source, attempt)


def test_good_messages_of_a_stranger(stage):
    scene = stage()
    p, d, source, attempt = under_way(scene)
    messages = of_attempt(number_of(attempt))
    rogue = stranger("rogue/0/1/1")
    try:
        name = rogue.add_peer(d.thread._core._context.metadata)
        for message in messages:
            rogue.notify(name, encode(message))

        def counted():
            rogue.notifications()
            kinds = {type(message).__name__ for message in messages}
            return sum(d.tally("stale_messages", kind) for kind in kinds) == len(messages)

        scene.until(counted, what=f"{len(messages)} stale; {d.tallies}")
    finally:
        rogue.close()
    goes_on(scene, p, d, source, attempt)


def test_garbage_of_a_linked_peer(stage):
    scene = stage()
    p, d, source, attempt = under_way(scene)
    for payload in GARBAGE.values():
        p.call("send", payload, "D")
    # What no prefill rank may say, or says of attempts that are not there.
    absurd = [
        Done(number_of(attempt), 0, 1 << 40),
        Done(999, 0, 16),
        Failed(999, "no"),
        Cancelled(999),
    ]
    for message in absurd:
        p.call("send", encode(message), "D")
    scene.until(lambda: d.tally("rejected_messages", "garbage") == len(GARBAGE), what="garbage")
    scene.until(
        lambda: d.tally("rejected_messages", "Done outside the registration") == 1, what="Done"
    )
    # P's own answer may be there already: D has told it that attempt 999 is over.
    scene.until(lambda: d.tally("stale_messages", "Cancelled") >= 1, what="Cancelled")
    goes_on(scene, p, d, source, attempt)
