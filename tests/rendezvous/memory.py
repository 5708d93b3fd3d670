"""Shadow memory: who holds which block, and what lies in it. The promises are checked here.

Contents are kept per token: a prefill block holds (prompt, index, tokens valid); a decode cell,
per (block, slot, prefill rank), holds (prompt, token).
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise

from neuron_push.rendezvous.attempt import attempt_of
from neuron_push.rendezvous.events import Post
from tests.rendezvous.net import Read, Write
from tests.rendezvous.shapes import SLAB_BYTES

CANARY = ("canary",)


def number_of(slab):
    """Number of a slab, by its region; None for none."""
    return None if slab is None else (slab.base - (1 << 50)) // SLAB_BYTES


def share_of(stripe, span):
    """The tokens of a range that a prefill rank sends."""
    return [
        token
        for token in range(span.start, span.stop)
        if token // stripe.unit % stripe.count == stripe.index
    ]


class Memory:
    """Reads and writes of WRITEs, each checked against the promises."""

    def __init__(self, world):
        self.world = world

    def start(self, writer, post: Post) -> Write:
        """A WRITE is posted: resolve its tokens to blocks on both sides, in one to three pieces."""
        world = self.world
        ours, theirs = post.source_blocks[0], post.destination_blocks[0]
        size, peer_size = writer.engine.shape.block_tokens, post.destination.groups[0].block_tokens
        rows = []
        for token in share_of(post.plan.stripe, post.done):
            source = int(ours.ids[token // size - ours.first])
            target = int(theirs.ids[token // peer_size - theirs.first])
            if target:
                rows.append((token, source, token % size, target, token % peer_size))
        if not rows:  # other replicas have all of the range: a notification and no bytes
            return Write(writer, post, attempt_of(post.done.attempt), post.agent, None, [])
        pins = {writer.engine.holder.get(row[1]) for row in rows}
        world.check(len(pins) == 1 and None not in pins, f"{writer}: posts from freed blocks")
        pin = pins.pop()
        world.check(
            not writer.engine.pins[pin].released(writer.rank), f"{writer}: posts after Unpinned"
        )
        world.rng.shuffle(rows)
        cuts = sorted(world.rng.randrange(len(rows) + 1) for _ in range(world.rng.randrange(3)))
        edges = [0, *cuts, len(rows)]
        pieces = [rows[a:b] for a, b in pairwise(edges) if a < b]
        write = Write(writer, post, attempt_of(post.done.attempt), post.agent, pin, pieces)
        if post.slab is not None:
            self._pack(write, rows)
        return write

    def fetch(self, reader, action) -> Read:
        """A READ is posted: from blocks that are lent, into blocks held for its attempt."""
        world = self.world
        theirs, ours = action.source_blocks[0], action.destination_blocks[0]
        size, peer_size = reader.engine.shape.block_tokens, action.source.groups[0].block_tokens
        rows = []
        for token in share_of(action.plan.stripe, action):
            source = int(theirs.ids[token // peer_size - theirs.first])
            target = int(ours.ids[token // size - ours.first])
            rows.append((token, source, token % peer_size, target, token % size))
        process, _ = world.agents.get(action.agent, (None, 0))
        me = reader.engine.name, reader.rank, reader.incarnation
        links = [
            link for link in (process.core.links if process else ())
            if link.peer == "decode" and (link.engine, link.rank, link.incarnation) == me
        ]  # fmt: skip
        pin = process.engine.holder.get(rows[0][1], -1) if process and rows else -1
        world.rng.shuffle(rows)
        cuts = sorted(world.rng.randrange(len(rows) + 1) for _ in range(world.rng.randrange(3)))
        edges = [0, *cuts, len(rows)]
        pieces = [rows[a:b] for a, b in pairwise(edges) if a < b]
        return Read(reader, action, action.agent, pin, links[0] if links else None, pieces)

    def take(self, read, rows):
        """Bytes arrive: only in blocks held for this attempt; of whom, only `Kept` can say."""
        world, process, number = self.world, read.reader, read.fetch.attempt
        engine, attempt = process.engine, process.engine.attempts[number]
        source, _ = world.agents[read.target]
        where = f"{process} <- {source}, attempt {number}"
        world.check(process.rank not in attempt.unpinned, f"{where}: READ into unpinned blocks")
        for token, block, slot, target, own_slot in rows:
            held = engine.holder.get(target) == number
            world.check(held, f"{where}: READ into block {target} of {engine.holder.get(target)}")
            content, value = source.engine.memory.get(block, CANARY), CANARY
            if content != CANARY and slot < content[2]:
                value = (content[0], content[1] * source.engine.shape.block_tokens + slot)
            if world.chance(world.faults.turned):
                value = ("turned", token)
            if read.fetch.slab is not None:
                slab = number_of(read.fetch.slab)
                used = slab in process.core._context.slabs.used
                world.check(used, f"{where}: READ into slab {slab}, which is free")
                process.staging.setdefault(slab, {})[token] = value
            else:
                engine.write((process.rank, target, own_slot, source.rank), value)
        world.landed += len(rows)

    def lent(self, process, action) -> bytes:
        """The digest of what a decode rank READ of this one."""
        engine, size = process.engine, process.engine.shape.block_tokens
        lent, values = action.source_blocks[0], []
        for token in share_of(action.plan.stripe, action):
            content = engine.memory.get(int(lent.ids[token // size - lent.first]), CANARY)
            there = content != CANARY and token % size < content[2]
            values.append((content[0], content[1] * size + token % size) if there else CANARY)
        return _digest(values)

    def found(self, process, action, prefill) -> bytes:
        """The digest of what a decode rank has READ of a prefill rank."""
        size, ours = process.engine.shape.block_tokens, action.blocks[0]
        cells = [
            (process.rank, int(ours.ids[token // size - ours.first]), token % size, prefill)
            for token in share_of(action.plan.stripe, action)
        ]
        return _digest([process.engine.cells.get(cell) for cell in cells])

    def _pack(self, write, rows):
        """The bytes of a piece go into a slab that no other WRITE of this rank reads."""
        slab, writer = number_of(write.post.slab), write.writer
        used = slab in writer.core._context.slabs.used
        self.world.check(used, f"{writer}: packs into slab {slab}, which is free")
        for other in writer.writes.values():
            shared = number_of(other.post.slab) == slab and not other.read_over
            self.world.check(not shared, f"{writer}: packs into slab {slab}, which {other} reads")
        cells = writer.staging[slab] = {}
        for row in rows:
            cells[row[0]] = self._read(write, row, packed=False)

    def unpack(self, process, action, number, writer):
        """A piece goes from its slab into blocks that its attempt still holds."""
        world, engine = self.world, process.engine
        attempt, size = engine.attempts[number], engine.shape.block_tokens
        where = f"{process}: unpacking slab {action.slab} of attempt {number}"
        world.check(process.rank not in attempt.unpinned, f"{where} after Unpinned")
        for token in share_of(action.plan.stripe, action):
            block = int(action.blocks[0].ids[token // size - action.blocks[0].first])
            world.check(engine.holder.get(block) == number, f"{where}: block {block} is not held")
            value = process.staging[action.slab].get(token, CANARY)
            good = value == (attempt.prompt, token) or _pulled(process, number)
            world.check(good, f"{where}: token {token} is {value}")
            engine.write((process.rank, block, token % size, writer), value)

    def snapshot(self, write):
        """What a crashing writer had handed to the wire."""
        rows = [row for piece in write.pieces for row in piece]
        return {row[0]: self._read(write, row) for row in rows}

    def _read(self, write, row, *, packed=True):
        token, source, slot, _, _ = row
        if write.ghost is not None:
            return write.ghost[token]
        if packed and write.post.slab is not None:
            return write.writer.staging[number_of(write.post.slab)].get(token, CANARY)
        content = write.writer.engine.memory.get(source, CANARY)
        if content == CANARY:
            return CANARY
        # Layers may be ahead of the whole: (valid tokens, parts of the layers).
        valid, reached = content[3] if len(content) > 3 else (0, 0)
        if slot >= (max(valid, content[2]) if 0 < write.post.done.part <= reached else content[2]):
            return CANARY
        prompt, index = content[:2]
        return (prompt, index * write.writer.engine.shape.block_tokens + slot)

    def land(self, write, rows):
        """Bytes arrive: only in blocks held for this attempt, only of this prompt."""
        world = self.world
        process, _ = world.agents[write.target]
        engine = process.engine
        attempt = engine.attempts.get(write.attempt)
        where = f"{write.writer} -> {process}, attempt {write.attempt}"
        for row in rows:
            token, _, _, block, slot = row
            held = attempt is not None and engine.holder.get(block) == write.attempt
            world.check(held, f"{where}: lands in block {block} of {engine.holder.get(block)}")
            quiet = process.rank in attempt.unpinned
            world.check(not quiet, f"{where}: lands after Unpinned of rank {process.rank}")
            value = self._read(write, row)
            world.check(value == (attempt.prompt, token), f"{where}: token {token} reads {value}")
            if write.post.granted is not None:
                self._land_in_slab(write, process, token, value)
                continue
            cell = process.rank, block, slot, write.writer.rank
            engine.write(cell, value, write.post.done.part)
        world.landed += len(rows)

    def _land_in_slab(self, write, process, token, value):
        """Only in a slab that the rank has granted for this very piece."""
        slab, piece = number_of(write.post.granted), write.post.done.piece
        attempt = process.core.consumer.attempts.get(write.attempt)
        shares = attempt.shares.values() if attempt else ()
        granted = any(
            share.link.rank == write.writer.rank and share.landing.granted.get(piece) == slab
            for share in shares
        )
        self.world.check(granted, f"{write}: lands in slab {slab}, which it was not granted")
        process.staging.setdefault(slab, {})[token] = value

    def check_received(self, process, attempt):
        """Every (prefill rank, token) byte of an attempt is there."""
        engine, size = process.engine, process.engine.shape.block_tokens
        prefill = self.world.engines[attempt.prefill].shape
        for ranks in engine.shape.providers(process.rank, prefill):
            for token in range(attempt.start, attempt.stop):
                block = attempt.blocks[token // size - attempt.first]
                cells = [(process.rank, block, token % size, rank) for rank in ranks]
                values = [engine.content(cell, prefill) for cell in cells]
                self.world.check(
                    values.count((attempt.prompt, token)) == 1,
                    f"{process}: attempt {attempt.number} decodes token {token} of ranks {ranks} "
                    f"over {values}",
                )

    def check_quiet(self, process, number):
        """No WRITE of an attempt can land on this rank any more, and nothing is unpacked."""
        self.world.check(number not in process.unpacking, f"{process}: {number} is being unpacked")
        for write in self.world.writes:
            loud = not write.over and write.attempt == number
            if loud and self.world.agents.get(write.target, (None,))[0] is process:
                self.world.check(False, f"{process}: attempt {number} called quiet, but {write}")
        for read in process.reads.values():
            loud = not read.over and read.fetch.attempt == number
            self.world.check(not loud, f"{process}: attempt {number} called quiet, but {read}")

    def check_unread(self, process, pin):
        """No WRITE of this rank reads blocks of a pin any more."""
        for read in self.world.reads:
            # Whoever is taken for dead may READ on; it decodes nothing, which is checked there.
            ours = self.world.agents.get(read.target, (None,))[0] is process and read.pin == pin
            if ours and not read.over and read.link is not None and not read.link.lost:
                self.world.check(False, f"{process}: pin {pin} released under {read}")
        for write in process.writes.values():
            reads = write.pin == pin and not write.read_over
            self.world.check(not reads, f"{process}: pin {pin} released under a WRITE")


def _digest(values):
    return blake2b(repr(values).encode(), digest_size=16).digest()


def _pulled(process, number):
    """Whether what an attempt unpacks was READ: prefill may have let it go meanwhile."""
    return process.core.consumer.attempts[number].command.pull
