"""Child processes: small Python servers stand in for engines."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from neuron_push import engines, processes
from neuron_push.engines import Engine, EngineOptions
from neuron_push.ports import free_ports
from neuron_push.processes import Server, ServerFailed

SERVE = """
import http.server, subprocess, sys
port = int(sys.argv[1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *words): pass
{before}
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
CHILD = "print(subprocess.Popen(['sleep', '600']).pid, flush=True)"


def server(tmp_path, before="", name="s"):
    (port,) = free_ports(1)
    command = [sys.executable, "-c", SERVE.format(before=before), str(port)]
    return Server(name, command, port, tmp_path / f"{name}.log")


def gone(pid):
    """Whether no process of that id runs; one that only awaits reaping does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_servers_start_side_by_side_and_are_gone_afterwards(tmp_path):
    both = [server(tmp_path, name="a"), server(tmp_path, name="b")]
    said = []
    with processes.running(both, 30, said.append):
        pids = [each.pid for each in both]
        assert all(each.healthy() for each in both)
    assert all(gone(pid) for pid in pids)
    assert sorted(line.split()[0] for line in said) == ["a", "b"]


def test_a_server_that_ends_early_is_noticed_with_its_log(tmp_path):
    failing = server(tmp_path, before="sys.exit('no memory')")
    other = server(tmp_path, name="other")
    expected = pytest.raises(ServerFailed, match=r"s ended with status 1(.|\n)*no memory")
    with expected, processes.running([other, failing], 30):
        pass
    assert not other.running


def test_a_server_that_never_serves_is_given_up(tmp_path):
    silent = server(tmp_path, before="import time; time.sleep(600)")
    expected = pytest.raises(ServerFailed, match="not ready after 0 s")
    with expected, processes.running([silent], 0.2):
        pass


def test_an_error_inside_the_block_stops_everything(tmp_path):
    one = server(tmp_path)
    with pytest.raises(KeyError), processes.running([one], 30):
        pid = one.pid
        raise KeyError
    assert gone(pid)


def test_one_that_ignores_a_polite_end_is_killed_with_its_children(tmp_path):
    one = server(tmp_path, before=DEAF + "\n" + CHILD)
    with one:
        one.wait_ready(30)
        child = int(one.log.read_text())
        assert not gone(child)
        one.stop(timeout=0.1)
    assert gone(child)


def test_a_paused_server_goes_on_and_can_be_stopped_while_paused(tmp_path):
    one = server(tmp_path)
    with one:
        one.wait_ready(30)
        one.pause()
        one.resume()
        assert one.healthy()
        one.pause()
    assert not one.running


def test_a_killed_server_can_be_started_again_on_its_port(tmp_path):
    one = server(tmp_path)
    with one:
        one.wait_ready(30)
        first = one.pid
        one.kill()
        one.start()
        one.wait_ready(30)
        assert one.pid != first


def test_an_interrupt_while_stopping_waits_until_everything_is_stopped(tmp_path):
    one = server(tmp_path, before=DEAF)
    one.start()
    one.wait_ready(30)
    stop = one.stop

    def interrupted(*words):
        os.kill(os.getpid(), signal.SIGINT)
        stop(0.1)

    one.stop = interrupted
    # Whoever runs this in the background of a shell has interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            processes.stop([one])
        assert not one.running
    finally:
        signal.signal(signal.SIGINT, before)
        stop(0.1)


def test_an_engines_command_and_environment(tmp_path):
    transfer = engines.connector("kv_producer", lease=3.0)
    options = EngineOptions("P", tmp_path, transfer, cpus="0", kv_blocks=7, arguments=["--x"])
    engine = Engine(options, tmp_path, side_port=5)
    words = " ".join(engine._command)
    assert "--num-gpu-blocks-override 7" in words and words.endswith("--x")
    assert "--no-enable-prefix-caching" in words and "--host 127.0.0.1" in words
    assert '"lease": 3.0' in words and '"kv_role": "kv_producer"' in words
    assert engine._environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5"
    assert engine._environment["VLLM_CPU_OMP_THREADS_BIND"] == "0"


@pytest.mark.parametrize(
    ("cores", "shares"),
    [
        ({0, 1}, ["0", "1"]),
        ({3}, ["3", "3"]),
        ({0, 2, 4, 6}, ["0,2", "4,6"]),
        (set(range(16)), ["0,1", "2,3"]),
    ],
)
def test_cores_are_shared_out(monkeypatch, cores, shares):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert [engines.cpu_share(index, 2) for index in range(2)] == shares
