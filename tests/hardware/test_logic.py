"""The hardware checks' own logic on host memory, and the suite's report."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.devices import machine
from tests.hardware import __main__ as command
from tests.hardware import fabric, gpu, neuron, suite
from tests.hardware.suite import Check, Skip

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]


class TestOnHostMemory:
    def test_geometry(self):
        assert gpu.geometry_of_pages("cpu") == {"orders": 2}

    def test_pages_of_neuron(self):
        assert int(neuron.pages("cpu")["address"], 16) > 0

    def test_packing(self):
        assert gpu.pack_and_unpack("cpu") == {"units": 6}

    def test_speed_is_measured_against_a_copy(self):
        found = gpu.speed("cpu", pages=16)
        assert found["bytes"] == 16 * 8 * 16 * 256
        assert found["ratio"] == pytest.approx(
            found["transform_gb_s"] / found["copy_gb_s"], rel=1e-6
        )

    @pytest.mark.real_nixl
    @pytest.mark.slow
    def test_writes_between_two_processes(self, monkeypatch):
        pytest.importorskip("nixl_cu12")
        monkeypatch.setenv("UCX_TLS", "tcp,self,sm")
        assert fabric.small_writes("cpu", "UCX", rounds=1)["writes"] == 15
        assert fabric.large_write("cpu", "UCX", 4 << 20, 1 << 20)["bytes"] == 4 << 20
        assert fabric.write_after_fence("cpu", "UCX", lambda: None, rounds=2) == {"rounds": 2}

    @pytest.mark.real_nixl
    @pytest.mark.slow
    def test_reads_then_writes_from_a_process_of_its_own(self):
        pytest.importorskip("nixl_cu12")
        found = neuron.apart("cpu", "UCX", 16 << 20, {"UCX_TLS": "tcp,self,sm"})
        assert found["bytes"] == 16 << 20
        assert found["wrong_blocks"] == []

    def test_a_process_that_fails_says_why(self):
        with pytest.raises(AssertionError, match="no_such_kind"):
            neuron.apart("no_such_kind", "UCX", 1 << 20, {})


class TestWithoutADevice:
    def test_checks_of_a_gpu_are_skipped_in_words(self):
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        gpus = [each for each in suite.CHECKS if each.needs == "cuda"]
        report = suite.run(gpus)
        assert report["counts"]["skipped"] == len(gpus) == 7
        assert not report["passed"]
        assert report["checks"][0]["detail"] == "PyTorch sees no GPU"

    def test_what_a_machine_has_is_seen(self, tmp_path):
        assert suite.present(tmp_path) == set()
        machine.trn2(tmp_path)
        assert suite.present(tmp_path) == {"neuron", "efa"}
        machine.p5en(tmp_path)
        assert suite.present(tmp_path) == {"neuron", "cuda", "efa"}


class TestReport:
    def report(self, *outcomes, **more):
        def run(outcome):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        checks = [
            Check(f"c{n}", "cuda", "what", lambda o=o: run(o)) for n, o in enumerate(outcomes)
        ]
        return suite.run(checks, **more)

    def test_all_passed(self):
        report = self.report({"rate": 1}, None)
        assert report["passed"]
        assert report["checks"][0]["detail"] == {"rate": 1}

    def test_one_that_fails_stops_none(self):
        report = self.report(AssertionError("old bytes"), {})
        assert not report["passed"]
        assert [each["outcome"] for each in report["checks"]] == ["failed", "passed"]
        assert report["checks"][0]["detail"]["error"] == "AssertionError: old bytes"

    def test_nothing_checked_is_no_success(self):
        assert not self.report()["passed"]
        assert not self.report(Skip("no GPU"))["passed"]
        assert self.report(Skip("no GPU"), {})["passed"]

    def test_time_is_limited(self):
        clock = iter([0, 0, 5, 11, 12])
        report = self.report({}, {}, limit=10, clock=lambda: next(clock))
        assert [each["outcome"] for each in report["checks"]] == ["passed", "not run"]
        assert not report["passed"]

    def test_the_command_writes_json(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(suite, "present", set)
        assert command.main(["--json", str(tmp_path / "report.json")]) == 1
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["checks"] == []
        assert "nothing to check" in capsys.readouterr().err

    def test_a_gpu_machine_needs_neither_nixl_nor_an_engine_nor_an_installation(self):
        code = (
            "import sys\n"
            "for name in ('nixl', 'nixl_cu12', 'nixl_cu13', 'vllm', 'zmq', 'aiohttp', 'pytest'):\n"
            "    sys.modules[name] = None\n"
            "import importlib.metadata\n"
            "importlib.metadata.entry_points = lambda **_: ()\n"
            "from tests.hardware import __main__ as command, gpu, memory\n"
            "command.load()\n"
            "assert memory.accelerator_of('cuda').name == 'cuda'\n"
            "print(gpu.geometry_of_pages('cpu'), gpu.pack_and_unpack('cpu'))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "{'orders': 2} {'units': 6}"

    def test_every_test_of_the_notes_is_there(self):
        names = {each.name.split("_")[0] for each in suite.CHECKS if each.needs == "neuron"}
        assert names == {"t1", "t2", "t3", "t4", "t5", "t6"}


class TestEngines:
    @pytest.fixture
    def engine(self):
        """An OpenAI-like server that answers every prompt with `words`."""
        servers = []

        def start(words):
            class Handler(http.server.BaseHTTPRequestHandler):
                def do_GET(self):
                    self.answer({"data": [{"id": "tiny"}]})

                def do_POST(self):
                    self.rfile.read(int(self.headers["Content-Length"]))
                    self.answer({"choices": [{"text": words}]})

                def answer(self, body):
                    raw = json.dumps(body).encode()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(raw)))
                    self.end_headers()
                    self.wfile.write(raw)

                def log_message(self, *arguments):
                    pass

            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            servers.append(server)
            return f"http://127.0.0.1:{server.server_port}/"

        yield start
        for server in servers:
            server.shutdown()
            server.server_close()

    def test_equal_answers_pass_and_others_do_not(self, engine):
        urls = {"NEURON_PUSH_ALONE_URL": engine("Paris"), "P": engine("Paris")}
        assert neuron.same_answers("P", urls) == {"prompts": 3}
        with pytest.raises(AssertionError, match="'Rome' instead of 'Paris'"):
            neuron.same_answers("P", {**urls, "P": engine("Rome")})

    def test_without_engines_it_is_skipped(self):
        with pytest.raises(Skip, match="NEURON_PUSH_PAIR_URL"):
            neuron.same_answers("NEURON_PUSH_PAIR_URL", {})
