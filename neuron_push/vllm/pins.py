"""References of our own on KV blocks.

vLLM frees a request's blocks without asking on preemption and on recompute after a failed
load. The references taken here keep them from being handed out again until every rank says
that nothing reads or writes them any more. They cost time per block, so blocks are *promised*
while vLLM's own references keep them, and *held* right before it lets go (custody.py). How many
blocks are held is bounded by the pool, and how long by leases, budgets and the fence: a full
pool makes new requests wait, not fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from time import monotonic
from typing import TYPE_CHECKING

from neuron_push.commands import unpack_ids

# How soon after the end of a transfer its blocks are expected back. A peer that is slower than
# this is not worth waiting for: vLLM preempts instead.
SOON = 0.2

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(slots=True)
class Pin:
    """Blocks held together, and the ranks that have let go of them."""

    since: float
    ended: float = 0.0  # when the transfer was over but for what is in flight
    size: int = 0  # blocks promised or held
    promised: list[bytes] = field(default_factory=list)  # packed ids, not held
    blocks: Sequence[KVCacheBlock] = ()  # held
    quiet: frozenset[int] = frozenset()

    @property
    def ids(self) -> list[int]:
        """Blocks promised and not held."""
        return [block for packed in self.promised for block in unpack_ids(packed)]


class Pins:
    """All pins of one engine. Lives on the scheduler's thread."""

    def __init__(self, pool: BlockPool, world: int) -> None:
        self._pool = pool
        self._world = world
        self._pins: dict[int, Pin] = {}
        self._next = 0
        self.blocks = 0  # promised or held

    def __len__(self) -> int:
        return len(self._pins)

    def new(self) -> int:
        """A new, empty pin."""
        self._next += 1
        self._pins[self._next] = Pin(monotonic())
        return self._next

    def promise(self, number: int, ids: Sequence[int], packed: bytes) -> None:
        """Name blocks that vLLM holds for now; `hold` takes references before it lets go.

        `packed` are the ids as they travel, kept because nobody needs to touch each of them then.
        A pin that every rank has let go of already takes no more.
        """
        pin = self._pins.get(number)
        if pin is not None and ids:
            pin.promised.append(packed)
            # Holes are at the front of a table.
            size = len(ids) if ids[0] else len(ids) - ids.count(0)
            pin.size += size
            self.blocks += size

    def promised(self, number: int) -> bool:
        """Whether vLLM's own references are needed, and no rank has let go yet."""
        pin = self._pins.get(number)
        return pin is not None and bool(pin.promised) and not pin.quiet

    def hold(self, number: int) -> None:
        """Take the promised references, unless the pin is gone; null blocks (id 0) need none."""
        pin = self._pins.get(number)
        if pin is not None and pin.promised:
            blocks = self._find(pin.ids)
            self._pool.touch(blocks)
            pin.blocks = [*pin.blocks, *blocks]
            pin.promised = []

    def _find(self, ids: Sequence[int]) -> list[KVCacheBlock]:
        table = self._pool.blocks
        if 0 in ids:
            return [table[block] for block in ids if block]
        return list(itemgetter(*ids)(table)) if len(ids) > 1 else [table[block] for block in ids]

    def ends(self, number: int) -> None:
        """The transfer is over; its blocks come back when what is in flight has drained."""
        pin = self._pins.get(number)
        if pin is not None:
            pin.ended = monotonic()

    def soon(self) -> bool:
        """Whether blocks are about to come back, so that a short wait pays."""
        since = monotonic() - SOON
        return any(pin.ended > since for pin in self._pins.values())

    def quiet(self, number: int, rank: int) -> None:
        """A rank is done with a pin; the last one frees the blocks. Repeats do nothing."""
        pin = self._pins.get(number)
        if pin is None:
            return
        pin.quiet |= {rank}
        if len(pin.quiet) >= self._world:
            self.drop(number)

    def drop(self, number: int) -> None:
        """Free a pin that no rank knows."""
        pin = self._pins.pop(number)
        self.blocks -= pin.size
        if pin.blocks:
            self._pool.free_blocks(reversed(pin.blocks))

    def held(self, number: int) -> int:
        """Blocks under a pin; 0 for one that is gone. Any thread may ask."""
        pin = self._pins.get(number)
        return pin.size if pin is not None else 0

    def oldest_age(self) -> float:
        """Age in seconds of the oldest pin; 0 if there is none."""
        first = next(iter(self._pins.values()), None)
        return monotonic() - first.since if first else 0.0
