"""Real engines with two ranks, or a sliding window beside full attention.

MLA is left to emulated engines: vLLM 0.32's CPU_MLA does not agree with itself. One engine alone
continues a prompt otherwise when it is given its own answer as part of the prompt, as its kernels
for prefill and decode differ, so a comparison of tokens proves nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from neuron_push import tiny_model
from neuron_push.engines import Engine, EngineOptions, connector
from neuron_push.processes import running
from tests.e2e import models
from tests.e2e.conftest import SETTINGS
from tests.e2e.fleet import Fleet, prompt

pytestmark = [pytest.mark.engines, pytest.mark.nightly, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Shape:
    make: Callable[[Path], Path]
    ranks: tuple[int, int] = (1, 1)
    sizes: tuple[int, int] = (32, 32)


SHAPES = {
    "TP 2 to 2": Shape(tiny_model.make, ranks=(2, 2)),
    "TP 2 to 1, 32 to 128": Shape(tiny_model.make, ranks=(2, 1), sizes=(32, 128)),
    "sliding window": Shape(models.sliding),
    "sliding window, 32 to 128": Shape(models.sliding, sizes=(32, 128)),
}


@pytest.fixture(scope="module", params=SHAPES)
def shaped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("shapes")
    shape = SHAPES[request.param]
    model = shape.make(folder / "model")

    def engine(name: str, role: str, index: int) -> Engine:
        ranks = shape.ranks[index]
        more = ["--tensor-parallel-size", str(ranks)]
        if ranks > 1:
            more += ["--distributed-executor-backend", "mp"]
        options = EngineOptions(
            name=name, model=model, transfer=connector(role, **SETTINGS),  # type: ignore[arg-type]
            block_size=shape.sizes[index], kv_blocks=200, max_batched=256,
            prefix_caching=True, arguments=more,
        )  # fmt: skip
        return Engine(options, folder)

    pair = engine("prefill", "kv_producer", 0), engine("decode", "kv_consumer", 1)
    with running(pair, 600):
        yield Fleet(*pair)


@pytest.mark.parametrize("tokens", [1, 33, 128, 300, 700])
async def test_a_prompt_of_any_length_is_exact(shaped: Fleet, tokens: int) -> None:
    await shaped.pushes_exactly(prompt(tokens, tokens))


async def test_prefixes_known_on_either_side_are_exact(shaped: Fleet) -> None:
    for engine, seed in ((shaped.prefill, 31), (shaped.decode, 41)):
        shared = prompt(400, seed)
        assert (await shaped.post(engine, shared, tokens=1)).ok
        await shaped.pushes_exactly(shared + prompt(100, seed + 1))
    await shaped.settles()


async def test_answers_depend_on_the_prompt(shaped: Fleet) -> None:
    """Else the tests above would prove nothing."""
    assert len({await shaped.reference(prompt(300, seed)) for seed in (1, 2, 3)}) == 3
