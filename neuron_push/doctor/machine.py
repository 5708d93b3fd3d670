"""One machine, as the checks see it. Tests replace the parts that are not there."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from neuron_push import efa

__all__ = ["UNLIMITED", "Machine", "Point", "Ran"]

UNLIMITED: Final = -1


class Ran(NamedTuple):
    """A command's end; status None means that it ran out of time."""

    status: int | None
    out: str
    err: str


class Point(NamedTuple):
    """An entry point and the distribution that offers it."""

    name: str
    target: str
    distribution: str
    version: str = ""


@dataclass
class Machine:
    """The machine this runs on."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    # ---------------------------------------------------------------- files

    def text(self, path: str) -> str:
        """A small file's text, stripped; empty if it cannot be read."""
        return efa.read(self.root / path.lstrip("/"))

    def names(self, pattern: str) -> list[str]:
        """Last parts of the paths that match, sorted."""
        return sorted(path.name for path in self.root.glob(pattern.lstrip("/")))

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder of that path."""
        return (self.root / path.lstrip("/")).exists()

    # ---------------------------------------------------------------- processes and libraries

    def run(
        self,
        command: Sequence[str],
        timeout: float = 10.0,
        environment: Mapping[str, str] | None = None,
    ) -> Ran | None:
        """Run a command to its end; None if there is no such command."""
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
                env={**self.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
            )
        except (FileNotFoundError, PermissionError):
            return None
        except subprocess.TimeoutExpired as expired:
            return Ran(None, _text(expired.stdout), _text(expired.stderr))
        return Ran(done.returncode, done.stdout, done.stderr)

    def child(
        self,
        arguments: Sequence[str],
        timeout: float,
        environment: Mapping[str, str] | None = None,
    ) -> Ran:
        """Run a part of the doctor in a process of its own, which may hang or die."""
        command = [sys.executable, "-m", "neuron_push.doctor.child", *arguments]
        ran = self.run(command, timeout, environment)
        return ran or Ran(127, "", f"{sys.executable} does not run")

    def loads(self, library: str, symbol: str = "") -> str:
        """Empty if the loader finds the library (and symbol), else its own words."""
        ran = self.child(["library", library, symbol], 20.0)
        return "" if ran.status == 0 else (ran.out.strip() or f"ended with status {ran.status}")

    # ---------------------------------------------------------------- Python

    def version(self, distribution: str) -> str:
        """Installed version of a distribution; empty if there is none."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def points(self, group: str) -> list[Point]:
        """Entry points of a group, from every distribution, doubles included."""
        return [
            Point(point.name, point.value, distribution.metadata["Name"], distribution.version)
            for distribution in importlib.metadata.distributions()
            for point in distribution.entry_points
            if point.group == group
        ]

    # ---------------------------------------------------------------- limits and network

    def kernel(self) -> str:
        """Release of the running kernel."""
        return platform.release()

    def memlock(self) -> int:
        """Bytes that a process may lock, or UNLIMITED."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return UNLIMITED if soft == resource.RLIM_INFINITY else soft

    def shared_memory(self) -> int:
        """Size of /dev/shm in bytes; 0 if there is none."""
        try:
            found = os.statvfs(self.root / "dev/shm")
        except OSError:
            return 0
        return found.f_frsize * found.f_blocks

    def resolve(self, host: str) -> list[str]:
        """Addresses of a host name; empty if it has none."""
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            return []
        return sorted({str(entry[4][0]) for entry in found})

    def binds(self, address: str, port: int) -> int:
        """0 if a listener can be opened there, else the errno."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # As libzmq does; without it a port just left counts as taken for a minute.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
            except OSError as problem:
                return problem.errno or 1
        return 0

    def reaches(self, host: str, port: int, timeout: float = 3.0) -> str:
        """Empty if something accepts a TCP connection there, else why not."""
        try:
            socket.create_connection((host, port), timeout).close()
        except OSError as problem:
            return str(problem)
        return ""


def _text(raw: bytes | str | None) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw or ""
