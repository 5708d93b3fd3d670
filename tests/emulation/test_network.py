"""Namespaces around a fleet: the commands, their removal, and the real thing where root is."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from neuron_push.emulation import fleet, network
from neuron_push.emulation.network import NetworkSpec, Place, plan
from neuron_push.emulation.relay import Relay, enter
from neuron_push.errors import ConfigError

SHAPED = NetworkSpec(rate_mbit=80, delay_ms=20, loss_percent=0.5)


class Machine:
    """Runs nothing and keeps account of namespaces."""

    def __init__(self, fail_at="", namespaces=()):
        self.ran, self.there, self.fail_at = [], list(namespaces), fail_at

    def __call__(self, command):
        text = " ".join(command)
        self.ran.append(text)
        if self.fail_at and self.fail_at in text:
            raise ConfigError(f"network: {text}: no")
        if text == "ip netns list":
            return "".join(f"{name} (id: 3)\n" for name in self.there)
        if text.startswith("ip netns add"):
            self.there.append(command[-1])
        if text.startswith("ip netns delete"):
            self.there.remove(command[-1])
        return ""


def words(spec, engines=2):
    return [" ".join(command) for command in plan(spec, engines, 42).make]


def test_every_engine_has_an_address_of_its_own_inside():
    made = plan(NetworkSpec(), 2, 42)
    assert made.hub == Place("neuron-push-42-hub", "10.231.0.1")
    assert [place.address for place in made.engines] == ["10.231.0.2", "10.231.0.3"]
    assert made.engines[1].inside(["serve"]) == [
        "ip", "netns", "exec", "neuron-push-42-1", "serve",
    ]  # fmt: skip


def test_nothing_but_namespaces_is_made_on_the_host():
    for line in words(SHAPED):
        assert line.startswith(("ip netns add neuron-push-42-", "ip -n neuron-push-42-",
                                "tc -n neuron-push-42-")), line  # fmt: skip


def test_delay_and_loss_act_once_on_the_way_and_the_rate_at_both_ends():
    shaping = [line for line in words(SHAPED, 1) if line.startswith("tc")]
    assert shaping == [
        "tc -n neuron-push-42-0 qdisc add dev eth0 root handle 1: netem limit 10000 "
        "delay 20000us loss 0.5%",
        "tc -n neuron-push-42-0 qdisc add dev eth0 parent 1:1 handle 2: tbf rate 80000000bit "
        "burst 131072 latency 50ms",
        "tc -n neuron-push-42-hub qdisc add dev port0 root handle 1: tbf rate 80000000bit "
        "burst 131072 latency 50ms",
    ]
    fast = " ".join(words(NetworkSpec(rate_mbit=100_000, delay_ms=10), 1))
    assert "netem limit 166666 " in fast and "burst 125000000 " in fast
    assert not [line for line in words(NetworkSpec()) if line.startswith("tc")]


@pytest.mark.parametrize("subnet", ["8.8.8.0/24", "10.0.0.0/30", "10.0.0.1/24", "here"])
def test_only_private_subnets_with_room(subnet):
    with pytest.raises(ConfigError, match="subnet"):
        plan(NetworkSpec(subnet=subnet), 2, 1)


def test_what_was_made_is_removed_and_nothing_else():
    machine = Machine(namespaces=["blue"])
    with network.up(plan(SHAPED, 2, 42), machine):
        assert len(machine.there) == 4
    assert machine.there == ["blue"]


def test_a_failure_on_the_way_up_leaves_nothing():
    machine = Machine(fail_at="neuron-push-42-1 qdisc", namespaces=["blue"])
    with pytest.raises(ConfigError), network.up(plan(SHAPED, 2, 42), machine):
        pytest.fail("it is not up")
    assert machine.there == ["blue"]


def test_one_that_cannot_be_removed_does_not_keep_the_others(caplog):
    machine = Machine(fail_at="delete neuron-push-42-0")
    with network.up(plan(SHAPED, 2, 42), machine):
        pass
    assert machine.there == ["neuron-push-42-0"] and "left behind" in caplog.text


def test_namespaces_of_fleets_that_were_killed_go_at_the_next_start():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine, theirs = f"neuron-push-{os.getpid()}-hub", f"neuron-push-{ended.pid}-0"
    machine = Machine(namespaces=["blue", mine, theirs])
    network.sweep(machine)
    assert machine.there == ["blue", mine]


def test_what_is_missing_is_said():
    assert "root" in network.missing(lambda tool: tool, user=1000)
    assert "iproute2" in network.missing(lambda tool: None, user=0)
    assert network.missing(lambda tool: tool, user=0) == ""


def test_a_kernel_without_a_queue_is_said(tmp_path, monkeypatch):
    tool = tmp_path / "tc"
    tool.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n")
    tool.chmod(0o755)
    with pytest.raises(ConfigError, match=r"no netem \(module sch_netem\)"):
        network.execute([str(tool), "qdisc", "add", "netem"])


def test_a_fleet_is_asked_at_its_addresses(tmp_path):
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "router: {}\nnetwork: {rate_mbit: 100}\n"
        "engines: [{name: p, role: prefill}, {name: d, role: decode}]\n"
    )
    built = fleet.build(fleet.load(file), tmp_path, print)
    p, d = built.engines
    assert p.entry == f"http://10.231.0.2:{p.port}#side={p.side_port}"
    assert p.url == f"http://127.0.0.1:{p.port}"
    assert d._command[:4] == ["ip", "netns", "exec", f"neuron-push-{os.getpid()}-1"]
    assert d._command[-2:] == ["--host", "10.231.0.3"]
    assert d._environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.231.0.3"
    assert built.router._command[3].endswith("-hub") and p.entry in built.router._command
    file.write_text("engines: []\nnetwork: {subnet: 1.1.1.0/24}\n")
    with pytest.raises(ConfigError, match="private"):
        fleet.load(file)


# ------------------------------------------------------------------ the real thing

needs_root = pytest.mark.skipif(bool(network.missing()), reason=network.missing() or "-")
# Namespaces of this module's own, so that several runs do not meet.
PID = os.getpid()


def inside(place, work):
    """Run `work` in a thread that has entered the namespace; its result."""
    found = []

    def main():
        enter(place.namespace)
        found.append(work())

    thread = threading.Thread(target=main)
    thread.start()
    thread.join(60)
    return found[0]


class Sink:
    """A server inside a namespace that reads to the end and answers with the count."""

    def __init__(self, place):
        self.listening = inside(place, lambda: socket.create_server((place.address, 0)))
        self.port = self.listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                client, _ = self.listening.accept()
            except OSError:
                return
            with client:
                count = 0
                while data := client.recv(1 << 16):
                    count += len(data)
                client.sendall(b"%d" % count)


def send(address, nbytes):
    """Seconds until the other side says that it has everything."""
    with socket.create_connection(address, 10) as peer:
        begun = time.monotonic()
        peer.sendall(bytes(nbytes))
        peer.shutdown(socket.SHUT_WR)
        assert int(peer.recv(64)) == nbytes
        return time.monotonic() - begun


@needs_root
def test_the_rate_limits_what_engines_send_each_other():
    made = plan(NetworkSpec(rate_mbit=80), 2, PID)
    with network.up(made):
        p, d = made.engines
        sink = Sink(d)
        took = inside(p, lambda: send((d.address, sink.port), 5_000_000))
        sink.listening.close()
    # 10 MB/s, less two buckets that begin full; a busy machine makes it longer, never shorter.
    assert 0.45 <= took < 5, took
    assert not [name for name in network._namespaces(network.execute) if f"-{PID}-" in name]


@needs_root
def test_the_host_reaches_a_server_inside_and_only_by_the_relay():
    made = plan(NetworkSpec(), 1, PID)
    with network.up(made):
        place = made.engines[0]
        sink = Sink(place)
        with Relay(0, place, sink.port) as relay:
            assert send(("127.0.0.1", relay.port), 300_000) < 5
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", relay.port), 1)
        sink.listening.close()


@needs_root
def test_a_dead_server_inside_looks_like_one_that_hangs_up():
    made = plan(NetworkSpec(), 1, PID)
    with (
        network.up(made),
        Relay(0, made.engines[0], 9) as relay,
        socket.create_connection(("127.0.0.1", relay.port), 5) as peer,
    ):
        assert peer.recv(1) == b""


def _lacks_netem():
    if network.missing():
        return network.missing()
    try:
        with network.up(plan(NetworkSpec(delay_ms=1), 1, PID)):
            return ""
    except ConfigError as error:
        return str(error)


@needs_root
@pytest.mark.parametrize("asked", [{"delay_ms": 1}, {"loss_percent": 0.1, "rate_mbit": 80}])
def test_a_kernel_that_cannot_delay_or_lose_refuses_and_leaves_nothing(asked):
    """Never a fleet over a network other than the one that was asked for."""
    if not _lacks_netem():
        pytest.skip("this kernel has netem")
    with (
        pytest.raises(ConfigError, match=r"this kernel has no netem \(module sch_netem\)"),
        network.up(plan(NetworkSpec(**asked), 2, PID)),
    ):
        pytest.fail("there is a network")
    assert not [name for name in network._namespaces(network.execute) if f"-{PID}-" in name]


@needs_root
def test_the_delay_is_there():
    if lacking := _lacks_netem():
        pytest.skip(lacking)
    made = plan(NetworkSpec(delay_ms=40, rate_mbit=80), 2, PID)
    with network.up(made):
        p, d = made.engines
        sink = Sink(d)
        took = inside(p, lambda: send((d.address, sink.port), 1))
        sink.listening.close()
    assert 0.08 <= took < 1, took
