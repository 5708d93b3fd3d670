"""Strided copies inside one side's memory: the work of packing and unpacking.

A side that can reorder brings the pages of one layout into the order of another. `plan` reduces
that to *rows*: pieces of equal length with a source and a destination address each. All layers,
heads and pages of a token range are one call, whatever the layouts, so an accelerator needs one
kernel (copy row i from address a[i] to address b[i]) and the host needs none. Where the addresses
step evenly, the same rows are also a few *grids*, which the host prefers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Axis", "Grid", "HostMover", "Mover", "Rows"]

Ints = npt.NDArray[np.int64]

# Rows gathered at once when neither side is dense: bounds the temporary copy to the CPU's cache.
BATCH_BYTES: Final = 1 << 20


class Axis(NamedTuple):
    """`size` steps of so many bytes on each side."""

    size: int
    source: int
    destination: int


class Grid(NamedTuple):
    """Rows of `unit` bytes at every combination of steps from two addresses."""

    unit: int
    source: int
    destination: int
    axes: tuple[Axis, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.unit * math.prod(axis.size for axis in self.axes)

    def turned(self) -> Grid:
        """The same places, read where this writes."""
        axes = tuple(Axis(axis.size, axis.destination, axis.source) for axis in self.axes)
        return Grid(self.unit, self.destination, self.source, axes)


# One side of rows; as a function, it is worked out by whoever looks at it first.
Side = Ints | int | Callable[[], Ints | int]


class Rows:
    """`count` pieces of `unit` bytes: piece i goes from source[i] to destination[i].

    An `int` in place of an array is the address of a dense side: piece i lies at i * unit behind
    it. Addresses on one side differ by multiples of `align` bytes, a divisor of `unit`. `grids`
    hold the same pieces in some order, if there is such a form.
    """

    __slots__ = ("_destination", "_source", "align", "count", "grids", "unit")

    def __init__(
        self, unit: int, align: int, count: int, source: Side, destination: Side,
        grids: tuple[Grid, ...] = (),
    ) -> None:  # fmt: skip
        self.unit = unit
        self.align = align
        self.count = count
        self._source = source
        self._destination = destination
        self.grids = grids

    @property
    def source(self) -> Ints | int:
        """Where pieces are read."""
        self._source = self._source() if callable(self._source) else self._source
        return self._source

    @property
    def destination(self) -> Ints | int:
        """Where they are written."""
        self._destination = (
            self._destination() if callable(self._destination) else self._destination
        )
        return self._destination

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.unit * self.count


class Moved(Protocol):
    """The end of a move, asked from the transfer thread."""

    def done(self) -> bool:
        """Whether all its bytes are in place; raises if it failed."""


class Mover(Protocol):
    """Carries rows out on one side's memory."""

    def move(self, rows: Sequence[Rows]) -> Moved:
        """Start copying; the rows of one call do not depend on each other.

        May return before the bytes are in place; the caller keeps both sides' memory until
        `done`.
        """


class _Done:
    def done(self) -> bool:
        return True


class HostMover:
    """Rows within this process's memory, copied by NumPy on the calling thread.

    The interpreter's lock is held for large gathers, so a piece should stay within a few MiB.
    """

    def move(self, rows: Sequence[Rows]) -> Moved:
        """Copy; everything is in place on return."""
        for part in rows:
            for grid in part.grids:
                _copy_grid(grid)
            if part.count and not part.grids:
                _copy(part)
        return _Done()


def _copy(rows: Rows) -> None:
    source, destination = rows.source, rows.destination
    if not isinstance(source, np.ndarray) and not isinstance(destination, np.ndarray):
        _dense(destination, rows)[:] = _dense(source, rows)
    elif not isinstance(destination, np.ndarray):
        assert isinstance(source, np.ndarray)
        _gather(source, _dense(destination, rows), rows)
    elif not isinstance(source, np.ndarray):
        memory, index = _scattered(destination, rows)
        memory[index] = _dense(source, rows)
    else:
        step = max(1, BATCH_BYTES // rows.unit)
        batch = np.empty(min(step, rows.count), _cell(rows.unit))
        memory, index = _scattered(destination, rows)
        for start in range(0, rows.count, step):
            part = slice(start, min(start + step, rows.count))
            held = batch[: part.stop - start]
            _gather(source[part], held, rows)
            memory[index[part]] = held


def _gather(source: Ints, out: npt.NDArray[Any], rows: Rows) -> None:
    memory, index = _scattered(source, rows)
    if memory.strides[0] == rows.unit:
        # "clip" copies straight into `out`; the index is in range by construction.
        np.take(memory, index, out=out, mode="clip")
    else:
        out[:] = memory[index]


def _cell(unit: int) -> np.dtype[Any]:
    """An element type of `unit` bytes; small ones are integers, which NumPy moves faster."""
    return np.dtype(f"u{unit}") if unit in (1, 2, 4, 8) else np.dtype(f"V{unit}")


class _Memory:
    """Raw memory that NumPy can view."""

    def __init__(
        self, address: int, unit: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": _cell(unit).str,
            "version": 3,
        }


def _copy_grid(grid: Grid) -> None:
    """One strided copy; NumPy orders and joins the axes itself."""
    shape = tuple(axis.size for axis in grid.axes)
    reads, writes = (tuple(axis[side] for axis in grid.axes) for side in (1, 2))
    source = np.asarray(_Memory(grid.source, grid.unit, shape, reads))
    np.copyto(np.asarray(_Memory(grid.destination, grid.unit, shape, writes)), source)


def _dense(address: int, rows: Rows) -> npt.NDArray[Any]:
    return np.asarray(_Memory(address, rows.unit, (rows.count,), (rows.unit,)))


def _scattered(addresses: Ints, rows: Rows) -> tuple[npt.NDArray[Any], Ints]:
    """Memory from the lowest address on, and each row's index in it."""
    low = int(addresses.min())
    stride = rows.unit if rows.align % rows.unit == 0 else rows.align
    index = (addresses - low) // stride if stride > 1 else addresses - low
    cells = int(index.max()) + 1
    return np.asarray(_Memory(low, rows.unit, (cells,), (stride,))), index
