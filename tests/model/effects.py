"""What one step of one process does to the world: messages, WRITEs, READs, questions."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.rendezvous.shapes import SLAB_BYTES, Shape

BLOCK = Shape().block_tokens


class Broken(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Write:
    """A posted WRITE: whose, where to, and what it reads and touches. Torn as the reader likes."""

    writer: str  # agents
    target: str
    number: int
    attempt: int
    start: int
    stop: int
    pin: int
    source: tuple[tuple[int, tuple[str, int]], ...]  # (block, what it must hold)
    blocks: tuple[int, ...]  # of decode
    done: bytes
    slab: int = -1  # of decode, into which it goes instead of blocks
    piece: int = 0  # that the slab was granted for
    own: int = -1  # slab of prefill that it reads instead of blocks

    @property
    def into(self) -> str:
        """The agent whose memory it changes."""
        return self.target

    @property
    def lane(self) -> tuple[int, int]:
        """Ranks of prefill and decode between which it goes."""
        return rank_of(self.writer), rank_of(self.target)


@dataclass(frozen=True)
class Read:
    """A posted READ: whose, where from, and what it reads and touches. Torn as the reader likes."""

    reader: str  # agents
    owner: str
    number: int
    attempt: int
    start: int
    stop: int
    source: tuple[tuple[int, tuple[str, int]], ...]  # (block, what it must hold)
    blocks: tuple[int, ...]  # of decode
    slab: int = -1  # of decode, into which it goes instead of blocks

    @property
    def into(self) -> str:
        """The agent whose memory it changes."""
        return self.reader

    @property
    def lane(self) -> tuple[int, int]:
        """Ranks of prefill and decode between which it goes."""
        return rank_of(self.owner), rank_of(self.reader)

    @property
    def piece(self) -> int:
        """What its slab is kept for."""
        return self.number


@dataclass
class Effects:
    """What one step of one process does to the world."""

    sent: list[tuple[str, str, bytes]] = field(default_factory=list)  # from, to, message
    posted: list[Write | Read] = field(default_factory=list)
    asked: list[tuple] = field(default_factory=list)  # over the side channel
    closed: list[str] = field(default_factory=list)  # agents
    # Attempts that a request is about to decode over: (attempt, start, stop).
    received: list[tuple[int, int, int]] = field(default_factory=list)
    # Pieces (lane, attempt, start, stop, piece) whose unpacking begins, and whose has ended well.
    unpacks: list[tuple] = field(default_factory=list)
    unpacked: list[tuple] = field(default_factory=list)


def rank_of(agent: str) -> int:
    """The rank that an agent is of."""
    return int(agent.split("/")[1])


def check(held, complaint):
    if not held:
        raise Broken(complaint)


def touched(action, span, match):
    """What a WRITE or READ of some tokens reads, with what must be there, and what it changes."""
    prompt, first = match.fingerprint.decode(), span.start // BLOCK
    reads = held_by(span, action.source_blocks[0])
    return (
        tuple((block, (prompt, first + n)) for n, block in enumerate(reads)),
        held_by(span, action.destination_blocks[0]),
    )


def held_by(span, blocks):
    """The blocks in which some tokens are."""
    indexes = range(span.start // BLOCK, -(-span.stop // BLOCK))
    return tuple(int(blocks.ids[index - blocks.first]) for index in indexes)


def slab_number(region) -> int:
    """Which slab of its rank a region is; -1 for none."""
    return -1 if region is None else (region.base - (1 << 50)) // SLAB_BYTES
