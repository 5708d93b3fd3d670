"""Strided copies inside one side's memory: the work of packing and unpacking.

A side that can reorder brings the pages of one layout into the order of another. `plan` reduces
that to *rows*: pieces of equal length with a source and a destination address each. All layers,
heads and pages of a token range are one call, whatever the layouts, so an accelerator needs one
kernel (copy row i from address a[i] to address b[i]) and the host needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["HostMover", "Mover", "Rows"]

Ints = npt.NDArray[np.int64]

# Rows gathered at once when neither side is dense: bounds the temporary copy to the CPU's cache.
BATCH_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """`count` pieces of `unit` bytes: piece i goes from source[i] to destination[i].

    An `int` in place of an array is the address of a dense side: piece i lies at i * unit behind
    it. Addresses on one side differ by multiples of `align` bytes, a divisor of `unit`.
    """

    unit: int
    align: int
    count: int
    source: Ints | int
    destination: Ints | int

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
            if part.count:
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

    def __init__(self, address: int, count: int, unit: int, stride: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "strides": (stride,),
            "typestr": _cell(unit).str,
            "version": 3,
        }


def _dense(address: int, rows: Rows) -> npt.NDArray[Any]:
    return np.asarray(_Memory(address, rows.count, rows.unit, rows.unit))


def _scattered(addresses: Ints, rows: Rows) -> tuple[npt.NDArray[Any], Ints]:
    """Memory from the lowest address on, and each row's index in it."""
    low = int(addresses.min())
    stride = rows.unit if rows.align % rows.unit == 0 else rows.align
    index = (addresses - low) // stride if stride > 1 else addresses - low
    return np.asarray(_Memory(low, int(index.max()) + 1, rows.unit, stride)), index
