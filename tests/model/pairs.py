"""Pairs of engines that the model knows: their ranks, layouts, slabs and settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace

from msgspec.structs import replace

from neuron_push.config import Config
from neuron_push.protocol import Address, EngineInfo, RankInfo
from tests.rendezvous.shapes import SEMANTICS, SLAB_BYTES, Shape

# Where prefill's listener answers, and where the first rank of an engine does.
LISTENER, FIRST_PORT = Address("P", 1), 2
# A repeat is due at every `soon`; every timeout is due after a `late`, and nothing in between.
# Silence is measured in steps that are shorter than the signs of life are apart.
SOON, STEP, STEPS, TIMEOUT = 0.002, 4.0, 3, 10.0
CONFIG = Config(
    accelerator="cpu", lease=TIMEOUT, patience=TIMEOUT, alive_interval=STEP, silence=TIMEOUT,
    resend=0.001, resend_most=0.001, greeting_timeout=TIMEOUT, drain_timeout=TIMEOUT,
    move_timeout=TIMEOUT, rotation_interval=0.001, slice_bytes=1 << 16, writes_in_flight=2,
    batch_tokens=0,
)  # fmt: skip
# Where both sides reorder, all runs are too short for them.
SHORT_RUNS = replace(CONFIG, min_run=1 << 20)
VLLM = SimpleNamespace(
    kv_transfer_config=SimpleNamespace(engine_id="engine"), speculative_config=None
)


@dataclass(frozen=True)
class Pair:
    """What a prefill and a decode engine are like, and by that how bytes go between them."""

    prefill: Shape
    decode: Shape
    config: Config = CONFIG

    def shape(self, role: str) -> Shape:
        return self.decode if role == "consumer" else self.prefill

    @cached_property
    def lanes(self) -> frozenset[tuple[int, int]]:
        """(prefill rank, decode rank) pairs between which bytes of every token go."""
        return frozenset(
            (source, rank)
            for rank in range(self.decode.world)
            for (source,) in self.decode.providers(rank, self.prefill)
        )


# By who reorders: with K and V apart on one side, somebody has to. One slab of decode's is never
# promised, so with three two WRITEs between slabs are under way at once.
PAIRS = {
    "": Pair(Shape(), Shape()),
    "packed": Pair(Shape(apart=True, slabs=1), Shape()),
    "unpacked": Pair(Shape(apart=True), Shape(slabs=1)),
    "both": Pair(Shape(slabs=2), Shape(slabs=3), SHORT_RUNS),
}


@cache
def pair(staged: str = "", ranks: tuple[int, int] = (1, 1)) -> Pair:
    """Two engines of so many ranks, each of which has its share of the heads."""
    found = PAIRS[staged]
    prefill, decode = (
        dataclasses.replace(shape, tp=count)
        for shape, count in zip((found.prefill, found.decode), ranks, strict=True)
    )
    return Pair(prefill, decode, found.config)


@cache
def geometry(shape: Shape, rank: int):
    """One for all states, as it never changes."""
    return shape.geometry(rank)


@cache
def shared(of: Pair) -> dict[int, object]:
    """What no state changes, by id."""
    geometries = [
        geometry(shape, rank) for shape in (of.prefill, of.decode) for rank in range(shape.world)
    ]
    return {id(each): each for each in (of, of.config, SEMANTICS, VLLM, LISTENER, *geometries)}


def info(name, role, incarnation, of: Pair) -> EngineInfo:
    """What an engine's listener answers."""
    shape = of.shape(role)
    ranks = tuple(
        RankInfo(
            rank, incarnation, Address(name, FIRST_PORT + rank), geometry(shape, rank),
            SLAB_BYTES if shape.slabs else 0,
        )
        for rank in range(shape.world)
    )  # fmt: skip
    return EngineInfo(
        name, incarnation, role, shape.world, shape.tp, shape.pp, 0, ("push",), SEMANTICS, ranks
    )
