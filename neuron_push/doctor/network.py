"""The side channel: can others reach the host it announces, and is its port free."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Callable, Iterator
from typing import Final

from neuron_push.doctor.finding import Finding, error, note, ok, warning
from neuron_push.doctor.machine import Machine
from neuron_push.errors import NeuronPushError
from neuron_push.ports import ephemeral
from neuron_push.protocol import Address, EngineInfo, SideChannelMessage, Who
from neuron_push.sidechannel import ask

__all__ = ["Ask", "host", "ports", "who"]

_HOST: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
_PORT: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"

Ask = Callable[[Address, SideChannelMessage, float], SideChannelMessage]


def host(machine: Machine, address: Address) -> Iterator[Finding]:
    """Whether peers on other machines can use the address that this engine gives them."""
    name = address.host
    found = machine.resolve(name)
    if not found:
        yield error(
            "network.host",
            f"{name} has no address",
            "the engine cannot listen there",
            f"set {_HOST} to this machine's address",
        )
        return
    parsed = [ipaddress.ip_address(each.partition("%")[0]) for each in found]
    if any(each.is_unspecified for each in parsed):
        yield error(
            "network.host",
            f"the side channel announces {name}",
            "it is the address that peers are told to call, and this one means every machine",
            f"set {_HOST} to the address of this machine (in a pod, status.podIP)",
        )
    elif any(each.is_loopback for each in parsed):
        yield warning(
            "network.host",
            f"the side channel announces {name} ({found[0]})",
            "peers and routers on other machines cannot reach it",
            f"set {_HOST} to the address of this machine (in a pod, status.podIP); ignore this if "
            "both engines run here",
        )
    elif problem := machine.binds(found[0], 0):
        yield error(
            "network.host",
            f"{name} ({found[0]}) is no address of this machine: {errno.errorcode.get(problem)}",
            "the engine cannot listen there",
            f"set {_HOST} to an address that `ip addr` shows",
        )
    else:
        yield ok("network.host", f"{name} ({found[0]}) is an address of this machine")


def ports(machine: Machine, address: Address, ranks: int, asking: Ask = ask) -> Iterator[Finding]:
    """The listener's port of each data-parallel rank; worker ranks take free ports."""
    where = (machine.resolve(address.host) or ["127.0.0.1"])[0]
    taken = []
    for rank in range(ranks):
        port = address.port + rank
        problem = machine.binds(where, port)
        if problem == errno.EADDRINUSE:
            info = who(Address(address.host, port), asking)
            if isinstance(info, EngineInfo):
                yield note("network.engine", f"engine {info.engine} answers at port {port}")
            else:
                taken.append(str(port))
    if taken:
        yield error(
            "network.port",
            f"port {', '.join(taken)} is taken, by no engine of ours",
            "the engine does not start",
            f"set {_PORT} (data-parallel ranks count up from it), or find the process with "
            "`ss -ltnp`",
        )
        return
    lent = ephemeral(machine.text("/proc/sys/net/ipv4/ip_local_port_range"))
    if lost := sorted(set(range(address.port, address.port + ranks)) & set(lent)):
        yield warning(
            "network.port",
            f"port {', '.join(map(str, lost))} may go to an outgoing connection",
            f"those take any of {lent[0]} to {lent[-1]}, so an engine may find its port taken when "
            "it is restarted",
            f"set {_PORT} to one that is none of these",
        )
    elif ranks:
        last = address.port + ranks - 1
        span = str(address.port) if ranks == 1 else f"{address.port} to {last}"
        yield ok("network.port", f"port {span} can be used")


def who(address: Address, asking: Ask = ask, timeout: float = 3.0) -> EngineInfo | str:
    """Who answers there, or why nobody does."""
    try:
        answer = asking(address, Who(), timeout)
    except NeuronPushError as problem:
        return str(problem)
    return answer if isinstance(answer, EngineInfo) else f"answered {type(answer).__name__}"
