"""Loopback ports of the host that lead to servers in a network namespace.

A socket belongs to the namespace of the thread that makes it, so no address, route or interface
is needed on the host.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from neuron_push.emulation.network import Place
from neuron_push.ports import HOST

_NAMESPACES: Final = Path("/run/netns")
_NETWORK: Final = 0x40000000  # CLONE_NEWNET
_CHUNK: Final = 64 << 10


def enter(namespace: str) -> None:
    """Move the calling thread into a network namespace, for the rest of its life."""
    handle = os.open(_NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, _NETWORK):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter {namespace}: {os.strerror(number)}")
    finally:
        os.close(handle)


class Relay:
    """Takes connections at a loopback port, until closed."""

    def __init__(self, port: int, place: Place, target: int) -> None:
        self._place = place
        self._target = target
        self._listening = socket.create_server((HOST, port), backlog=128)
        self.port = int(self._listening.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def close(self) -> None:
        """Take no more connections and cut those there are."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            enter(self._place.namespace)
            with socket.create_connection((self._place.address, self._target), 10) as server:
                server.settimeout(None)
                with self._lock:
                    self._open |= {client, server}
                try:
                    self._both_ways(client, server)
                finally:
                    with self._lock:
                        self._open -= {client, server}

    def _both_ways(self, client: socket.socket, server: socket.socket) -> None:
        back = threading.Thread(target=_pump, args=(server, client), daemon=True)
        back.start()
        _pump(client, server)
        back.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Copy until the source ends, and then say so to the target."""
    with suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
