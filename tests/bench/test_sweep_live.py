"""A small sweep over real engines: `python -m pytest -m nightly tests/bench`."""

import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from neuron_push import processes
from neuron_push.bench.sweep import results
from neuron_push.emulation import fleet, models

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
FLEET = """
model: tiny-gqa
engines:
  - {name: prefill, role: prefill, profile: quick, verify: sampled, max_batched: 512}
  - {name: decode, role: decode, profile: quick, verify: sampled, max_batched: 512}
"""
COLUMNS = ("push", "nixl-push", "nixl-pull", "floor-ttft", "floor-tpot")


def command(folder, *words):
    fleet = folder / "fleet.yaml"
    fleet.write_text(FLEET)
    return [
        sys.executable, "-m", "neuron_push.cli", "bench", "sweep", "--out", str(folder / "out"),
        "--fleet", str(fleet), "--cells", "512x4", "1kx4", "--repeats", "1", "--seconds", "2",
        "--output-len", "8", *words,
    ]  # fmt: skip


def test_every_column_is_measured_and_a_second_call_has_nothing_to_do(tmp_path):
    words = command(tmp_path, "--columns", *COLUMNS)
    # A busy machine makes runs unfit, which is not what is asked here.
    assert subprocess.run(words, check=False).returncode in (0, 1)
    found = results.load(tmp_path / "out")
    assert len(found) == 2 * len(COLUMNS)
    for result in found:
        column = result.neuron_push.column
        assert result.completed == result.num_prompts == 8
        assert all(ttft > 0 for ttft in result.ttfts)
        transfers = column in ("push", "nixl-push", "nixl-pull")
        assert bool(result.neuron_push.handover) == transfers
        assert not [why for why in result.neuron_push.unfit if "wrong" in why]
    again = subprocess.run(words, check=True, capture_output=True, text=True)
    assert f"0 runs of 2 s, {len(found)} done before" in again.stdout


@pytest.mark.parametrize(
    ("connector", "columns"),
    [
        ("neuron-push", ["push", "pull", "floor-ttft"]),
        ("vllm-push", ["nixl-push"]),
        ("vllm-pull", ["nixl-pull"]),
    ],
)
def test_engines_that_run_already_are_measured_at_their_urls(tmp_path, connector, columns):
    (tmp_path / "fleet.yaml").write_text(FLEET)
    spec = fleet.load(tmp_path / "fleet.yaml")
    spec = msgspec.structs.replace(
        spec, engines=tuple(msgspec.structs.replace(e, connector=connector) for e in spec.engines)
    )
    built = fleet.build(spec, tmp_path / "logs", print)
    prefill, decode = built.engines
    with processes.running(built.engines):
        words = [
            sys.executable, "-m", "neuron_push.cli", "bench", "sweep",
            "--out", str(tmp_path / "out"), "--columns", *columns, "--model", fleet.SERVED,
            "--tokenizer", str(models.find(spec.model, tmp_path / "logs" / "models")),
            "--prefill-url", f"{prefill.url}#side={prefill.side_port}&name={prefill.spec.name}",
            "--decode-url", decode.url, "--cells", "512x4", "--repeats", "1", "--seconds", "2",
            "--output-len", "8",
        ]  # fmt: skip
        subprocess.run(words, check=True)
        computed = [each["prefill_tokens"] for each in decode.summaries()]
    found = results.load(tmp_path / "out")
    assert {result.neuron_push.column for result in found} == set(columns)
    assert all(result.completed == result.num_prompts == 8 for result in found)
    # Decode has computed last tokens only: KV came over.
    assert sum(computed) < 512


def test_an_interrupt_stops_everything_and_leaves_no_half_a_result(tmp_path):
    words = command(tmp_path, "--columns", "push", "--seconds", "60")
    with (tmp_path / "said").open("w") as said:
        sweep = subprocess.Popen(words, stdout=said, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    deadline = time.monotonic() + 300
    while "warming up" not in (tmp_path / "said").read_text():
        assert sweep.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    sweep.send_signal(signal.SIGTERM)
    assert sweep.wait(60) == 130
    assert not list((tmp_path / "out").glob("*_iter*.json"))
    everything = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(tmp_path) not in everything.stdout
