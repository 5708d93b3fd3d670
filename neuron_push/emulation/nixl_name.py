"""Lets `import nixl` find the one installed flavour where the meta package is missing.

vLLM's own NIXL connectors know that name only; the meta package would bring a second UCX.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

FLAVOURS = ("nixl_cu12", "nixl_cu13")


class _Alias(MetaPathFinder, Loader):
    """Asked last, so a real `nixl` is found before."""

    def __init__(self, flavour: str) -> None:
        self._flavour = flavour

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "nixl" and not fullname.startswith("nixl."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == "nixl")

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return importlib.import_module(self._flavour + spec.name.removeprefix("nixl"))

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed under its own name."""


def install() -> None:
    """Idempotent, and cheap: nothing is imported."""
    if any(isinstance(finder, _Alias) for finder in sys.meta_path):
        return
    for flavour in FLAVOURS:
        if importlib.util.find_spec(flavour) is not None:
            sys.meta_path.append(_Alias(flavour))
            return
