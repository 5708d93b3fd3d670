"""Fills slots, reads them back and says what is wrong.

Tensors are reached by their own indexing only: nothing here knows geometry or plans, whose
mistakes it must notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from neuron_push.emulation import pattern
from neuron_push.emulation.devices import Device
from neuron_push.emulation.fill import Ints, Rows
from neuron_push.emulation.memory import Cache, GroupShape, View, allocate

# Slots read at once: temporaries stay in the processor's cache, which halves the time.
CHUNK_BYTES: Final = 1 << 20
# Wrong rows described per call; the rest is counted.
MOST_DESCRIBED: Final = 8


@dataclass(frozen=True)
class Slots:
    """Tokens of one or more requests, and where each group keeps them.

    `blocks` has a row per group. Block 0 stands for "not kept": such tokens are passed over. Rows
    of state groups, which do not keep tokens, are 0 throughout.
    """

    tokens: Ints
    positions: Ints
    blocks: tuple[Ints, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int) -> Slots:
        cut = slice(start, stop)
        return Slots(
            self.tokens[cut], self.positions[cut], tuple(rows[cut] for rows in self.blocks)
        )


@dataclass(frozen=True)
class Wrong:
    """One head's row of one token that does not hold what it must."""

    index: int
    """Of the token within the slots that were read."""
    layer: int
    head: int
    kind: str
    position: int
    channel: int
    """First wrong word (8 bytes, or an element where pages are kept by element)."""
    expected: str
    seen: str


@dataclass
class Reading:
    """What reading some slots back gave."""

    difference: Ints
    """Per token: 0 if right, else a hash of how it is wrong."""
    wrong_rows: int
    examples: list[Wrong]
    nbytes: int


class Oracle:
    """Over one rank's cache."""

    def __init__(self, cache: Cache, seed: int) -> None:
        self._cache = cache
        self._seed = seed
        self._slot_bytes = sum(shape.slot_bytes * len(shape.layers) for shape in cache.shapes)
        # None where a slot's words do not lie side by side.
        self._rows = [
            [Rows(view.tensor, view.base) if view.words == torch.int64 else None for view in views]
            for views in cache.views
        ]
        self._weights = [
            [_weights(view.base, view.words) for view in views] for views in cache.views
        ]

    def keys(self, slots: Slots) -> pattern.Words:
        """What decides the content of each slot."""
        return pattern.keys(slots.tokens, slots.positions, self._seed)

    def fill(self, slots: Slots) -> None:
        """Write whole slots: one call per group of layers that share blocks."""
        keys = self.keys(slots).view(np.int64)
        for number, shape in enumerate(self._cache.shapes):
            if not shape.state:
                self._fill_group(number, slots.positions, slots.blocks[number], keys)

    def fill_layers(self, slots: Slots, start: int, stop: int) -> None:
        """Write some layers of whole slots, counted from the rank's first."""
        keys = self.keys(slots).view(np.int64)
        for number, shape in enumerate(self._cache.shapes):
            if shape.state or start >= len(shape.layers):
                continue
            for view in self._cache.views[number]:
                own = replace(
                    view,
                    tensor=view.tensor[:, :, start:stop],
                    base=view.base[start:stop],
                )
                where = _where(shape, slots.positions, slots.blocks[number])
                own.tensor[where] = _expected(own, torch.from_numpy(keys))

    def fill_state(self, number: int, block: int, key: Ints) -> None:
        """Write the page that holds a request's state, in every layer of group `number`."""
        self._fill_group(number, np.zeros(1, np.int64), np.array([block]), key)

    def _fill_group(self, number: int, positions: Ints, blocks: Ints, keys: Ints) -> None:
        shape = self._cache.shapes[number]
        for view, rows in zip(self._cache.views[number], self._rows[number], strict=True):
            if rows is not None:
                rows.fill(blocks, positions % shape.block_tokens, keys)
            else:
                where = _where(shape, positions, blocks)
                view.tensor[where] = _expected(view, torch.from_numpy(keys))

    def read(self, slots: Slots) -> Reading:
        """Compare slots with what they must hold, byte for byte."""
        reading = Reading(np.zeros(len(slots), np.int64), 0, [], 0)
        first = 0
        for part in self._parts(slots):
            key = torch.from_numpy(self.keys(part).view(np.int64))
            for number, blocks in enumerate(part.blocks):
                self._read_group(number, part.positions, key, blocks, first, reading)
            first += len(part)
        return reading

    def read_state(self, number: int, block: int, position: int, key: Ints) -> Reading:
        """Compare such a page with what it must hold once `position` is computed."""
        reading = Reading(np.zeros(1, np.int64), 0, [], 0)
        where = np.array([position]), torch.from_numpy(key), np.array([block])
        self._read_group(number, *where, 0, reading)
        return reading

    def _read_group(
        self,
        number: int,
        positions: Ints,
        key: torch.Tensor,
        blocks: Ints,
        first: int,
        reading: Reading,
    ) -> None:
        shape = self._cache.shapes[number]
        kept = np.flatnonzero(blocks)
        if not len(kept):
            return
        where = _where(shape, positions[kept], blocks[kept])
        for view, weights in zip(self._cache.views[number], self._weights[number], strict=True):
            seen = view.tensor[where]
            expected = _expected(view, key[torch.from_numpy(kept)])
            reading.nbytes += seen.numel() * seen.element_size()
            if torch.equal(seen, expected):
                continue
            unlike = (seen.to(torch.int64) - expected.to(torch.int64)) * weights
            at = kept + first
            reading.difference[at] += unlike.flatten(1).sum(1).numpy()
            _describe(shape, view, seen, expected, at, positions[kept], reading)

    def _parts(self, slots: Slots) -> Iterator[Slots]:
        size = max(1, CHUNK_BYTES // self._slot_bytes)
        for start in range(0, len(slots), size):
            yield slots.part(start, start + size)


def warm_up(device: Device, shapes: tuple[GroupShape, ...]) -> None:
    """Do everything once on a cache aside: what libraries do at first use takes half a second."""
    oracle = Oracle(allocate(device, shapes, 3), 0)
    size = max(shape.block_tokens for shape in shapes)
    for count in (size, max(1, size // 2)):  # a whole block, and a part of one
        positions = np.arange(count)
        blocks = tuple(1 + positions // shape.block_tokens % 2 for shape in shapes)
        slots = Slots(positions, positions, blocks)
        oracle.fill(slots)
        oracle.read(slots)


def _where(shape: GroupShape, positions: Ints, blocks: Ints) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(blocks), torch.from_numpy(positions % shape.block_tokens)


def _expected(view: View, key: torch.Tensor) -> torch.Tensor:
    tail = (1,) * view.base.dim()
    return (view.base.unsqueeze(0) ^ key.view(-1, *tail)).view(view.words)


def _weights(base: torch.Tensor, words: torch.dtype) -> torch.Tensor:
    """Odd factors, so that no single wrong word hashes to nothing."""
    shape = base.view(words).shape
    flat = pattern.mix(np.arange(int(np.prod(shape)), dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(flat.view(np.int64)).view(shape)


def _describe(
    shape: GroupShape,
    view: View,
    seen: torch.Tensor,
    expected: torch.Tensor,
    at: Ints,
    positions: Ints,
    reading: Reading,
) -> None:
    rows = (seen != expected).any(-1).nonzero()
    reading.wrong_rows += len(rows)
    for row in rows[: max(0, MOST_DESCRIBED - len(reading.examples))]:
        place = dict(zip(view.order, row[1:].tolist(), strict=False))
        there, here = seen[tuple(row)], expected[tuple(row)]
        channel = int((there != here).nonzero()[0, 0])
        token = int(row[0])
        kind = "latent" if shape.latent else "KV"[place.get("k", view.kind)]
        kind = "state" if shape.state else kind
        reading.examples.append(
            Wrong(
                int(at[token]), shape.layers[place["l"]], shape.heads[place.get("h", 0)], kind,
                int(positions[token]), channel, _hex(here[channel]), _hex(there[channel]),
            )
        )  # fmt: skip


def _hex(word: torch.Tensor) -> str:
    return word.numpy().tobytes().hex()
