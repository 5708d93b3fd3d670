"""The few calls to Neuron's runtime library that need no initialised runtime of our own.

Sources: nrt.h of aws-neuron-sdk (`nrt_get_total_nc_count`, `nrt_get_attached_efa_bdf`). `nrt_init`
is never called: it claims cores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, NamedTuple

__all__ = ["INSTALLED", "NAME", "Loaded", "Runtime", "load"]

NAME: Final = "libnrt.so.1"
# Where AWS's package puts it, which is often not on the loader's path.
INSTALLED: Final = "/opt/aws/neuron/lib/libnrt.so.1"
_BDF_BYTES: Final = 64


class Loaded(NamedTuple):
    """The library, or why there is none; `by_path` if only its full path led to it."""

    library: Any
    by_path: bool
    error: str


def load(dlopen: Callable[[str], Any] = ctypes.CDLL) -> Loaded:
    """Load the library, and with it make `libnrt.so.1` known to later callers in this process.

    NIXL and libfabric look it up by that name only. The loader answers such a look-up with a
    library of that name that is loaded already, wherever it came from.
    """
    try:
        return Loaded(dlopen(NAME), False, "")
    except OSError as error:
        first = str(error)
    try:
        return Loaded(dlopen(INSTALLED), True, first)
    except OSError as error:
        return Loaded(None, False, f"{first}; {error}")


class Runtime:
    """Questions to a loaded library. Answers are None where it cannot tell."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def cores(self) -> int | None:
        """Neuron cores of the machine; libfabric refuses Neuron memory where this is 0."""
        count = ctypes.c_uint32()
        status = self._call("nrt_get_total_nc_count", ctypes.byref(count))
        return int(count.value) if status == 0 else None

    def attached_efa(self, address: int) -> str | None:
        """PCI address of the EFA device next to this memory (runtime 2.31.24 and later)."""
        text = ctypes.create_string_buffer(_BDF_BYTES)
        length = ctypes.c_size_t(_BDF_BYTES)
        status = self._call(
            "nrt_get_attached_efa_bdf", ctypes.c_void_p(address), text, ctypes.byref(length)
        )
        return text.value.decode() if status == 0 and text.value else None

    def _call(self, name: str, *arguments: Any) -> int | None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return None
        return int(function(*arguments))
