"""NIXL with device memory, on a pretended machine: what is refused, and what is reported."""

from __future__ import annotations

import logging
import os
import sys

import numpy as np
import pytest

from neuron_push.errors import ConfigError, TransportError
from neuron_push.geometry import Region
from neuron_push.nixl import NixlFactory, binding, logs
from neuron_push.transport import AgentName, WriteId
from tests.devices.nixl import FakeMachine

BASE, LENGTH = 0x10000, 0x8000


@pytest.fixture
def open_on(monkeypatch):
    def opening(machine, *, memory="VRAM", base=BASE, length=LENGTH, backend="LIBFABRIC", **more):
        monkeypatch.setattr(sys.modules[binding.__module__], "binding", machine.module)
        region = Region(base, length, memory, 0)
        return NixlFactory((backend,), **more)(AgentName("engine/0"), [region])

    return opening


def trn2(**changes):
    return FakeMachine(device="neuron", allocations=((BASE, LENGTH),), **changes)


class TestRegistration:
    def test_a_whole_allocation_is_registered(self, open_on, caplog):
        with caplog.at_level(logging.INFO):
            open_on(trn2()).close()
        assert "0000:53:00.0 on rail 0 (rdmap0s0)" in caplog.text

    def test_an_agent_made_before_the_runtime_is_refused(self, open_on):
        with pytest.raises(ConfigError, match="in VRAM, but LIBFABRIC offers only DRAM"):
            open_on(trn2(runtime_started=False))

    def test_a_provider_without_efa_is_refused(self, open_on):
        with pytest.raises(ConfigError, match="offers only DRAM"):
            open_on(trn2(provider="tcp"))

    def test_a_backend_without_device_memory_is_refused(self, open_on):
        with pytest.raises(ConfigError, match="UCX offers only DRAM"):
            open_on(trn2(), backend="UCX")

    def test_falling_back_to_host_memory_is_fatal(self, open_on, capfd):
        machine = trn2(hmem=False)
        with pytest.raises(ConfigError, match="takes the KV cache's device memory for host"):
            open_on(machine)
        # What NIXL said is still to be seen where it is looked for.
        assert "falling back to system memory" in capfd.readouterr().err
        assert machine.agents[0]._registered == []

    @pytest.mark.parametrize("where", [{"base": BASE + 8}, {"base": BASE + 4096, "length": 4096}])
    def test_what_is_no_allocation_is_refused_by_the_driver(self, open_on, where):
        with pytest.raises(TransportError, match="cannot register 1 regions of VRAM"):
            open_on(trn2(), **where)

    def test_a_range_that_is_not_registered_cannot_be_sent(self, open_on):
        transport = open_on(trn2())
        peer = transport.add_peer(b"\0\1p" + b"p")
        rows = np.array([[BASE + LENGTH, 64, 0]], np.uint64)
        with pytest.raises(TransportError, match="no backend has this memory"):
            transport.post(WriteId(1), peer, rows, rows, ("VRAM", "VRAM"), b"")
        transport.close()


class TestOpening:
    def test_the_thread_is_readied_before_the_agent_exists(self, open_on):
        machine, order = trn2(), []
        open_on(machine, enter=lambda: order.append(len(machine.agents))).close()
        assert order == [0]

    def test_what_readies_the_thread_may_refuse(self, open_on):
        def refuse():
            raise ConfigError("not yet")

        machine = trn2()
        with pytest.raises(ConfigError, match="not yet"):
            open_on(machine, enter=refuse)
        assert machine.agents == []

    def test_parameters_reach_their_backend(self, open_on):
        machine = trn2()
        open_on(machine, parameters={"LIBFABRIC": {"striping_threshold": "65536"}}).close()
        assert machine.agents[0].parameters == {"LIBFABRIC": {"striping_threshold": "65536"}}

    def test_a_backend_with_parameters_that_does_not_load_is_named(self, open_on):
        with pytest.raises(ConfigError, match="needs libfabric 2"):
            open_on(trn2(plugins=("UCX",)), parameters={"LIBFABRIC": {"a": "b"}})

    def test_host_memory_needs_no_ear(self, open_on, monkeypatch):
        monkeypatch.setattr(logs, "overheard", None)
        open_on(trn2(), memory="DRAM").close()


class TestLogs:
    def test_lines_are_collected_and_passed_on(self, capfd):
        with logs.overheard() as lines:
            os.write(2, b"one\ntwo\n")
            assert lines == []
        assert lines == ["one", "two"]
        assert capfd.readouterr().err == "one\ntwo\n"

    def test_standard_error_is_given_back_after_an_exception(self, capfd):
        with pytest.raises(ZeroDivisionError), logs.overheard():
            os.write(2, b"before\n")
            raise ZeroDivisionError
        os.write(2, b"after\n")
        assert capfd.readouterr().err == "before\nafter\n"

    def test_rails_are_read_from_the_lines_of_the_publication(self):
        found = logs.rails(
            [
                "D1 Created rail 0 (device=rdmap85s0, provider=efa)",
                "D1 Created rail 1 (device=rdmap86s0, provider=efa)",
                "D1 VRAM memory 0x7f on device PCI 0000:53:00.0 mapped to rail 0 (EFA device=x)",
                "D1 VRAM memory 0x7f on device PCI 0000:53:00.0 mapped to rail 1 (EFA device=y)",
                "D1 VRAM memory 0x8f on device PCI 0000:53:00.0 mapped to rail 1 (EFA device=y)",
                "I1 something else",
            ]
        )
        assert found.devices == {0: "rdmap85s0", 1: "rdmap86s0"}
        assert found.providers == {"efa"}
        assert found.used == {"0000:53:00.0": [0, 1]}
        assert str(found) == "0000:53:00.0 on rail 0 (rdmap85s0), rail 1 (rdmap86s0)"

    def test_older_lines_without_provider_or_device_are_read_too(self):
        found = logs.rails(["Created rail 3 (device=efa_3)", "memory mapped to rail 3"])
        assert str(found) == "device memory on rail 3 (efa_3)"

    def test_silence_names_the_variable(self):
        assert "NIXL_LOG_LEVEL=DEBUG" in str(logs.rails([]))


@pytest.mark.real_nixl
class TestRealNixl:
    """What the fake above claims about creating backends one by one."""

    @pytest.fixture(autouse=True)
    def nixl(self):
        pytest.importorskip("nixl_cu12")

    def test_a_backend_may_be_created_with_parameters(self):
        memory = np.zeros(4096, np.uint8)
        region = Region(memory.ctypes.data, memory.nbytes, "DRAM", 0)
        opened = NixlFactory(("UCX",), parameters={"UCX": {"num_threads": "0"}})
        transport = opened(AgentName("parameters"), [region])
        assert "DRAM" in transport.offered()
        assert transport.metadata()
        transport.close()

    def test_a_backend_that_does_not_exist_is_named_either_way(self):
        for parameters in ({}, {"NONE_SUCH": {"a": "b"}}):
            with pytest.raises(ConfigError, match="NONE_SUCH"):
                NixlFactory(("NONE_SUCH",), parameters=parameters)(AgentName("none"), [])
