"""Completion notices beside a main loop of pure Python that never lets go of the interpreter.

Prefill is a process whose main thread computes without a pause; its transfer thread gets the
interpreter only when Python takes it away from there. Decode is another process, and this one
watches decode's memory, so that the moment of landing is seen by neither.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Final

import numpy as np

from neuron_push.bench.rank import ENVIRONMENT, Rank, Shape
from neuron_push.bench.trap import Bytes
from neuron_push.config import Config
from neuron_push.errors import TransportError
from neuron_push.protocol import Address

SHAPE: Final = Shape(blocks=24, width=8192)
BLOCKS: Final = list(range(1, 9))
TLS: Final = "tcp,self,sm"
PATIENCE: Final = 60.0
# Seconds between two looks at decode's memory: the resolution.
LOOK: Final = 0.0001


def measure(transfers: int) -> list[float]:
    """Seconds from the last byte in decode's memory to its transfer thread having everything."""
    context = multiprocessing.get_context("spawn")
    memory = SharedMemory(create=True, size=SHAPE.blocks * SHAPE.block_bytes)
    pipes = []
    children = []
    try:
        for target in (_prefill, _decode):
            ours, theirs = context.Pipe()
            child = context.Process(target=target, args=(theirs, memory.name), daemon=True)
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)
        prefill, decode = pipes
        address = _hear(prefill)
        _hear(decode)
        watched = _bytes(memory)
        try:
            return [
                _one(number, prefill, decode, address, watched) for number in range(transfers + 3)
            ][3:]
        finally:
            del watched
    finally:
        for child in children:
            child.kill()
            child.join()
        memory.close()
        memory.unlink()


def _one(
    number: int, prefill: Connection, decode: Connection, address: Address, watched: Bytes
) -> float:
    kv = watched.reshape(-1, SHAPE.blocks, SHAPE.plane_bytes)
    kv[:] = 0
    name = f"t{number}"
    decode.send((name, address))
    prefill.send(name)
    ends = kv[:, BLOCKS, -1]
    deadline = time.monotonic() + PATIENCE
    while not ends.all():
        if time.monotonic() > deadline:
            raise TransportError(f"transfer {name} did not land within {PATIENCE:.0f} s")
        time.sleep(LOOK)
        ends = kv[:, BLOCKS, -1]
    landed = time.monotonic()
    told: float = _hear(decode)
    return max(0.0, told - landed)


def _bytes(memory: SharedMemory) -> Bytes:
    assert memory.buf is not None
    return np.frombuffer(memory.buf, np.uint8)


def _hear(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE):
        raise TransportError(f"a rank did not answer within {PATIENCE:.0f} s")
    return pipe.recv()


def _rank(role: str, memory: Bytes | None = None) -> Rank:
    os.environ.update({**ENVIRONMENT, "UCX_TLS": TLS})
    return Rank("P" if role == "kv_producer" else "D", role, Config(), SHAPE, memory=memory)


def _prefill(pipe: Connection, _: str) -> None:
    """Transfers asked for by a thread, while the main thread hogs the interpreter."""
    rank = _rank("kv_producer")
    sys.setswitchinterval(Config().switch_interval)
    pipe.send(rank.address)

    def serve() -> None:
        stamp = 0
        while True:
            name = pipe.recv()
            stamp += 1
            rank.offer(name, BLOCKS, stamp)

    threading.Thread(target=serve, daemon=True).start()
    count = 0
    while True:
        count += 1


def _decode(pipe: Connection, name: str) -> None:
    """Tells when it has everything, transfer by transfer."""
    memory = SharedMemory(name=name)
    rank = _rank("kv_consumer", _bytes(memory))
    pipe.send(None)
    while True:
        transfer, address = pipe.recv()
        attempt = rank.want(transfer, BLOCKS, address, "P")
        pipe.send(rank.hears("Received", attempt))
