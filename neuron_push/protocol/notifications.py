"""Messages that travel as NIXL notifications: one transfer, and the link it uses."""

from __future__ import annotations

from typing import Literal

import msgspec

from neuron_push.protocol.message import Message

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


class Register(Message, frozen=True):
    """Decode -> prefill: blocks reserved for tokens [start, stop); WRITE into them.

    start == stop says that nothing is wanted and the prompt may be let go. `pull` asks for the
    loan of the prompt's blocks instead, to READ them; it names the blocks that it READs into only
    where it wants a digest of what goes there.
    `attempt` grows with the registrations of the decode engine's incarnation; what is registered
    anew has a new number, and nothing said of the old one concerns it. `link` repeats
    the hello's: a copy that was sent over an earlier link may name blocks given back since.
    """

    attempt: int
    link: int
    match: Match
    start: int
    stop: int
    blocks: tuple[BlockList, ...]
    patience_ms: int
    pull: bool = False


class Registered(Message, frozen=True):
    """Prefill -> decode: the registration is known (sent again for every repeat)."""

    attempt: int


class Soon(Message, frozen=True):
    """Prefill -> decode: the last tokens are being computed or sent; poll quickly."""

    attempt: int


class Done(Message, frozen=True):
    """On a WRITE itself: this rank's share of tokens [start, stop) has landed.

    Where replicas take turns along the prompt (`Hello.stripe`), that is its own turns of the range.
    """

    attempt: int
    start: int
    stop: int
    nbytes: int = 0
    copies: int = 0
    piece: int = 0  # in a slab granted for this piece; 0: in the blocks themselves
    digest: bytes = b""  # of the bytes, if prefill takes one
    part: int = 0  # of so many `parts` of this rank's layers, from 1; 0: all layers
    parts: int = 0


class Need(Message, frozen=True):
    """Prefill -> decode: a piece is ready for a slab. Repeated until granted.

    `piece` is a number above 0 that the prefill rank never uses again.
    """

    attempt: int
    piece: int


class Grant(Message, frozen=True):
    """Decode -> prefill: the slab is for this piece and nobody else (sent for every repeat)."""

    attempt: int
    piece: int
    slab: int


class Return(Message, frozen=True):
    """Prefill -> decode: no WRITE of this piece was or will be posted; the slab may be reused."""

    attempt: int
    piece: int


class Lend(Message, frozen=True):
    """Prefill -> decode: the blocks that hold tokens [start, stop), to be READ. Repeated.

    They are held for this attempt until it says `Taken` or `Cancel`. Only `Kept` says that they
    were: a prefill rank that takes decode for dead lets them go. `link` repeats the registration's,
    here and in the answers.
    """

    attempt: int
    link: int
    blocks: tuple[BlockList, ...]


class Taken(Message, frozen=True):
    """Decode -> prefill: every READ of this attempt has ended. Repeated until answered."""

    attempt: int
    link: int


class Kept(Message, frozen=True):
    """Prefill -> decode: the blocks lent were held until `Taken` came, so what was READ is good."""

    attempt: int
    link: int
    digest: bytes = b""  # of what was lent, if decode's registration names blocks


class Failed(Message, frozen=True):
    """Prefill -> decode: this attempt will not complete. Not yet a promise of quiet."""

    attempt: int
    reason: str


class Cancel(Message, frozen=True):
    """Decode -> prefill: stop; answer `Cancelled` when nothing is or will be in flight.

    Of a pull: no READ is in flight and none will be posted.
    """

    attempt: int
    reason: str


class Cancelled(Message, frozen=True):
    """Prefill -> decode: no WRITE of this attempt is in flight and none will be posted."""

    attempt: int


class Alive(Message, frozen=True):
    """Sign of life; `answer` asks for one in return."""

    answer: bool


class Move(Message, frozen=True):
    """The sender's agent is being replaced; use the new one from now on.

    Two engines that serve each other have a link each way; `by` says which one this is about.
    """

    by: Side  # what the sender is on this link
    agent: str
    metadata: bytes


class Moved(Message, frozen=True):
    """Nothing is or will be in flight from the sender towards the agents before this one."""

    by: Side
    agent: str


Notification = (
    Register
    | Registered
    | Soon
    | Done
    | Need
    | Grant
    | Return
    | Lend
    | Taken
    | Kept
    | Failed
    | Cancel
    | Cancelled
    | Alive
    | Move
    | Moved
)
