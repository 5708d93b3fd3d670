"""libnrt without Neuron devices.

Sources: nrt.h of aws-neuron-sdk (status 0 is success; nrt_get_attached_efa_bdf answers for
addresses of device memory, since runtime 2.31.24); ld.so(8) for where a library is found by name.
"""

from __future__ import annotations


class FakeNrt:
    """The loaded library: device memory at `ranges`, as (start, length) -> PCI address."""

    def __init__(self, ranges=None, cores=64):
        self._ranges = ranges or {}
        self._cores = cores

    def nrt_init(self, *arguments):
        raise AssertionError("nrt_init claims cores")

    def nrt_get_total_nc_count(self, count):
        count._obj.value = self._cores
        return 0

    def nrt_get_attached_efa_bdf(self, address, text, length):
        for (start, size), bdf in self._ranges.items():
            if start <= address.value < start + size:
                text.value = bdf.encode()
                length._obj.value = len(bdf)
                return 0
        return 2  # NRT_INVALID


class OldNrt:
    """A runtime before 2.31.24."""

    def nrt_get_total_nc_count(self, count):
        count._obj.value = 2
        return 0


def loader(path_has_it=False, installed=True, library=None):
    """A dlopen for a machine with libnrt on the loader's path, in /opt/aws, or nowhere."""
    library = library or FakeNrt()

    def dlopen(name):
        if name.startswith("/opt/aws/neuron/lib/") and installed:
            return library
        if "/" not in name and path_has_it:
            return library
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    return dlopen
