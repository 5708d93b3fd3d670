"""The doctor on the machine that the tests run on, with each trap made for real.

What needs a device or a kernel cannot be made here and stays with the fakes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

from neuron_push.doctor import backends, child, network, software
from neuron_push.doctor.machine import UNLIMITED, Machine
from neuron_push.nixl import NixlFactory
from neuron_push.protocol import Address
from neuron_push.tamper import Tampering
from tests.doctor.kit import found

compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def distribution(folder, name, version, entry_points=""):
    """Installed metadata of a package without code."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


class TestInstallations:
    @pytest.fixture
    def site(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path

    def test_a_second_flavour_of_nixl(self, site):
        if not Machine().version("nixl-cu12"):
            pytest.skip("needs nixl-cu12")
        assert found(software.duplicates(Machine()))["nixl.flavours"].level == "ok"
        distribution(site, "nixl-cu13", "1.5.1")
        assert found(software.duplicates(Machine()))["nixl.flavours"].level == "error"

    def test_placeholders(self, site):
        for name, version in [
            ("torch-neuronx", "1.0"),
            ("neuronx-distributed", "0.1"),
            ("vllm-neuron", "0.1.0"),
        ]:
            distribution(site, name, version)
        seen = found(software.placeholders(Machine()))
        assert [each.level for each in seen.values()] == ["error"] * 3

    def test_a_version_that_is_too_old(self, site):
        distribution(site, "vllm", "0.24.0")
        assert found(software.tested(Machine()))["version.vllm"].level == "error"

    def test_a_left_over_installation(self, site):
        distribution(
            site, "neuron-push-old", "0.0.1",
            "[vllm.general_plugins]\nneuron_push = neuron_push.vllm:register\n",
        )  # fmt: skip
        listed = list(software.plugin(Machine(environ={})))
        assert "neuron-push-old" in listed[0].seen

    def test_a_filter_that_leaves_the_plugin_out(self):
        machine = Machine(environ={"VLLM_PLUGINS": "nothing_at_all"})
        assert [f.level for f in software.plugin(machine)] == ["error", "warning"]


class TestNetwork:
    def test_a_port_that_somebody_has(self):
        with socket.socket() as stranger:
            stranger.bind(("127.0.0.1", 0))
            stranger.listen()
            address = Address("127.0.0.1", stranger.getsockname()[1])
            assert Machine().binds("127.0.0.1", address.port) == errno.EADDRINUSE
            asked = []

            def nobody(address, message, timeout):
                asked.append(address)
                return message

            seen = found(network.ports(Machine(), address, 1, nobody))
        assert seen["network.port"].level == "error"
        assert asked == [address]

    @pytest.mark.parametrize(
        ("host", "level"),
        [
            ("localhost", "warning"),
            ("0.0.0.0", "error"),
            ("192.0.2.1", "error"),
            ("no-such-host.invalid", "error"),
        ],
    )
    def test_hosts_that_peers_cannot_use(self, host, level):
        assert found(network.host(Machine(), Address(host, 5600)))["network.host"].level == level

    def test_a_closed_port_is_not_reached(self):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = listener.getsockname()[1]
            assert Machine().reaches("127.0.0.1", port) == ""
        assert "refused" in Machine().reaches("127.0.0.1", port)


class TestMachine:
    def test_it_reads_this_one(self):
        machine = Machine()
        assert machine.text("/proc/version").startswith("Linux")
        assert machine.text("/no/such/file") == ""
        assert machine.exists("/proc") and not machine.exists("/no/such")
        assert machine.names("/proc/self/stat") == ["stat"]
        assert machine.kernel() in machine.text("/proc/version")
        assert machine.memlock() == UNLIMITED or machine.memlock() >= 0
        assert machine.shared_memory() >= 0

    def test_commands_may_be_missing_fail_or_hang(self):
        machine = Machine()
        assert machine.run(["no-such-command-here"]) is None
        assert machine.run([sys.executable, "-c", "raise SystemExit(3)"]).status == 3
        slow = machine.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)
        assert slow.status is None

    def test_a_library_is_found_or_the_loader_says_why(self):
        assert Machine().loads("libc.so.6") == ""
        assert Machine().loads("libc.so.6", "malloc") == ""
        assert "has no nrt_init" in Machine().loads("libc.so.6", "nrt_init")
        assert "cannot open shared object" in Machine().loads("libnrt-not-here.so.1")


@pytest.mark.real_nixl
class TestNixl:
    @pytest.fixture(autouse=True)
    def nixl(self):
        pytest.importorskip("nixl_cu12")

    def test_a_write_goes_round(self):
        seen = found(backends.one(Machine(), "UCX"))
        assert seen["nixl.UCX"].level == "ok"
        assert "checksum equal" in seen["nixl.UCX.loopback"].seen

    def test_a_byte_that_was_changed_on_the_way_is_noticed(self, monkeypatch):
        monkeypatch.setattr(child, "NixlFactory", lambda names: Tampered(NixlFactory(names)))
        answer = child.backend("UCX", 1 << 20)
        assert answer["equal"] is False

    def test_a_backend_that_is_not_there(self):
        finding = found(backends.one(Machine(), "NOT_A_BACKEND"))["nixl.NOT_A_BACKEND"]
        assert "NOT_A_BACKEND" in finding.seen

    @compiler
    @pytest.mark.slow
    def test_each_library_that_libfabric_lacks_is_named_by_the_loader(self, tmp_path):
        """The wheel's plugin, over libraries without code that appear one after the other."""
        pytest.importorskip("nixl_cu12")
        if not Machine().version("nixl-cu12").startswith("1.5"):
            pytest.skip("nixl 1.5 is the one that needs FABRIC_1.10")
        machine = Machine(environ={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
        named = []
        while "FABRIC_1.10" not in named and len(named) < 8:
            finding = found(backends.one(machine, "LIBFABRIC"))["nixl.LIBFABRIC"]
            assert "NIXL_LOG_LEVEL" not in finding.remedy, "the words lead to no remedy"
            name = re.search(r"FABRIC_1\.10|lib\w+\.so\.\d+(?=: cannot open)", finding.seen)[0]
            named.append(name)
            if name != "FABRIC_1.10":
                stub(tmp_path, name, FABRIC_OF_2_6 if "fabric" in name else ())
        # The order is the loader's; a machine may have some of them.
        assert named[-1] == "FABRIC_1.10"
        assert len(set(named)) == len(named)
        print("the loader missed", named)


class Tampered:
    """The test fault that flips a byte of every WRITE, with the one more question of the child."""

    def __init__(self, factory):
        self._factory = Tampering(factory)

    def __call__(self, name, regions):
        opened = self._factory(name, regions)
        if not hasattr(opened, "offered"):
            opened.offered = lambda: ["DRAM"]
        return opened


# Symbol versions that libfabric 2.6 exports (its libfabric.map.in).
FABRIC_OF_2_6 = tuple(f"FABRIC_1.{minor}" for minor in range(10))


def stub(folder, name, versions=()):
    """A shared library of that name without code, with these symbol versions."""
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, "-x", "c", "-"]
    if versions:
        script = folder / f"{name}.map"
        script.write_text("".join(f"{version} {{ }};\n" for version in versions))
        command.insert(1, f"-Wl,--version-script={script}")
    subprocess.run(command, input="int nothing;\n", text=True, check=True)


def test_the_whole_report_is_json(capsys):
    """Without the two checks that load vLLM and NIXL, which have tests of their own."""
    from neuron_push.doctor import command

    skipped = {software.platform, backends.check}
    checks = [check for check in command.CHECKS if check not in skipped]
    findings = [finding for check in checks for finding in check(Machine())]
    report = json.loads(command.report(Machine(), findings))
    assert len(report["findings"]) == len(findings) > 8
