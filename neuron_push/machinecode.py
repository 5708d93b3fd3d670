"""The copy of a grid as machine code, by Numba; `hostmover` imports it where that is installed.

NumPy walks a strided copy in the order of its destination. Reading K and V that lie side by side
then takes two passes, each over every other 256 bytes, and a call of memcpy per row. Here the axes
are walked in an order that leaves both sides' next bytes near, and rows are a few vector moves.
The interpreter's lock is not held meanwhile.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from neuron_push.transform import Axis, Grid

__all__ = ["copy"]

# Axes of the loop below; rows are multiples of so many bytes; those longer than the last are left
# to NumPy, whose one call of memcpy per row is nothing then.
AXES: Final = 5
WORD: Final = 8
LONG: Final = 4096


def _moves(nbytes: int) -> Any:
    """An intrinsic that copies `nbytes` between two addresses, of any alignment."""

    @intrinsic  # type: ignore[misc, untyped-decorator, unused-ignore]
    def moves(_: Any, destination: Any, source: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            words = min(nbytes // 8, 4)
            pointer = ir.PointerType(ir.VectorType(ir.IntType(64), words))
            to, of = (builder.inttoptr(each, pointer) for each in arguments)
            loaded = []
            for index in range(nbytes // (8 * words)):
                loaded.append(builder.load(builder.gep(of, [ir.Constant(ir.IntType(32), index)])))
                loaded[-1].align = 1
            for index, value in enumerate(loaded):
                place = builder.gep(to, [ir.Constant(ir.IntType(32), index)])
                builder.store(value, place).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return moves


_moves_256, _moves_64, _moves_8 = _moves(256), _moves(64), _moves(8)


@njit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _row(unit: Any, destination: Any, source: Any) -> None:
    if unit % 256 == 0:
        for at in range(0, unit, 256):
            _moves_256(destination + at, source + at)
    elif unit % 64 == 0:
        for at in range(0, unit, 64):
            _moves_64(destination + at, source + at)
    else:
        for at in range(0, unit, 8):
            _moves_8(destination + at, source + at)


@njit(  # type: ignore[misc, untyped-decorator, unused-ignore]
    "void(int64, int64, int64, int64[::1], int64[::1], int64[::1])", cache=True, nogil=True
)
def _walk(unit: Any, destination: Any, source: Any, sizes: Any, writes: Any, reads: Any) -> None:
    for a in range(sizes[0]):
        for b in range(sizes[1]):
            for c in range(sizes[2]):
                for d in range(sizes[3]):
                    to = destination + a * writes[0] + b * writes[1] + c * writes[2] + d * writes[3]
                    of = source + a * reads[0] + b * reads[1] + c * reads[2] + d * reads[3]
                    for _ in range(sizes[4]):
                        _row(unit, to, of)
                        to += writes[4]
                        of += reads[4]


def copy(grid: Grid) -> bool:
    """Copy a grid; False if it is none for this: too many axes, rows that are odd or long."""
    if len(grid.axes) > AXES or grid.unit % WORD or grid.unit > LONG:
        return False
    axes = sorted(grid.axes, key=_nearness, reverse=True)
    axes = [Axis(1, 0, 0)] * (AXES - len(axes)) + axes
    sizes, reads, writes = np.array(axes, np.int64).T.copy()
    _walk(grid.unit, grid.destination, grid.source, sizes, writes, reads)
    return True


def _nearness(axis: Axis) -> tuple[int, int]:
    """Inner axes step least on the side where they step less; of two such, the shorter one."""
    return min(abs(axis.source), abs(axis.destination)), axis.size
