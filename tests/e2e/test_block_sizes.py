"""Real engines whose blocks differ: CPU_ATTN `vec` stores K transposed, so pages are reordered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from neuron_push import tiny_model
from neuron_push.engines import Engine, EngineOptions, connector, cpu_share
from neuron_push.processes import running
from tests.e2e.conftest import SETTINGS
from tests.e2e.fleet import Fleet, prompt

pytestmark = [pytest.mark.engines, pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=[(32, 128), (128, 32)], ids=["32-to-128", "128-to-32"])
def unequal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("blocks")
    model = tiny_model.make(folder / "model")

    def engine(name: str, role: str, index: int) -> Engine:
        options = EngineOptions(
            name=name, model=model, transfer=connector(role, **SETTINGS),  # type: ignore[arg-type]
            cpus=cpu_share(index, 2), block_size=request.param[index], kv_blocks=200,
            max_batched=256, prefix_caching=True,
        )  # fmt: skip
        return Engine(options, folder)

    pair = engine("prefill", "kv_producer", 0), engine("decode", "kv_consumer", 1)
    with running(pair):
        yield Fleet(*pair)


@pytest.mark.parametrize("tokens", [1, 31, 32, 127, 128, 129, 300, 1000])
async def test_a_prompt_of_any_length_is_exact(unequal: Fleet, tokens: int) -> None:
    await unequal.pushes_exactly(prompt(tokens, tokens))


async def test_prefixes_known_on_either_side_are_exact(unequal: Fleet) -> None:
    for engine, seed in ((unequal.prefill, 31), (unequal.decode, 41)):
        shared = prompt(400, seed)
        assert (await unequal.post(engine, shared, tokens=1)).ok
        await unequal.pushes_exactly(shared + prompt(100, seed + 1))
    await unequal.settles()
