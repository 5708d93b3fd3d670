"""The version and the limits of both channels.

Constants are part of the protocol: a peer may not exceed them, or they hold before any settings are
known (the side channel answers routers and strangers). `Limits` is what an operator may set.
"""

from __future__ import annotations

from typing import Final

import msgspec

VERSION: Final = 2
MAGIC: Final = b"NP"

# Unless set otherwise. A registration of a million tokens in fragmented 16-token blocks is about
# 400 KiB; UCX and LIBFABRIC both carry notifications of a megabyte.
MAX_NOTIFICATION: Final = 1 << 20
# An engine of 64 ranks and 128 layers lists about 3 MiB of geometry.
MAX_SIDE_CHANNEL: Final = 16 << 20
# Longest identifier, reason or address that a peer may send, in bytes.
MAX_TEXT: Final = 512
# Blocks that one registration may list per group; 16 million tokens in 16-token blocks.
MAX_BLOCKS: Final = 1 << 20
MAX_GROUPS: Final = 64
MAX_RANKS: Final = 4096
# Numbers of staged pieces; one per MiB would reach this after an exabyte.
MAX_PIECE: Final = 1 << 40
# Bytes of a digest.
MAX_DIGEST: Final = 64
# Parts of a prompt's layers that travel apart.
MAX_PARTS: Final = 64
# Slabs that one rank may offer.
MAX_SLABS: Final = 1024


class Limits(msgspec.Struct, frozen=True):
    """What an engine's settings say of messages to and from its peers."""

    notification: int = MAX_NOTIFICATION  # bytes


LIMITS: Final = Limits()
