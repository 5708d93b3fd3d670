"""What a check found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["Finding", "Level", "error", "exit_status", "note", "ok", "warning"]

# "note" is worth reading and asks for nothing.
Level = Literal["ok", "note", "warning", "error"]
_STATUS: Final[dict[Level, int]] = {"ok": 0, "note": 0, "warning": 1, "error": 2}


@dataclass(frozen=True)
class Finding:
    """One observation. `why` and `remedy` are empty where nothing is to be done."""

    check: str  # a stable name, such as "nixl.LIBFABRIC"
    level: Level
    seen: str
    why: str = ""
    remedy: str = ""


def ok(check: str, seen: str) -> Finding:
    """As it should be."""
    return Finding(check, "ok", seen)


def note(check: str, seen: str, why: str = "") -> Finding:
    """Worth knowing; asks for nothing."""
    return Finding(check, "note", seen, why)


def warning(check: str, seen: str, why: str, remedy: str) -> Finding:
    """Works, or may work, but not as it should."""
    return Finding(check, "warning", seen, why, remedy)


def error(check: str, seen: str, why: str, remedy: str) -> Finding:
    """Will not work, or will be wrong."""
    return Finding(check, "error", seen, why, remedy)


def exit_status(findings: Iterable[Finding]) -> int:
    """0 if all is well, 1 with warnings, 2 with errors."""
    return max((_STATUS[finding.level] for finding in findings), default=0)
