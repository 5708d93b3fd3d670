"""What every transport promises, checked over byte arrays and over real NIXL."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from neuron_push.errors import ConfigError, Disconnected, ProtocolError, TransportError
from neuron_push.geometry import Region
from neuron_push.memory import MemoryFabric

MIB = 1 << 20
_serial = itertools.count()


class MemoryNetwork:
    """Opens agents over a fabric; `large` is a WRITE that is worth calling so."""

    large = 4 * MIB

    def __init__(self):
        self.fabric = MemoryFabric()
        self.opened = []

    def memory(self, nbytes):
        return self.fabric.allocate(nbytes)

    def view(self, region):
        return self.fabric.view(region.base, region.length)

    def open(self, name, *regions):
        self.opened.append(self.fabric.open(name, regions))
        return self.opened[-1]

    def end(self):
        for transport in self.opened:
            transport.close()


class NixlNetwork(MemoryNetwork):
    large = 64 * MIB

    def __init__(self):
        self.arrays = {}
        self.opened = []

    def memory(self, nbytes):
        array = np.zeros(nbytes, np.uint8)
        self.arrays[array.ctypes.data] = array
        return Region(base=array.ctypes.data, length=nbytes, memory="DRAM", device=0)

    def view(self, region):
        return self.arrays[region.base]

    def open(self, name, *regions):
        from neuron_push.nixl import NixlTransport

        self.opened.append(NixlTransport(name, regions))
        return self.opened[-1]


@pytest.fixture(params=["memory", pytest.param("nixl", marks=pytest.mark.real_nixl)])
def network(request, monkeypatch):
    # Shared memory would copy inside `post`; tcp behaves as a network does.
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    network = MemoryNetwork() if request.param == "memory" else NixlNetwork()
    yield network
    network.end()


class Pair:
    """P writes, D is written to."""

    def __init__(self, network, nbytes=MIB):
        self.network = network
        serial = next(_serial)
        self.source, self.target = network.memory(nbytes), network.memory(nbytes)
        network.view(self.source)[:] = np.resize(np.arange(251, dtype=np.uint8), nbytes)
        self.p = network.open(f"p/0/{serial}/1", self.source)
        self.d = network.open(f"d/0/{serial}/1", self.target)
        self.to_d = self.p.add_peer(self.d.metadata())
        self.to_p = self.d.add_peer(self.p.metadata())

    def post(self, write, offset=0, nbytes=4096, payload=b"landed"):
        self.p.post(
            write,
            self.to_d,
            rows((self.source.base + offset, nbytes)),
            rows((self.target.base + offset, nbytes)),
            ("DRAM", "DRAM"),
            payload,
        )

    def fetch(self, read, offset=0, nbytes=4096):
        """D reads what P would write."""
        self.d.fetch(
            read,
            self.to_p,
            rows((self.source.base + offset, nbytes)),
            rows((self.target.base + offset, nbytes)),
            ("DRAM", "DRAM"),
        )

    def arrivals(self, count, seconds=10.0):
        """Drive both sides until D has taken `count` notifications."""
        taken = []
        for _ in within(seconds):
            taken += self.d.notifications()
            assert self.p.notifications() == []
            if len(taken) >= count:
                return taken
        raise AssertionError(f"{len(taken)} of {count} notifications arrived")

    def finish(self, write):
        """Drive both sides until a WRITE is done, and return what D was told."""
        taken, state = [], "pending"
        for _ in within(20):
            state = self.p.poll(write)
            taken += self.d.notifications()
            if state == "done":
                return taken
        raise AssertionError("the WRITE did not end")


def rows(*spans):
    return np.array([(address, length, 0) for address, length in spans], np.uint64)


def within(seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield


def until_raises(kind, call, seconds=10.0):
    for _ in within(seconds):
        try:
            call()
        except kind as error:
            return error
    raise AssertionError(f"no {kind.__name__} within {seconds} s")


def test_metadata_names_the_agent_that_it_belongs_to(network):
    pair = Pair(network)
    assert (pair.to_d, pair.to_p) == (pair.d.name, pair.p.name)


def test_an_agent_without_peers_has_no_notifications(network):
    assert network.open("alone", network.memory(4096)).notifications() == []


def test_notifications_arrive_in_order_with_any_bytes(network):
    pair = Pair(network)
    payloads = [b"", b"\xff\x00\xfe", b"x" * MIB, *(b"%d" % i for i in range(50))]
    for payload in payloads:
        pair.p.notify(pair.to_d, payload)
    assert pair.arrivals(len(payloads)) == [(pair.p.name, payload) for payload in payloads]


def test_both_sides_may_notify(network):
    pair = Pair(network)
    pair.p.notify(pair.to_d, b"ping")
    pair.arrivals(1)
    pair.d.notify(pair.to_p, b"pong")
    for _ in within(10):
        pair.d.notifications()
        if taken := pair.p.notifications():
            break
    assert taken == [(pair.d.name, b"pong")]


def test_a_write_lands_before_its_notification(network):
    pair = Pair(network)
    pair.post(1, offset=8192, nbytes=4096)
    taken = pair.finish(1) or pair.arrivals(1)
    assert taken == [(pair.p.name, b"landed")]
    landed = network.view(pair.target)
    assert (landed[8192:12288] == network.view(pair.source)[8192:12288]).all()
    assert not landed[:8192].any() and not landed[12288:].any()


def test_a_large_write_of_many_rows_lands_whole(network):
    pair = Pair(network, network.large)
    step = 8192
    offsets = np.arange(0, network.large, step, dtype=np.uint64)
    source = np.column_stack([offsets + np.uint64(pair.source.base), offsets, offsets])
    source[:, 1:] = (step, 0)
    target = source.copy()
    # The other way round, so that nothing merges.
    target[:, 0] = offsets[::-1] + np.uint64(pair.target.base)
    pair.p.post(7, pair.to_d, source, target, ("DRAM", "DRAM"), b"all")
    taken = pair.finish(7) or pair.arrivals(1)
    assert taken == [(pair.p.name, b"all")]
    expected = network.view(pair.source).reshape(-1, step)[::-1]
    assert (network.view(pair.target).reshape(-1, step) == expected).all()


def test_several_writes_may_be_in_flight(network):
    pair = Pair(network)
    for write in range(8):
        pair.post(write, offset=4096 * write, payload=b"%d" % write)
    taken = []
    for write in reversed(range(8)):
        taken += pair.finish(write)
    taken += pair.arrivals(8 - len(taken)) if len(taken) < 8 else []
    assert sorted(payload for _, payload in taken) == [b"%d" % write for write in range(8)]


def test_a_peer_may_be_added_again(network):
    pair = Pair(network)
    pair.p.notify(pair.to_d, b"one")
    pair.arrivals(1)
    assert pair.p.add_peer(pair.d.metadata()) == pair.to_d
    pair.post(1)
    assert (pair.finish(1) or pair.arrivals(1)) == [(pair.p.name, b"landed")]


def test_a_removed_peer_may_be_added_again(network):
    pair = Pair(network)
    pair.p.remove_peer(pair.to_d)
    with pytest.raises(TransportError, match="not loaded"):
        pair.p.notify(pair.to_d, b"x")
    pair.p.add_peer(pair.d.metadata())
    pair.p.notify(pair.to_d, b"back")
    assert pair.arrivals(1) == [(pair.p.name, b"back")]


def test_unknown_peers_are_ignored_by_remove_and_refused_by_the_rest(network):
    pair = Pair(network)
    pair.p.remove_peer("nobody")
    with pytest.raises(TransportError, match="nobody"):
        pair.p.notify("nobody", b"x")
    span = rows((pair.source.base, 8)), rows((pair.target.base, 8))
    with pytest.raises(TransportError, match="nobody"):
        pair.p.post(1, "nobody", *span, ("DRAM", "DRAM"), b"")


@pytest.mark.parametrize("metadata", [b"", b"\x00", b"\x00\x01a", b"\x00\x02\xff\xffxx", b"x" * 99])
def test_malformed_metadata_is_an_error_and_no_more(network, metadata):
    pair = Pair(network)
    with pytest.raises(TransportError):
        pair.p.add_peer(metadata)
    pair.p.notify(pair.to_d, b"still here")
    assert pair.arrivals(1) == [(pair.p.name, b"still here")]


def test_an_agent_does_not_load_itself(network):
    pair = Pair(network)
    with pytest.raises(TransportError, match="our own name"):
        pair.p.add_peer(pair.p.metadata())


@pytest.mark.parametrize(
    ("source", "target"),
    [((-4096, 64), (0, 64)), ((0, 64), (MIB, 64)), ((0, 64), (0, 32))],
    ids=["source unregistered", "beyond the target", "lengths differ"],
)
def test_a_write_outside_of_registered_memory_is_not_posted(network, source, target):
    pair = Pair(network)
    with pytest.raises(TransportError):
        pair.p.post(
            1,
            pair.to_d,
            rows((pair.source.base + source[0], source[1])),
            rows((pair.target.base + target[0], target[1])),
            ("DRAM", "DRAM"),
            b"",
        )
    with pytest.raises(ProtocolError, match="not in flight"):
        pair.p.poll(1)


def test_misuse_is_told_from_failure(network):
    pair = Pair(network)
    with pytest.raises(ProtocolError, match="not in flight"):
        pair.p.poll(1)
    with pytest.raises(ProtocolError):
        pair.p.post(1, pair.to_d, rows()[:0].reshape(0, 3), rows(), ("DRAM", "DRAM"), b"")
    pair.post(1)
    with pytest.raises(ProtocolError, match="before"):
        pair.post(1)
    pair.finish(1)
    with pytest.raises(ProtocolError, match="not in flight"):
        pair.p.poll(1)


def test_a_write_to_a_closed_peer_raises_at_post_or_later(network):
    pair = Pair(network)
    pair.p.notify(pair.to_d, b"hello")
    pair.arrivals(1)
    pair.d.close()
    writes = itertools.count(1)

    def write():
        number = next(writes)
        pair.post(number)
        until_raises(TransportError, lambda: pair.p.poll(number))
        pair.p.poll(number)

    assert isinstance(until_raises(TransportError, write), Disconnected)
    assert isinstance(
        until_raises(TransportError, lambda: pair.p.notify(pair.to_d, b"x")), Disconnected
    )


def test_a_failed_write_goes_on_failing_when_polled(network):
    pair = Pair(network, network.large)
    pair.p.notify(pair.to_d, b"hello")
    pair.arrivals(1)
    pair.post(1, nbytes=network.large)
    pair.d.close()
    first = until_raises(TransportError, lambda: pair.p.poll(1))
    for _ in range(3):
        with pytest.raises(TransportError) as again:
            pair.p.poll(1)
        assert str(again.value) == str(first)


def test_a_closed_peer_cannot_be_added_and_its_successor_can(network):
    pair = Pair(network)
    metadata = pair.d.metadata()
    pair.d.close()
    with pytest.raises(TransportError):
        pair.p.add_peer(metadata)
    pair.d = network.open(pair.to_d, pair.target)
    pair.p.add_peer(pair.d.metadata())
    pair.post(1)
    assert (pair.finish(1) or pair.arrivals(1)) == [(pair.p.name, b"landed")]


def test_close_is_idempotent_and_ends_all_use(network):
    pair = Pair(network)
    pair.post(1)
    pair.p.close()
    pair.p.close()
    calls = [
        pair.p.metadata,
        pair.p.notifications,
        lambda: pair.p.poll(1),
        lambda: pair.p.notify(pair.to_d, b""),
        lambda: pair.p.add_peer(pair.d.metadata()),
        lambda: pair.p.remove_peer(pair.to_d),
        lambda: pair.post(2),
    ]
    for call in calls:
        with pytest.raises(TransportError, match="closed"):
            call()


def test_two_generations_may_share_memory(network):
    pair = Pair(network)
    second = network.open(pair.d.name[:-1] + "2", pair.target)
    pair.to_d = pair.p.add_peer(second.metadata())
    pair.d.close()
    pair.d = second
    pair.post(1)
    assert (pair.finish(1) or pair.arrivals(1)) == [(pair.p.name, b"landed")]


# --- byte arrays only: the controls that tests of the core rely on ------------------------


@pytest.fixture
def pair():
    return Pair(MemoryNetwork())


def landed(pair):
    return int(np.count_nonzero(pair.network.view(pair.target)))


def test_a_read_brings_the_peers_bytes_and_tells_nobody(network):
    pair = Pair(network)
    pair.fetch(1, offset=100, nbytes=5000)
    for _ in within(20):
        told = pair.p.notifications()  # which also drives the transfer, on either side
        if pair.d.poll(1) == "done":
            break
    target, source = network.view(pair.target), network.view(pair.source)
    assert (target[100:5100] == source[100:5100]).all()
    assert not target[:100].any() and not target[5100:].any()
    assert told == [] and pair.d.notifications() == []


def test_a_read_of_memory_that_is_not_registered_is_refused(network):
    pair = Pair(network)
    with pytest.raises(TransportError):
        pair.d.fetch(
            1, pair.to_p, rows((pair.source.base, 2 * MIB)), rows((pair.target.base, 2 * MIB)),
            ("DRAM", "DRAM"),
        )  # fmt: skip


def test_a_read_from_an_agent_that_is_gone_is_an_error(network):
    pair = Pair(network)
    pair.p.close()

    def read():
        pair.fetch(1)
        for _ in within(20):
            pair.d.poll(1)

    until_raises(TransportError, read)


def test_closing_the_reader_is_a_fence(pair):
    pair.network.fabric.auto_land = False
    pair.fetch(1)
    (read,) = pair.network.fabric.writes
    assert pair.network.fabric.land(read, 10) == 10
    pair.d.close()
    assert pair.network.fabric.land(read) == 0 and landed(pair) == 9  # the first byte is 0


def test_a_test_may_land_a_write_byte_by_byte(pair):
    fabric = pair.network.fabric
    fabric.auto_land = False
    pair.network.view(pair.source)[:] = 1
    pair.post(1, nbytes=100)
    (write,) = fabric.writes
    assert pair.p.poll(1) == "pending" and landed(pair) == 0
    assert fabric.land(write, 30) == 30 and landed(pair) == 30
    assert pair.p.poll(1) == "pending"
    pair.network.view(pair.source)[:] = 2
    assert fabric.land(write) == 70
    assert pair.network.view(pair.target)[:100].tolist() == [1] * 30 + [2] * 70
    assert pair.d.notifications() == []
    assert pair.p.poll(1) == "done"
    assert pair.d.notifications() == [(pair.p.name, b"landed")]


def test_removing_or_losing_a_peer_is_no_fence_and_closing_is(pair):
    fabric = pair.network.fabric
    fabric.auto_land = False
    pair.network.view(pair.source)[:] = 1
    pair.post(1, nbytes=100)
    (write,) = fabric.writes
    pair.p.remove_peer(pair.to_d)
    pair.d.remove_peer(pair.to_p)
    assert fabric.land(write, 10) == 10
    fabric.disconnect(pair.p.name, pair.d.name)
    with pytest.raises(Disconnected):
        pair.p.poll(1)
    assert fabric.land(write, 10) == 10
    fabric.kill(pair.p.name)
    pair.network.view(pair.source)[:] = 2
    assert fabric.land(write, 10) == 10
    pair.d.close()
    assert fabric.land(write) == 0 and landed(pair) == 30
    assert set(pair.network.view(pair.target)[:30]) == {1}


def test_closing_the_writer_is_a_fence_too(pair):
    pair.network.fabric.auto_land = False
    pair.post(1)
    (write,) = pair.network.fabric.writes
    pair.p.close()
    assert pair.network.fabric.land(write) == 0 and landed(pair) == 0


def test_letters_may_be_dropped_doubled_and_put_in_another_order(pair):
    fabric = pair.network.fabric
    fabric.auto_deliver = False
    for text in (b"a", b"b", b"c"):
        pair.p.notify(pair.to_d, text)
    assert fabric.drop(1).payload == b"b"
    fabric.duplicate(0)
    fabric.reorder([1, 2, 0])
    while fabric.letters:
        fabric.deliver()
    assert [text for _, text in pair.d.notifications()] == [b"c", b"a", b"a"]


def test_a_broken_connection_lasts_until_the_peer_is_added_again(pair):
    fabric = pair.network.fabric
    fabric.disconnect(pair.p.name, pair.d.name)
    for agent, peer in ((pair.p, pair.to_d), (pair.d, pair.to_p)):
        with pytest.raises(Disconnected):
            agent.notify(peer, b"x")
    pair.p.add_peer(pair.d.metadata())
    pair.p.notify(pair.to_d, b"mended")
    assert pair.arrivals(1) == [(pair.p.name, b"mended")]


def test_an_array_may_be_put_on_the_fabric_at_its_own_address(pair):
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    region = pair.network.fabric.adopt(array)
    assert region.base == array.ctypes.data and region.length == 48
    pair.network.view(region)[:] = 0
    assert not array.any()


# --- real NIXL only ------------------------------------------------------------------------


@pytest.fixture
def nixl(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    network = NixlNetwork()
    yield network
    network.end()


@pytest.mark.real_nixl
def test_close_destroys_the_agent_even_if_a_traceback_refers_to_it(nixl):
    pair = Pair(nixl)
    agent = weakref.ref(pair.p._agent.agent)
    with pytest.raises(TransportError) as failure:
        pair.p.add_peer(pair.d.metadata()[:-20])
    wrapper = pair.p._agent
    gc.disable()
    try:
        pair.p.close()
        assert agent() is None
    finally:
        gc.enable()
    assert failure.value.__cause__.__traceback__ is None
    del wrapper


@pytest.mark.real_nixl
def test_close_says_so_if_something_keeps_the_agent_alive(nixl):
    transport = nixl.open("kept", nixl.memory(4096))
    kept = transport._agent.agent
    for _ in range(2):
        with pytest.raises(TransportError, match="not fenced"):
            transport.close()
    del kept
    transport.close()


@pytest.mark.real_nixl
def test_no_finaliser_touches_nixl_after_close(nixl):
    pair = Pair(nixl, nixl.large)
    pair.post(1, nbytes=nixl.large)
    handle = pair.p._posted[1].handle
    pair.p.close()
    assert handle._released


@pytest.mark.real_nixl
def test_agents_come_and_go_without_a_leak(nixl):
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    region = nixl.memory(MIB)
    pair = Pair(nixl)
    before = 0
    for turn in range(12):
        agent = nixl.open(f"guest/{turn}", region)
        agent.add_peer(pair.d.metadata())
        agent.notify(pair.d.name, b"x")
        for _ in within(10):
            agent.notifications()
            if pair.d.notifications():
                break
        agent.close()
        if turn == 3:
            before = open_files()
    assert open_files() <= before + 2


@pytest.mark.real_nixl
def test_another_thread_may_not_use_an_agent(nixl):
    transport = nixl.open("owned", nixl.memory(4096))
    seen = []

    def use():
        with pytest.raises(ProtocolError, match="thread"):
            transport.notifications()
        seen.append(True)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen


@pytest.mark.real_nixl
def test_backends_that_are_not_there_are_named(nixl):
    from neuron_push.nixl import NixlTransport

    region = nixl.memory(4096)
    for backends in (("NONSENSE",), ("UCX", "NONSENSE")):
        with pytest.raises(ConfigError, match=r"no backend NONSENSE; plugins found: .*UCX"):
            NixlTransport("x", [region], backends)
    with pytest.raises(ConfigError, match="no backend"):
        NixlTransport("x", [region], ())


@pytest.mark.real_nixl
def test_memory_that_no_backend_registers_is_named(nixl, monkeypatch):
    from neuron_push.nixl import NixlTransport, binding

    monkeypatch.setattr(binding().nixl_agent, "get_backend_mem_types", lambda *_: ["DRAM_SEG"])
    region = Region(base=4096, length=4096, memory="VRAM", device=0)
    with pytest.raises(ConfigError, match="in VRAM, but UCX offers only DRAM"):
        NixlTransport("x", [region])


@pytest.mark.real_nixl
def test_the_names_of_nixls_exceptions_are_still_there():
    from neuron_push.nixl import binding

    for name in ("nixlRemoteDisconnectError", "nixlNotFoundError"):
        assert issubclass(getattr(binding().nixlBind, name), Exception)


def test_a_missing_nixl_says_what_to_install(monkeypatch):
    from neuron_push.nixl import binding

    monkeypatch.setattr(sys.modules["neuron_push.nixl.binding"], "_PACKAGES", ("no_such_nixl",))
    with pytest.raises(ConfigError, match=r"pip install nixl-cu12.*No module named 'no_such_nixl'"):
        binding.__wrapped__()


# --- the deliberate fault ------------------------------------------------------------------


@pytest.mark.real_nixl
@pytest.mark.parametrize("nbytes", [1, 100, 4096, 100_000])
def test_tampering_changes_one_byte_at_the_target_only(nixl, nbytes):
    from neuron_push.nixl import factory

    pair = Pair(nixl)
    pair.p.close()
    original = nixl.view(pair.source).copy()
    pair.p = factory(("UCX",), fault="tamper")("tampering", [pair.source])
    nixl.opened.append(pair.p)
    pair.to_d = pair.p.add_peer(pair.d.metadata())
    for write in range(300):
        pair.post(write, nbytes=nbytes)
        pair.finish(write)
    wrong = nixl.view(pair.target)[:nbytes] != original[:nbytes]
    assert np.count_nonzero(wrong) == 1
    assert (nixl.view(pair.source) == original).all()


def test_tampering_needs_host_memory():
    from neuron_push.tamper import Tampering

    device = Region(base=4096, length=4096, memory="VRAM", device=0)
    with pytest.raises(ConfigError, match="host memory"):
        Tampering(MemoryFabric().open)("x", [device])
