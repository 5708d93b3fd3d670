from __future__ import annotations

import pytest

from neuron_push.doctor import fabric
from neuron_push.doctor.machine import Ran
from tests.devices import machine as files
from tests.doctor.kit import FakeMachine, fi_info, found, levels


def p5en(tmp_path, count=16, nodes=16, **parts):
    files.p5en(tmp_path, adapters=count)
    for number in range(nodes):
        files.put(tmp_path / f"dev/infiniband/uverbs{number}")
    parts.setdefault("commands", {"fi_info -p": fi_info(count)})
    return FakeMachine(tmp_path, parts.pop("environ", {}), **parts)


class TestEfa:
    def test_all_devices_reached_is_fine(self, tmp_path):
        here = p5en(tmp_path)
        assert levels(fabric.devices(here)) == {"efa.devices": "ok", "efa.fi_info": "ok"}

    def test_a_machine_that_should_have_some_is_an_error(self, tmp_path):
        finding = found(fabric.devices(p5en(tmp_path, 0, 0)))["efa.devices"]
        assert finding.level == "error"
        assert "p5en.48xlarge without any EFA" in finding.seen

    @pytest.mark.parametrize("kind", ["", "g6.xlarge", "trn2.3xlarge"])
    def test_another_machine_needs_none(self, tmp_path, kind):
        if kind:
            files.instance(tmp_path, kind)
        assert levels(fabric.devices(FakeMachine(tmp_path, {}))) == {"efa.devices": "note"}

    def test_nodes_that_a_container_lacks_are_counted(self, tmp_path):
        here = p5en(tmp_path, 16, 4)
        finding = found(fabric.devices(here))["efa.nodes"]
        assert finding.level == "warning"
        assert "4 /dev/infiniband/uverbs* for 16" in finding.seen

    def test_libfabric_that_sees_fewer_is_an_error(self, tmp_path):
        here = p5en(tmp_path, commands={"fi_info -p": fi_info(15)})
        finding = found(fabric.devices(here))["efa.fi_info"]
        assert finding.level == "error"
        assert "15 of 16" in finding.seen

    def test_libfabric_without_the_provider_repeats_its_words(self, tmp_path):
        here = p5en(tmp_path, commands={"fi_info -p": Ran(61, "", "fi_getinfo: -61 (No data)")})
        assert "No data" in found(fabric.devices(here))["efa.fi_info"].seen

    def test_aws_puts_it_off_the_path(self, tmp_path):
        here = p5en(tmp_path, commands={"/opt/amazon/efa/bin/fi_info -p": fi_info(16)})
        assert levels(fabric.devices(here))["efa.fi_info"] == "ok"

    def test_without_fi_info_it_says_so(self, tmp_path):
        assert levels(fabric.devices(p5en(tmp_path, commands={})))["efa.fi_info"] == "warning"

    def test_each_device_counts_once(self):
        assert fabric.domains(fi_info(3).out) == {"rdmap0s0", "rdmap1s0", "rdmap2s0"}


class TestMemory:
    @pytest.mark.parametrize(
        ("efa", "pages", "environ", "level"),
        [
            (False, 0, {}, "note"),
            (True, 2560, {}, "ok"),
            (True, 0, {}, "warning"),
            (True, 0, {"FI_EFA_USE_HUGE_PAGE": "0"}, "note"),
        ],
    )
    def test_huge_pages_matter_to_efa(self, tmp_path, efa, pages, environ, level):
        files.put(tmp_path / "proc/meminfo", f"MemTotal: 1 kB\nHugePages_Total:    {pages}\n")
        if efa:
            files.efa(tmp_path)
        assert levels(fabric.huge_pages(FakeMachine(tmp_path, environ))) == {
            "memory.huge_pages": level
        }

    @pytest.mark.parametrize(
        ("rdma", "limit", "level"),
        [(True, -1, "ok"), (False, 8 << 20, "note"), (True, 8 << 20, "error")],
    )
    def test_locked_memory_matters_to_rdma(self, tmp_path, rdma, limit, level):
        if rdma:
            files.efa(tmp_path, vendor="0x15b3")
        here = FakeMachine(tmp_path, {}, lockable=limit)
        assert levels(fabric.locked_memory(here)) == {"memory.memlock": level}

    @pytest.mark.parametrize(("size", "level"), [(8 << 30, "ok"), (64 << 20, "warning")])
    def test_a_containers_shared_memory_is_small(self, tmp_path, size, level):
        here = FakeMachine(tmp_path, {}, shm=size)
        assert levels(fabric.shared_memory(here)) == {"memory.shm": level}
