"""Deliberate faults of the emulated device: what tests of the oracle do to KV that arrived.

All but "early-fence" (which the writer's fence itself plays) damage the context of a request at
the moment it becomes schedulable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from neuron_push.emulation.memory import Cache, View

if TYPE_CHECKING:
    from neuron_push.emulation.writer import Step


class Faults:
    """Called by the writer around each step."""

    def __init__(self, cache: Cache, fault: str) -> None:
        self._cache = cache
        self._damage: dict[str, Callable[[View, list[int]], None]] = {
            "flip-byte": _flip, "swap-blocks": _swap, "drop-layer": _drop,
            "late-block": self._hold_back,
        }  # fmt: skip
        self._fault = fault
        self._held: list[tuple[View, int, torch.Tensor]] = []

    def __call__(self, moment: str, step: Step) -> None:
        damage = self._damage.get(self._fault)
        if damage is None:
            return
        if moment == "drawn":
            for view, block, content in self._held:
                view.tensor[block] = content
            self._held.clear()
        if moment != "before":
            return
        for piece in step.pieces:
            if piece.context is None:
                continue
            blocks = list(dict.fromkeys(piece.context[1][0].tolist()))
            if len(blocks) > 1:
                for view in self._cache.views[0]:
                    damage(view, blocks)

    def _hold_back(self, view: View, blocks: list[int]) -> None:
        self._held.append((view, blocks[0], view.tensor[blocks[0]].clone()))
        view.tensor[blocks[0]] = 0


def _flip(view: View, blocks: list[int]) -> None:
    last = (blocks[0], 0) + (-1,) * (view.tensor.dim() - 2)
    view.tensor[last] ^= 1 << 3


def _swap(view: View, blocks: list[int]) -> None:
    first = view.tensor[blocks[0]].clone()
    view.tensor[blocks[0]] = view.tensor[blocks[1]]
    view.tensor[blocks[1]] = first


def _drop(view: View, blocks: list[int]) -> None:
    axis = 2 + view.order.index("l")
    for block in blocks:
        view.tensor[block].select(axis - 1, -1).zero_()
