"""NIXL's place: notifications are delayed, lost, doubled and overtaken; WRITEs land late and torn.

What lands is judged: a WRITE or READ may move bytes only into blocks that were held for its attempt
since it was registered, a WRITE only out of blocks that nobody was given since it was posted, and a
READ only out of blocks that are held as long as its prefill rank lends them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from neuron_push.memory import MemoryFabric
from neuron_push.memory.fabric import Letter, MemoryTransport, PostedWrite
from neuron_push.protocol import Done, decode_notification
from neuron_push.rendezvous.attempt import attempt_of


@dataclass
class Weather:
    """What may go wrong on the way; probabilities, and mean delays in seconds."""

    slow: float = 0.001  # a notification
    side: float = 0.002  # the side channel
    http: float = 0.001
    land: float = 0.003  # a piece of a WRITE or READ
    drop: float = 0.0
    dup: float = 0.0
    reorder: float = 0.0
    stuck: float = 0.0  # a WRITE or READ that never ends
    mute: float = 0.0  # a question on the side channel that is never answered
    late: float = 0.0  # a piece that takes a second or so
    turn: float = 0.0  # a piece of which one byte arrives wrong


@dataclass(eq=False)
class Flight:
    """What is known of a WRITE or READ while it moves bytes."""

    write: PostedWrite
    attempt: int
    reader: object = None  # the worker, of a READ
    owner: object = None  # the worker whose blocks are read
    # Blocks on both sides, as (engine, block, hand-outs of it so far), but for slabs.
    source: list = field(default_factory=list)
    target: list = field(default_factory=list)


class StormyFabric(MemoryFabric):
    """All memory and agents of one world."""

    def __init__(self, world) -> None:
        super().__init__(auto_land=False, auto_deliver=False)
        self.world = world
        self.owners: dict[str, object] = {}  # agent name -> worker
        self._last: dict[tuple[str, str], float] = {}

    def open_for(self, worker):
        """A transport factory of one worker's."""

        def opens(name, regions):
            transport = StormyTransport(self, name, regions, next(self._serials))
            self._agents[transport.metadata()] = transport
            self.owners[name] = worker
            return transport

        return opens

    def forget(self, arrays) -> None:
        """Memory of a process that is gone."""
        for array in arrays:
            self._arrays.pop(array.ctypes.data, None)

    # ------------------------------------------------------------------ notifications

    def send(self, letter: Letter) -> None:
        clock, weather = self.world.clock, self.world.weather
        if clock.chance(weather.drop):
            self.world.notes["letters lost"] += 1
            return
        for _ in range(2 if clock.chance(weather.dup) else 1):
            copy = Letter(letter.source, letter.target, letter.payload)
            self.letters.append(copy)
            pair, when = (letter.source, letter.target.name), clock.now + clock.wait(weather.slow)
            if not clock.chance(weather.reorder):
                when = self._last[pair] = max(when, self._last.get(pair, 0.0))
            clock.at(when - clock.now, "notification", lambda c=copy: self._arrive(c))

    def _arrive(self, letter: Letter) -> bool:
        if letter not in self.letters:  # the connection broke meanwhile
            return False
        self.deliver(self.letters.index(letter))
        self.owners[letter.target.name].stirred()
        return not letter.target.closed

    # ------------------------------------------------------------------ bytes

    def launch(self, posted: PostedWrite, source, target) -> None:
        """A WRITE or READ begins: what it touches is looked up, its pieces get their times."""
        world, clock = self.world, self.world.clock
        owner, receiver = self.owners[source.name], self.owners[target.name]
        flight = Flight(posted, 0, owner=owner)
        if posted.reads:
            flight.attempt, flight.reader = receiver.attempt_of_read(posted.id), receiver
        else:
            done = decode_notification(posted.payload)
            assert isinstance(done, Done)
            flight.attempt = attempt_of(done.attempt)
        clock.rng.shuffle(posted.rows)
        flight.source = owner.blocks_at(row[0] for row in posted.rows)
        flight.target = receiver.blocks_at(row[1] for row in posted.rows)
        if not posted.reads:
            flight.target = [
                (engine, block, engine.registered.get((flight.attempt, block), -1))
                for engine, block, _ in flight.target
            ]
        world.notes["READs" if posted.reads else "WRITEs"] += 1
        cuts = sorted(clock.rng.randrange(posted.nbytes + 1) for _ in range(clock.rng.randrange(3)))
        edges, when = [0, *cuts, posted.nbytes], 0.0
        for low, high in pairwise(edges):
            if clock.chance(world.weather.stuck):
                return
            when += clock.rng.uniform(0.5, 1.5) if clock.chance(world.weather.late) else 0.0
            when += clock.wait(world.weather.land)
            clock.at(when, "bytes", lambda n=high - low: self._piece(flight, n))

    def _piece(self, flight: Flight, nbytes: int) -> bool:
        write, check = flight.write, self.world.clock.check
        if write not in self.writes or not nbytes:
            return False
        what = f"{'READ' if write.reads else 'WRITE'} of attempt {flight.attempt}"
        for engine, block, epoch in flight.target:
            good = engine.held(block) and engine.epochs[block] == epoch
            check(good, f"{engine}: a {what} lands in block {block}, which is not held for it")
        if not write.reads and write.sent is None:
            for engine, block, epoch in flight.source:
                # One that vLLM let go of unasked is held again before anybody is given it.
                good = engine.epochs[block] == epoch
                check(good, f"{engine}: a {what} reads block {block}, which was handed out")
        if write.reads and flight.owner.lends(flight.reader, flight.attempt):
            for engine, block, epoch in flight.source:
                good = engine.epochs[block] == epoch and (engine.held(block) or engine.unasked)
                check(good, f"{engine}: a {what} reads block {block}, lent and not held")
        self.land(write, nbytes)
        if self.world.clock.chance(self.world.weather.turn):
            address = write.rows[0][1]
            self.view(address, 1)[:] ^= 1
            self.world.notes["bytes turned"] += 1
        if write.landed == write.nbytes:
            self.owners[write.source.name].stirred()
        return True


class StormyTransport(MemoryTransport):
    """One agent in bad weather."""

    _fabric: StormyFabric

    def _send(self, target, payload) -> None:
        self._fabric.send(Letter(self._name, target, bytes(payload)))

    def _start(self, posted, ends, memory) -> None:
        super()._start(posted, ends, memory)
        self._fabric.launch(posted, *ends)
