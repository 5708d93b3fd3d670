"""What the doctor runs in processes of their own, since it may hang, crash or leave things loaded.

python -m neuron_push.doctor.child backend UCX 64     create an agent, WRITE 64 MiB, JSON
python -m neuron_push.doctor.child plugin             load vLLM and the connector, JSON
python -m neuron_push.doctor.child library NAME [SYMBOL]
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import time
import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from neuron_push.errors import NeuronPushError, TransportError
from neuron_push.geometry import Region
from neuron_push.nixl import NixlFactory, NixlTransport, logs
from neuron_push.transport import AgentName, WriteId

__all__ = ["backend", "library", "main", "plugin"]

_DEADLINE: Final = 60.0
_SLICE: Final = 16 << 20

Bytes = npt.NDArray[np.uint8]


def main(arguments: Sequence[str]) -> int:
    """Run one of the above; its answer is the last line on standard output."""
    what, *rest = arguments
    if what == "library":
        problem = library(*rest)
        say(problem)
        return bool(problem)
    try:
        answer = backend(rest[0], int(rest[1]) << 20) if what == "backend" else plugin()
    except NeuronPushError as error:
        say(str(error))
        return 1
    say(json.dumps(answer))
    return 0


def say(line: str) -> None:
    """One line of answer."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def library(name: str, symbol: str = "") -> str:
    """Empty if the library (and symbol) is found, else the loader's words."""
    try:
        loaded = ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return "" if not symbol or hasattr(loaded, symbol) else f"{name} has no {symbol}"


def plugin() -> dict[str, Any]:
    """Platform that vLLM takes, and why the connector would refuse to load, if it does."""
    refused = ""
    platforms = importlib.import_module("vllm.platforms")
    device = str(platforms.current_platform.device_type)
    importlib.import_module("neuron_push.vllm").register()
    try:
        importlib.import_module("neuron_push.vllm.connector")
    except NeuronPushError as error:
        refused = str(error)
    return {"device": device, "refused": refused}


def backend(name: str, nbytes: int) -> dict[str, Any]:
    """Memory that the backend offers here, and the outcome of a WRITE between two agents.

    Two agents: NIXL's LIBFABRIC reports a transfer from an agent to itself as done at once.
    """
    random = np.random.default_rng(7)
    source = random.integers(0, 256, nbytes, np.uint8)
    target = np.zeros(nbytes, np.uint8)
    opened = NixlFactory((name,))
    with logs.overheard() as said:
        prefill = opened(AgentName("doctor/prefill"), [_region(source)])
        decode = opened(AgentName("doctor/decode"), [_region(target)])
    rails = logs.rails(said)
    answer: dict[str, Any] = {
        "memory": prefill.offered(),
        "providers": sorted(rails.providers),
        "rails": str(rails) if rails.devices else "",
        "bytes": nbytes,
    }
    try:
        answer["seconds"] = _write(prefill, decode, source, target)
        answer["equal"] = zlib.crc32(source.data) == zlib.crc32(target.data)
    except NeuronPushError as error:
        answer["failure"] = str(error)
    decode.close()
    prefill.close()
    return answer


def _write(prefill: NixlTransport, decode: NixlTransport, source: Bytes, target: Bytes) -> float:
    """Seconds until the receiver is told of the last slice; a small WRITE warms up first."""
    peer = prefill.add_peer(decode.metadata())
    decode.add_peer(prefill.metadata())
    started = time.monotonic()
    for write, (start, stop) in enumerate([(0, 4096), *_slices(len(source))]):
        if write == 1:
            started = time.monotonic()
        rows = [np.array([[a.ctypes.data + start, stop - start, 0]], np.uint64)
                for a in (source, target)]  # fmt: skip
        prefill.post(WriteId(write), peer, rows[0], rows[1], ("DRAM", "DRAM"), b"%d" % write)
        _await(prefill, decode, WriteId(write))
    return time.monotonic() - started


def _await(prefill: NixlTransport, decode: NixlTransport, write: WriteId) -> None:
    deadline = time.monotonic() + _DEADLINE
    done = told = False
    while not (done and told):
        done = done or prefill.poll(write) == "done"
        told = any(payload == b"%d" % write for _, payload in decode.notifications()) or told
        prefill.notifications()
        if time.monotonic() > deadline:
            missing = "its notification" if done else "it"
            raise TransportError(f"{missing} did not arrive within {_DEADLINE:g} s")


def _slices(nbytes: int) -> list[tuple[int, int]]:
    return [(start, min(start + _SLICE, nbytes)) for start in range(0, nbytes, _SLICE)]


def _region(array: Bytes) -> Region:
    return Region(array.ctypes.data, array.nbytes, "DRAM", 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
