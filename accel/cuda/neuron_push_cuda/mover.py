"""Packing and unpacking on a GPU: rows between raw addresses, as gathers and scatters of PyTorch.

A row is one or more *cells* of equal size; memory from the lowest address on is seen as an array of
cells, and rows become indices into it. Only the cells that are named are touched.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from neuron_push.accelerator import Fence
from neuron_push.transform import Ints, Rows

__all__ = ["StreamMover", "device_bytes"]

# Rows gathered at once when neither side is dense: bounds the temporary copy.
BATCH_BYTES: Final = 64 << 20
# Widest element that is copied as one.
_WIDEST: Final = 8


class StreamMover:
    """Carries rows out beside the engine.

    `aside` runs a function with a side stream as the current one, and gives the fence of its end.
    `view` makes a flat byte tensor of (address, length); tests give one for host memory.
    """

    def __init__(
        self,
        aside: Callable[[Callable[[], None]], Fence],
        view: Callable[[int, int], Any],
    ) -> None:
        self._aside = aside
        self._view = view

    def move(self, rows: Sequence[Rows]) -> Fence:
        """Launch the copies and return; the fence is done when they are."""

        def work() -> None:
            for part in rows:
                if part.count:
                    self._copy(part)

        return self._aside(work)

    def _copy(self, rows: Rows) -> None:
        width = math.gcd(rows.align, _WIDEST, *map(_lowest, (rows.source, rows.destination)))
        cell = min(rows.align, rows.unit)
        source, read = self._side(rows.source, rows, cell, width)
        target, written = self._side(rows.destination, rows, cell, width)
        if read is None and written is None:
            target.copy_(source)
        elif written is None:
            target.copy_(source.index_select(0, read))
        elif read is None:
            target.index_copy_(0, written, source)
        else:
            step = max(1, BATCH_BYTES // cell)
            for start in range(0, len(read), step):
                part = slice(start, start + step)
                target.index_copy_(0, written[part], source.index_select(0, read[part]))

    def _side(self, where: Ints | int, rows: Rows, cell: int, width: int) -> tuple[Any, Any]:
        """Cells of one side, and the index of each cell of each row; None if they are in order."""
        torch = importlib.import_module("torch")
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

        def cells(base: int, count: int) -> Any:
            return self._view(base, count * cell).view(kinds[width]).view(count, cell // width)

        per_row = rows.unit // cell
        if not isinstance(where, np.ndarray):
            return cells(where, rows.count * per_row), None
        low = int(where.min())
        first = (where - low) // cell
        index = (first[:, None] + np.arange(per_row)).reshape(-1)
        memory = cells(low, int(index.max()) + 1)
        return memory, torch.from_numpy(index).to(memory.device, non_blocking=True)


def device_bytes(device: int) -> Callable[[int, int], Any]:
    """A view of GPU memory at an address, through the CUDA array interface (version 3)."""

    def view(address: int, length: int) -> Any:
        torch = importlib.import_module("torch")
        return torch.as_tensor(_Raw(address, length), device=f"cuda:{device}")

    return view


class _Raw:
    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (length,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


def _lowest(where: Ints | int) -> int:
    return int(where.min()) if isinstance(where, np.ndarray) else where
