"""The launch scripts, run with a stand-in for vLLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_push.ports import free_ports

SCRIPTS = Path(__file__).resolve().parents[2] / "deploy/scripts"
VLLM = """#!{python}
import http.server, json, os, sys
words = sys.argv
port = int(words[words.index("--port") + 1])
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps([words[1:], dict(os.environ)]) + "\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
BENCH = """#!{python}
import json, sys
words = sys.argv
out = words[words.index("--result-dir") + 1] + "/" + words[words.index("--result-filename") + 1]
rate = float(words[words.index("--request-rate") + 1])
figures = {{"median_ttft_ms": 50 * rate, "median_tpot_ms": 6}}
json.dump({{"completed": 8, "failed": 0, **figures}}, open(out, "w"))
"""
needs_curl = pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")


@pytest.fixture
def node(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("vllm", VLLM), ("fake-bench", BENCH)):
        (programs / name).write_text(text.format(python=sys.executable))
        (programs / name).chmod(0o755)
    one, two = free_ports(2)
    environment = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "RUN_DIR": str(tmp_path / "run"),
        "SEEN": str(tmp_path / "seen"), "HOST_IP": "127.0.0.1", "PREFILL_PORT": str(one),
        "DECODE_PORT": str(two), "START_SECONDS": "30", "RESULTS": str(tmp_path / "results"),
    }  # fmt: skip

    def run(script, **more):
        words = [str(SCRIPTS / script)] if isinstance(script, str) else script
        return subprocess.run(
            words, env=environment | more, capture_output=True, text=True, timeout=60, check=False
        )

    run.folder = tmp_path
    yield run
    run("cleanup.sh")


def seen(node):
    return [json.loads(line) for line in (node.folder / "seen").read_text().splitlines()]


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", str(script)], check=True, cwd=SCRIPTS)


@needs_curl
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_both_legs_start_in_either_mode_and_cleanup_ends_them(node, mode):
    from neuron_push.config import Config

    for leg, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        done = node(f"serve-{leg}.sh", MODE=mode)
        assert done.returncode == 0, done.stderr
        words, environment = seen(node)[-1]
        transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
        if mode == "push":
            assert transfer["kv_role"] == role
            Config.parse(transfer["kv_connector_extra_config"], {})
        else:
            assert transfer["kv_connector"] == "NixlConnector"
        assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    again = node("serve-prefill.sh", MODE=mode)
    assert again.returncode == 1 and "running already" in again.stderr
    pids = [int(path.read_text()) for path in (node.folder / "run").glob("*.pid")]
    assert len(pids) == 2
    done = node("cleanup.sh")
    assert sorted(done.stdout.split()) == ["decode", "ended", "ended", "prefill"]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIG_DFL)


@needs_curl
@pytest.mark.parametrize(
    ("device", "mode", "expected"),
    [("neuron", "push", True), ("neuron", "pull", False), ("cuda", "push", False)],
)
def test_a_trn2_engine_knows_a_steps_output_before_the_next_begins(node, device, mode, expected):
    for leg in ("prefill", "decode"):
        done = node(f"serve-{leg}.sh", MODE=mode, DEVICE=device)
        assert done.returncode == 0, done.stderr
        words, environment = seen(node)[-1]
        assert ("--no-async-scheduling" in words) is expected
        assert (
            json.loads(words[words.index("--kv-transfer-config") + 1])["kv_buffer_device"] == "cuda"
        )
        assert environment.get("NEURON_RT_MAP_HBM") == ("1" if device == "neuron" else None)


@needs_curl
def test_an_engine_that_ends_is_told_with_the_end_of_its_log(node):
    (node.folder / "bin/vllm").write_text("#!/bin/sh\necho out of memory\nexit 3\n")
    done = node("serve-prefill.sh")
    assert done.returncode == 1 and "out of memory" in done.stderr


def test_what_is_missing_or_wrong_is_named(node):
    for more, text in (
        ({"HOST_IP": ""}, "HOST_IP"),
        ({"MODE": "x"}, "MODE"),
        ({"DEVICE": "x"}, "DEVICE"),
    ):
        done = node("serve-prefill.sh", **more)
        assert done.returncode == 2 and text in done.stderr


def test_a_sweep_names_results_as_published_goes_on_and_is_drawn(node):
    sweep = {"INPUTS": "1024 4096", "RATES": "1 2", "ITERATIONS": "2", "BENCH": "fake-bench"}
    for mode in ("push", "pull"):
        assert node("sweep.sh", MODE=mode, **sweep).returncode == 0
    names = {path.name for path in (node.folder / "results").iterdir()}
    assert len(names) == 16 and "push_qps2_in4096_out256_iter2.json" in names
    assert node("sweep.sh", MODE="push", **sweep).stdout.count("is there") == 8
    pytest.importorskip("matplotlib")
    chart = node.folder / "charts.png"
    words = [sys.executable, str(SCRIPTS / "plot.py"), str(node.folder / "results")]
    done = node([*words, "--out", str(chart)])
    assert done.returncode == 0, done.stderr
    assert chart.read_bytes().startswith(b"\x89PNG")
