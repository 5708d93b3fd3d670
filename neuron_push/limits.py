"""How much a peer may make this engine hold or look at, by name: the setting `limits`.

What lies beyond is refused with the limit's name, and nothing is kept of it. Not here is what
belongs to the messages themselves (`protocol/limits.py`), and what an int32 or an address can say
(`geometry.py`).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

__all__ = ["LIMITS", "Limits"]

_Bytes = Annotated[int, Meta(ge=1 << 16, le=1 << 28)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine takes from its peers at most."""

    notification: _Bytes = 1 << 20
    """Longest notification, bytes. Longer ones of peers are not read, and a registration of ours
    that would be longer fails its request. A million tokens in scattered blocks of 16 take 400 KiB.
    Both engines use the same."""

    side_channel: _Bytes = 16 << 20
    """Longest message of the side channel, bytes. An engine of 64 ranks and 128 layers lists about
    3 MiB of geometry. Routers, the doctor and other commands read 16 MiB, whatever is set here."""

    questions: Annotated[int, Meta(ge=1, le=1 << 16)] = 256
    """Questions to engines that one rank has open at once; a greeting of 64 ranks takes 64."""

    links: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    """Decode ranks linked to one prefill rank at once."""

    registrations: Annotated[int, Meta(ge=1, le=1 << 24)] = 16_384
    """Transfers that one decode rank may ask of one prefill rank at once, waiting or under way."""

    blocks: Annotated[int, Meta(ge=1, le=1 << 24)] = 1 << 20
    """Blocks that one registration or loan may list per KV group; in blocks of 16 they hold 16
    million tokens."""

    blocks_in_all: Annotated[int, Meta(ge=1, le=1 << 30)] = 1 << 24
    """Blocks that all of a decode rank's registrations at one prefill rank may list together, over
    all groups; 4 bytes each."""

    slabs: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    """Staging slabs that a rank may offer."""

    ranks: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    """Worker ranks that an engine may list."""

    regions: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    """Memory regions that a rank may have: one per layer, and per K or V. The deepest public models
    have about 130 layers."""

    groups: Annotated[int, Meta(ge=1, le=1 << 10)] = 64
    """KV groups that a rank may have. vLLM's hybrid cache manager makes fewer than ten."""

    planes: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    """Planes (K or V of one layer) that a rank may have, over all groups."""

    heads: Annotated[int, Meta(ge=1, le=1 << 16)] = 1024
    """KV heads per group. Attention without grouping reaches 128."""


LIMITS: Final = Limits()
