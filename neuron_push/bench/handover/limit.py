"""The limit of a handover: one WRITE of the bytes that are left, and its notification.

Two processes with a NIXL agent each, as two engines have, over memory arranged like a rank's KV:
`layers` planes of pages. One posts and polls, the other looks for notifications; nothing else runs.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from neuron_push.emulation.memory import pages
from neuron_push.errors import TransportError
from neuron_push.geometry import Region
from neuron_push.nixl import NixlTransport
from neuron_push.transport import AgentName, WriteId

PATIENCE: Final = 60.0
# Seconds between two looks: a process that spins is set back where cores are few.
LOOK: Final = 2e-5
QUIET: Final = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
# An engine's KV is far larger than a processor's cache: every WRITE takes other pages of so much.
SPREAD: Final = 512 << 20
Descriptors = Any


@dataclass(frozen=True)
class Load:
    """What is left to be sent when prefill ends."""

    tokens: int
    layers: int
    page_bytes: int
    """One block in one layer."""
    block_tokens: int
    scattered: bool
    huge: bool = False
    """Pages of memory are of 2 MiB, as `emulation.options` has it."""

    @property
    def pages(self) -> int:
        """Per layer."""
        return -(-self.tokens // self.block_tokens)

    @property
    def nbytes(self) -> int:
        return self.layers * self.pages * self.page_bytes

    @property
    def places(self) -> int:
        """How many WRITEs find pages of their own before they are used again."""
        return max(1, SPREAD // (2 * self.nbytes))

    def rows(self, base: int) -> Descriptors:
        """(count, 3) of address, length, device; scattered pages leave every second one out."""
        plane = 2 * self.pages * self.page_bytes
        starts = base + plane * np.arange(self.layers, dtype=np.uint64)[:, None]
        if self.scattered:
            order = np.random.default_rng(1).permutation(self.pages).astype(np.uint64)
            addresses = starts + (2 * order * np.uint64(self.page_bytes))[None, :]
            length = self.page_bytes
        else:
            addresses, length = starts, self.pages * self.page_bytes
        rows = np.zeros((addresses.size, 3), np.uint64)
        rows[:, 0], rows[:, 1] = addresses.ravel(), length
        return rows


def measure(load: Load, repeat: int, environment: Mapping[str, str]) -> list[float]:
    """Seconds from the post to the notification's arrival, per WRITE."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(
        target=_receive, args=(theirs, load, repeat, dict(environment)), daemon=True
    )
    sent, give = context.Pipe(duplex=False)
    receiver.start()
    sender = context.Process(
        target=_send, args=(give, ours, load, repeat, dict(environment)), daemon=True
    )
    sender.start()
    for end in (ours, theirs, give):
        end.close()
    try:
        if not sent.poll(PATIENCE):
            raise TransportError(f"a plain NIXL WRITE was not over within {PATIENCE:.0f} s")
        found: list[float] = sent.recv()
        return found
    except EOFError:
        raise TransportError("the process with the plain NIXL WRITE ended") from None
    finally:
        for process in (sender, receiver):
            process.kill()
            process.join()


def _open(name: str, load: Load, environment: dict[str, str]) -> tuple[NixlTransport, int, Any]:
    os.environ.update({**QUIET, **environment})
    memory = pages(load.places * 2 * load.nbytes, huge=load.huge)
    memory[:] = 1
    base = int(memory.ctypes.data)
    region = Region(base, memory.nbytes, "DRAM", 0)
    return NixlTransport(AgentName(name), [region]), base, memory


def _receive(pipe: Connection, load: Load, repeat: int, environment: dict[str, str]) -> None:
    agent, base, _memory = _open("limit-d", load, environment)
    pipe.send((agent.metadata(), base))
    agent.add_peer(pipe.recv())
    agent.notify(AgentName("limit-p"), b"hello")
    for _ in range(repeat):
        while not agent.notifications():
            time.sleep(LOOK)
        pipe.send(time.monotonic())
    with suppress(EOFError):
        pipe.recv()  # the other end closes when it is done


def _send(
    result: Connection, pipe: Connection, load: Load, repeat: int, environment: dict[str, str]
) -> None:
    agent, base, _memory = _open("limit-p", load, environment)
    metadata, there = pipe.recv()
    peer = agent.add_peer(metadata)
    pipe.send(agent.metadata())
    while not agent.notifications():
        time.sleep(0.001)
    took = []
    for number in range(repeat):
        away = number % load.places * 2 * load.nbytes
        source, destination = load.rows(base + away), load.rows(there + away)
        began = time.monotonic()
        agent.post(WriteId(number), peer, source, destination, ("DRAM", "DRAM"), b"done")
        while agent.poll(WriteId(number)) != "done":
            time.sleep(LOOK)
        while not pipe.poll(LOOK):
            agent.notifications()
        took.append(pipe.recv() - began)
    result.send(took[1:])  # the first one opens connections
