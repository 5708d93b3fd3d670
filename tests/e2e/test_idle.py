"""What the connector costs engines that have nothing to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from neuron_push import tiny_model
from neuron_push.engines import Engine, EngineOptions, connector, cpu_share
from neuron_push.processes import running
from tests.e2e.fleet import BLOCK, Fleet, prompt

psutil = pytest.importorskip("psutil")

pytestmark = [pytest.mark.engines, pytest.mark.nightly, pytest.mark.timeout(400)]

SETTLE, WINDOW, WINDOWS = 15.0, 15.0, 4  # seconds, and how many
MOST = 0.01  # of a core


def pair(folder: Path, model: Path, kind: str) -> tuple[Engine, Engine]:
    def engine(name: str, index: int) -> Engine:
        transfer = connector("kv_consumer" if index else "kv_producer")
        options = EngineOptions(
            name=f"{name}-{kind}", model=model, transfer=transfer if kind == "with" else None,
            cpus=cpu_share(index, 2), block_size=BLOCK, kv_blocks=200, max_batched=256,
        )  # fmt: skip
        return Engine(options, folder)

    return engine("prefill", 0), engine("decode", 1)


def spent(engines: Sequence[Engine]) -> float:
    """Processor time of engines and their children so far, seconds."""
    times = []
    for engine in engines:
        process = psutil.Process(engine.pid)
        for each in (process, *process.children(recursive=True)):
            times.append(each.cpu_times())
    return sum(each.user + each.system for each in times)


def test_an_idle_pair_uses_under_one_percent_of_a_core_more_than_one_without_connector(tmp_path):
    model = tiny_model.make(tmp_path / "model")
    pairs = {kind: pair(tmp_path, model, kind) for kind in ("with", "without")}
    with running(pairs["with"]), running(pairs["without"]):
        asyncio.run(Fleet(*pairs["with"]).pushes_exactly(prompt(300, 1)))
        for engine in pairs["without"]:
            assert asyncio.run(Fleet(*pairs["without"]).post(engine, prompt(300, 1))).ok
        time.sleep(SETTLE)  # what still looks around for news has gone to rest
        used: dict[str, list[float]] = {kind: [] for kind in pairs}
        for _ in range(WINDOWS):
            before = {kind: spent(engines) for kind, engines in pairs.items()}
            time.sleep(WINDOW)
            for kind, engines in pairs.items():
                used[kind].append((spent(engines) - before[kind]) / WINDOW)
    print({kind: [f"{each:.2%}" for each in shares] for kind, shares in used.items()})
    assert median(used["with"]) - median(used["without"]) < MOST
