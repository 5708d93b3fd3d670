"""One NIXL agent as a `Transport`."""

from __future__ import annotations

import gc
import logging
import struct
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from neuron_push.errors import ConfigError, Disconnected, ProtocolError, TransportError
from neuron_push.geometry import Region
from neuron_push.nixl.binding import NO_PARAMETERS, Edge, Parameters, create_agent
from neuron_push.transport import (
    AgentName,
    Descriptors,
    WriteId,
    WriteState,
)

__all__ = ["NixlTransport"]

logger = logging.getLogger(__name__)

# Backends whose release of a handle in flight cancels it. LIBFABRIC frees the handle at once
# while its completions still point to it, so there the handle must outlive the backend.
_CANCELLING: Final = frozenset({"UCX"})
_NAME_LENGTH: Final = struct.Struct(">H")


@dataclass
class _Posted:
    handle: Any
    peer: AgentName
    state: WriteState = "pending"
    # Why it failed, once it has. Kept as text: an exception would keep frames alive, and with
    # them the agent.
    failure: str = ""
    disconnected: bool = False


class NixlTransport:
    """One NIXL agent. Opened, used and closed on one thread."""

    def __init__(
        self,
        name: AgentName,
        regions: Sequence[Region],
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 0,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        self._name = name
        self._owner = threading.get_ident()
        self._cancelling = _CANCELLING.issuperset(backends)
        self._peers: set[AgentName] = set()
        # Peers found gone since they were added. nixl 1.5 goes on saying so; 1.3 and 1.4 forget
        # such a peer by themselves, and then no longer know its name.
        self._lost: set[str] = set()
        # Every handle that is not released stays here until `close`, so that no finaliser of
        # NIXL's wrapper runs on a thread of the garbage collector's choice.
        self._posted: dict[WriteId, _Posted] = {}
        self._registrations: list[Any] = []
        # Whether the C++ agent of a closed transport is still alive.
        self._remains: weakref.ref[Any] | None = None
        self._agent: Any = create_agent(name, tuple(backends), num_threads, parameters)
        try:
            self._register(regions)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> AgentName:
        """Unique name of the agent."""
        return self._name

    def offered(self) -> list[str]:
        """Memory types that the backends can register on this machine."""
        agent = self._open()
        return sorted(
            {
                kind.removesuffix("_SEG")
                for backend in agent.backends
                for kind in agent.get_backend_mem_types(backend)
            }
        )

    def metadata(self) -> bytes:
        """NIXL's metadata behind the agent's name, so that a peer knows whom it replaces."""
        with Edge("cannot read the metadata of our own agent"):
            raw = self._open().get_agent_metadata()
        name = self._name.encode()
        return bytes(_NAME_LENGTH.pack(len(name)) + name + raw)

    def add_peer(self, metadata: bytes) -> AgentName:
        """Load a peer's metadata, replacing what is loaded under its name."""
        name, raw = _split(metadata)
        if name == self._name:
            raise TransportError(f"the peer's agent has our own name {name!r}")
        self.remove_peer(name)
        with Edge("cannot load the metadata of", name):
            loaded = self._open().add_remote_agent(raw)
        found = AgentName(loaded.decode() if isinstance(loaded, bytes) else loaded)
        self._peers.add(found)
        if found != name:
            self.remove_peer(found)
            raise TransportError(f"metadata announced as {name!r} is that of {found!r}")
        return found

    def remove_peer(self, peer: AgentName) -> None:
        """Forget a peer; WRITEs posted before go on."""
        agent = self._open()
        if peer in self._peers:
            self._peers.discard(peer)
            self._lost.discard(peer)
            with Edge("cannot remove", peer):
                agent.remove_remote_agent(peer)

    def notify(self, peer: AgentName, payload: bytes) -> None:
        """Send a notification to a loaded peer."""
        agent = self._reach(peer)
        with Edge("cannot notify", peer, self._lost):
            agent.send_notif(peer, payload)

    def notifications(self) -> list[tuple[AgentName, bytes]]:
        """Drive progress and take what has arrived."""
        with Edge("cannot take notifications"):
            arrived = self._open().get_new_notifs()
        return [
            (AgentName(sender), payload)
            for sender, payloads in arrived.items()
            for payload in payloads
        ]

    def post(
        self,
        write: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
        payload: bytes,
    ) -> None:
        """Start a WRITE; on an exception it may still be under way, as after a failed poll."""
        self._start("WRITE", write, peer, (source, memory[0]), (destination, memory[1]), payload)

    def fetch(
        self,
        read: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
    ) -> None:
        """Start a READ; on an exception it may still be under way, as after a failed poll."""
        self._start("READ", read, peer, (destination, memory[1]), (source, memory[0]), b"")

    def _start(
        self,
        kind: Literal["WRITE", "READ"],
        number: WriteId,
        peer: AgentName,
        ours: tuple[Descriptors, str],
        theirs: tuple[Descriptors, str],
        payload: bytes,
    ) -> None:
        agent = self._reach(peer)
        if number in self._posted:
            raise ProtocolError(f"{kind} {number} was posted before")
        _check_rows(ours[0], theirs[0])
        with Edge(f"cannot prepare a {kind} with", peer, self._lost):
            handle = agent.initialize_xfer(
                kind,
                *(
                    agent.get_xfer_descs(np.ascontiguousarray(rows, np.uint64), memory)
                    for rows, memory in (ours, theirs)
                ),
                peer,
                payload,
            )
        posted = self._posted[number] = _Posted(handle, peer)
        self._advance(posted, agent.transfer, f"cannot post a {kind} with")

    def poll(self, write: WriteId) -> WriteState:
        """Drive one WRITE or READ. NIXL sends what a WRITE notifies from here, once it is there."""
        agent = self._open()
        posted = self._posted.get(write)
        if posted is None:
            raise ProtocolError(f"WRITE {write} is not in flight")
        if posted.failure:
            raise (Disconnected if posted.disconnected else TransportError)(posted.failure)
        if posted.state == "pending":
            self._advance(posted, agent.check_xfer_state, "lost a transfer with")
        if posted.state == "pending":
            return "pending"
        del self._posted[write]
        with Edge("cannot release a WRITE that is done"):
            agent.release_xfer_handle(posted.handle)
        return "done"

    def close(self) -> None:
        """Destroy the agent and make sure that it is gone; raises TransportError if it is not."""
        if self._agent is not None:
            agent = self._open()
            self._agent = None
            self._abandon_writes(agent)
            self._deregister(agent)
            self._peers.clear()
            # Dropping the C++ agent itself, rather than its wrapper, ends it even if a frame in
            # somebody's traceback still refers to the wrapper.
            self._remains = weakref.ref(agent.agent)
            agent.agent = None
        self._check_destroyed()

    def _check_destroyed(self) -> None:
        if self._remains is not None and self._remains() is not None:
            gc.collect()
            if self._remains() is not None:
                raise TransportError(f"agent {self._name} is still referred to: it is not fenced")

    def _open(self) -> Any:
        if self._agent is None:
            raise TransportError(f"agent {self._name} is closed")
        if threading.get_ident() != self._owner:
            raise ProtocolError(f"agent {self._name} is used from a thread that does not own it")
        return self._agent

    def _reach(self, peer: AgentName) -> Any:
        agent = self._open()
        if peer not in self._peers:
            raise TransportError(f"peer {peer!r} is not loaded")
        if peer in self._lost:
            raise Disconnected(f"{peer} is gone")
        return agent

    def _advance(self, posted: _Posted, call: Any, what: str) -> None:
        try:
            with Edge(what, posted.peer, self._lost):
                answer = call(posted.handle)
                if answer not in ("PROC", "DONE"):
                    raise TransportError(f"{what} {posted.peer}: NIXL says {answer!r}")
        except TransportError as error:
            posted.failure = str(error)
            posted.disconnected = isinstance(error, Disconnected)
            raise
        posted.state = "done" if answer == "DONE" else "pending"

    def _register(self, regions: Sequence[Region]) -> None:
        agent = self._open()
        offered = self.offered()
        for memory in sorted({region.memory for region in regions}):
            if memory not in offered:
                raise ConfigError(
                    f"the KV cache is in {memory}, but {'/'.join(agent.backends)} offers only "
                    f"{'/'.join(offered) or 'nothing'} on this machine"
                )
            rows = [(r.base, r.length, r.device, "") for r in regions if r.memory == memory]
            with Edge(f"cannot register {len(rows)} regions of {memory}"):
                self._registrations.append(agent.register_memory(rows, memory))

    def _abandon_writes(self, agent: Any) -> None:
        for posted in self._posted.values():
            if posted.state == "done" or self._cancelling:
                try:
                    agent.release_xfer_handle(posted.handle)
                except Exception as error:  # noqa: BLE001  the agent goes either way
                    logger.debug("a WRITE in flight was not cancelled: %r", error)
            # Whatever is not released stays allocated, a few hundred bytes, rather than be
            # freed by the finaliser while the agent is going down. The wrapper also refers to
            # the C++ agent.
            for field, value in (("_released", True), ("_agent", None)):
                if hasattr(posted.handle, field):
                    setattr(posted.handle, field, value)
        self._posted.clear()

    def _deregister(self, agent: Any) -> None:
        for registration in self._registrations:
            try:
                agent.deregister_memory(registration)
            except Exception as error:  # noqa: BLE001  the agent goes either way
                logger.warning("agent %s: memory was not deregistered: %r", self._name, error)
        self._registrations.clear()


def _split(metadata: bytes) -> tuple[AgentName, bytes]:
    start = _NAME_LENGTH.size
    if len(metadata) > start:
        end = start + _NAME_LENGTH.unpack_from(metadata)[0]
        try:
            name = metadata[start:end].decode()
        except UnicodeDecodeError:
            name = ""
        if name and end < len(metadata):
            return AgentName(name), metadata[end:]
    raise TransportError("the peer's agent metadata is malformed")


def _check_rows(source: Descriptors, destination: Descriptors) -> None:
    for rows in (source, destination):
        if rows.ndim != 2 or rows.shape[1] != 3 or not len(rows):
            raise ProtocolError(f"descriptors have shape {rows.shape} instead of (n > 0, 3)")
    if len(source) != len(destination):
        raise ProtocolError(f"{len(source)} source rows for {len(destination)} destination rows")
