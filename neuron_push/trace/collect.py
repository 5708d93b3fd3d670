"""Asks every process of a fleet for its trace events, and lays their clocks over each other.

An answer carries the answering process's monotonic clock. It was read between our question and
its answer, so the offset to our clock is known to half the round trip; of several questions the
quickest is believed. Processes of one machine share the clock: their offset comes out as zero
within that error.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from neuron_push.errors import NeuronPushError, PeerError
from neuron_push.protocol import Address, EngineInfo, EventBatch, Events, TraceEvent, Who
from neuron_push.sidechannel import Keyring, ask

# Questions per process to find the offset of its clock.
TRIES: Final = 5
TIMEOUT: Final = 5.0

Asker = Callable[[int], EventBatch]


@dataclass(frozen=True)
class Clock:
    """How a process's clock relates to the collector's: ours = theirs + offset, in seconds."""

    offset: float
    error: float


@dataclass
class Track:
    """The events of one process, on the collector's clock."""

    source: str
    clock: Clock
    events: list[TraceEvent]
    lost: int = 0
    tracing: bool = True


def side_channel(address: Address, ring: Keyring | None = None) -> Asker:
    """Asks an engine's listener or one of its ranks."""

    def asker(after: int) -> EventBatch:
        answer = ask(address, Events(after), TIMEOUT, ring)
        if not isinstance(answer, EventBatch):
            raise PeerError(f"answered {type(answer).__name__} to Events")
        return answer

    return asker


def router(url: str, key: str = "") -> Asker:
    """Asks a router."""

    def asker(after: int) -> EventBatch:
        raw = http_get(f"{url.rstrip('/')}/trace?after={after}", key)
        return msgspec.msgpack.decode(raw, type=EventBatch)

    return asker


def http_get(url: str, key: str = "") -> bytes:
    """One GET; raises PeerError."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return bytes(answer.read())
    except OSError as error:
        raise PeerError(f"{url}: {error}") from None


def engines_of(url: str, key: str = "") -> list[Address]:
    """Side channels of the engines that a router knows."""
    report: dict[str, Any] = msgspec.json.decode(http_get(f"{url.rstrip('/')}/pairs", key))
    found = []
    for engine in (*report["prefill"], *report["decode"]):
        host, _, port = engine["side_channel"].rpartition(":")
        found.append(Address(host, int(port)))
    return list(dict.fromkeys(found))


def processes_of(engine: Address, ring: Keyring | None = None) -> list[Asker]:
    """The listener of an engine and its worker ranks; raises NeuronPushError."""
    info = ask(engine, Who(), TIMEOUT, ring)
    if not isinstance(info, EngineInfo):
        raise PeerError(f"{engine.host}:{engine.port} answered {type(info).__name__} to Who")
    return [side_channel(engine, ring), *(side_channel(rank.address, ring) for rank in info.ranks)]


def collect(
    askers: Sequence[Asker], clock: Callable[[], float] = time.monotonic
) -> tuple[list[Track], list[str]]:
    """Everything that is kept now; and what could not be had, in words."""
    tracks, complaints = [], []
    for asker in askers:
        try:
            tracks.append(_track(asker, clock))
        except (NeuronPushError, msgspec.DecodeError) as error:
            complaints.append(str(error))
    return tracks, complaints


def _track(asker: Asker, clock: Callable[[], float]) -> Track:
    best, batch = _clock(asker, clock)
    if not batch.size:
        return Track(batch.source, best, [], tracing=False)
    events: list[TraceEvent] = []
    after = lost = 0
    while True:
        batch = asker(after)
        lost += batch.lost if after == 0 or batch.lost == 0 else batch.lost - after
        events += batch.events
        if not batch.events:
            break
        after = batch.next
    moved = [msgspec.structs.replace(event, at=event.at + best.offset) for event in events]
    return Track(batch.source, best, moved, max(0, lost))


def _clock(asker: Asker, clock: Callable[[], float]) -> tuple[Clock, EventBatch]:
    best: Clock | None = None
    for _ in range(TRIES):
        asked = clock()
        batch = asker(1 << 62)  # no events: the answer is as quick as can be
        answered = clock()
        offset = (asked + answered) / 2 - batch.now
        error = (answered - asked) / 2
        if best is None or error < best.error:
            best = Clock(offset, error)
    assert best is not None
    return best, batch
