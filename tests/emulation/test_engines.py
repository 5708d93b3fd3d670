"""`neuron-push emulate` over real servers: up, asked through the router, stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from neuron_push.demo.report import Samples
from neuron_push.emulation import network, pattern
from neuron_push.ports import free_ports
from tests.emulation import kit

pytest.importorskip("vllm")
pytest.importorskip("nixl_cu12")
psutil = pytest.importorskip("psutil")

FLEET = """
router: {{}}
{more}
engines:
  - name: prefill
    role: prefill
    port: {ports[0]}
    device: trn2
    profile: quick
    fault: "{fault}"
    settings: {settings}
  - name: decode
    role: decode
    port: {ports[1]}
    device: trn2
    block_size: 48
    profile: quick
    settings: {settings}
"""


class Command:
    """The command as a user runs it."""

    def __init__(self, folder, fault="", more="", settings="{}"):
        ports = free_ports(2)
        self.engines = [f"http://127.0.0.1:{port}" for port in ports]
        text = FLEET.format(fault=fault, more=more, settings=settings, ports=ports)
        (folder / "fleet.yaml").write_text(text)
        self.logs = folder / "logs"
        words = [sys.executable, "-m", "neuron_push.cli", "emulate", str(folder / "fleet.yaml")]
        self.process = subprocess.Popen(
            [*words, "--logs", str(self.logs)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip

    def url(self):
        for line in self.process.stdout:
            if found := re.search(r"the fleet is up: .* at (\S+);", line):
                return found[1]
        pytest.fail(f"the fleet did not start: {self.process.wait()}")

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        text, _ = self.process.communicate(timeout=60)
        return self.process.returncode, text


@pytest.fixture
def start(tmp_path):
    running = []

    def begin(**options):
        running.append(Command(tmp_path, **options))
        return running[-1]

    yield begin
    for command in running:
        if command.process.poll() is None:
            command.stop()


def post(url, path, **body):
    request = urllib.request.Request(
        f"{url}/{path}", json.dumps({"model": "emulated", **body}).encode(),
        {"content-type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]


def ask(url, prompt, count):
    options = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return post(url, "completions", prompt=prompt, max_tokens=count, **options)["token_ids"]


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.real_nixl
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "settings",
    ["{}", pytest.param("{host_staging: true}", marks=pytest.mark.nightly)],
    ids=["direct", "through-host-memory"],
)
def test_a_fleet_answers_what_correct_kv_gives_and_stops_cleanly(start, settings):
    command = start(settings=settings)
    url = command.url()
    for length in (31, 700, 1500):
        prompt = kit.prompt(length, seed=length)
        assert ask(url, prompt, 8) == pattern.continuation(prompt, 8)
    asks_like_any_client(url)
    status, text = command.stop()
    assert status == 0, text
    assert " 0 wrong rows" in text and "before the next launch 0" not in text.split("decode-0")[0]
    decode = json.loads((command.logs / "reports" / "decode-0.json").read_text())
    assert decode["context_tokens"] > 30 + 699 + 1499 and decode["wrong_rows"] == 0


def asks_like_any_client(url):
    """What vLLM offers beyond tokens, through the router and with KV from elsewhere."""
    said = post(
        url, "completions", prompt=kit.prompt(50), max_tokens=3, logprobs=2, ignore_eos=True
    )
    assert (
        len(said["logprobs"]["token_logprobs"]) == 3 and max(said["logprobs"]["token_logprobs"]) < 0
    )
    messages = [{"role": "user", "content": "Shall we?"}]
    choice = {"structured_outputs": {"choice": ["yes", "never"]}}
    said = post(url, "chat/completions", messages=messages, max_tokens=8, **choice)
    assert said["message"]["content"] in ("yes", "never") and said["finish_reason"] == "stop"
    chat = {"messages": messages, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    first, *_ = post(url, "chat/completions", **chat)["logprobs"]["content"]
    assert len(first["top_logprobs"]) == 3


# How much faster than by default time passes, for all that an engine does by time.
RATE = 50
HOUR = (
    "{silence: 0.06, alive_interval: 0.01, lease: 0.6, rotation_interval: 0.02, idle_poll: 0.0004}"
)
# What each process of a fleet may take more of meanwhile.
MOST = {"threads": 0, "descriptors": 4, "rss_kib": 8 << 10}


def holdings(command):
    """What each process of a fleet holds."""
    processes = psutil.Process(command.process.pid).children(recursive=True)
    return {
        each.pid: {
            "threads": each.num_threads(),
            "descriptors": each.num_fds(),
            "rss_kib": each.memory_info().rss >> 10,
        }
        for each in processes
    }


def in_use(engine):
    """What an engine holds after a step of its own, by which it says so."""
    post(engine, "v1/completions", prompt=".", max_tokens=1)
    with urllib.request.urlopen(f"{engine}/metrics", timeout=60) as answer:
        return Samples(answer.read().decode()).in_use()


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.real_nixl
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_after_an_idle_hour_nothing_has_grown_and_the_next_request_is_served(start):
    command = start(settings=HOUR)
    url = command.url()
    for seed in range(4):
        ask(url, kit.prompt(700, seed), 8)
    before = holdings(command)
    time.sleep(3600 / RATE)
    after = holdings(command)
    assert after.keys() == before.keys()
    for pid, held in after.items():
        grown = {key: held[key] - before[pid][key] for key in MOST}
        print(f"process {pid}: grown by {grown}, of {before[pid]}")
        assert all(grown[key] <= most for key, most in MOST.items()), psutil.Process(pid).cmdline()
    prompt = kit.prompt(1500, seed=9)
    assert ask(url, prompt, 8) == pattern.continuation(prompt, 8)
    for engine in command.engines:
        deadline = time.monotonic() + 20
        while (held := in_use(engine)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not held, engine
    status, text = command.stop()
    assert status == 0, text
    assert " 0 wrong rows" in text


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.real_nixl
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_fence_that_lies_shows_in_the_answer_and_in_the_exit_status(start):
    command = start(fault="early-fence")
    url = command.url()
    # The first one waits for the engines to meet, and its bytes are there by then.
    prompts = [kit.prompt(1500, seed) for seed in range(6)]
    assert any(ask(url, prompt, 8) != pattern.continuation(prompt, 8) for prompt in prompts)
    status, text = command.stop()
    assert status == 1, text
    assert (command.logs / "reports" / "decode-0.wrong.jsonl").exists()


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.real_nixl
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(network.missing()), reason=network.missing() or "-")
def test_a_fleet_in_namespaces_sends_its_kv_over_the_shaped_link(start):
    command = start(more="network: {rate_mbit: 400}")
    url = command.url()
    prompt = kit.prompt(1500, seed=1)
    assert ask(url, prompt, 8) == pattern.continuation(prompt, 8)
    hub = f"{network.PREFIX}-{command.process.pid}-hub"
    said = network.execute(("tc", "-n", hub, "-s", "qdisc", "show", "dev", "port1"))
    decode = json.loads((command.logs / "reports" / "decode-0.json").read_text())
    assert "rate 400Mbit" in said
    assert int(re.search(r"Sent (\d+) bytes", said)[1]) > 1000 * decode["context_tokens"] > 0
    status, text = command.stop()
    assert status == 0, text
    assert hub not in network.execute(("ip", "netns", "list"))
