"""What one process does, run once and remembered, in small numbers.

What a process does on an event depends on that process alone. Its states, messages, WRITEs and
questions are numbered as they are first met, and sets of them are bits of an integer.
"""

from __future__ import annotations

from dataclasses import dataclass

from neuron_push.rendezvous.links import base
from tests.model.bounds import NAMES, Bounds, P
from tests.model.engines import DecodeEngine, PrefillEngine
from tests.model.freeze import Key, clone
from tests.model.pairs import pair, shared
from tests.model.processes import Process

# A WRITE flies until it has landed; then prefill has yet to see that. One that was called broken
# may still land, but nobody is told. A READ flies until decode has seen its end.
FLYING, LANDED, BROKEN, SPOILT = "flying", "landed", "broken", "spoilt"


class Table:
    """Numbers for things, as they are first met."""

    def __init__(self):
        self.things, self._numbers = [], {}

    def bit(self, thing) -> int:
        number = self._numbers.setdefault(thing, len(self.things))
        if number == len(self.things):
            self.things.append(thing)
        return 1 << number

    def of(self, bits):
        """(bit, thing) for every bit."""
        while bits:
            bit = bits & -bits
            bits ^= bit
            yield bit, self.things[bit.bit_length() - 1]


@dataclass(frozen=True, slots=True)
class Seen:
    """What others look at of one rank."""

    open: tuple[str, ...]  # agents
    bases: frozenset[str]  # what the names of those share
    peers: tuple[str, ...]  # agents
    known: frozenset[str]  # what the names of those share


@dataclass(slots=True)
class Local:
    """One state of one process, and what others look at of it."""

    process: Process
    events: tuple
    open: tuple[str, ...]
    ranks: tuple[Seen, ...]
    memory: frozenset
    leftovers: tuple[str, ...]
    incarnation: int
    crippled: bool
    inbox: int = 0  # messages known to be for it
    known: int = 0  # of the messages looked at
    idle: int = 0  # messages that change nothing

    def hears(self, other: Local):
        """For each of its ranks the other's agents that it would hear of, as they know it."""
        return tuple(
            tuple(
                agent for their in other.ranks if mine.bases & their.known for agent in their.open
            )
            for mine in self.ranks
        )


@dataclass(slots=True)
class Change:
    """What one event does to a process and to the world, in numbers."""

    local: int
    sent: int = 0
    posted: int = 0
    asked: int = 0
    closed: tuple[str, ...] = ()
    received: tuple = ()
    unpacks: tuple = ()
    unpacked: tuple = ()
    broken: Exception | None = None


class Machines:
    """All states of processes that were met within some bounds."""

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self.pair = pair(bounds.staged, bounds.ranks)
        self.locals: list[Local] = []
        self._keys: dict[tuple, int] = {}
        self.changes: dict[tuple, Change] = {}
        self.messages, self.writes, self.asked = Table(), Table(), Table()
        self._starts: dict[tuple[int, int], int] = {}

    def start(self, side: int, incarnation: int) -> int:
        """A fresh process."""
        if (side, incarnation) not in self._starts:
            role = ("producer", "consumer")[side]
            process = Process(NAMES[side], role, incarnation, self.pair)
            count, process.prompt = self.bounds.blocks[side], "steps" not in self.bounds.slow
            if side == P:
                process.engine = PrefillEngine(process, count)
            else:
                process.engine = DecodeEngine(process, count, recompute=self.bounds.recompute)
            self._starts[side, incarnation] = self._intern(process)
        return self._starts[side, incarnation]

    def _shared(self, process):
        identities = (rank.identity for rank in process.ranks)
        return shared(self.pair) | {id(each): each for each in identities}

    def _intern(self, process: Process) -> int:
        key = Key(process.now, 13, self._shared(process)).of(process)
        number = self._keys.setdefault(key, len(self.locals))
        if number == len(self.locals):
            self.locals.append(seen(process))
        return number

    def change(self, number: int, key, event: tuple) -> Change:
        """What an event does to a process in a state; `key` stands for the event."""
        found = self.changes.get((number, key))
        if found is None:
            found = self.changes[number, key] = self._run(number, event)
        return found

    def _run(self, number, event) -> Change:
        original = self.locals[number].process
        process = clone(original, self._shared(original))
        try:
            effects = process.apply(event)
        except Exception as error:  # noqa: BLE001  told with its story
            return Change(number, broken=error)
        sent = posted = asked = 0
        for item in effects.sent:
            sent |= self.messages.bit(item)
        for item in effects.posted:
            posted |= self.writes.bit((item, FLYING))
        for item in effects.asked:
            asked |= self.asked.bit(item)
        return Change(
            self._intern(process), sent, posted, asked, tuple(effects.closed),
            tuple(effects.received), tuple(effects.unpacks), tuple(effects.unpacked),
        )  # fmt: skip

    def inbox(self, local) -> int:
        """Messages for agents of a process that exist."""
        total = len(self.messages.things)
        if local.known < total:
            for index in range(local.known, total):
                if self.messages.things[index][1] in local.open:
                    local.inbox |= 1 << index
            local.known = total
        return local.inbox


def seen(process: Process) -> Local:
    """A state of a process, as it is looked at."""
    engine = process.engine
    if isinstance(engine, DecodeEngine):
        memory = engine.writable() | process.granted()
    else:
        memory = engine.readable()
    ranks = []
    for rank in process.ranks:
        agents, peers = tuple(rank.open.values()), tuple(rank.peers())
        ranks.append(Seen(agents, frozenset(map(base, agents)), peers, frozenset(map(base, peers))))
    return Local(
        process, tuple(process.enabled()), process.open(), tuple(ranks), memory,
        tuple(process.leftovers()), process.incarnation, process.crippled,
    )  # fmt: skip
