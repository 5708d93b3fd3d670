"""What can become of a cell."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ci.matrix.cells import Cell


class State(StrEnum):
    """Emulated success is never hardware success."""

    PASSED_HARDWARE = "passed-hardware"
    PASSED_EMULATED = "passed-emulated"
    NOT_RUN = "not-run"
    FAILED = "failed"
    # The engines said readably that they cannot work together, as matrix.yaml says they must.
    REFUSED = "refused"


@dataclass
class Outcome:
    """One cell's."""

    cell: Cell
    state: State
    reason: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


def passed(on_hardware: bool) -> State:
    """The state of a cell whose checks hold."""
    return State.PASSED_HARDWARE if on_hardware else State.PASSED_EMULATED
