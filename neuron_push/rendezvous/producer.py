"""The prefill side of a transfer: match registrations with prompts, WRITE, drain.

A *source* is a prompt being computed or held here; a *sending* is one attempt of one decode
rank. They meet in either order:

    WAITING --source offered--> SENDING --all tokens landed--> ENDED (served)
       ^                           |
       +--- source preempted ------+
       |                           | cancelled, source ended, WRITE failed, peer lost
       |                           v
       +--- the same ---------> STOPPING --no WRITE in flight, or fenced--> ENDED

A registration to *pull* has nothing posted: while SENDING, its blocks are lent once all of them
are settled (loans.py), and the decode rank is what drains.

Nothing is posted in any state but SENDING, and only tokens that were never posted for that
attempt: a repeated WRITE could land after the decode rank has let its blocks go. A source's
pin goes when no WRITE reads its blocks and none will (promise 2).

`SENDING_MOVES` is the whole transition table; leaving it is a defect of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from neuron_push.errors import ProtocolError
from neuron_push.geometry import Region
from neuron_push.plan import Blocks, Plan, StagedPlan
from neuron_push.protocol import Match, Register
from neuron_push.rendezvous.cuts import Cut
from neuron_push.rendezvous.links import Link
from neuron_push.rendezvous.parts import Parted
from neuron_push.rendezvous.ranges import RangeSet
from neuron_push.transport import AgentName, WriteId


class SendingState(Enum):
    """Where a decode rank's attempt stands on this prefill rank."""

    WAITING = "waiting"
    SENDING = "sending"
    STOPPING = "stopping"
    ENDED = "ended"


SENDING_MOVES = {
    SendingState.WAITING: {SendingState.SENDING, SendingState.STOPPING, SendingState.ENDED},
    SendingState.SENDING: {SendingState.WAITING, SendingState.STOPPING, SendingState.ENDED},
    SendingState.STOPPING: {SendingState.ENDED},
    SendingState.ENDED: set(),
}


@dataclass(slots=True, eq=False)
class Source:
    """A prompt on this rank: how far it is settled, and which blocks hold it."""

    number: int
    request: str
    match: Match
    blocks: list[Blocks] = field(default_factory=list)
    settled: int = 0
    pin: int = -1
    near: bool = False  # its last tokens are being computed
    last: bool = False  # prefill is complete
    finished: float | None = None  # when the request left the engine with its prompt complete
    gone: bool = False  # preempted or ended: its blocks are not to be read any more
    writes: int = 0  # WRITEs in flight that read its blocks
    loans: int = 0  # decode ranks that may be READing them
    computing: int = 0  # tokens that `step` reaches, where layers are streamed
    step: int = 0
    reached: dict[int, int] = field(default_factory=dict)  # tokens settled, by part from 1
    # A dict for its order, so that a simulated world replays exactly.
    sendings: dict[Sending, None] = field(default_factory=dict)
    served: set[tuple[str, int]] = field(default_factory=set)  # decode ranks that are done
    sharers: int = 1

    @property
    def handed_over(self) -> bool:
        """Whether every decode rank that wants some of it is done."""
        return self.finished is not None and len(self.served) >= self.sharers

    @property
    def idle(self) -> bool:
        """Whether nobody needs it and nobody reads it."""
        needless = self.gone or (self.handed_over and not self.sendings)
        return needless and not (self.writes or self.loans)


@dataclass(frozen=True, slots=True)
class Write:
    """One WRITE in flight: which tokens, from which source, by which way."""

    start: int
    stop: int
    source: Source
    generation: int  # ours
    agent: AgentName  # theirs
    posted: float  # when
    slab: int = -1  # ours, if it was packed there
    part: int = 0  # of the layers; 0: all


@dataclass(slots=True, eq=False)
class Want:
    """Tokens for which a slab of the decode rank was asked."""

    start: int
    stop: int
    plan: Plan
    asked: float
    slab: Region | None = None  # granted, while one of ours is waited for


@dataclass(slots=True, eq=False)
class Sending:
    """One decode rank's attempt: what it asked for and what was posted and has landed."""

    link: Link
    register: Register
    blocks: tuple[Blocks, ...]
    cut: Cut
    slab_cut: Cut  # of what goes through slabs, if not all does
    began: float
    expires: float
    state: SendingState = SendingState.WAITING
    source: Source | None = None
    posted: RangeSet = field(default_factory=RangeSet)
    landed: RangeSet = field(default_factory=RangeSet)
    writes: dict[WriteId, Write] = field(default_factory=dict)  # in flight
    wants: dict[int, Want] = field(default_factory=dict)  # by piece, when decode unpacks
    pieces: RangeSet = field(default_factory=RangeSet)  # that were posted into granted slabs
    parted: Parted = field(default_factory=Parted)  # posted part by part
    arrived: Parted = field(default_factory=Parted)  # landed part by part
    lender: Source | None = None  # whose blocks are lent, if decode READs
    sealing: bool = False  # all of them was READ, and a digest of it is being taken
    broken: bool = False  # a WRITE failed half way: quiet only when fenced
    cancelled: bool = False  # the decode rank waits for `Cancelled`
    started: float = 0.0  # when its first WRITE was posted, or its blocks were lent
    soon: bool = False
    reason: str = ""  # why it failed
    repeat_at: float = 0.0  # when the failure, or the loan, is to be told again

    def move(self, state: SendingState) -> None:
        if state not in SENDING_MOVES[self.state]:
            raise ProtocolError(f"sending {self.register.attempt}: {self.state} -> {state}")
        self.state = state

    @property
    def key(self) -> tuple[int, int]:
        return self.link.id, self.register.attempt

    @property
    def listed(self) -> int:
        """Blocks that its registration lists."""
        return sum(int(each.ids.size) for each in self.blocks)

    @property
    def complete(self) -> bool:
        return self.landed.covers(self.register.start, self.register.stop)

    @property
    def quiet(self) -> bool:
        return not self.writes and not self.broken and self.lender is None

    @property
    def granted(self) -> list[int]:
        """Pieces that have a slab of the decode rank and wait for one of ours."""
        return [number for number, want in self.wants.items() if want.slab is not None]

    def next_piece(self) -> tuple[int, int, Plan] | None:
        """The next tokens to post and by which plan, or None if nothing new is settled."""
        if self.state is not SendingState.SENDING or self.source is None or self.register.pull:
            return None
        taken = self.posted
        if self.wants or self.link.parts:
            taken = RangeSet()
            asked = ((want.start, want.stop) for want in self.wants.values())
            begun = self.parted.of(1) if self.link.parts else ()  # the first part goes first
            for begin, end in (*self.posted, *asked, *begun):
                taken.add(begin, end)
        register, plan = self.register, self.link.plan
        assert plan is not None
        piece = self.cut.next(taken, register.start, register.stop, self.source.settled)
        if piece is not None and isinstance(plan, StagedPlan) and plan.straight:
            chosen = plan.plan_of(*piece, self.source.blocks, self.blocks)
            return (*self.slab_cut.shorter(*piece), plan) if chosen is plan else (*piece, chosen)
        return None if piece is None else (*piece, plan)

    def next_part(self) -> tuple[int, int, int] | None:
        """The next tokens of a part of the layers: (start, stop, part), or None.

        Only of tokens that are not posted whole, so after `next_piece` has nothing more.
        """
        source, register = self.source, self.register
        if self.state is not SendingState.SENDING or source is None or register.pull:
            return None
        parts = len(self.link.parts)
        cut = replace(self.cut, most=self.cut.most * parts)
        for part in range(1, parts + 1):
            taken = RangeSet()
            for low, high in (*self.posted, *self.parted.of(part)):
                taken.add(low, high)
            settled = max(source.settled, source.reached.get(part, 0))
            piece = cut.next(taken, register.start, register.stop, settled)
            if piece is not None:
                return *piece, part
        return None


def extend(groups: list[Blocks], group: int, first: int, packed: bytes) -> None:
    """Append newly settled blocks to a source's list, or replace it if they do not follow."""
    added = Blocks.unpack(first, packed)
    if group >= len(groups):
        groups.append(added)
    elif not added.ids.size:
        return
    elif first == groups[group].first + groups[group].ids.size:
        joined = np.concatenate([groups[group].ids, added.ids])
        groups[group] = Blocks(groups[group].first, joined)
    else:
        groups[group] = added
