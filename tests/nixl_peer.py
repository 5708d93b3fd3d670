"""A process with NIXL agents over one array, driven over a pipe; for tests that stop and kill.

UCX is told to use tcp only, where bytes of a posted WRITE sit in sockets: the hard case.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

# No child outlives this, whatever becomes of the test.
LIFE = 110


class Peer:
    """The parent's end. `tell` starts a command, `hear` waits for its result, `call` does both."""

    def __init__(self, nbytes, value=0):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        saved = {name: os.environ.get(name) for name in _ENVIRONMENT}
        os.environ.update(_ENVIRONMENT)
        try:
            self.process = context.Process(target=_serve, args=(theirs, nbytes, value), daemon=True)
            self.process.start()
        finally:
            for name, value_before in saved.items():
                if value_before is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value_before
        theirs.close()

    def tell(self, command, *arguments):
        self._pipe.send((command, arguments))

    def hear(self, seconds=45):
        if not self._pipe.poll(seconds):
            raise AssertionError("the process did not answer")
        result = self._pipe.recv()
        if isinstance(result, _Raised):
            raise AssertionError(f"the process failed: {result.text}")
        return result

    def call(self, command, *arguments):
        self.tell(command, *arguments)
        return self.hear()

    def stop(self):
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.join(10)


class _Raised:
    def __init__(self, text):
        self.text = text


class _Commands:
    """The child's end: one array, any number of agents over it."""

    def __init__(self, nbytes, value):
        import numpy as np

        self._np = np
        self.array = np.full(nbytes, value, np.uint8)
        self.agents = {}

    def base(self):
        return self.array.ctypes.data

    def open(self, name):
        from neuron_push.geometry import Region
        from neuron_push.nixl import NixlTransport

        region = Region(base=self.base(), length=self.array.nbytes, memory="DRAM", device=0)
        self.agents[name] = NixlTransport(name, [region])
        return self.agents[name].metadata()

    def add(self, name, metadata):
        return self.agents[name].add_peer(metadata)

    def remove(self, name, peer):
        self.agents[name].remove_peer(peer)

    def deregister(self, name):
        transport = self.agents[name]
        transport._deregister(transport._agent)

    def close(self, name):
        start = time.monotonic()
        self.agents.pop(name).close()
        return time.monotonic() - start

    def notify(self, name, peer, payload):
        self.agents[name].notify(peer, payload)

    def post(self, name, write, peer, base, offset, nbytes):
        def row(address):
            return self._np.array([[address + offset, nbytes, 0]], self._np.uint64)

        rows = row(self.base()), row(base)
        self.agents[name].post(write, peer, *rows, ("DRAM", "DRAM"), b"landed")

    def drive(self, name, write, seconds):
        """Poll a WRITE to its end: "done", the name of an exception, or "pending"."""
        from neuron_push.errors import TransportError

        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if self.agents[name].poll(write) == "done":
                    return "done"
            except TransportError as error:
                return type(error).__name__
            self.agents[name].notifications()
        return "pending"

    def progress(self, seconds, wanted=0):
        """Let all agents work for a while, or until so many notifications have come."""
        taken = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not (wanted and len(taken) >= wanted):
            for agent in self.agents.values():
                taken += agent.notifications()
        return taken

    def progress_until_some_landed(self, offset, nbytes, seconds=10):
        """Take in a WRITE bit by bit, and stop in the middle of it; bytes landed so far."""
        landed = 0
        deadline = time.monotonic() + seconds
        while not landed and time.monotonic() < deadline:
            for agent in self.agents.values():
                agent.notifications()
            landed = self.count(offset, nbytes)
        return landed

    def fill(self, offset, nbytes, value):
        self.array[offset : offset + nbytes] = value

    def count(self, offset, nbytes, but=0):
        """Bytes that differ from `but`."""
        return int(self._np.count_nonzero(self.array[offset : offset + nbytes] != but))


_ENVIRONMENT = {"UCX_TLS": "tcp,self", "NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}


def _serve(pipe, nbytes, value):
    signal.alarm(LIFE)
    commands = _Commands(nbytes, value)
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(getattr(commands, command)(*arguments))
        except Exception as error:  # noqa: BLE001  the parent raises it again
            pipe.send(_Raised(repr(error)))
