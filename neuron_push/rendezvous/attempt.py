"""The decode side of a transfer: register, wait for every share, or drain.

    CONNECTING --linked--> WAITING --all shares landed--> ENDED (Received)
        |        ^            |
        |        |            | peer failed or lost, abandoned, out of patience
        |        |            v
        |        +------- DRAINING --every share quiet--> ENDED (ReceiveFailed)
        | never answered: the peer
        | was restarted, or had lost us
        |
        | no peer, abandoned, out of patience
        +--> ENDED (ReceiveFailed)

A *share* is what one prefill rank owes an attempt. It is *quiet* when no WRITE of that rank
for this attempt can land any more: it said `Cancelled`, or it was fenced, or everything it
owed has landed (a prefill rank never posts the same tokens of an attempt twice); if we READ it
(reads.py), none of our READs is in flight. The pin on
the blocks goes exactly when every share is quiet, never on a timeout (promise 1).

Registered anew, an attempt has another number on the wire: what was said of its earlier
registration, however late it comes, is no word about this one.

`ATTEMPT_MOVES` is the whole transition table; leaving it is a defect of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from neuron_push.commands import Receive
from neuron_push.config import Config
from neuron_push.errors import ProtocolError
from neuron_push.plan import Blocks
from neuron_push.protocol import Register
from neuron_push.rendezvous.landing import Landing
from neuron_push.rendezvous.links import Link
from neuron_push.rendezvous.parts import Parted
from neuron_push.rendezvous.ranges import RangeSet
from neuron_push.rendezvous.reads import Reading


def number_of(attempt: int, *, anew: bool = False) -> int:
    """The number on the wire of an attempt's registration, the first or the one made anew."""
    return 2 * attempt + anew


def attempt_of(number: int) -> int:
    """The attempt that a registration's number on the wire belongs to."""
    return number // 2


class AttemptState(Enum):
    """Where a decode attempt stands."""

    CONNECTING = "connecting"
    WAITING = "waiting"
    DRAINING = "draining"
    ENDED = "ended"


ATTEMPT_MOVES = {
    AttemptState.CONNECTING: {AttemptState.WAITING, AttemptState.ENDED},
    AttemptState.WAITING: {AttemptState.DRAINING, AttemptState.ENDED},
    AttemptState.DRAINING: {AttemptState.CONNECTING, AttemptState.ENDED},
    AttemptState.ENDED: set(),
}


@dataclass(slots=True, eq=False)
class Share:
    """What one prefill rank owes an attempt."""

    link: Link
    answered: bool = False
    quiet: bool = False
    landed: RangeSet = field(default_factory=RangeSet)
    landing: Landing = field(default_factory=Landing)  # of a staged share
    reading: Reading | None = None  # if we READ it
    parted: Parted = field(default_factory=Parted)  # what landed of some layers only
    parts: int = 0  # how many parts its layers come in, if they do

    @property
    def owed(self) -> bool:
        """Whether its peer is still needed."""
        return not self.quiet if self.reading is None else not self.reading.kept

    def holds(self, start: int, stop: int) -> bool:
        """Whether the tokens [start, stop) are here and good."""
        good = self.reading is None or self.reading.kept
        return good and self.landed.covers(start, stop)


@dataclass(slots=True, eq=False)
class Attempt:
    """One registration of one request, on this decode rank."""

    command: Receive
    began: float
    deadline: float
    state: AttemptState = AttemptState.CONNECTING
    shares: dict[int, Share] = field(default_factory=dict)
    register: Register | None = None  # but for the link
    reason: str = ""
    reported: bool = False
    sent: int = 0  # how often it was registered
    again: bool = False  # to be connected anew once it is quiet
    anew: bool = False  # that has happened, which it does once
    announced: bool = False  # bytes are on the way: poll quickly
    send_at: float = 0.0
    wait: float = 0.0

    def move(self, state: AttemptState) -> None:
        if state not in ATTEMPT_MOVES[self.state]:
            raise ProtocolError(f"attempt {self.command.attempt}: {self.state} -> {state}")
        self.state = state

    def wait_longer(self, config: Config, now: float) -> None:
        """Repeat what was said, later each time."""
        self.wait = min(max(self.wait * 2, config.resend), config.resend_most)
        self.send_at = now + self.wait

    @property
    def number(self) -> int:
        """The number of its registration on the wire."""
        return number_of(self.command.attempt, anew=self.anew)

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        """The reserved blocks, group by group."""
        lists = zip(self.command.first, self.command.blocks, strict=True)
        return tuple(Blocks.unpack(first, packed) for first, packed in lists)

    @property
    def draining(self) -> bool:
        """Whether nobody wants its bytes any more."""
        return self.state is AttemptState.DRAINING

    @property
    def answered(self) -> bool:
        """Whether any prefill rank has said anything about it."""
        return any(share.answered for share in self.shares.values())

    @property
    def unpacking(self) -> bool:
        """Whether its blocks are being written by ourselves."""
        return any(share.landing.running for share in self.shares.values())

    @property
    def wants_nothing(self) -> bool:
        return self.command.start == self.command.stop
