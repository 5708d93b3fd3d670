"""Messages, versions and limits: everything that crosses a wire, and nothing else.

Two channels carry these types:

* the *side channel* (TCP, one address per engine and one per worker rank) carries
  `Who`/`EngineInfo`, `Announce`/`Announced`, `Hello`/`Welcome`, `Why`/`Because`,
  `Events`/`EventBatch` and `Holds`/`Held`, or `Refusal`;
* *NIXL notifications* (worker to worker, once both sides have said hello) carry
  everything else.

A frame is two magic bytes, one version byte and one MessagePack value. Field names say
prefill/decode or source/destination, never local/remote, so that a message means the
same on both ends.
"""

from __future__ import annotations

from neuron_push.protocol.codec import (
    clip,
    decode_notification,
    decode_side_channel,
    encode,
)
from neuron_push.protocol.limits import MAGIC, MAX_PIECE, MAX_TEXT, VERSION
from neuron_push.protocol.notifications import (
    Alive,
    BlockList,
    Cancel,
    Cancelled,
    Done,
    Failed,
    Grant,
    Kept,
    Lend,
    Match,
    Move,
    Moved,
    Need,
    Notification,
    Register,
    Registered,
    Return,
    Side,
    Soon,
    Taken,
)
from neuron_push.protocol.sidechannel import (
    Address,
    Announce,
    Announced,
    Because,
    EngineInfo,
    EventBatch,
    Events,
    Held,
    Hello,
    Holds,
    RankInfo,
    Refusal,
    SideChannelMessage,
    Slabs,
    TraceEvent,
    Welcome,
    Who,
    Why,
)

__all__ = [
    "MAGIC",
    "MAX_PIECE",
    "MAX_TEXT",
    "VERSION",
    "Address",
    "Alive",
    "Announce",
    "Announced",
    "Because",
    "BlockList",
    "Cancel",
    "Cancelled",
    "Done",
    "EngineInfo",
    "EventBatch",
    "Events",
    "Failed",
    "Grant",
    "Held",
    "Hello",
    "Holds",
    "Kept",
    "Lend",
    "Match",
    "Move",
    "Moved",
    "Need",
    "Notification",
    "RankInfo",
    "Refusal",
    "Register",
    "Registered",
    "Return",
    "Side",
    "SideChannelMessage",
    "Slabs",
    "Soon",
    "Taken",
    "TraceEvent",
    "Welcome",
    "Who",
    "Why",
    "clip",
    "decode_notification",
    "decode_side_channel",
    "encode",
]
