"""The promises, of every state and of every step."""

from __future__ import annotations

from neuron_push.rendezvous.links import base
from tests.model.effects import Broken, Read
from tests.model.machines import FLYING, LANDED, SPOILT, Machines, Table


class Judge:
    """Knows what has landed; a state remembers that as bits of `landed`."""

    def __init__(self, machines: Machines):
        self._machines = machines
        self._locals = machines.locals
        self._writes = machines.writes
        self._landed = Table()

    def landed(self, d, moved, *, spoilt=False) -> int:
        """That tokens have landed: in blocks, or as a piece in a slab; spoilt ones for nothing."""
        fact = (d.incarnation, moved.lane, moved.attempt, moved.start, moved.stop)
        if moved.slab < 0:
            return 0 if spoilt else self._landed.bit(fact)
        piece = (*fact, moved.piece)
        return self._landed.bit((*piece, SPOILT) if spoilt else piece)

    def lanes(self) -> set[tuple[int, int]]:
        """(prefill rank, decode rank) pairs between which something has landed."""
        return {lane for _, lane, *_ in self._landed.things}

    def spoil(self, p, writes):
        """READs in flight whose blocks prefill holds no more, while it could still be read."""
        for bit, (item, phase) in self._writes.of(writes):
            if not isinstance(item, Read) or phase != FLYING or item.owner not in p.open:
                continue
            if not {fact[1:] for fact in p.memory}.issuperset(item.source):
                writes = writes & ~bit | self._writes.bit((item, SPOILT))
        return writes

    def staged(self, d, change, writes, landed):
        """Slabs are filled when nothing reads them, and unpacked when all of a piece is there."""
        for _, (write, _) in self._writes.of(change.posted):
            for _, (other, phase) in self._writes.of(writes):
                both = write is not other and not isinstance(other, Read) and phase != LANDED
                if (
                    both
                    and 0 <= write.own == other.own
                    and base(write.writer) == base(other.writer)
                ):
                    raise Broken(
                        f"tokens {write.start}..{write.stop} are packed into slab {write.own}, of "
                        f"which tokens {other.start}..{other.stop} are still being sent"
                    )
        for lane, attempt, start, stop, piece in change.unpacks:
            here = (d.incarnation, lane, attempt, start, stop, piece)
            if not landed & (self._landed.bit(here) | self._landed.bit((*here, SPOILT))):
                raise Broken(f"tokens {start}..{stop} of attempt {attempt} are unpacked too early")
        for lane, attempt, start, stop, piece in change.unpacked:
            here = (d.incarnation, lane, attempt, start, stop)
            if landed & self._landed.bit((*here, piece)):
                landed |= self._landed.bit(here)
        return landed

    def received(self, d, received, landed):
        """Promise 3: what decode computes over has landed, from every rank on every rank."""
        for attempt, start, stop in received:
            for lane in self._machines.pair.lanes:
                tokens = set(range(start, stop))
                for _, (who, where, number, low, high, *slab) in self._landed.of(landed):
                    if (who, where, number) == (d.incarnation, lane, attempt) and not slab:
                        tokens -= set(range(low, high))
                if tokens:
                    text = f" from rank {lane[0]} on rank {lane[1]}" if lane != (0, 0) else ""
                    raise Broken(
                        f"D decodes over attempt {attempt}, of which tokens {sorted(tokens)} "
                        f"have not landed{text}"
                    )

    def check(self, p, d, writes):
        """Promises 1 and 2 for every WRITE that flies, and 1 for every READ."""
        for _, (write, phase) in self._writes.of(writes):
            if phase == LANDED or d is None or write.into not in d.open:
                continue
            if write.slab >= 0:
                self._check_slab(write, d)
            for block in write.blocks:
                if (write.attempt, block) not in d.memory:
                    kind = type(write).__name__.upper()
                    raise Broken(
                        f"a {kind} of tokens {write.start}..{write.stop} for attempt "
                        f"{write.attempt} may land in block {block} of D, which is not held for it"
                    )
            if isinstance(write, Read) or p is None or write.writer not in p.open:
                continue
            for block, content in write.source:
                if (write.pin, block, content) not in p.memory:
                    raise Broken(
                        f"a WRITE for attempt {write.attempt} may read block {block} of P, which "
                        f"is not held, or does not hold block {content[1]} of {content[0]!r}"
                    )

    def _check_slab(self, write, d):
        """Promise 1 for slabs: one that may change is kept for that piece, and for no other."""
        place = write.lane[1], write.slab
        kept = {each for each in d.memory if each[0] == "slab" and (each[1][1], each[4]) == place}
        if kept != {("slab", write.lane, write.attempt, write.piece, write.slab)}:
            raise Broken(
                f"tokens {write.start}..{write.stop} of attempt {write.attempt} may land in slab "
                f"{write.slab} of D, which is not kept for them alone"
            )
