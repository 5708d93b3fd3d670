"""PyTorch's expandable segments, which cannot be registered for RDMA as one piece.

Such a segment is one range of addresses over many physical allocations of 2 or 20 MiB, and a
driver exports one allocation at a time. Registering a range across them fails with "invalid
argument" or, worse, maps its first piece only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["VARIABLES", "asked_for", "holds"]

# The second is the name since PyTorch 2.9.
VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def asked_for(environ: Mapping[str, str]) -> str:
    """The variable that turns expandable segments on, or an empty string."""
    for name in VARIABLES:
        options = environ.get(name, "").replace(" ", "").lower().split(",")
        if "expandable_segments:true" in options:
            return name
    return ""


def holds(torch: Any, address: int) -> bool:
    """Whether PyTorch's allocator keeps this address in an expandable segment.

    The setting can be changed while a process runs, so the segment itself is asked.
    """
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return bool(segment.get("is_expandable", False))
    return False
