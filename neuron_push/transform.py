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
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Axis", "Grid", "InPlace", "Mover", "Rows"]

Ints = npt.NDArray[np.int64]


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


class InPlace:
    """A move that was over when its call returned."""

    def done(self) -> bool:
        return True


class Mover(Protocol):
    """Carries rows out on one side's memory."""

    def move(self, rows: Sequence[Rows]) -> Moved:
        """Start copying; the rows of one call do not depend on each other.

        May return before the bytes are in place; the caller keeps both sides' memory until
        `done`.
        """
