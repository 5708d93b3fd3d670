"""A worker rank without an engine: listener, transfer thread and KV in host memory.

Every block's bytes follow from a stamp and the block's place in its prompt, so both ends of a
transfer can say what should be there.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from neuron_push.bench.trap import Bytes, Trap, Trapping
from neuron_push.commands import (
    Abandon,
    Command,
    Offer,
    Receive,
    ReceiveFailed,
    Report,
    Retire,
    Settle,
    Unpinned,
    encode,
    pack_ids,
)
from neuron_push.config import Config
from neuron_push.geometry import Geometry, Group, Plane, Region, Semantics
from neuron_push.ports import HOST, free_ports
from neuron_push.protocol import Address, EngineInfo, Match
from neuron_push.rendezvous import Identity
from neuron_push.sidechannel import Keyring, Listener
from neuron_push.transfer import TransferThread

__all__ = ["CANARY", "ENVIRONMENT", "LAYERS", "TOKENS", "Rank", "Shape", "content"]

LAYERS: Final = 2
TOKENS: Final = 16  # per block
CANARY: Final = 0x5A
ELEMENT: Final = 4
# Bytes that wait in sockets are the hard case, and the one that every machine has. UCX looks at
# every device that it may use, hundreds of times for one agent.
ENVIRONMENT: Final = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
}


class Shape(msgspec.Struct, frozen=True):
    """How large the cache of a rank is."""

    blocks: int = 32
    width: int = 16  # channels per token

    @property
    def plane_bytes(self) -> int:
        """Of one block, in K or V of one layer."""
        return TOKENS * self.width * ELEMENT

    @property
    def block_bytes(self) -> int:
        return 2 * LAYERS * self.plane_bytes


def content(shape: Shape, stamp: int, index: int) -> Bytes:
    """The bytes of the index-th block of a prompt; no element of them is zero."""
    words = np.arange(shape.block_bytes // ELEMENT, dtype=np.uint32)
    words = words * np.uint32(2654435761) + np.uint32((stamp * 40503 + index * 65599) & 0x7FFFFFFF)
    return (words | np.uint32(0x01000001)).view(np.uint8).reshape(LAYERS, 2, shape.plane_bytes)


class Rank:
    """One rank. Commands by any thread; reports are collected by the one that waits."""

    def __init__(
        self, engine: str, role: str, config: Config, shape: Shape | None = None, port: int = 0,
        memory: Bytes | None = None,
    ) -> None:  # fmt: skip
        """`memory` is zeroed bytes to keep the cache in, where others can watch it."""
        self.shape = shape or Shape()
        if memory is None:
            memory = np.zeros(self.shape.blocks * self.shape.block_bytes, np.uint8)
        self.kv = memory.reshape(LAYERS, 2, self.shape.blocks, self.shape.plane_bytes)
        self.trap = Trap()
        # When each report was heard: by its kind and the number of its attempt or pin.
        self.heard: dict[tuple[str, int], float] = {}
        self.reasons: dict[int, str] = {}
        self.tallies: dict[str, float] = {}
        self._numbers = itertools.count(1)
        self._prompts: dict[int, tuple[str, list[int]]] = {}
        me = Identity(engine, 0, secrets.randbits(31), _semantics(self.shape), self._geometry())
        info = EngineInfo(engine, 1, role, 1, 1, 1, 0, ("push",), me.semantics, ())
        ring = Keyring.of(config.side_channel_keys)
        port = port or free_ports(1)[0]  # one that it may be started on again
        self.listener = Listener(engine, HOST, port, lambda: info, keys=ring)
        self.thread = TransferThread(config, me, Trapping(self.trap), self.listener.address)
        try:
            self.thread.start()
            self.until(lambda: bool(self.listener.ranks()), 60, "announced")
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> Address:
        """Where the engine is found."""
        return self.listener.address

    def call(self, method: str, *arguments: Any) -> Any:
        """Run a method, as `Child.call` does in another process."""
        return getattr(self, method)(*arguments)

    def close(self) -> None:
        """Stop. Idempotent."""
        self.trap.running.set()
        self.thread.close()
        self.listener.close()

    # ------------------------------------------------------------------ transfers

    def offer(self, name: str, blocks: Sequence[int], stamp: int, part: int | None = None) -> int:
        """Prefill: compute a prompt, whole or its first `part` blocks; a number for the rest."""
        number = next(self._numbers)
        self.fill(blocks, stamp)
        self._prompts[number] = (name, list(blocks))
        self.thread.submit(encode([Offer(number, name, _match(name, len(blocks)))]))
        self._settle(number, 0, len(blocks) if part is None else part)
        return number

    def finish(self, number: int, begin: int) -> None:
        """Prefill: compute a prompt's blocks from `begin` on."""
        self._settle(number, begin, len(self._prompts[number][1]))

    def retire(self, number: int, reason: str) -> None:
        """Prefill: the request is aborted."""
        self.thread.submit(encode([Retire(number, "ended", reason)]))

    def want(
        self, name: str, blocks: Sequence[int], prefill: Address, engine: str = "",
        patience: float = 60.0, hold: bool = False,
    ) -> int:  # fmt: skip
        """Decode: receive a prompt into these blocks; the attempt's and its pin's number.

        With `hold` a failure is told once nothing can land any more, as recompute needs it.
        """
        command = self.receive(name, blocks, prefill, engine, patience, hold)
        self.thread.submit(encode([command]))
        return command.attempt

    def receive(
        self, name: str, blocks: Sequence[int], prefill: Address, engine: str = "",
        patience: float = 60.0, hold: bool = False,
    ) -> Receive:  # fmt: skip
        """The command of `want`."""
        number = next(self._numbers)
        return Receive(
            number, name, prefill, engine, _match(name, len(blocks)), 0, len(blocks) * TOKENS,
            (0,), (pack_ids(list(blocks)),), number, patience, hold,
        )  # fmt: skip

    def abandon(self, number: int, reason: str = "the client left") -> None:
        """Decode: give an attempt up."""
        self.thread.submit(encode([Abandon(number, reason)]))

    def has(self, kind: str, number: int) -> bool:
        """Whether a report came: "Received", "ReceiveFailed" or "Unpinned"."""
        self._collect()
        return (kind, number) in self.heard

    def hears(self, kind: str, number: int, within: float = 30.0) -> float:
        """Wait for a report; when it came (monotonic)."""
        self.until(lambda: self.has(kind, number), within, f"{kind} {number}")
        return self.heard[kind, number]

    def until(self, condition: Callable[[], bool], within: float = 30.0, what: str = "") -> None:
        """Wait for a condition, looking again whenever a report comes or a while has passed."""
        deadline = time.monotonic() + within
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {within} s: {what or condition}; {self.state()}")
            self.thread.wait(0.005)

    def reason(self, number: int) -> str:
        """Why an attempt failed."""
        return self.reasons.get(number, "")

    # ------------------------------------------------------------------ memory

    def fill(self, blocks: Sequence[int], stamp: int) -> None:
        """Give blocks the content of a prompt."""
        for index, block in enumerate(blocks):
            self.kv[:, :, block] = content(self.shape, stamp, index)

    def exact(self, blocks: Sequence[int], stamp: int) -> bool:
        """Whether blocks hold that content."""
        pairs = enumerate(blocks)
        return all((self.kv[:, :, b] == content(self.shape, stamp, i)).all() for i, b in pairs)

    def foreign(self, blocks: Sequence[int], stamp: int) -> int:
        """Bytes that are neither zero nor that content."""
        harm = 0
        for index, block in enumerate(blocks):
            page = self.kv[:, :, block]
            harm += int(((page != 0) & (page != content(self.shape, stamp, index))).sum())
        return harm

    def paint(self, blocks: Sequence[int], value: int = CANARY) -> None:
        """Give blocks one value."""
        self.kv[:, :, list(blocks)] = value

    def differing(self, blocks: Sequence[int], value: int = CANARY) -> int:
        """Bytes that do not have that value."""
        return int(np.count_nonzero(self.kv[:, :, list(blocks)] != value))

    # ------------------------------------------------------------------ faults, looking inside

    def send(self, payload: bytes, engine: str) -> None:
        """Notify whoever of that engine is linked with bytes as they are."""
        for link in self.thread._core.links:
            if link.engine == engine:
                self.trap.outgoing.append((link.agent, payload))

    def arm(
        self, point: str, act: str | Callable[[], None], peer: str, watched: Sequence[int] = ()
    ) -> None:
        """Set the trap for a transfer with an engine; `watched` are blocks of this rank."""
        self.trap.arm(point, act, peer, [self.kv[:, :, block] for block in watched])

    def let_go(self) -> None:
        """WRITEs that a trap holds are looked at again; one not sprung yet never is."""
        self.trap.disarm()

    def tally(self, name: str, label: str = "") -> float:
        """What the transfer thread has counted so far."""
        counters, _ = self.thread.tally.take()
        for counter, labels in counters.items():
            for each, value in labels.items():
                key = f"{counter}/{each}"
                self.tallies[key] = self.tallies.get(key, 0.0) + value
        return self.tallies.get(f"{name}/{label}", 0.0)

    def state(self) -> dict[str, Any]:
        """Links, sessions and what the process holds; read without locks, so only when quiet."""
        core, used = self.thread._core, Path("/proc/self")
        status = (used / "status").read_text().split()
        return {
            "generation": core._context.generation,
            "links": len(core.links),
            "attempts": sorted(core.consumer.attempts),
            "sendings": len(core.producer.sendings),
            "sources": len(core.producer.sources),
            "fencing": core.generations.pending,
            "rss_kib": int(status[status.index("VmRSS:") + 1]),
            "threads": int(status[status.index("Threads:") + 1]),
            "descriptors": len(os.listdir(used / "fd")),
            "failure": repr(self.thread.failure),
            "thread": f"{self.thread.stands:.1f} s at {self.thread.doing}",
        }

    # ------------------------------------------------------------------ inside

    def _settle(self, number: int, begin: int, end: int) -> None:
        _, blocks = self._prompts[number]
        last, packed = end == len(blocks), pack_ids(list(blocks[begin:end]))
        commands: list[Command] = [Settle(number, end * TOKENS, (begin,), (packed,), number, last)]
        if last:
            commands.append(Retire(number, "finished"))
        self.thread.submit(encode(commands))

    def _collect(self) -> None:
        now = time.monotonic()
        for report in self.thread.take():
            self.heard.setdefault((type(report).__name__, _number(report)), now)
            if isinstance(report, ReceiveFailed):
                self.reasons[report.attempt] = report.reason

    def _geometry(self) -> Geometry:
        shape = self.shape
        region = Region(int(self.kv.ctypes.data), self.kv.nbytes, "DRAM", 0)
        size, token = shape.plane_bytes, shape.width * ELEMENT
        planes = []
        for layer in range(LAYERS):
            key = 2 * layer * shape.blocks * size
            value = key + shape.blocks * size
            for kind, offset in (("k", key), ("v", value)):
                planes.append(
                    Plane(layer, kind, 0, offset, size, size, token, ELEMENT, shape.width)  # type: ignore[arg-type]
                )
        group = Group("full", TOKENS, TOKENS, shape.blocks, (0,), tuple(planes))
        return Geometry((region,), (group,), ELEMENT)


def _semantics(shape: Shape) -> Semantics:
    return Semantics("m", LAYERS, 1, shape.width, "float32", ("full",))


def _match(name: str, blocks: int) -> Match:
    return Match(name, name, b"digest", blocks * TOKENS)


def _number(report: Report) -> int:
    return report.pin if isinstance(report, Unpinned) else report.attempt
