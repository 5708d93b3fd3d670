"""TCP ports that stay free between being chosen and being bound, and over a restart.

The kernel gives ports of its ephemeral range to outgoing connections, for as long as they last and
up to a minute more. A port of that range that is free now may belong to a stranger by the time its
server starts, or starts again.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Final

from neuron_push.errors import NeuronPushError

__all__ = ["HOST", "ephemeral", "free_ports"]

HOST: Final = "127.0.0.1"
_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
# IANA's range, which systems without that file use.
_IANA: Final = range(49_152, 65_536)
# Below are the ports that services are known by, this connector's and vLLM's among them.
_LOWEST: Final = 10_000
# Not given again: the first caller may not have bound its port yet.
_given: set[int] = set()


def ephemeral(text: str | None = None) -> range:
    """Ports of outgoing connections; `text` is what the kernel says of them ("32768 60999")."""
    try:
        text = _EPHEMERAL.read_text() if text is None else text
        first, last = map(int, text.split())
    except (OSError, ValueError):
        return _IANA
    return range(first, last + 1)


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody has at the moment, all different and new to this process.

    They lie outside the ephemeral range, if that leaves any, and are looked for from a random one
    on, so that processes that choose at the same time choose differently.
    """
    found: list[int] = []
    for port in _candidates():
        if len(found) == count:
            break
        if port not in found and _free(port):
            found.append(port)
    if len(found) < count:
        raise NeuronPushError(f"no {count} free TCP ports on {HOST}: `ss -tan` shows who has them")
    _given.update(found)
    return found


def _candidates() -> list[int]:
    """In the order in which they are tried; what was given before comes last."""
    every, taken = range(_LOWEST, 65_536), ephemeral()
    outside = [port for port in every if port not in taken] or list(every)
    # No generator that a caller may have seeded: two runs of one seed would choose alike.
    start = secrets.randbelow(len(outside))
    order = outside[start:] + outside[:start]
    return [port for port in order if port not in _given] + order


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
