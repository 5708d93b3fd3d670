"""Ray Serve LLM over a mixed emulated fleet: the recipe of deploy/ray, answered by pushed KV.

    NEURON_PUSH_RAY_PYTHON=/path/to/python pytest -m ray tests/rayserve

names an interpreter with Ray, the vLLM that its `ray[llm]` asks for (0.29 for Ray 2.60) and this
package; without it, the one that runs the test is tried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from neuron_push.emulation import pattern
from neuron_push.ports import free_ports
from tests.emulation import kit

PYTHON = os.environ.get("NEURON_PUSH_RAY_PYTHON", sys.executable)
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture
def served(tmp_path):
    probe = [PYTHON, "-c", "import neuron_push.rayserve"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(f"{PYTHON} has no Ray Serve LLM: set NEURON_PUSH_RAY_PYTHON")
    (port,) = free_ports(1)
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        [PYTHON, "-m", "tests.rayserve.fleet", str(tmp_path), str(port)],
        stdin=subprocess.PIPE, stdout=log, stderr=log,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )  # fmt: skip
    yield f"http://127.0.0.1:{port}/v1/completions", process
    process.stdin.close()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
    log.close()
    print((tmp_path / "log").read_text()[-4000:])


def ask(url, prompt, count):
    body = {
        "model": "emulated", "prompt": prompt, "max_tokens": count, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def first_answer(url, process, prompt, count, seconds=420):
    """Engines load for a minute or more after the application is there."""
    until = time.monotonic() + seconds
    while True:
        assert process.poll() is None, "the fleet has ended"
        try:
            return ask(url, prompt, count)
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < until, "no answer"
            time.sleep(2)


def test_prompts_are_pushed_from_trn2_to_p5en_under_ray(served, tmp_path):
    url, process = served
    lengths = (31, 700, 1500)
    for length in lengths:
        prompt = kit.prompt(length, seed=length)
        assert first_answer(url, process, prompt, 8) == pattern.continuation(prompt, 8)
    (decode,) = (tmp_path / "decode").glob("*-0.json")
    decode = json.loads(decode.read_text())
    # Decode computed one token of each prompt; the rest came as KV, and every byte was right.
    assert decode["wrong_rows"] == 0 and decode["context_tokens"] >= sum(lengths) - len(lengths)
    assert decode["prefill_tokens"] == len(lengths)
