"""Block lists: which blocks hold a request's tokens, and how they travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from neuron_push.commands import unpack_ids
from neuron_push.errors import PlanError
from neuron_push.geometry import Group

__all__ = ["Blocks", "decode_runs", "encode_runs"]

Ints = npt.NDArray[np.int64]

# Block ids are int32 in every engine.
MAX_BLOCK: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of one group of one request, in token order.

    Block i of the list covers tokens [(first + i) * block_tokens, (first + i + 1) * block_tokens).
    An id below the geometry's reserved_blocks (vLLM's null block, 0) is a hole: its tokens are not
    present (out of the sliding window) or not wanted.
    """

    first: int
    ids: npt.NDArray[np.int32]

    @classmethod
    def unpack(cls, first: int, packed: bytes) -> Blocks:
        """Of packed ids (`commands.pack_ids`)."""
        return cls(first, np.array(unpack_ids(packed), np.int32))


def encode_runs(ids: Sequence[int] | npt.NDArray[Any]) -> list[int]:
    """Flat [start, count, start, count, ...] of ascending neighbours; a run from 0 is all zeros.

    The exception for 0 keeps a long row of null blocks two numbers long.
    """
    blocks = np.asarray(ids, dtype=np.int64)
    if blocks.size == 0:
        return []
    previous, following = blocks[:-1], blocks[1:]
    joined = np.where(previous == 0, following == 0, following == previous + 1)
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    counts = np.diff(starts, append=blocks.size)
    return np.column_stack((blocks[starts], counts)).ravel().tolist()


def decode_runs(runs: Sequence[int], limit: int) -> npt.NDArray[np.int32]:
    """The ids that `encode_runs` wrote, from a peer that may have sent anything.

    Raises:
        PlanError: an odd length, a negative start, a count below one, more than `limit` blocks in
            all, or an id beyond int32. Nothing larger than `runs` is allocated before that check.
    """
    if len(runs) % 2:
        raise PlanError(f"block runs hold {len(runs)} numbers, which is odd")
    if not runs:
        return np.empty(0, np.int32)
    try:
        pairs = np.array(runs, dtype=np.int64).reshape(-1, 2)
    except (OverflowError, TypeError, ValueError) as error:
        raise PlanError("block runs are not 64-bit integers") from error
    starts, counts = pairs[:, 0], pairs[:, 1]
    # Single counts are bounded first, so that their sum cannot wrap around.
    if counts.min() < 1 or counts.max() > limit or counts.sum() > limit:
        raise PlanError(f"block runs must hold between 1 and {limit} blocks (limits.blocks)")
    if starts.min() < 0 or starts.max() > MAX_BLOCK or (starts + counts).max() > MAX_BLOCK + 1:
        raise PlanError("a block id is out of range")
    ends = np.cumsum(counts)
    steps = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    steps[np.repeat(starts == 0, counts)] = 0
    ids: npt.NDArray[np.int32] = (np.repeat(starts, counts) + steps).astype(np.int32)
    return ids


def pages(blocks: Blocks, group: Group, reserved: int, who: str) -> Ints:
    """Page number of every listed page of a group, negative for holes.

    Raises:
        PlanError: an id is negative or not in this cache, or the list starts before token 0.
    """
    ids = blocks.ids.astype(np.int64)
    if blocks.first < 0 or (ids.size and (ids.min() < 0 or ids.max() >= group.num_blocks)):
        raise PlanError(f"{who} block list names blocks outside its cache of {group.num_blocks}")
    ids[ids < reserved] = -1
    per_block = group.block_tokens // group.page_tokens
    if per_block == 1:
        return ids
    return (ids[:, None] * per_block + np.arange(per_block)).ravel()
