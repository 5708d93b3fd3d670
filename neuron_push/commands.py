"""What an engine tells its transfer thread, and what it hears back.

Commands travel from the engine's scheduler half to the worker half inside vLLM's per-step
metadata and on to the transfer thread; reports travel back. A *pin* is a number under which
the scheduler half holds references on KV blocks; the thread says when they may go.

On the way to the thread commands are packed (`encode`): the engine's main loop passes bytes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from neuron_push.prompts import Prompt, match_of
from neuron_push.protocol import Address, Match

_ids: msgspec.msgpack.Decoder[list[int]] = msgspec.msgpack.Decoder(list[int])
_encoder = msgspec.msgpack.Encoder()

# Per KV group, block ids in token order, as `pack_ids` writes them.
GroupBlocks = tuple[bytes, ...]


# Block ids as bytes: main loops pass them on without an object per block.
pack_ids: Callable[[Sequence[int]], bytes] = _encoder.encode


def unpack_ids(packed: bytes) -> list[int]:
    """What `pack_ids` wrote; nothing for an empty payload."""
    return _ids.decode(packed) if packed else []


class _Record(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of commands and reports: small to pickle, immutable."""


class Receive(_Record, frozen=True):
    """Decode: reserve `blocks` for tokens [start, stop) of a prompt and register them.

    `first[g]` is the index, in token order, of the first listed block of group g; block id 0
    means that the group does not want those tokens. `start == stop` tells the prefill engine
    that nothing is wanted; nothing is reported then. `hold_failure` delays the report of a
    failure until no WRITE can land any more (needed when vLLM recomputes into the same
    blocks). `pull`: READ a finished prompt instead of waiting for its WRITEs.
    """

    attempt: int
    request: str
    prefill: Address
    engine: str  # expected engine id, or "" to accept whoever answers
    match: Match
    start: int
    stop: int
    first: tuple[int, ...]
    blocks: GroupBlocks
    pin: int
    patience: float
    hold_failure: bool = False
    pull: bool = False


class Abandon(_Record, frozen=True):
    """Decode: the request is gone or has given up; stop the attempt and drain it."""

    attempt: int
    reason: str


class Offer(_Record, frozen=True):
    """Prefill: the prompt of `match` is being computed here under the number `source`."""

    source: int
    request: str
    match: Match


class Near(_Record, frozen=True):
    """Prefill: the last tokens of `source` are about to be computed; who waits may look sharp."""

    source: int


class Compute(_Record, frozen=True):
    """Prefill: this step computes tokens up to `stop` of `source`; sent where layers are streamed.

    Fields as of Settle, which follows with the step's end and then names no blocks again.
    """

    source: int
    stop: int
    first: tuple[int, ...]
    blocks: GroupBlocks
    pin: int
    step: int  # the engine step that computes them, from 1


class Layers(_Record, frozen=True):
    """Prefill: with its fence, so many parts of the layers are computed of what a step has."""

    step: int
    parts: int


class Settle(_Record, frozen=True):
    """Prefill: with this step's fence, tokens [0, stop) of `source` are settled.

    `blocks` are those added since the previous Settle, one list per group, in token order;
    `first[g]` is the index of the first of them. All are held under `pin` from now on. `last`
    says that prefill is complete with this step.
    """

    source: int
    stop: int
    first: tuple[int, ...]
    blocks: GroupBlocks
    pin: int
    last: bool


class Retire(_Record, frozen=True):
    """Prefill: the request left the engine.

    "finished": what was settled stays on offer until served or the lease ends.
    "preempted": stop reading its blocks; the prompt will be offered again.
    "ended": it will never be complete (aborted, failed, empty); say so to whoever registered.

    `pin` names the source's pin where the engine waits for its `Unpinned` after this, whatever
    was said before.
    """

    source: int
    outcome: Literal["finished", "preempted", "ended"]
    reason: str = ""
    pin: int = -1


class Unnamed(_Record, frozen=True):
    """A command whose match is still to be made of the prompt's name, which takes time."""

    prompt: Prompt
    command: Offer | Receive

    def named(self) -> Offer | Receive:
        """The command with its match."""
        return msgspec.structs.replace(self.command, match=match_of(self.prompt))


# Stands in a command until it is named.
NO_MATCH = Match("", "", b"", 0)

Command = Receive | Abandon | Offer | Near | Compute | Layers | Settle | Retire
Sent = Command | Unnamed

_decoder = msgspec.msgpack.Decoder(list[Sent])


# Commands as `TransferThread.submit` takes them.
encode: Callable[[Sequence[Sent]], bytes] = _encoder.encode


def decode(payload: bytes) -> list[Command]:
    """What `encode` wrote; nothing for an empty payload."""
    if not payload:
        return []
    return [
        each.named() if isinstance(each, Unnamed) else each for each in _decoder.decode(payload)
    ]


class Received(_Record, frozen=True):
    """Decode: every byte of the attempt has arrived."""

    attempt: int
    request: str


class ReceiveFailed(_Record, frozen=True):
    """Decode: the attempt ended without its bytes; `quiet` when no WRITE can land any more."""

    attempt: int
    request: str
    reason: str
    quiet: bool


class Unpinned(_Record, frozen=True):
    """Nothing reads or writes the blocks of `pin` any more, and nothing will."""

    pin: int


Report = Received | ReceiveFailed | Unpinned
