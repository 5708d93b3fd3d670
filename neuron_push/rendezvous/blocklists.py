"""Block lists as messages carry them, to and from a rank's own."""

from __future__ import annotations

from collections.abc import Sequence

from neuron_push.errors import PeerError
from neuron_push.geometry import Geometry
from neuron_push.plan import Blocks, decode_runs, encode_runs
from neuron_push.protocol import BlockList


def decode_blocks(
    geometry: Geometry, lists: Sequence[BlockList], start: int, stop: int, most: int
) -> tuple[Blocks, ...]:
    """The blocks that hold tokens [start, stop), group by group; raises PeerError if they cannot.

    `geometry` is that of the rank whose blocks are named; a group may list so many at `most`.
    """
    groups = geometry.groups
    if len(lists) != len(groups):
        raise PeerError(f"{len(lists)} block lists for {len(groups)} KV groups")
    blocks = []
    for group, entry in zip(groups, lists, strict=True):
        ids = decode_runs(entry.runs, most)
        if entry.first < 0 or (ids.size and int(ids.max()) >= group.num_blocks):
            raise PeerError("a block id or index lies outside the registered pages")
        low, high = entry.first, entry.first + ids.size
        if start < stop and group.kind in ("full", "mla") and not (
            low * group.block_tokens <= start and stop <= high * group.block_tokens
        ):  # fmt: skip
            raise PeerError(
                f"blocks {low}..{high} of {group.block_tokens} tokens do not hold tokens "
                f"{start}..{stop}"
            )
        blocks.append(Blocks(entry.first, ids))
    return tuple(blocks)


def encode_blocks(
    geometry: Geometry, blocks: Sequence[Blocks], start: int, stop: int
) -> tuple[BlockList, ...]:
    """The blocks of a prompt that hold tokens [start, stop), for a message."""
    lists = []
    for group, table in zip(geometry.groups, blocks, strict=True):
        first, ids = table.first, table.ids
        if group.kind != "state":
            low = max(first, start // group.block_tokens)
            high = -(-stop // group.block_tokens)
            first, ids = low, ids[low - first : max(low, high) - first]
        lists.append(BlockList(first, tuple(encode_runs(ids.tolist()))))
    return tuple(lists)
