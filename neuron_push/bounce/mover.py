"""Packing and unpacking on the host, for pages on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from neuron_push.bounce.copies import HostCopies
from neuron_push.hostmover import HostMover
from neuron_push.transform import InPlace, Ints, Moved, Rows

__all__ = ["StagedMover"]


class StagedMover:
    """Rows between slabs on the host and pages on the device, on the calling thread.

    The device's side of a move goes through a scratch buffer, in the order of its addresses, so
    that neighbours are one copy; what reorders is the host.
    """

    def __init__(self, copies: HostCopies, scratch_bytes: int) -> None:
        self._copies = copies
        self._bytes = scratch_bytes
        self._scratch = copies.host(scratch_bytes)
        self._host = HostMover()

    def move(self, rows: Sequence[Rows]) -> Moved:
        """Copy; everything is in place on return."""
        for part in rows:
            if part.count:
                self._move(part)
        return InPlace()

    def _move(self, rows: Rows) -> None:
        source, destination = _each(rows.source, rows), _each(rows.destination, rows)
        packs = self._copies.on_host(int(destination[0]))
        device = source if packs else destination
        order = np.argsort(device)
        step = max(1, self._bytes // rows.unit)
        for start in range(0, rows.count, step):
            part = order[start : start + step]
            size = rows.unit, rows.unit, len(part)
            if packs:
                self._pass(device[part], rows.unit, to_host=True)
                self._host.move([Rows(*size, self._scratch.base, destination[part])])
            else:
                self._host.move([Rows(*size, source[part], self._scratch.base)])
                self._pass(device[part], rows.unit, to_host=False)

    def _pass(self, addresses: Ints, unit: int, *, to_host: bool) -> None:
        """Sorted pieces of the device to or from the scratch buffer, one behind the other."""
        breaks = np.flatnonzero(np.diff(addresses) != unit) + 1
        starts = np.concatenate(([0], breaks, [len(addresses)]))
        for low, high in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            host, device = self._scratch.base + low * unit, int(addresses[low])
            to, origin = (host, device) if to_host else (device, host)
            self._copies.copy(to, origin, (high - low) * unit)


def _each(side: Ints | int, rows: Rows) -> Ints:
    """The address of every piece."""
    if isinstance(side, np.ndarray):
        return side
    return side + rows.unit * np.arange(rows.count, dtype=np.int64)
