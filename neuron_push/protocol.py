"""Messages, versions and limits: everything that crosses a wire, and nothing else.

Two channels carry these types:

* the *side channel* (TCP, one address per engine and one per worker rank) carries
  `Who`/`EngineInfo`, `Announce`/`Announced`, `Hello`/`Welcome`, `Events`/`EventBatch` and
  `Holds`/`Held`, or `Refusal`;
* *NIXL notifications* (worker to worker, once both sides have said hello) carry
  everything else.

A frame is two magic bytes, one version byte and one MessagePack value. Field names say
prefill/decode or source/destination, never local/remote, so that a message means the
same on both ends.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from neuron_push.errors import PeerError
from neuron_push.geometry import Geometry, Region, Semantics

VERSION: Final = 1
MAGIC: Final = b"NP"

# A registration of a million tokens in fragmented 16-token blocks is about 400 KiB; UCX and
# LIBFABRIC both carry notifications of a megabyte.
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
# Slabs that one rank may offer.
MAX_SLABS: Final = 1024


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, positional, tagged by class name."""


# ---------------------------------------------------------------------------------------
# Side channel
# ---------------------------------------------------------------------------------------


class Address(msgspec.Struct, frozen=True, array_like=True):
    """A side-channel endpoint that others can reach."""

    host: str
    port: int


class Slabs(msgspec.Struct, frozen=True, array_like=True):
    """A rank's staging memory: slab i begins at byte i * `slab_bytes` of the region."""

    region: Region
    slab_bytes: int

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


class Who(_Message, frozen=True):
    """Asks an engine's listener who it is. Anyone may ask: routers, peers, people."""


class EngineInfo(_Message, frozen=True):
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


class Announce(_Message, frozen=True):
    """A worker rank tells its own engine's listener where it answers."""

    engine: str
    info: RankInfo
    semantics: Semantics


class Announced(_Message, frozen=True):
    """The listener has recorded the rank."""


class Hello(_Message, frozen=True):
    """A decode rank opens a link to a prefill rank.

    `ask` lists, per KV group of the decode rank, the global KV heads this prefill rank must
    provide. `sharers` counts the decode ranks of that engine that ask this prefill rank for
    anything: it serves a prompt to all of them before it lets go.
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


class Welcome(_Message, frozen=True):
    """The prefill rank accepts; notifications may flow once the decode rank has seen this."""

    engine: str
    rank: int
    incarnation: int
    agent: str
    metadata: bytes
    way: Literal["direct", "packed", "unpacked"] = "direct"  # as prefill has decided


class Why(_Message, frozen=True):
    """Asks an engine's listener why a request failed; `request` is any part of its id."""

    request: str


class Because(_Message, frozen=True):
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


class Events(_Message, frozen=True):
    """Asks for the trace events recorded since number `after`; 0 asks for all that are kept."""

    after: int = 0


class EventBatch(_Message, frozen=True):
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


class Holds(_Message, frozen=True):
    """Asks a decode engine whether it still holds KV blocks for a transfer."""

    transfer: str


class Held(_Message, frozen=True):
    """Blocks held for that transfer; 0 once nothing can land in them any more."""

    transfer: str
    blocks: int


class Refusal(_Message, frozen=True):
    """Readable reason why the other side's request cannot be served."""

    reason: str


# ---------------------------------------------------------------------------------------
# NIXL notifications
# ---------------------------------------------------------------------------------------


Side = Literal["prefill", "decode"]


class BlockList(msgspec.Struct, frozen=True, array_like=True):
    """One group's blocks: token block `first` + i lies in the i-th listed block.

    `runs` is flat [start, count, start, count, ...]; block 0 (null) means "not wanted".
    """

    first: int
    runs: tuple[int, ...]


class Match(msgspec.Struct, frozen=True, array_like=True):
    """How a registration finds its prompt.

    `transfer` is the router's id for this dispatch, or empty. `base` is the request id
    without the engine's random suffix. `fingerprint` digests the prompt and guards both.
    """

    transfer: str
    base: str
    fingerprint: bytes
    tokens: int


class Register(_Message, frozen=True):
    """Decode -> prefill: blocks reserved for tokens [start, stop); WRITE into them.

    start == stop says that nothing is wanted and the prompt may be let go.
    `attempt` grows with every registration of the decode engine's incarnation. `link` repeats
    the hello's: a copy that was sent over an earlier link may name blocks given back since.
    """

    attempt: int
    link: int
    match: Match
    start: int
    stop: int
    blocks: tuple[BlockList, ...]
    patience_ms: int


class Registered(_Message, frozen=True):
    """Prefill -> decode: the registration is known (sent again for every repeat)."""

    attempt: int


class Soon(_Message, frozen=True):
    """Prefill -> decode: the last tokens are being computed or sent; poll quickly."""

    attempt: int


class Done(_Message, frozen=True):
    """On a WRITE itself: this rank's share of tokens [start, stop) has landed."""

    attempt: int
    start: int
    stop: int
    nbytes: int = 0
    copies: int = 0
    piece: int = 0  # in a slab granted for this piece; 0: in the blocks themselves


class Need(_Message, frozen=True):
    """Prefill -> decode: a piece is ready for a slab. Repeated until granted.

    `piece` is a number above 0 that the prefill rank never uses again.
    """

    attempt: int
    piece: int


class Grant(_Message, frozen=True):
    """Decode -> prefill: the slab is for this piece and nobody else (sent for every repeat)."""

    attempt: int
    piece: int
    slab: int


class Return(_Message, frozen=True):
    """Prefill -> decode: no WRITE of this piece was or will be posted; the slab may be reused."""

    attempt: int
    piece: int


class Failed(_Message, frozen=True):
    """Prefill -> decode: this attempt will not complete. Not yet a promise of quiet."""

    attempt: int
    reason: str


class Cancel(_Message, frozen=True):
    """Decode -> prefill: stop; answer `Cancelled` when nothing is or will be in flight."""

    attempt: int
    reason: str


class Cancelled(_Message, frozen=True):
    """Prefill -> decode: no WRITE of this attempt is in flight and none will be posted."""

    attempt: int


class Alive(_Message, frozen=True):
    """Sign of life; `answer` asks for one in return."""

    answer: bool


class Move(_Message, frozen=True):
    """The sender's agent is being replaced; use the new one from now on.

    Two engines that serve each other have a link each way; `by` says which one this is about.
    """

    by: Side  # what the sender is on this link
    agent: str
    metadata: bytes


class Moved(_Message, frozen=True):
    """Nothing is or will be in flight from the sender towards the agents before this one."""

    by: Side
    agent: str


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
Notification = (
    Register
    | Registered
    | Soon
    | Done
    | Need
    | Grant
    | Return
    | Failed
    | Cancel
    | Cancelled
    | Alive
    | Move
    | Moved
)

_encoder = msgspec.msgpack.Encoder()
_side_channel_decoder = msgspec.msgpack.Decoder(SideChannelMessage)
_notification_decoder = msgspec.msgpack.Decoder(Notification)
_HEADER: Final = MAGIC + bytes([VERSION])


def encode(message: _Message) -> bytes:
    """Frame one message for either channel."""
    return _HEADER + _encoder.encode(message)


def decode_side_channel(frame: bytes) -> SideChannelMessage:
    """Parse one side-channel frame.

    Raises PeerError, saying what was wrong, for anything that is not a well-formed message of
    this version within the limits.
    """
    message: SideChannelMessage = _decode(frame, MAX_SIDE_CHANNEL, _side_channel_decoder)
    if isinstance(message, EngineInfo) and len(message.ranks) > MAX_RANKS:
        raise PeerError(f"EngineInfo lists {len(message.ranks)} ranks; the limit is {MAX_RANKS}")
    return message


def decode_notification(frame: bytes) -> Notification:
    """Parse one NIXL notification; raises PeerError as `decode_side_channel` does."""
    message: Notification = _decode(frame, MAX_NOTIFICATION, _notification_decoder)
    if isinstance(message, Register):
        _check_register(message)
    elif isinstance(message, Need | Grant | Return) and not 0 < message.piece <= MAX_PIECE:
        raise PeerError(f"{type(message).__name__} names piece {message.piece}")
    elif isinstance(message, Done) and not 0 <= message.start < message.stop:
        raise PeerError(f"Done names the empty or negative range {message.start}..{message.stop}")
    return message


def clip(text: str) -> str:
    """Shorten a text to what a message may carry."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def _decode(frame: bytes, limit: int, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    if len(frame) > limit:
        raise PeerError(f"message of {len(frame)} bytes exceeds the limit of {limit}")
    if frame[:2] != MAGIC:
        raise PeerError(f"not a neuron-push message: starts with {frame[:4]!r}")
    if len(frame) < 3 or frame[2] != VERSION:
        seen = frame[2] if len(frame) > 2 else "none"
        raise PeerError(
            f"protocol version {seen} is not {VERSION}: upgrade the older of the two engines"
        )
    try:
        return decoder.decode(memoryview(frame)[3:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"malformed message: {error}") from None


def _check_register(message: Register) -> None:
    texts = (message.match.transfer, message.match.base)
    if any(len(text) > MAX_TEXT for text in texts) or len(message.match.fingerprint) > 64:
        raise PeerError(f"Register carries an identifier longer than {MAX_TEXT}")
    if not 0 <= message.start <= message.stop <= message.match.tokens:
        raise PeerError(
            f"Register asks for tokens {message.start}..{message.stop} of {message.match.tokens}"
        )
    numbers = (message.attempt, message.link, message.patience_ms)
    if len(message.blocks) > MAX_GROUPS or min(numbers) < 0:
        raise PeerError("Register has a negative number or too many groups")
