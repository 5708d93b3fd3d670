"""Digests: taken by prefill of what it sends or lends, and by decode of what is there.

The bytes are hashed in ascending order of where they land, which is the one thing that both sides
know: prefill from its copies, decode from the same plan over its own blocks. So neither the
layout, nor how copies were merged, nor how prefill's blocks lie makes a difference.

Hashing takes place on the transfer thread, one WRITE at a time. A prompt that was READ is hashed
whole and may be large, so that goes step by step (`Hashing`), and others have their turn. SHA-256
is what processors have instructions for: 1.4 GiB per second where BLAKE2b did 0.8 (16 KiB rows). It
reads memory through addresses, so it works where the KV cache is host memory.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from neuron_push.errors import ConfigError, NeuronPushError, PlanError
from neuron_push.geometry import Geometry
from neuron_push.plan import Blocks, Copies, Plan, StagedPlan, bind
from neuron_push.rendezvous import Identity
from neuron_push.rendezvous.events import Check, Event, Seal, Sealed, Unpack, Unpacked
from neuron_push.transport import Descriptors

__all__ = ["Hashing", "complaint", "demand_host_memory", "seal"]

Addresses = npt.NDArray[np.integer]
# Bytes hashed at a time: 6 ms.
STEP = 8 << 20


def demand_host_memory(identity: Identity) -> None:
    """Raise ConfigError for a rank whose KV cache cannot be hashed."""
    memory = {region.memory for region in identity.geometry.regions}
    if memory != {"DRAM"} or (identity.slabs is not None and identity.slabs.sole):
        raise ConfigError(
            "kv_digest needs a KV cache in host memory (accelerator cpu); turn it off"
        )


def seal(source: Descriptors, destination: Descriptors) -> bytes:
    """The digest of a WRITE that reads the source rows."""
    return _last(_steps(*_sent(source, destination)))


class Hashing:
    """The digests of prompts that were READ: on prefill of what it lends, on decode of what came.

    `step` goes on with the oldest and appends its answer to `events` when it has ended.
    """

    def __init__(self, identity: Identity, events: deque[Event]) -> None:
        self._identity = identity
        self._events = events
        self._tasks: deque[tuple[Iterator[bytes], Callable[[bytes], Event]]] = deque()

    def seal(self, action: Seal, now: float) -> None:
        """Take the digest of what a decode rank has READ; answers with Sealed."""
        answer = action.link, action.attempt
        lists = action.source_blocks, action.destination_blocks
        try:
            copies = action.plan.copies(action.start, action.stop, *lists, last=True)
            rows = bind(copies, self._identity.geometry, action.destination)
        except NeuronPushError as error:
            self._events.append(Sealed(*answer, reason=str(error)))
        else:
            steps = _steps(*_sent(*rows))
            self._tasks.append((steps, lambda digest: Sealed(*answer, digest)))

    def check(self, action: Check) -> None:
        """Compare what was READ with its digest; answers with Unpacked."""
        wrong, rows = _found(action, self._identity)

        def judge(digest: bytes) -> Event:
            reason = wrong or _judgement(action, digest)
            return Unpacked(action.job, reason, corrupt=bool(reason))

        self._tasks.append((_steps(*rows), judge))

    def step(self) -> None:
        """Go on for a few milliseconds."""
        if self._tasks:
            steps, answer = self._tasks[0]
            digest = next(steps)
            if digest:
                self._tasks.popleft()
                self._events.append(answer(digest))


def complaint(wanted: Check | Unpack, own: Identity) -> str:
    """Why what has landed for a WRITE is not what was sent; empty if it is."""
    if wanted.done is None:
        return ""
    wrong, rows = _found(wanted, own)
    return wrong or _judgement(wanted, _last(_steps(*rows)))


def _judgement(wanted: Check | Unpack, digest: bytes) -> str:
    done = wanted.done
    assert done is not None
    return f"{_what(wanted)} (digest)" if done.nbytes and digest != done.digest else ""


def _what(wanted: Check | Unpack) -> str:
    return f"the KV of tokens {wanted.start} to {wanted.stop} is not what prefill sent"


def _found(wanted: Check | Unpack, own: Identity) -> tuple[str, tuple[Addresses, Addresses]]:
    """Where the bytes are that are to be hashed, in order; or why they cannot be the right ones."""
    done, nothing = wanted.done, (np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert done is not None
    plan, geometry = wanted.plan, own.geometry
    if isinstance(plan, StagedPlan) and plan.unpacks:
        assert own.slabs is not None and isinstance(wanted, Unpack)
        geometry = plan.landing(own.slabs.slab(wanted.slab))
    span, what = (wanted.start, wanted.stop), _what(wanted)
    known = wanted.source_blocks if isinstance(wanted, Check) else ()
    try:
        source = known or _presumed(plan, span[1])
        copies = plan.copies(*span, source, wanted.blocks, last=wanted.last)
        address, length = _landed(copies, geometry)
    except PlanError as error:
        return f"{what}: {error}", nothing
    if done.nbytes and not done.digest:
        return f"{what}, or not: kv_digest is not set there", nothing
    if copies.nbytes != done.nbytes:
        return f"{what}: {done.nbytes} bytes instead of {copies.nbytes}", nothing
    order = np.argsort(address)
    return "", (address[order], length[order])


def _presumed(plan: Plan, stop: int) -> tuple[Blocks, ...]:
    """Lists of prefill's blocks in which everything is present; where they lie says nothing."""
    if isinstance(plan, StagedPlan):
        groups, block = plan.pairs, plan.source.reserved_blocks
    else:
        groups, block = plan.groups, plan.source_reserved
    counts = [max(1, -(-stop // group.source.block_tokens)) for group in groups]
    return tuple(Blocks(0, np.full(count, block, np.int32)) for count in counts)


def _landed(copies: Copies, geometry: Geometry) -> tuple[Addresses, Addresses]:
    """Where the copies have written, and how much."""
    region, offset, length = copies.destination_region, copies.destination_offset, copies.length
    base = np.array([each.base for each in geometry.regions], np.int64)
    size = np.array([each.length for each in geometry.regions], np.int64)
    if len(length) and ((offset < 0) | (offset + length > size[region])).any():
        raise PlanError("a copy leaves its region")
    return base[region] + offset, length


def _sent(source: Descriptors, destination: Descriptors) -> tuple[Addresses, Addresses]:
    """Where the bytes of copies come from and how much, in the order in which they lie there."""
    order = np.argsort(destination[:, 0])
    return source[order, 0], source[order, 1]


def _steps(addresses: Addresses, lengths: Addresses) -> Iterator[bytes]:
    """Hash the rows: nothing after every STEP bytes or so, and the digest in the end."""
    found, fresh = hashlib.sha256(), 0
    for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True):
        for begin in range(0, length, STEP):
            size = min(STEP, length - begin)
            found.update((ctypes.c_char * size).from_address(address + begin))
            fresh += size
            if fresh >= STEP:
                fresh = 0
                yield b""
    yield found.digest()


def _last(steps: Iterator[bytes]) -> bytes:
    *_, digest = steps
    return digest
