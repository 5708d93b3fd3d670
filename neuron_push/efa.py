"""EFA devices and the machine's kind, as the kernel shows them. `root` is where /sys is."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["AMAZON", "devices", "instance_type", "read", "should_have_efa"]

# PCI vendor of EFA devices.
AMAZON: Final = "0x1d0f"
# Families with an accelerator whose published network is EFA. A machine of theirs without an EFA
# device was launched, or its container started, without asking for one.
_EFA_FAMILIES: Final = (
    "p4d.",
    "p4de.",
    "p5.",
    "p5e.",
    "p5en.",
    "p6-",
    "p6e-",
    "trn1",
    "trn2",
    "trn3",
)
# The exception among them (neuron.md 2.5).
_WITHOUT_EFA: Final = ("trn1.2xlarge", "trn2.3xlarge")


def devices(root: Path) -> list[str]:
    """Names of the RDMA devices that are EFA adapters."""
    vendors = (root / "sys/class/infiniband").glob("*/device/vendor")
    return sorted(path.parts[-3] for path in vendors if read(path) == AMAZON)


def instance_type(root: Path) -> str:
    """What the firmware calls the machine, such as "p5en.48xlarge"; empty if it is not said."""
    return read(root / "sys/devices/virtual/dmi/id/product_name")


def should_have_efa(root: Path) -> bool:
    """Whether machines of this type are sold with EFA."""
    kind = instance_type(root)
    return kind.startswith(_EFA_FAMILIES) and kind not in _WITHOUT_EFA


def read(path: Path) -> str:
    """A small file without its line end; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
