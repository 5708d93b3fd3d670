"""What NIXL says on standard error while an agent is made, and nowhere else.

NIXL (C++, absl logging) has no other channel for two facts. A provider that cannot register device
memory is a warning there, after which the memory is registered as host memory: fatal here. And
which EFA rails serve a GPU is a debug line, so NIXL_LOG_LEVEL=DEBUG must have been set before NIXL
was loaded, which reads it once.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Rails", "fall_back", "overheard", "rails"]

# The descriptor that absl writes to, whatever Python's sys.stderr is.
_STDERR: Final = 2
_FALL_BACK: Final = re.compile(r"falling back to system memory", re.IGNORECASE)
_CREATED: Final = re.compile(r"Created rail (\d+) \(device=([^,)\s]+)(?:, provider=([^)\s]+))?")
_MAPPED: Final = re.compile(r"(?:device PCI (\S+) )?mapped to rail (\d+)")


@dataclass
class Rails:
    """EFA devices by rail number, and the rails that each accelerator's memory uses."""

    devices: dict[int, str] = field(default_factory=dict)
    providers: set[str] = field(default_factory=set)
    used: dict[str, list[int]] = field(default_factory=dict)  # by the accelerator's PCI address

    def __str__(self) -> str:
        if not self.devices:
            return "NIXL said nothing about rails (set NIXL_LOG_LEVEL=DEBUG before it loads)"
        if not self.used:
            return f"{len(self.devices)} rails: {', '.join(self.devices.values())}"
        return "; ".join(
            f"{device or 'device memory'} on "
            + ", ".join(f"rail {rail} ({self.devices.get(rail, '?')})" for rail in numbers)
            for device, numbers in self.used.items()
        )


@contextlib.contextmanager
def overheard() -> Iterator[list[str]]:
    """Collect the lines that this process writes to standard error meanwhile; all are passed on.

    The list is filled at the end. Lines of other threads are among them.
    """
    lines: list[str] = []
    sys.stderr.flush()
    saved = os.dup(_STDERR)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), _STDERR)
            try:
                yield lines
            finally:
                sys.stderr.flush()
                os.dup2(saved, _STDERR)
                file.seek(0)
                said = file.read()
                _pass_on(said)
                lines += said.decode(errors="replace").splitlines()
    finally:
        os.close(saved)


def fall_back(lines: Iterable[str]) -> str:
    """The line in which NIXL takes device memory for host memory; empty if there is none."""
    return next((line.strip() for line in lines if _FALL_BACK.search(line)), "")


def rails(lines: Iterable[str]) -> Rails:
    """Rails that were created, and the ones mapped to each accelerator."""
    found = Rails()
    for line in lines:
        if created := _CREATED.search(line):
            found.devices[int(created[1])] = created[2]
            if created[3]:
                found.providers.add(created[3])
        elif mapped := _MAPPED.search(line):
            used = found.used.setdefault(mapped[1] or "", [])
            if int(mapped[2]) not in used:
                used.append(int(mapped[2]))
    return found


def _pass_on(said: bytes) -> None:
    while said:
        said = said[os.write(_STDERR, said) :]
