"""The engines that a router knows: who they say they are, and what it has given them to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from neuron_push.protocol import EngineInfo
from neuron_push.router.jobs import Job
from neuron_push.router.places import Place

Leg = Literal["prefill", "decode"]
Mode = Literal["push", "pull"]

ROLES = {
    "prefill": ("kv_producer", "producer", "kv_both", "both"),
    "decode": ("kv_consumer", "consumer", "kv_both", "both"),
}


def _nothing() -> None:
    """Nobody listens."""


@dataclass(eq=False)
class Engine:
    """One engine as last seen. Only the event loop's thread touches it."""

    leg: Leg
    place: Place
    # What it last said of itself; None until it has answered once.
    info: EngineInfo | None = None
    # Why it cannot be used at the moment; empty when it can.
    trouble: str = "not asked yet"
    in_flight: int = 0
    # Prompt tokens of the prefill legs in flight.
    tokens: int = 0
    # Dispatches to it whose first byte has not come: their KV is on its way, or will be.
    moving: int = 0
    restarts: int = 0
    # Position in the order of dispatches, for the least recently used one among equals.
    last_used: int = 0
    # Called when it becomes usable or unusable, or another engine answers in its place.
    changed: Callable[[], None] = _nothing
    # Blocks promised to the decode legs in flight and to cancelled ones that are not drained.
    _promised: dict[str, int] = field(default_factory=dict)
    # Those of them that the last known number of free blocks cannot have taken into account.
    _unseen: dict[str, int] = field(default_factory=dict)
    _asking: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """For messages: the engine id when known, and the URL."""
        return f"{self.info.engine} at {self.place.url}" if self.info else self.place.url

    @property
    def device(self) -> str:
        """What it runs on, as the operator or else the engine itself says; may be empty."""
        software = dict(self.info.software) if self.info else {}
        return self.place.device or software.get("device", "")

    # ------------------------------------------------------------------ what it says

    def begin_asking(self) -> None:
        """From now on it may count the blocks of what was dispatched before."""
        self._asking = set(self._unseen)

    def seen(self, info: EngineInfo, mode: Mode = "push") -> bool:
        """Record an answer; True if another process answers than the last time."""
        restarted = self.info is not None and (
            (self.info.engine, self.info.incarnation) != (info.engine, info.incarnation)
        )
        self.restarts += restarted
        for transfer in self._asking:
            self._unseen.pop(transfer, None)
        self._asking.clear()
        old, self.info = self.info, info
        self._judge(self._objection(info, mode))
        if old is None or old.semantics != info.semantics:
            self.changed()
        return restarted

    def lost(self, reason: str) -> None:
        """Record that it does not answer. What it said before is kept, to notice a restart."""
        self._judge(reason)

    def _judge(self, trouble: str) -> None:
        before, self.trouble = self.trouble, trouble
        if bool(before) != bool(trouble):
            self.changed()

    def _objection(self, info: EngineInfo, mode: Mode) -> str:
        if info.role not in ROLES[self.leg]:
            return f"its kv_role is {info.role!r}, which cannot serve as {self.leg}"
        if mode not in info.modes:
            return f"it does not serve {mode}, only: {', '.join(info.modes) or 'nothing'}"
        if len(info.ranks) < info.world:
            return f"starting: {len(info.ranks)} of {info.world} worker ranks have announced"
        if self.place.ranks > 1 and info.data_rank != self.place.rank:
            return f"data-parallel rank {info.data_rank} answers where {self.place.rank} should"
        return ""

    # ------------------------------------------------------------------ what it has to do

    @property
    def load(self) -> float:
        """Predicted work in hand, by its own speed: what policies compare.

        Prefill is paid by the token; a decode step costs about the same whoever is in it, so
        requests count there, the more the less room is left for them.
        """
        if self.leg == "prefill":
            return (self.tokens + self.in_flight) / self.place.weight
        return self.in_flight * (1 + self.occupancy) / self.place.weight

    @property
    def rank_key(self) -> tuple[float, float, int]:
        """Least load, then most free KV blocks, then longest unused."""
        return (self.load, -self.free_blocks, self.last_used)

    @property
    def occupancy(self) -> float:
        """Share of its KV blocks in use or promised; 0 when unknown."""
        total = self.info.total_blocks if self.info else -1
        if total <= 0:
            return 0.0
        return min(1.0, max(0.0, 1 - self.free_blocks / total))

    @property
    def free_blocks(self) -> float:
        """Blocks free for more, with those promised to pushes that have not begun taken off.

        The smaller of two views: what it said was free, less what was dispatched since; and
        all it has, less all that is promised (some may still wait in its queue).
        """
        info = self.info
        if info is None or info.free_blocks < 0:
            return 0.0
        free = float(info.free_blocks - sum(self._unseen.values()))
        if info.total_blocks > 0:
            free = min(free, info.total_blocks - sum(self._promised.values()))
        return free

    def admits(self, job: Job) -> bool:
        """Whether the job's KV fits beside what is promised. Unknown sizes always fit."""
        info = self.info
        if info is None or info.free_blocks < 0:
            return True
        needed = self.blocks_of(job)
        if info.total_blocks > 0 and needed > info.total_blocks:
            return True  # will never fit: the engine says so in its own words
        return needed <= self.free_blocks

    def blocks_of(self, job: Job) -> int:
        """Blocks that a decode leg needs until its last token."""
        size = self.info.block_tokens if self.info else 0
        return math.ceil(job.tokens / size) if size > 0 else 0

    def promise(self, transfer: str, job: Job) -> None:
        """Take a decode leg's blocks into account."""
        self._promised[transfer] = self._unseen[transfer] = self.blocks_of(job)

    def forgive(self, transfer: str) -> None:
        """Its blocks are free again, or nobody will ask for them. Idempotent."""
        self._promised.pop(transfer, None)
        self._unseen.pop(transfer, None)

    def report(self) -> dict[str, Any]:
        """For people and scripts."""
        info = self.info
        return {
            "url": self.place.url,
            "side_channel": f"{self.place.side.host}:{self.place.side.port}",
            "engine": info.engine if info else None,
            "incarnation": info.incarnation if info else None,
            "data_rank": self.place.rank,
            "device": self.device or None,
            "software": dict(info.software) if info else {},
            "weight": self.place.weight,
            "ready": not self.trouble,
            "trouble": self.trouble or None,
            "in_flight": self.in_flight,
            "moving": self.moving,
            "load": round(self.load, 1),
            "restarts": self.restarts,
            "free_blocks": info.free_blocks if info else -1,
            "promised_blocks": sum(self._promised.values()),
            "total_blocks": info.total_blocks if info else -1,
        }


__all__ = ["Engine", "Leg", "Mode"]
