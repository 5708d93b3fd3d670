"""Pages that pass through host memory, on a device that takes narrow and copy_ only."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from neuron_push.accelerator import CpuAccelerator
from neuron_push.bounce import HostCopies, HostStaged, Slots, StagedMover, StagedTransport
from neuron_push.errors import ConfigError, PlanError, ProtocolError, TransportError
from neuron_push.geometry import Region
from neuron_push.transform import Rows
from neuron_push.transport import WriteId
from tests.devices.tensors import FakeTensor, HostBytes, NeuronBytes

MEMORY = ("DRAM", "DRAM")


def host_bytes(nbytes):
    return HostBytes(memoryview(bytearray(nbytes)))


@pytest.fixture
def device():
    return NeuronBytes(memoryview(bytearray(range(256)) * 4))


@pytest.fixture
def copies(device):
    found = HostCopies(host_bytes)
    found.add(device.data_ptr(), device)
    return found


def seen(slab, length):
    return bytes(slab.owner.data[:length])


class TestFake:
    def test_it_refuses_what_neuron_refuses(self, device):
        other = NeuronBytes(memoryview(bytearray(1024)))
        with pytest.raises(RuntimeError, match="status=2"):
            device.copy_(other)
        with pytest.raises(RuntimeError, match="strided"):
            device.strided(2).copy_(host_bytes(1024))
        with pytest.raises(RuntimeError, match="sizes differ"):
            device.copy_(host_bytes(8))


class TestCopies:
    def test_exact_ranges_go_either_way(self, device, copies):
        base, slab = device.data_ptr(), copies.host(16)
        copies.copy(slab.base + 2, base + 10, 3)
        assert seen(slab, 6) == bytes([0, 0, 10, 11, 12, 0])
        copies.copy(base + 300, slab.base + 2, 3)
        assert bytes(device.data[299:304]) == bytes([43, 10, 11, 12, 47])

    def test_it_knows_which_memory_is_the_hosts(self, device, copies):
        slab = copies.host(16)
        assert copies.on_host(slab.base) and copies.on_host(slab.base + 15)
        assert not copies.on_host(device.data_ptr())
        assert not copies.on_host(64)

    @pytest.mark.parametrize("offset", [-1, 1020, 1024])
    def test_what_lies_outside_is_refused(self, device, copies, offset):
        slab = copies.host(16)
        with pytest.raises(PlanError, match="no part of a KV cache"):
            copies.copy(slab.base, device.data_ptr() + offset, 8)

    def test_two_places_of_one_kind_are_refused(self, device, copies):
        with pytest.raises(PlanError, match="between a device and its host"):
            copies.copy(device.data_ptr(), device.data_ptr() + 8, 8)

    def test_what_the_device_says_is_passed_on(self, device, copies):
        device.narrow = lambda axis, start, length: device.strided(2)
        with pytest.raises(PlanError, match="strided view is not supported"):
            copies.copy(copies.host(8).base, device.data_ptr(), 8)


class TestMover:
    @pytest.mark.parametrize("scratch", [8, 64, 4096])
    def test_rows_are_packed_and_unpacked_in_any_order(self, device, copies, scratch):
        mover = StagedMover(copies, scratch)
        base, slab = device.data_ptr(), copies.host(64)
        places = np.array([8, 0, 100, 4], np.int64)
        assert mover.move([Rows(4, 4, 4, base + places, slab.base)]).done()
        expected = b"".join(bytes(range(p, p + 4)) for p in places)
        assert seen(slab, 16) == expected
        mover.move([Rows(4, 4, 4, slab.base, base + 512 + places)])
        for number, place in enumerate(places.tolist()):
            part = expected[4 * number : 4 * number + 4]
            assert bytes(device.data[512 + place : 516 + place]) == part
        assert bytes(device.data[524:528]) == bytes(range(12, 16))

    def test_neighbours_are_one_copy(self, device, copies, monkeypatch):
        made = []
        real = copies.copy
        monkeypatch.setattr(copies, "copy", lambda *words: made.append(words[2]) or real(*words))
        mover, slab = StagedMover(copies, 4096), copies.host(64)
        places = device.data_ptr() + np.array([12, 0, 4, 8, 64], np.int64)
        mover.move([Rows(4, 4, 5, places, slab.base)])
        assert made == [16, 4]

    def test_no_rows_are_no_work(self, copies):
        none = np.array([], np.int64)
        assert StagedMover(copies, 64).move([Rows(4, 4, 0, none, none)]).done()


class Inner:
    """A transport that lands bytes when it is polled the second time."""

    def __init__(self):
        self.posted, self.sent, self.closed, self.polls = [], {}, False, 0
        self.fail = None

    def post(self, write, peer, source, destination, memory, payload):
        self.posted.append((source.tolist(), destination.tolist(), payload))
        self.sent[write] = 2

    def fetch(self, read, peer, source, destination, memory):
        assert read not in self.sent, "a number twice"
        self.sent[read] = 2

    def poll(self, write):
        if self.fail:
            raise self.fail
        self.sent[write] -= 1
        return "pending" if self.sent[write] else "done"

    def close(self):
        self.closed = True


def rows(*pieces):
    return np.array([(address, length, 3) for address, length in pieces], np.uint64)


class TestTransport:
    @pytest.fixture
    def inner(self):
        return Inner()

    @pytest.fixture
    def slots(self, copies):
        return Slots.make(copies, 1, 32)

    @pytest.fixture
    def transport(self, inner, copies, slots):
        return StagedTransport(inner, copies, slots)

    def drive(self, transport, *writes):
        left = set(writes)
        for _ in range(100):
            left -= {write for write in left if transport.poll(write) == "done"}
            if not left:
                return
        raise AssertionError(left)

    def test_source_ranges_are_sent_from_a_slot(self, transport, inner, slots, device):
        base = device.data_ptr()
        source, destination = rows((base + 4, 8), (base + 64, 8)), rows((1, 8), (100, 8))
        transport.post(WriteId(7), "peer", source, destination, MEMORY, b"done")
        ((ours, theirs, payload),) = inner.posted
        assert ours == [[slots.region.base, 8, 0], [slots.region.base + 8, 8, 0]]
        assert theirs == destination.tolist() and payload == b"done"
        assert slots.free == []
        self.drive(transport, WriteId(7))
        assert slots.free == [slots.region.base]

    def test_more_than_a_slot_goes_in_parts_and_is_told_with_the_last(
        self, transport, inner, device
    ):
        base = device.data_ptr()
        source, destination = rows((base, 40), (base + 100, 30)), rows((1000, 40), (5000, 30))
        transport.post(WriteId(7), "peer", source, destination, MEMORY, b"done")
        assert len(inner.posted) == 1
        self.drive(transport, WriteId(7))
        lengths = [[row[1] for row in ours] for ours, _, _ in inner.posted]
        places = [[row[0] for row in theirs] for _, theirs, _ in inner.posted]
        assert lengths == [[32], [8, 24], [6]]
        assert places == [[1000], [1032, 5000], [5024]]
        assert [payload for _, _, payload in inner.posted] == [b"", b"", b"done"]

    def test_a_write_waits_for_a_slot(self, transport, inner, device):
        base = device.data_ptr()
        for number in (1, 2):
            transport.post(
                WriteId(number), "p", rows((base, 8)), rows((number, 8)), MEMORY, b"%d" % number
            )
        assert [payload for _, _, payload in inner.posted] == [b"1"]
        self.drive(transport, WriteId(1), WriteId(2))
        assert [payload for _, _, payload in inner.posted] == [b"1", b"2"]

    def test_what_is_packed_already_is_sent_from_where_it_is(self, transport, inner, copies, slots):
        slab = copies.host(64)
        transport.post(WriteId(1), "p", rows((slab.base, 16)), rows((9, 16)), MEMORY, b"")
        assert inner.posted[0][0] == [[slab.base, 16, 3]]
        assert len(slots.free) == 1
        self.drive(transport, WriteId(1))
        assert len(slots.free) == 1

    def test_reads_go_by_beside_writes_in_parts(self, transport, inner, copies, device):
        slab, base = copies.host(64), device.data_ptr()
        transport.post(WriteId(7), "p", rows((base, 40)), rows((9, 40)), MEMORY, b"")
        transport.fetch(WriteId(2), "p", rows((5, 8)), rows((slab.base, 8)), MEMORY)
        self.drive(transport, WriteId(2), WriteId(7))
        with pytest.raises(ProtocolError, match="not in flight"):
            transport.poll(WriteId(2))

    def test_bytes_that_cannot_be_copied_leave_nothing_in_flight(self, transport, inner, slots):
        with pytest.raises(PlanError, match="no part of a KV cache"):
            transport.post(WriteId(1), "p", rows((64, 8)), rows((9, 8)), MEMORY, b"")
        assert inner.posted == [] and len(slots.free) == 1
        with pytest.raises(ProtocolError, match="not in flight"):
            transport.poll(WriteId(1))

    def test_a_slot_of_a_lost_write_is_used_again_once_the_agent_is_gone(
        self, transport, inner, slots, device
    ):
        source = rows((device.data_ptr(), 8))
        transport.post(WriteId(1), "p", source, rows((9, 8)), MEMORY, b"")
        inner.fail = TransportError("gone")
        with pytest.raises(TransportError):
            transport.poll(WriteId(1))
        assert slots.free == []
        transport.close()
        assert inner.closed and len(slots.free) == 1


class Device(CpuAccelerator):
    """Describes itself as Neuron does."""

    name = "neuron"
    can_reorder = False
    hides_end = True

    def nixl_backends(self, wanted=()):
        raise ConfigError("shows no EFA device")


class TestAccelerator:
    @pytest.fixture
    def staged(self, device):
        return HostStaged(Device(), host_bytes, lambda tensor: device)

    @pytest.fixture
    def tensor(self, device):
        return FakeTensor("cpu", base=device.data_ptr(), size=1024)

    def test_a_device_that_registers_its_memory_is_refused(self):
        with pytest.raises(ConfigError, match="cpu's can: leave it off"):
            HostStaged(CpuAccelerator(), host_bytes, lambda tensor: tensor)

    def test_pages_are_described_as_host_memory_and_the_rest_as_the_devices(self, staged, tensor):
        assert staged.region(tensor) == (tensor.base, 1024)
        assert (staged.memory_type(tensor), staged.device_id(tensor)) == ("DRAM", 0)
        assert (staged.name, staged.hides_end, staged.can_reorder) == ("neuron", True, True)
        tensor.kind = "meta"
        with pytest.raises(ConfigError, match="'meta'"):
            staged.memory_type(tensor)

    def test_a_cache_that_is_a_part_of_its_allocation_is_refused(self, staged, tensor):
        tensor.size = 4096
        with pytest.raises(ConfigError, match="1024 bytes of 4096"):
            staged.region(tensor)

    def test_only_host_memory_is_registered_and_it_is_said_loudly(self, staged, tensor, caplog):
        staged.region(tensor)
        slab = staged.slab(64)
        opened = []
        with caplog.at_level(logging.WARNING):
            factory = staged.transports(lambda *words: opened.append(words) or Inner(), 2, 32)
        assert "pages pass through" in caplog.text
        pages = Region(tensor.base, 1024, "DRAM", 0)
        factory("name", [pages, Region(slab.base, 64, "DRAM", 0)])
        ((name, regions),) = opened
        assert name == "name"
        assert [region.length for region in regions] == [64, 64]
        assert all(staged.copies.on_host(region.base) for region in regions)

    def test_a_backend_for_host_memory_is_chosen(self, staged, monkeypatch):
        from neuron_push import efa

        monkeypatch.setattr(efa, "devices", lambda root: [])
        assert staged.nixl_backends() == ("UCX",)
        assert staged.nixl_backends(("LIBFABRIC",)) == ("LIBFABRIC",)
        monkeypatch.setattr(efa, "devices", lambda root: ["rdmap0s0"])
        assert staged.nixl_backends() == ("LIBFABRIC",)
        assert staged.nixl_parameters("UCX") == {}

    def test_it_moves_rows_although_the_device_does_not(self, staged, tensor, device):
        staged.region(tensor)
        staged.transports(lambda *words: SimpleNamespace(), 1, 64)
        slab = staged.slab(16)
        place = np.array([tensor.base + 20], np.int64)
        staged.mover().move([Rows(4, 4, 1, place, slab.base)])
        assert seen(slab, 4) == bytes([20, 21, 22, 23])
