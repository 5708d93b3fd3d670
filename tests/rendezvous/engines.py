"""The scheduler half of an engine, reduced to what touches blocks: pins, offers, attempts.

It frees its own reference whenever it likes, as vLLM does; a block goes back, and is reused
(its content becomes a canary), when every rank has also reported the pin.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from neuron_push.commands import (
    Abandon,
    Compute,
    Layers,
    Offer,
    Receive,
    Received,
    ReceiveFailed,
    Retire,
    Settle,
    Unpinned,
    pack_ids,
)
from neuron_push.protocol import Address, Match, RankInfo
from neuron_push.rendezvous.parts import parts_of
from tests.rendezvous.memory import CANARY
from tests.rendezvous.net import Process, engine_info
from tests.rendezvous.shapes import BLOCKS, Shape


@dataclass(eq=False)
class Pin:
    """References on a source's blocks: the engine's own, and one per rank that reads them."""

    ranks: int
    blocks: list[int] = field(default_factory=list)
    own: bool = True
    unpinned: set[int] = field(default_factory=set)

    def released(self, rank: int) -> bool:
        return rank in self.unpinned

    @property
    def free(self) -> bool:
        return not self.own and len(self.unpinned) == self.ranks


@dataclass(eq=False)
class Attempt:
    """One registration, as its scheduler half and the oracle see it."""

    number: int
    prompt: str
    start: int
    stop: int
    first: int
    blocks: list[int]
    prefill: str
    hold_failure: bool
    own: bool = True
    abandoned: bool = False
    reported: dict[int, bool] = field(default_factory=dict)  # rank -> success
    unpinned: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Engine:
    """One engine process group; a restart makes a new one."""

    world: object
    name: str
    shape: Shape
    role: str
    incarnation: int
    up: bool = True
    holder: dict[int, int] = field(default_factory=dict)  # block -> attempt or pin
    memory: dict[int, tuple] = field(default_factory=dict)  # prefill: block -> content
    cells: dict[tuple, tuple] = field(default_factory=dict)  # decode
    parts: dict[tuple, dict] = field(default_factory=dict)  # decode: what came by parts of layers
    pins: dict[int, Pin] = field(default_factory=dict)
    attempts: dict[int, Attempt] = field(default_factory=dict)
    numbers: int = 0
    retired: set[int] = field(default_factory=set)  # sources

    def __post_init__(self):
        self.processes = [
            Process(self.world, self, rank, self.incarnation) for rank in range(self.shape.world)
        ]
        self.sent = [0.0] * len(self.processes)

    def write(self, cell, value, part=0):
        """A decode cell is written, whole or one part of its layers."""
        if part:
            self.parts.setdefault(cell, {})[part] = value
        else:
            self.cells[cell] = value
            self.parts.pop(cell, None)

    def content(self, cell, prefill: Shape):
        """What lies in a decode cell, written whole or by all parts of the layers alike."""
        found = self.parts.get(cell, {})
        values = set(found.values())
        if len(found) == len(parts_of(prefill.geometry(cell[3]))) and len(values) == 1:
            return values.pop()
        return self.cells.get(cell)

    def info(self):
        ranks = tuple(
            RankInfo(p.rank, p.incarnation, p.address, p.identity.geometry, *_slabs(p.identity))
            for p in self.processes
        )
        return engine_info(self, self.role, ranks)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def command(self, command):
        """To every rank, in order, each at its own time."""
        for rank, process in enumerate(self.processes):
            now = self.world.now
            self.sent[rank] = max(self.sent[rank], now + self.world.rng.uniform(0, 0.002))
            process.later(self.sent[rank] - now, command)

    def take(self, count: int, holder: int) -> list[int] | None:
        """Free blocks in random order, or None if there are not enough."""
        free = [block for block in range(1, BLOCKS) if block not in self.holder]
        if len(free) < count:
            return None
        blocks = self.world.rng.sample(free, count)
        self.holder.update(dict.fromkeys(blocks, holder))
        return blocks

    def give_back(self, blocks: list[int]):
        for block in blocks:
            del self.holder[block]
            self.memory[block] = CANARY

    # -------------------------------------------------------------------- decode

    def receive(self, match, prompt, prefill, *, start=0, hold=False, patience=3.0, pull=False):
        """Reserve blocks and register them; returns the attempt, or None without blocks."""
        size, number = self.shape.block_tokens, self.number()
        first = start // size
        count = -(-match.tokens // size) - first if start < match.tokens else 0
        blocks = self.take(count, number)
        if blocks is None:
            return None
        attempt = Attempt(
            number, prompt, start, match.tokens, first, blocks, prefill.rstrip("~"), hold
        )  # fmt: skip
        self.attempts[number] = attempt
        self.command(
            Receive(number, f"r{number}", Address(prefill, 0), "", match, start, match.tokens,
                    (first,), (pack_ids(list(blocks)),), number if blocks else -1, patience, hold,
                    pull=pull and bool(blocks))
        )  # fmt: skip
        return attempt

    def abandon(self, attempt: Attempt):
        """The client left, or the request failed elsewhere: own reference back at once."""
        if not attempt.abandoned and self.up:
            attempt.abandoned = True
            self.command(Abandon(attempt.number, "the client left"))
            self.drop(attempt)

    def drop(self, attempt: Attempt):
        """The engine's own reference goes; what was received must still be there."""
        if not attempt.own:
            return
        if (
            self.up
            and len(attempt.reported) == len(self.processes)
            and all(attempt.reported.values())
        ):
            for process in self.processes:
                self.world.memory.check_received(process, attempt)
        attempt.own = False
        self._free(attempt)

    def _free(self, attempt: Attempt):
        if not attempt.own and len(attempt.unpinned) == len(self.processes):
            self.give_back(attempt.blocks)
            attempt.blocks = []

    # -------------------------------------------------------------------- prefill

    def offer(self, match: Match) -> int:
        source = self.number()
        self.command(Offer(source, f"p{source}", match))
        return source

    def settle(self, source: int, prompt: str, old: int, stop: int, total: int, *, last: bool):
        """Tokens [old, stop) are computed; returns False when there is no room."""
        size = self.shape.block_tokens
        first = -(-old // size)
        pin = self.pins.get(source)
        blocks = self.take(-(-stop // size) - first, source)
        if blocks is None:
            return False
        pin = self.pins.setdefault(source, Pin(len(self.processes)))
        pin.blocks += blocks
        for index, block in enumerate(pin.blocks):
            self.memory[block] = (prompt, index, min(size, stop - index * size))
        self.command(Settle(source, stop, (first,), (pack_ids(list(blocks)),), source, last))
        return True

    def settle_by_layers(self, source: int, prompt: str, old: int, stop: int, *, last: bool, then):
        """The same, with the layers' bytes one after the other; `then` follows when all are there.

        Returns False when there is no room.
        """
        size, world = self.shape.block_tokens, self.world
        first = -(-old // size)
        blocks = self.take(-(-stop // size) - first, source)
        if blocks is None:
            return False
        pin = self.pins.setdefault(source, Pin(len(self.processes)))
        pin.blocks += blocks
        parts = len(parts_of(self.shape.geometry(0)))
        self.command(Compute(source, stop, (first,), (pack_ids(list(blocks)),), source, source))

        def reach(part):
            if not self.up or source in self.retired:
                return
            for index, block in enumerate(pin.blocks):
                valid = min(size, stop - index * size)
                was = self.memory.get(block, CANARY)
                whole = was[2] if was != CANARY else 0
                ahead = (valid, part)
                if part == parts:
                    whole, ahead = valid, (0, 0)
                self.memory[block] = (prompt, index, whole, ahead)
            if part < parts:
                self.command(Layers(source, part))
                world.at(world.rng.uniform(0, 0.01), lambda: reach(part + 1))
                return
            done = first + len(blocks)
            self.command(Settle(source, stop, (done,), (b"",), source, last))
            then()

        world.at(world.rng.uniform(0, 0.01), lambda: reach(1))
        return True

    def retire(self, source: int, outcome: str):
        self.retired.add(source)
        self.command(Retire(source, outcome, "test"))
        pin = self.pins.get(source)
        if pin is not None:
            pin.own = False
            self._free_pin(source)

    def _free_pin(self, number: int):
        pin = self.pins[number]
        if pin.free:
            self.give_back(pin.blocks)
            pin.blocks = []

    # -------------------------------------------------------------------- reports

    def report(self, process: Process, report):
        if not self.up:
            return
        match report:
            case Received() | ReceiveFailed():
                self._ended(process, self.attempts[report.attempt], report)
            case Unpinned() if report.pin in self.attempts:
                self._unpinned(process, self.attempts[report.pin])
            case Unpinned():
                self._unpinned_source(process, report.pin)

    def _ended(self, process, attempt, report):
        world, name = self.world, f"{process}: attempt {attempt.number}"
        world.check(process.rank not in attempt.reported, f"{name} reported twice")
        world.check(attempt.start < attempt.stop, f"{name} wants nothing, yet {report}")
        attempt.reported[process.rank] = isinstance(report, Received)
        world.outcomes[type(report).__name__] += 1
        if isinstance(report, Received):
            world.memory.check_received(process, attempt)
            if len(attempt.reported) == len(self.processes):
                world.at(world.rng.uniform(0, 0.3), lambda: self.drop(attempt))
            return
        world.reasons[report.reason] += 1
        held = attempt.hold_failure and not attempt.abandoned
        world.check(report.quiet or not held, f"{name} failed before it was quiet")
        if report.quiet:
            world.memory.check_quiet(process, attempt.number)
        world.at(world.rng.uniform(0, 0.1), lambda: self.abandon(attempt))

    def _unpinned(self, process, attempt):
        name = f"{process}: attempt {attempt.number}"
        self.world.check(process.rank not in attempt.unpinned, f"{name} unpinned twice")
        self.world.memory.check_quiet(process, attempt.number)
        attempt.unpinned.add(process.rank)
        self._free(attempt)

    def _unpinned_source(self, process, number):
        self.world.memory.check_unread(process, number)
        pin = self.pins[number]
        self.world.check(not pin.released(process.rank), f"{process}: pin {number} unpinned twice")
        pin.unpinned.add(process.rank)
        self._free_pin(number)


def _slabs(identity):
    """What a rank announces of its staging memory."""
    slabs = identity.slabs
    return (slabs.slab_bytes, slabs.sole) if slabs else ()
