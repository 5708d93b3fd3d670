"""Messages of the side channel: who an engine is, and hellos between worker ranks."""

from __future__ import annotations

from typing import Literal

import msgspec

from neuron_push.geometry import Geometry, Region, Semantics
from neuron_push.protocol.message import Message


class Address(msgspec.Struct, frozen=True, array_like=True):
    """A side-channel endpoint that others can reach."""

    host: str
    port: int


class Slabs(msgspec.Struct, frozen=True, array_like=True):
    """A rank's staging memory: slab i begins at byte i * `slab_bytes` of the region."""

    region: Region
    slab_bytes: int
    # True if nothing else of this rank is registered: whatever comes must come through a slab.
    sole: bool = False

    @property
    def count(self) -> int:
        """Number of slabs."""
        return self.region.length // self.slab_bytes

    def slab(self, index: int) -> Region:
        """The memory of one slab."""
        base = self.region.base + index * self.slab_bytes
        return Region(base, self.slab_bytes, self.region.memory, self.region.device)


class RankInfo(msgspec.Struct, frozen=True, array_like=True):
    """What one worker rank of an engine holds and where it answers."""

    rank: int
    incarnation: int
    address: Address
    geometry: Geometry
    slab_bytes: int = 0  # of each staging slab; 0 if the rank cannot reorder
    sole: bool = False  # as in Slabs


class Who(Message, frozen=True):
    """Asks an engine's listener who it is. Anyone may ask: routers, peers, people."""


class EngineInfo(Message, frozen=True):
    """An engine's answer to `Who`.

    `ranks` lists the worker ranks that have announced themselves; it is complete when it has
    `world` entries. `free_blocks` and `total_blocks` count logical KV blocks; -1 is unknown.
    """

    engine: str
    incarnation: int
    role: str  # "producer", "consumer" or "both", as vLLM's kv_role
    world: int
    tensor_parallel: int
    pipeline_parallel: int
    data_rank: int
    modes: tuple[str, ...]  # transfer modes served, e.g. ("push",)
    semantics: Semantics
    ranks: tuple[RankInfo, ...]
    free_blocks: int = -1
    total_blocks: int = -1
    block_tokens: int = 0
    software: tuple[tuple[str, str], ...] = ()  # ("vllm", "0.32.0"), ...


class Announce(Message, frozen=True):
    """A worker rank tells its own engine's listener where it answers."""

    engine: str
    info: RankInfo
    semantics: Semantics


class Announced(Message, frozen=True):
    """The listener has recorded the rank."""


class Hello(Message, frozen=True):
    """A decode rank opens a link to a prefill rank.

    `ask` lists, per KV group of the decode rank, the global KV heads this prefill rank must
    provide, and `stripe` (index, count, unit) which of several replicas it is: it sends every
    `count`-th unit of so many tokens. `sharers` counts the decode ranks of that engine that ask
    this prefill rank for anything: it serves a prompt to all of them before it lets go.
    """

    engine: str
    rank: int
    incarnation: int
    link: int  # drawn by the decode rank, grows with every hello it sends
    semantics: Semantics
    geometry: Geometry
    agent: str
    metadata: bytes
    ask: tuple[tuple[int, ...], ...]
    sharers: int
    slabs: Slabs | None = None  # for pages that decode unpacks; None if it cannot
    stripe: tuple[int, int, int] = (0, 1, 1)


class Welcome(Message, frozen=True):
    """The prefill rank accepts; notifications may flow once the decode rank has seen this."""

    engine: str
    rank: int
    incarnation: int
    agent: str
    metadata: bytes
    way: Literal["direct", "packed", "unpacked", "both"] = "direct"  # as prefill has decided
    readable: bool = True  # False if its pages are not registered: it can push, and lends nothing


class Why(Message, frozen=True):
    """Asks an engine's listener why a request failed; `request` is any part of its id."""

    request: str


class Because(Message, frozen=True):
    """Why it failed; empty if nothing is known."""

    reason: str


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to one transfer, on the recording process's monotonic clock."""

    at: float  # seconds
    name: str
    transfer: str
    detail: str = ""
    seconds: float = 0.0  # how long it took, for what takes time
    value: float = 0.0  # bytes or tokens, by the name


class Events(Message, frozen=True):
    """Asks for the trace events recorded since number `after`; 0 asks for all that are kept."""

    after: int = 0


class EventBatch(Message, frozen=True):
    """Trace events in order. `next` is what to ask `after` the next time.

    `now` (monotonic) and `wall` (Unix time) are the answering process's clocks at the answer,
    `lost` counts events that were overwritten before anybody asked. A process that does not
    trace answers a `size` of 0.
    """

    source: str
    size: int
    now: float
    wall: float
    next: int
    lost: int
    events: tuple[TraceEvent, ...]


class Holds(Message, frozen=True):
    """Asks a decode engine whether it still holds KV blocks for a transfer."""

    transfer: str


class Held(Message, frozen=True):
    """Blocks held for that transfer; 0 once nothing can land in them any more."""

    transfer: str
    blocks: int


class Refusal(Message, frozen=True):
    """Readable reason why the other side's request cannot be served."""

    reason: str


SideChannelMessage = (
    Who
    | EngineInfo
    | Announce
    | Announced
    | Hello
    | Welcome
    | Why
    | Because
    | Events
    | EventBatch
    | Holds
    | Held
    | Refusal
)
