"""The modelled link under WRITEs: in virtual time, and between two transfer threads."""

import time

import numpy as np
import pytest

from neuron_push.commands import Received, Unpinned, encode
from neuron_push.emulation import cost
from neuron_push.emulation.link import Linked, linked
from neuron_push.errors import Disconnected, ProtocolError

SLOW = cost.Profile("here", link=cost.Link(bandwidth=1e6, latency=0.25))


class Inner:
    """A transport whose WRITEs land when told to."""

    def __init__(self):
        self.posted, self.landed, self.notified, self.gone = {}, set(), [], False

    def post(self, write, peer, source, destination, memory, payload):
        self.posted[write] = payload

    def poll(self, write):
        if write not in self.posted:
            raise ProtocolError(f"WRITE {write} is not in flight")
        return "done" if write in self.landed else "pending"

    def notify(self, peer, payload):
        if self.gone:
            raise Disconnected(peer)
        self.notified.append((peer, payload))


class Bench:
    def __init__(self, profile=SLOW):
        self.inner, self.clock = Inner(), cost.VirtualClock()
        self.link = Linked(self.inner, profile, self.clock)

    def post(self, write, nbytes, payload=b"there"):
        rows = np.array([[0, nbytes - 1, 0], [5000, 1, 0]], np.uint64)
        self.link.post(write, "D", rows, rows, ("DRAM", "DRAM"), payload)

    def at(self, moment, write):
        self.clock.sleep_until(moment)
        return self.link.poll(write)


def test_a_write_is_over_when_the_modelled_time_is():
    bench = Bench()
    bench.post(1, 500_000)
    bench.inner.landed.add(1)
    assert bench.at(0.7499, 1) == "pending" and not bench.inner.notified
    assert bench.at(0.7501, 1) == "done" and bench.inner.notified == [("D", b"there")]
    assert bench.inner.posted == {1: b""}


def test_bytes_that_land_later_than_modelled_are_waited_for():
    bench = Bench()
    bench.post(1, 10)
    assert bench.at(9.0, 1) == "pending" and not bench.inner.notified
    bench.inner.landed.add(1)
    assert bench.at(9.0, 1) == "done" and len(bench.inner.notified) == 1


def test_writes_share_the_bandwidth_and_overlap_their_latencies():
    bench = Bench()
    for write in (1, 2):
        bench.post(write, 500_000)
        bench.inner.landed.add(write)
    assert (bench.at(0.76, 1), bench.at(0.76, 2)) == ("done", "pending")
    assert bench.at(1.2499, 2) == "pending" and bench.at(1.2501, 2) == "done"
    bench.clock.sleep_until(10.0)
    bench.post(3, 500_000)  # the link has been idle since
    bench.inner.landed.add(3)
    assert bench.at(10.7499, 3) == "pending" and bench.at(10.7501, 3) == "done"


def test_without_a_link_nothing_waits():
    bench = Bench(cost.Profile("no link"))
    bench.post(1, 1 << 30)
    bench.inner.landed.add(1)
    assert bench.link.poll(1) == "done"


def test_a_peer_that_left_meanwhile_is_an_error_and_unknown_writes_stay_one():
    bench = Bench()
    bench.post(1, 10)
    bench.inner.landed.add(1)
    bench.inner.gone = True
    with pytest.raises(Disconnected):
        bench.at(1.0, 1)
    with pytest.raises(ProtocolError):
        bench.link.poll(2)


@pytest.mark.real_nixl
def test_a_real_transfer_takes_the_modelled_time(monkeypatch):
    """Same bytes with and without the link; the reports of both sides wait for it."""
    pytest.importorskip("nixl_cu12")
    from contextlib import ExitStack

    from neuron_push.config import Config
    from neuron_push.nixl import factory
    from tests import test_transfer as kit

    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setattr(kit, "factory", lambda backends: linked(factory(backends), SLOW))
    with ExitStack() as stack:
        config = Config(lease=30.0)
        prefill = kit.build(stack, "P", "producer", config)
        decode = kit.build(stack, "D", "consumer", config)
        kit.fill(prefill)
        nbytes = sum(array[:, [4, 5, 2]].nbytes for array in prefill.kv)
        decode.thread.submit(encode([kit.receive(prefill, patience=30.0)]))
        begun = time.monotonic()
        prefill.thread.submit(encode(kit.settled()))
        decode.hears(lambda report: report == Received(1, "r1"), within=40.0)
        took = time.monotonic() - begun
        prefill.hears(lambda report: report == Unpinned(71), within=40.0)
        assert took >= SLOW.transfer(nbytes)
        assert all((a[:, [7, 3, 9]] == b[:, [4, 5, 2]]).all()
                   for a, b in zip(decode.kv, prefill.kv, strict=True))  # fmt: skip


@pytest.mark.real_nixl
def test_nixl_sends_nothing_for_the_silent_part(monkeypatch):
    pytest.importorskip("nixl_cu12")
    from tests.test_transport_contract import NixlNetwork

    monkeypatch.setenv("UCX_TLS", "tcp,self")
    network = NixlNetwork()
    source, target = network.memory(4096), network.memory(4096)
    network.view(source)[:] = 7
    try:
        plain = network.open("P/link", source), network.open("D/link", target)
        sender, receiver = Linked(plain[0], SLOW, cost.RealClock()), plain[1]
        peer = sender.add_peer(receiver.metadata())
        rows = [np.array([[r.base, 4096, 0]], np.uint64) for r in (source, target)]
        heard, begun = [], time.monotonic()
        sender.post(1, peer, *rows, ("DRAM", "DRAM"), b"there")
        while sender.poll(1) == "pending":
            heard += receiver.notifications()
        assert time.monotonic() - begun >= 0.25 and heard == []
        while not heard:
            heard += receiver.notifications()
        assert heard == [("P/link", b"there")] and (network.view(target) == 7).all()
    finally:
        network.end()
