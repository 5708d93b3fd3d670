"""Engines that run on real nodes, as an inventory file declares them.

    - {device: trn2, role: prefill, tp: 8, block: 32, vllm: 0.29.0, name: p0, url: http://p:8100,
       host: p, side_port: 5600, served: model}

NEURON_PUSH_HARDWARE names the file. A cell runs on hardware only if both of its sides are there.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ci.matrix.cells import Cell, Side
from neuron_push.errors import ConfigError

VARIABLE = "NEURON_PUSH_HARDWARE"


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A running engine."""

    device: str
    role: str
    name: str
    """Its engine id."""
    url: str
    host: str
    side_port: int
    served: str
    vllm: str
    tp: int = 1
    block: int = 32
    model: str = ""
    """The cells' model that stands for what it serves; "": any."""

    def fits(self, role: str, side: Side, model: str) -> bool:
        mine = Side(self.device, self.tp, self.block, self.vllm)
        return self.role == role and mine == side and self.model in ("", model)


def inventory() -> list[Node]:
    """Declared engines; none without the variable."""
    path = os.environ.get(VARIABLE)
    if not path:
        return []
    try:
        return msgspec.yaml.decode(Path(path).read_bytes(), type=list[Node])
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"{VARIABLE}={path}: {error}") from None


def pair(cell: Cell, nodes: list[Node]) -> tuple[Node, Node] | None:
    """The engines for a cell, or None when one is missing."""
    found = [
        next((node for node in nodes if node.fits(role, side, cell.model)), None)
        for role, side in (("prefill", cell.prefill), ("decode", cell.decode))
    ]
    if cell.connector != "neuron-push" or found[0] is None or found[1] is None:
        return None
    return found[0], found[1]
