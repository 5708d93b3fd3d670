"""Registry, runner and report of the hardware checks."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_push import efa

# Of one machine's run: what has not begun by then is reported as not run.
LIMIT_S = 300.0


class Skip(Exception):
    """What the check needs is not there; the text says what."""


@dataclass(frozen=True)
class Check:
    """One check: raises AssertionError (or anything else) if the machine fails it."""

    name: str
    needs: str  # "cuda", "neuron" or "efa"
    what: str
    run: Callable[[], dict[str, Any] | None]


CHECKS: list[Check] = []


def check(needs: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function; its name names the check, its docstring says what is checked."""

    def register(function):
        first = (function.__doc__ or "").strip().splitlines()[0]
        CHECKS.append(Check(function.__name__, needs, first, function))
        return function

    return register


def present(root: Path = Path("/")) -> set[str]:
    """Which of cuda, neuron and efa this machine has."""
    found = set()
    if any((root / "dev").glob("neuron[0-9]*")):
        found.add("neuron")
    if any((root / "dev").glob("nvidia[0-9]*")):
        found.add("cuda")
    if efa.devices(root):
        found.add("efa")
    return found


def run(checks: Iterable[Check], limit: float = LIMIT_S, clock=time.monotonic) -> dict[str, Any]:
    """Run checks in order and report each; one that fails stops none."""
    started, results = clock(), []
    for each in checks:
        began = clock()
        if began - started > limit:
            outcome, detail = "not run", f"the {limit:g} s of the suite were over"
        else:
            outcome, detail = _outcome(each)
        results.append(
            {
                "name": each.name,
                "needs": each.needs,
                "what": each.what,
                "outcome": outcome,
                "detail": detail,
                "seconds": round(clock() - began, 3),
            }
        )
    counts = {
        kind: sum(result["outcome"] == kind for result in results)
        for kind in ("passed", "failed", "skipped", "not run")
    }
    # Nothing checked is no success.
    good = counts["passed"] > 0 and counts["failed"] == 0 and counts["not run"] == 0
    return {"passed": good, "counts": counts, "checks": results}


def _outcome(each: Check) -> tuple[str, Any]:
    try:
        return "passed", each.run() or {}
    except Skip as reason:
        return "skipped", str(reason)
    except Exception as problem:  # noqa: BLE001  a failure is a result
        lines = traceback.format_exception(problem)[-3:]
        return "failed", {"error": f"{type(problem).__name__}: {problem}", "where": "".join(lines)}
