from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from neuron_push import tiny_model
from neuron_push.engines import Engine, EngineOptions, connector, cpu_share
from neuron_push.processes import running
from tests.e2e.fleet import BLOCK, Fleet

SETTINGS = {"lease": 8.0, "patience": 20.0}


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("e2e")
    model = tiny_model.make(folder / "model")

    def engine(name: str, role: str, index: int) -> Engine:
        options = EngineOptions(
            name=name, model=model, transfer=connector(role, **SETTINGS),  # type: ignore[arg-type]
            cpus=cpu_share(index, 2), block_size=BLOCK, kv_blocks=200, max_batched=256,
            prefix_caching=True,
        )  # fmt: skip
        return Engine(options, folder)

    pair = engine("prefill", "kv_producer", 0), engine("decode", "kv_consumer", 1)
    with running(pair):
        yield Fleet(*pair)
