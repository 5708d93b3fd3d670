"""A second process with a buffer and a NIXL agent over it, and this process's end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import zlib
from collections.abc import Iterator, Mapping

import numpy as np

from neuron_push.transport import AgentName, WriteId
from tests.hardware.memory import Buffer
from tests.hardware.suite import Skip

WAIT_S = 20.0


class Receiver:
    """The other process: owns a buffer, takes notifications, says what its bytes are."""

    def __init__(self, kind: str, nbytes: int, backend: str, environment: Mapping[str, str]):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, kind, nbytes, backend, dict(environment))
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def call(self, command, *arguments, seconds=90.0):
        self._pipe.send((command, arguments))
        if not self._pipe.poll(seconds):
            raise AssertionError(f"the receiver did not answer {command} within {seconds:g} s")
        problem, answer = self._pipe.recv()
        if problem:
            raise AssertionError(f"the receiver failed: {problem}")
        return answer

    def close(self):
        with contextlib.suppress(OSError, AssertionError):
            self.call("stop", seconds=10.0)
        self._process.join(5)
        self._process.kill()


class Pair:
    """A sender here and a receiver there, introduced to each other."""

    def __init__(self, kind, nbytes, backend, environment):
        self.receiver = Receiver(kind, nbytes, backend, environment)
        try:
            self.buffer = Buffer(kind, nbytes)
            self.agent = _open(self.buffer, backend, f"hardware/sender/{os.getpid()}")
            # The receiver loads the sender's metadata while the sender makes progress.
            self.region, metadata = self.receiver.call("describe")
            self.peer = self.agent.add_peer(metadata)
            self.receiver.call("meet", self.agent.metadata())
        except BaseException:
            self.receiver.close()
            raise
        self._writes = 0

    def write(self, pieces, payload: bytes) -> float:
        """WRITE (source offset, destination offset, length) pieces; seconds until told."""
        self._writes += 1
        write = WriteId(self._writes)
        ours = [(self.buffer.region.base + s, n, self.buffer.region.device) for s, _, n in pieces]
        theirs = [(self.region.base + d, n, self.region.device) for _, d, n in pieces]
        began = time.monotonic()
        self.agent.post(
            write, self.peer, np.array(ours, np.uint64), np.array(theirs, np.uint64),
            (self.buffer.region.memory, self.region.memory), payload,
        )  # fmt: skip
        self.receiver._pipe.send(("told", (payload,)))
        done = told = False
        while not (done and told):
            done = done or self.agent.poll(write) == "done"
            self.agent.notifications()
            if self.receiver._pipe.poll(0):
                problem, told = self.receiver._pipe.recv()
                assert not problem and told, problem or f"{payload!r} was never notified"
            late = time.monotonic() - began
            assert late < 2 * WAIT_S, f"WRITE {payload!r}: done {done}, told {told}"
        return time.monotonic() - began

    def read(self, pieces) -> float:
        """READ (their offset, our offset, length) pieces; seconds until they are here."""
        agent = self.agent._agent
        ours = [(self.buffer.region.base + d, n, self.buffer.region.device) for _, d, n in pieces]
        theirs = [(self.region.base + s, n, self.region.device) for s, _, n in pieces]
        began = time.monotonic()
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(np.array(ours, np.uint64), self.buffer.region.memory),
            agent.get_xfer_descs(np.array(theirs, np.uint64), self.region.memory),
            self.peer,
        )
        state = agent.transfer(handle)
        while state != "DONE":
            assert state == "PROC", state
            assert time.monotonic() - began < 2 * WAIT_S, "a READ does not end"
            self.agent.notifications()
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        return time.monotonic() - began

    def fill(self, seed):
        """Random bytes over there; returns them."""
        self.receiver.call("fill", seed)
        return random_bytes(seed, self.region.length)

    def digest(self, start, length):
        return self.receiver.call("digest", start, length)

    def close(self):
        self.receiver.close()
        self.agent.close()


@contextlib.contextmanager
def pair(kind, nbytes, backend, environment=None) -> Iterator[Pair]:
    found = Pair(kind, nbytes, backend, environment or {})
    try:
        yield found
    finally:
        found.close()


def random_bytes(seed, nbytes):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def digest(data) -> int:
    return zlib.crc32(np.ascontiguousarray(data).data)


def _open(buffer, backend, name):
    try:
        from neuron_push.nixl import NixlFactory, binding

        binding()
    except Exception as problem:
        raise Skip(f"NIXL does not load: {problem}") from problem
    opened = NixlFactory((backend,), enter=buffer.accelerator.enter_thread)
    return opened(AgentName(name), [buffer.region])


class _Commands:
    def __init__(self, kind, nbytes, backend):
        self._buffer = Buffer(kind, nbytes)
        self._agent = _open(self._buffer, backend, f"hardware/receiver/{os.getpid()}")
        self._heard = set()

    def describe(self):
        return self._buffer.region, self._agent.metadata()

    def meet(self, metadata):
        self._agent.add_peer(metadata)

    def told(self, payload):
        deadline = time.monotonic() + WAIT_S
        while payload not in self._heard:
            self._heard |= {heard for _, heard in self._agent.notifications()}
            if time.monotonic() > deadline:
                return False
        self._heard.discard(payload)
        return True

    def digest(self, start, length):
        return digest(self._buffer.read(start, length))

    def fill(self, seed):
        self._buffer.write(random_bytes(seed, len(self._buffer.tensor)))


def _serve(pipe, kind, nbytes, backend, environment):
    os.environ.update(environment)
    commands, problem = None, ""
    try:
        commands = _Commands(kind, nbytes, backend)
    except BaseException as error:  # noqa: BLE001  told to the other end
        problem = repr(error)
    while True:
        # Progress between questions, so that the sender's set-up does not stall.
        while not pipe.poll(0.002):
            if commands is not None:
                commands._heard |= {heard for _, heard in commands._agent.notifications()}
        name, arguments = pipe.recv()
        if name == "stop":
            if commands is not None:
                commands._agent.close()
            pipe.send(("", None))
            return
        try:
            pipe.send((problem, None if problem else getattr(commands, name)(*arguments)))
        except Exception as error:  # noqa: BLE001  told to the other end
            pipe.send((repr(error), None))
