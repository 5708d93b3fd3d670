"""Rows within this process's memory, moved by the host.

NumPy copies them. Grids of short rows are copied by machine code (`machinecode`) where Numba is
installed, which vLLM brings: it takes a second to load, in the background, from the first grid on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from neuron_push.transform import Grid, InPlace, Ints, Moved, Rows

__all__ = ["HostMover", "load_machine_code"]

logger = logging.getLogger(__name__)

# Rows gathered at once when neither side is dense: bounds the temporary copy to the CPU's cache.
BATCH_BYTES: Final = 1 << 20


class _MachineCode:
    """The copy of a grid as machine code, once it is there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loading: threading.Thread | None = None
        self.copy: Callable[[Grid], bool] = self._not_yet

    def _not_yet(self, _: Grid) -> bool:
        self.load()
        return False

    def load(self) -> threading.Thread:
        """Start loading; called again, it is the same thread that loads."""
        with self._lock:
            if self._loading is None:
                self._loading = threading.Thread(target=self._load, name="machine-code")
                self._loading.start()
            return self._loading

    def _load(self) -> None:
        try:
            from neuron_push import machinecode
        except Exception as error:  # noqa: BLE001
            # Not installed, not for this processor, no folder to keep code in: NumPy does as well.
            logger.info("Strided copies are left to NumPy: %s", error)
            self.copy = _never
        else:
            self.copy = machinecode.copy


def _never(_: Grid) -> bool:
    return False


_machine = _MachineCode()


def load_machine_code() -> bool:
    """Load it and wait for that; False if it cannot be had here."""
    _machine.load().join()
    return _machine.copy is not _never


class HostMover:
    """Rows within this process's memory, copied on the calling thread.

    NumPy holds the interpreter's lock for large gathers, so a piece should stay within a few MiB.
    """

    def move(self, rows: Sequence[Rows]) -> Moved:
        """Copy; everything is in place on return."""
        for part in rows:
            for grid in part.grids:
                if not _machine.copy(grid):
                    _copy_grid(grid)
            if part.count and not part.grids:
                _copy(part)
        return InPlace()


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
