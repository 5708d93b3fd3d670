"""What both ends of the side channel share: limits, addresses, binding."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Any, Final

import zmq

from neuron_push import ports
from neuron_push.errors import ConfigError, TransportError
from neuron_push.protocol import Address, clip

__all__ = ["bind", "endpoint", "limit"]

# Frames a little over the limit are refused in words; libzmq cuts larger ones off unread.
_SLACK: Final = 1 << 16
# Frames that may wait per connection: one, in an orderly exchange.
_HIGH_WATER: Final = 4
# How long a peer that connects may take for ZeroMQ's handshake.
_HANDSHAKE_MS: Final = 5000
_HOSTNAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")


def limit(each: zmq.Socket[Any], nbytes: int) -> None:
    """Bound what a peer can make this socket hold, `nbytes` a message; closing waits for none."""
    each.setsockopt(zmq.MAXMSGSIZE, nbytes + _SLACK)
    each.setsockopt(zmq.LINGER, 0)
    each.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    each.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    each.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    each.setsockopt(zmq.IPV6, 1)


def endpoint(address: Address) -> str:
    """host:port for ZeroMQ, whose addresses have a syntax of their own that a peer's must not."""
    host, port = address.host, address.port
    if not 0 < port < 65536:
        raise TransportError(f"{port} is not a TCP port")
    try:
        if ipaddress.ip_address(host).version == 6:
            return f"[{host}]:{port}"
    except ValueError:
        if not _HOSTNAME.fullmatch(host):
            raise TransportError(f"{clip(host)!r} is not a host name or address") from None
    return f"{host}:{port}"


def bind(router: zmq.Socket[bytes], host: str, port: int) -> tuple[int, str]:
    """Listen at host:port (0: any free port); the port, and the address as ZeroMQ writes it."""
    where = f"side-channel address {host}:{port}"
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"{where}: host cannot be resolved: {error}") from error
    shown = f"[{found}]" if ":" in str(found) else found
    try:
        router.bind(f"tcp://{shown}:{port or '*'}")
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            hint = "the port is taken; choose another side_channel_port" + _lent(port)
        else:
            hint = f"not an address of this machine ({error}); set side_channel_host"
        raise ConfigError(f"{where}: {hint}") from error
    endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    bound = endpoint.rstrip(b"\0").decode()
    return int(bound.rpartition(":")[2]), bound


def _lent(port: int) -> str:
    """What to add where it may be an outgoing connection that has the port."""
    lent = ports.ephemeral()
    if port not in lent:
        return ""
    return f", none of {lent[0]} to {lent[-1]}: outgoing connections of this machine take those"
