"""The scheduler half's side channel: says who the engine is, and where its ranks answer."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import zmq

from neuron_push.geometry import Semantics
from neuron_push.limits import LIMITS, Limits
from neuron_push.protocol import (
    Address,
    Announce,
    Announced,
    Because,
    EngineInfo,
    Events,
    Held,
    Holds,
    RankInfo,
    Refusal,
    SideChannelMessage,
    Who,
    Why,
    clip,
)
from neuron_push.sidechannel.keys import Keyring
from neuron_push.sidechannel.server import Request, Server
from neuron_push.tracing import Ring, batch_of

__all__ = ["Listener"]

logger = logging.getLogger(__name__)


class Listener:
    """Answers `Who` and collects `Announce` on a thread of its own.

    `describe` is called on that thread for every `Who` (the ranks that have announced
    themselves are filled in afterwards), `explain` for every `Why`, `holds` for every `Holds`.
    `ring` is what `Events` asks for; with `keys` nobody else is answered. Raises ConfigError if
    it cannot listen at host:port.
    """

    def __init__(
        self,
        engine: str,
        host: str,
        port: int,
        describe: Callable[[], EngineInfo],
        explain: Callable[[str], str] = lambda request: "",
        holds: Callable[[str], int] = lambda transfer: 0,
        ring: Ring | None = None,
        keys: Keyring | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self._engine = engine
        self._describe = describe
        self._explain = explain
        self._holds = holds
        self._ring = ring
        self._keys = keys
        self._limits = limits
        # Guards `_announced`; everything else belongs to the thread.
        self._lock = threading.Lock()
        self._announced: dict[int, Announce] = {}
        self._wake, self._woken = socket.socketpair()
        opened: Future[Address] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(host, port, opened), name="neuron-push-listener", daemon=True
        )
        self._thread.start()
        try:
            self.address = opened.result()
        except BaseException:
            self.close()
            raise

    def ranks(self) -> tuple[RankInfo, ...]:
        """Ranks that have announced themselves, in order. Any thread may ask."""
        with self._lock:
            return tuple(self._announced[rank].info for rank in sorted(self._announced))

    def close(self) -> None:
        """Stop and join the thread; the port is free afterwards. Idempotent."""
        self._wake.close()
        self._thread.join()
        self._woken.close()

    def _run(self, host: str, port: int, opened: Future[Address]) -> None:
        try:
            server = Server(host, port, self._keys, self._limits)
        except BaseException as error:  # noqa: BLE001  raised again in the constructor
            opened.set_exception(error)
            return
        try:
            opened.set_result(server.address)
            poller = zmq.Poller()
            for each in (*server.sockets, self._woken):
                poller.register(each, zmq.POLLIN)
            # With keys, their file is looked at now and then.
            milliseconds = 1000 if self._keys else None
            while self._woken.fileno() not in dict(poller.poll(milliseconds)):
                for request in server.poll():
                    self._serve(request)
        finally:
            server.close()

    def _serve(self, request: Request) -> None:
        try:
            request.answer(self._answer(request.message))
        except Exception:
            # One bad answer must not silence the engine for everybody else.
            logger.exception("engine %s cannot answer a question", self._engine)
            request.answer(Refusal("the engine failed to answer; its log says why"))

    def _answer(self, message: SideChannelMessage) -> SideChannelMessage:
        if isinstance(message, Who):
            return msgspec.structs.replace(self._describe(), ranks=self.ranks())
        if isinstance(message, Announce):
            return self._record(message)
        if isinstance(message, Why):
            return Because(clip(self._explain(message.request)))
        if isinstance(message, Holds):
            return Held(message.transfer, self._holds(message.transfer))
        if isinstance(message, Events):
            return batch_of(self._ring, f"{self._engine} scheduler", message.after)
        kind = type(message).__name__
        return Refusal(f"this is the engine's own address; {kind} belongs to one of its ranks")

    def _record(self, announce: Announce) -> Announced | Refusal:
        rank = announce.info.rank
        if announce.engine != self._engine:
            return Refusal(clip(f"this is engine {self._engine}, not {announce.engine}"))
        if not 0 <= rank < self._limits.ranks:
            return Refusal(f"rank {rank} is out of range: limits.ranks is {self._limits.ranks}")
        with self._lock:
            for other, known in self._announced.items():
                if other != rank and known.semantics != announce.semantics:
                    fields = _differing(known.semantics, announce.semantics)
                    return Refusal(clip(f"ranks {other} and {rank} hold unlike caches: {fields}"))
            self._announced[rank] = announce
        return Announced()


def _differing(one: Semantics, two: Semantics) -> str:
    values = ((name, getattr(one, name), getattr(two, name)) for name in one.__struct_fields__)
    return "; ".join(f"{name} {a} and {b}" for name, a, b in values if a != b)
