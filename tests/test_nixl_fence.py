"""What stops a posted WRITE on real NIXL, and what does not: the reason for generations.

P and Q write, D is written to. All bytes go over tcp on loopback, where they wait in sockets
while the receiver makes no progress.
"""

from __future__ import annotations

import time

import pytest

from tests.nixl_peer import Peer

pytestmark = [pytest.mark.real_nixl, pytest.mark.slow]

SIZE = 64 << 20
P_BYTE, Q_BYTE, CANARY = 0xAB, 0xCD, 0x5A


@pytest.fixture
def start():
    peers = []

    def start(nbytes, value=0):
        peers.append(Peer(nbytes, value))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


def connect(writer, name, d, generation):
    """Load both ways, and see a small WRITE through, so that the connection is up."""
    writer.call("add", name, d.metadata[generation])
    d.call("add", generation, writer.metadata[name])
    writer.call("post", name, 0, generation, d.base, 0, 4096)
    writer.tell("drive", name, 0, 10)
    assert d.call("progress", 10, 1) == [(name, b"landed")]
    assert writer.hear() == "done"


def agent(peer, name):
    if not hasattr(peer, "metadata"):
        peer.metadata = {}
        peer.base = peer.call("base")
    peer.metadata[name] = peer.call("open", name)


def half_written(p, d, generation="d/1"):
    """P's WRITE of SIZE bytes to D's first half, part of it landed; D makes no progress."""
    d.call("fill", 0, SIZE, 0)
    p.call("post", "p", 1, generation, d.base, 0, SIZE)
    p.tell("drive", "p", 1, 15)
    landed = d.call("progress_until_some_landed", 0, SIZE)
    # Time for the sockets to fill up.
    time.sleep(0.3)
    assert 0 < landed < SIZE
    return landed


def pair(start, d_bytes=SIZE):
    p, d = start(SIZE, P_BYTE), start(d_bytes)
    agent(p, "p")
    agent(d, "d/1")
    connect(p, "p", d, "d/1")
    return p, d


@pytest.mark.parametrize("act", ["deregister", "remove"])
def test_deregistering_memory_or_removing_the_peer_does_not_stop_a_write(start, act):
    p, d = pair(start)
    half_written(p, d)
    d.call("deregister", "d/1") if act == "deregister" else d.call("remove", "d/1", "p")
    # The blocks are given to another request.
    d.call("fill", 0, SIZE, CANARY)
    d.call("progress", 2)
    assert d.call("count", 0, SIZE, CANARY) > SIZE // 4


def test_closing_the_generation_fences_a_stopped_writer_and_spares_the_healthy_one(start):
    p, d = pair(start, d_bytes=2 * SIZE)
    q = start(2 * SIZE, Q_BYTE)
    agent(q, "q")
    connect(q, "q", d, "d/1")
    half_written(p, d)
    p.stop()

    agent(d, "d/2")
    q.call("add", "q", d.metadata["d/2"])
    q.call("post", "q", 1, "d/2", d.base, SIZE, SIZE)
    q.tell("drive", "q", 1, 15)
    assert d.call("progress", 15, 1) == [("q", b"landed")]
    assert q.hear() == "done"

    assert d.call("close", "d/1") < 1
    d.call("fill", 0, SIZE, CANARY)
    p.go_on()
    d.call("progress", 1.5)
    assert p.hear() == "Disconnected"
    assert d.call("count", 0, SIZE, CANARY) == 0
    assert d.call("count", SIZE, SIZE, Q_BYTE) == 0

    # P was not dead after all: it is welcome in the new generation.
    p.call("add", "p", d.metadata["d/2"])
    p.call("post", "p", 2, "d/2", d.base, 0, SIZE)
    p.tell("drive", "p", 2, 15)
    assert d.call("progress", 15, 1) == [("p", b"landed")]
    assert p.hear() == "done"
    assert d.call("count", 0, SIZE, P_BYTE) == 0


def test_a_killed_writers_bytes_land_late_but_not_after_close(start):
    p, d = pair(start)
    before = half_written(p, d)
    p.kill()
    time.sleep(3)
    # Seconds after the death, and D only now makes progress again.
    d.call("fill", 0, SIZE, 0)
    late = d.call("progress_until_some_landed", 0, SIZE, 2)
    assert late > 0, f"{before} bytes landed before the death, none after"
    d.call("close", "d/1")
    d.call("fill", 0, SIZE, CANARY)
    agent(d, "d/2")
    d.call("progress", 1)
    assert d.call("count", 0, SIZE, CANARY) == 0


def test_closing_the_writers_agent_is_a_fence_for_its_source(start):
    p, d = pair(start)
    d.call("fill", 0, SIZE, 0)
    p.call("post", "p", 1, "d/1", d.base, 0, SIZE)
    assert p.call("drive", "p", 1, 0.5) == "pending"
    d.stop()
    assert p.call("close", "p") < 1
    # The source blocks are given to another request: its bytes must not reach D.
    p.call("fill", 0, SIZE, CANARY)
    d.go_on()
    d.call("progress", 1)
    assert d.call("count", 0, SIZE) == SIZE - d.call("count", 0, SIZE, P_BYTE) < SIZE
    # D's own list of what P told it ends there: no notification for bytes that never came.
    assert d.call("progress", 0.1) == []
