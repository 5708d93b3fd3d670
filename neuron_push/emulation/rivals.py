"""What vLLM's NIXL connectors need to be measured fairly on a machine of few cores.

They let NIXL's progress thread spin on a core of its own, and on CPU platforms they pin their
thread, and every one it starts, to the last core: two engines would share one core out of many.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Any


def slow_progress(microseconds: int) -> None:
    """Agents made from now on let their progress threads sleep; they still wake for traffic."""
    for package in ("nixl_cu12", "nixl_cu13", "nixl"):
        try:
            bindings = importlib.import_module(f"{package}._api").nixlBind
        except (ImportError, AttributeError):
            continue
        plain = getattr(bindings.nixlAgentConfig, "plain", bindings.nixlAgentConfig)
        bindings.nixlAgentConfig = _delayed(plain, microseconds)


def _delayed(plain: Any, microseconds: int) -> Any:
    """The class of NIXL's settings, deaf to the delay that its Python API sets: none."""
    field = plain.pthrDelay

    def hold(self: Any, _: int) -> None:
        field.fset(self, microseconds)

    return type("Delayed", (plain,), {"plain": plain, "pthrDelay": property(field.fget, hold)})


def spread(cores: Set[int]) -> None:
    """Let every thread of this process run on these cores."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), cores)
