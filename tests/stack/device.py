"""A played model and its device: KV bytes that follow from the tokens, written in their time.

The value of a token's KV is a hash of everything up to it, so a token read from a wrong place is
noticed, whichever it is; so is the next token, so a right answer was computed rightly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from neuron_push import layouts
from neuron_push.accelerator import CpuAccelerator, Slab

LAYERS, HEADS, WIDTH = 2, 2, 2
CANARY = -0x0BADCAFE
_SALT = np.random.default_rng(1).integers(1, 1 << 30, (LAYERS, 2, HEADS, WIDTH))
_MASK = (1 << 30) - 1


class Golden:
    """A prompt, what is generated from it, and a hash of every prefix."""

    known: ClassVar[dict[tuple[int, ...], Golden]] = {}

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = len(prompt)
        self.tokens: list[int] = []
        self._hashes: list[int] = []
        for token in prompt:
            self._add(token)

    @classmethod
    def of(cls, prompt: Sequence[int]) -> Golden:
        found = cls.known.get(key := tuple(prompt))
        if found is None:
            found = cls.known[key] = cls(prompt)
        return found

    def _add(self, token: int) -> None:
        last = self._hashes[-1] if self._hashes else 12345
        self.tokens.append(token)
        self._hashes.append((last * 1103515245 + token * 40503 + 12345) & _MASK)

    def reach(self, count: int) -> None:
        while len(self.tokens) < count:
            self._add(3 + self._hashes[-1] % 490)

    def token(self, position: int) -> int:
        self.reach(position + 1)
        return self.tokens[position]

    def values(self, start: int, stop: int, heads: slice) -> np.ndarray:
        """(tokens, layers, K and V, heads, channels) of int32."""
        self.reach(stop)
        hashes = np.array(self._hashes[start:stop], np.int64)
        salted = hashes[:, None, None, None, None] * _SALT[:, :, heads] >> 7
        return (salted & _MASK).astype(np.int32)


class Memory:
    """KV caches of one rank: an array per layer, seen as (2, blocks, heads, tokens, channels)."""

    def __init__(self, fabric, blocks: int, block: int, heads: slice, order: str) -> None:
        count = heads.stop - heads.start
        shape = (2, blocks, count, block, WIDTH)
        if order == "NHD":
            shape = (2, blocks, block, count, WIDTH)
        self.block, self.heads = block, heads
        self.stores = [np.full(shape, CANARY, np.int32) for _ in range(LAYERS)]
        axes = (0, 1, 3, 2, 4) if order == "NHD" else (0, 1, 2, 3, 4)
        self.layers = [store.transpose(axes) for store in self.stores]
        self._page = self.stores[0][0, 0].nbytes
        self._blocks = blocks
        for store in self.stores:
            fabric.adopt(store)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"model.layers.{number}.self_attn.attn": torch.from_numpy(array.view(np.float32))
            for number, array in enumerate(self.layers)
        }

    def block_at(self, address: int) -> int | None:
        """The block at an address; None for a slab's."""
        for store in self.stores:
            offset = address - store.ctypes.data
            if 0 <= offset < store.nbytes:
                return offset // self._page % self._blocks
        return None

    def poison(self, blocks: Sequence[int]) -> None:
        for layer in self.layers:
            layer[:, list(blocks)] = CANARY

    def _places(self, table: Sequence[int], start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(start, stop)
        return np.asarray(table)[positions // self.block], positions % self.block

    def write(
        self, layer: int, golden: Golden, table: Sequence[int], start: int, stop: int
    ) -> None:
        blocks, slots = self._places(table, start, stop)
        values = golden.values(start, stop, self.heads)[:, layer]
        self.layers[layer][:, blocks, :, slots] = values

    def wrong(self, golden: Golden, table: Sequence[int], stop: int) -> int | None:
        """The first token of [0, stop) whose KV is not what it should be."""
        blocks, slots = self._places(table, 0, stop)
        values = golden.values(0, stop, self.heads)
        for number, layer in enumerate(self.layers):
            alike = (layer[:, blocks, :, slots] == values[:, number]).all(axis=(1, 2, 3))
            if not alike.all():
                return int(alike.argmin())
        return None


@dataclass
class Work:
    """One request in one step: tokens [start, stop) are computed over those before them."""

    name: str
    golden: Golden
    table: list[int]
    start: int
    stop: int
    samples: bool


class Stream:
    """The device's work in order, two ticks per step: the layers one after the other."""

    def __init__(self, clock) -> None:
        self._clock = clock
        self.launched = self.done = 0
        self._queue: deque[Callable[[], None]] = deque()
        self._free_at = 0.0

    def launch(self, seconds: float, action: Callable[[], None]) -> float:
        """Queue one tick; returns when it ends."""
        self.launched += 1
        self._free_at = max(self._free_at, self._clock.now) + seconds
        self._queue.append(action)
        return self._free_at

    def advance(self) -> None:
        """The oldest tick ends."""
        self._queue.popleft()()
        self.done += 1


@dataclass
class Mark:
    """A fence: everything launched before it."""

    stream: Stream
    ticks: int

    def done(self) -> bool:
        return self.stream.done >= self.ticks

    def wait(self, timeout_s: float) -> bool:
        return self.done()


class PlayedAccelerator(CpuAccelerator):
    """Host memory behind a device that works while the CPU goes on."""

    name = "played"

    def __init__(self, fabric, stream: Stream) -> None:
        self._fabric, self._stream = fabric, stream
        self.slabs: list[np.ndarray] = []

    def planes(self, tensor, attention, place):
        return layouts.split_first(layouts.View.of(tensor), place)

    def record_fence(self):
        return Mark(self._stream, self._stream.launched)

    def slab(self, nbytes: int) -> Slab:
        memory = np.zeros(nbytes, np.uint8)
        self._fabric.adopt(memory)
        self.slabs.append(memory)
        return Slab(memory.ctypes.data, memory)
