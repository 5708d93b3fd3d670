"""What Neuron's driver asks of memory that is to be registered."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final

from neuron_push.errors import ConfigError

__all__ = ["PAGE", "require_mapped"]

# The driver exports memory in host pages (aws-neuron-driver, neuron_dmabuf.c), and libfabric takes
# an address for the start of what is exported.
PAGE: Final = mmap.PAGESIZE


def require_mapped(root: Path, base: int, length: int) -> None:
    """Raise ConfigError unless this process has mapped the whole range.

    The driver exports only memory that the process has mapped. A range may span several mappings
    that touch. Where the mappings cannot be read nothing is said.
    """
    try:
        lines = (root / "proc/self/maps").read_text().splitlines()
    except OSError:
        return
    reached = base
    for line in lines:  # in ascending order
        start, _, end = line.split(maxsplit=1)[0].partition("-")
        if int(start, 16) <= reached < int(end, 16):
            reached = int(end, 16)
    if reached < base + length:
        missing = "it is not" if reached == base else f"only {reached - base} bytes are"
        raise ConfigError(
            f"cannot register {length} bytes of Neuron memory at {base:#x}: {missing} mapped into "
            "this process; set NEURON_RT_MAP_HBM=1 before the Neuron runtime starts"
        )
