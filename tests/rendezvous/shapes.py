"""Small geometries of engines with tensor and pipeline parallelism; no memory behind them."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_push.geometry import Geometry, Group, Plane, Region, Semantics
from neuron_push.protocol import Slabs

HEADS, LAYERS, WIDTH, ELEMENT = 4, 2, 512, 2
BLOCKS = 256
# Eight tokens of a rank that holds everything; more where ranks share.
SLAB_BYTES = 8 * 2 * WIDTH * ELEMENT * HEADS * LAYERS
SEMANTICS = Semantics("toy", LAYERS, HEADS, WIDTH, "bfloat16", ("full",))


@dataclass(frozen=True)
class Shape:
    """Parallelism and block size of one engine."""

    tp: int = 1
    pp: int = 1
    block_tokens: int = 4
    apart: bool = False  # K and V in two halves of a region rather than side by side per token
    slabs: int = 0  # staging slabs of each rank; 0 if it cannot reorder

    @property
    def world(self) -> int:
        return self.tp * self.pp

    def heads(self, rank: int) -> tuple[int, ...]:
        seat, share = rank % self.tp, HEADS // self.tp
        if not share:  # replicas
            return (seat * HEADS // self.tp,)
        return tuple(range(seat * share, (seat + 1) * share))

    def layers(self, rank: int) -> tuple[int, ...]:
        share = LAYERS // self.pp
        stage = rank // self.tp
        return tuple(range(stage * share, (stage + 1) * share))

    def providers(self, rank: int, prefill: Shape) -> list[list[int]]:
        """Prefill ranks that hold something of what a decode rank of this shape holds.

        Replicas of each other stand together: any of them may send a token, but only one.
        """
        alike: dict[tuple, list[int]] = {}
        for other in range(prefill.world):
            holding = prefill.heads(other), prefill.layers(other)
            if set(self.heads(rank)) & set(holding[0]) and set(self.layers(rank)) & set(holding[1]):
                alike.setdefault(holding, []).append(other)
        return list(alike.values())

    def staging(self) -> Slabs | None:
        if not self.slabs:
            return None
        return Slabs(Region(1 << 50, self.slabs * SLAB_BYTES, "DRAM", 0), SLAB_BYTES)

    def geometry(self, rank: int) -> Geometry:
        heads = self.heads(rank)
        token = WIDTH * ELEMENT * (1 if self.apart else 2)
        head = token * self.block_tokens
        page = head * len(heads)
        planes, regions = [], []
        for index, layer in enumerate(self.layers(rank)):
            size = page * BLOCKS * (2 if self.apart else 1)
            regions.append(Region((1 << 30) + index * (1 << 34), size, "DRAM", 0))
            for kind, offset in (("k", 0), ("v", size // 2 if self.apart else WIDTH * ELEMENT)):
                planes.append(Plane(layer, kind, index, offset, page, head, token, ELEMENT, WIDTH))
        group = Group("full", self.block_tokens, self.block_tokens, BLOCKS, heads, tuple(planes))
        return Geometry(tuple(regions), (group,), ELEMENT)
