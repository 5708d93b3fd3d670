"""Ranks in processes of their own, to be stopped and killed.

They are forked from a server that has NIXL loaded (`warm`), which makes one cost tens of
milliseconds instead of seconds. None outlives its parent, or `LIFE` without being told anything.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from neuron_push.bench.pipe import ChildFailed, answer
from neuron_push.bench.rank import Rank, Shape
from neuron_push.config import Config
from neuron_push.protocol import Address

__all__ = ["Child", "ChildFailed"]

# Seconds after which a child that is told nothing ends, whatever becomes of its parent.
LIFE: Final = 600
_PR_SET_PDEATHSIG: Final = 1


class Child:
    """A rank in another process. `call` runs a method of `Rank` there."""

    def __init__(
        self, engine: str, role: str, config: Config, shape: Shape | None = None, port: int = 0
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["neuron_push.bench.warm"])
        self.engine = engine
        self._recipe = (engine, role, config, shape or Shape())
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, *self._recipe, port), name=f"rank {engine}", daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self.address: Address = self.hear(60)
        except BaseException:
            self.kill()
            raise

    def again(self) -> Child:
        """The same engine started anew on its port; kill or close this one before."""
        return Child(*self._recipe, port=self.address.port)

    def tell(self, method: str, *arguments: Any) -> None:
        """Start a method there; `hear` brings its result."""
        self._pipe.send((method, arguments))

    def hear(self, within: float = 60.0) -> Any:
        """The result of the method told."""
        return answer(self._pipe, self.engine, within)

    def call(self, method: str, *arguments: Any) -> Any:
        """Run a method there and wait for its result."""
        self.tell(method, *arguments)
        return self.hear()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def standing(self) -> str:
        """ "T" when the whole process stands still, "Z" when it is dead, else it runs."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return "Z"
        return stat.rpartition(")")[2].split()[0].replace("X", "Z")

    def stop(self) -> None:
        """SIGSTOP; returns when it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        self.wait_until("T")

    def wait_until(self, standing: str, within: float = 30.0) -> None:
        """Wait until it is stopped ("T"), dead ("Z") or one of both ("TZ"). Any thread may."""
        deadline = time.monotonic() + within
        while (found := self.standing) not in standing:
            if found == "Z" or time.monotonic() > deadline:
                raise ChildFailed(f"{self.engine} is not {standing!r} but {found!r}")
            time.sleep(0.001)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, stopped or not; returns when it is gone."""
        self._process.kill()
        self._process.join(10)
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def _serve(
    pipe: Connection, engine: str, role: str, config: Config, shape: Shape, port: int
) -> None:
    signal.alarm(LIFE)
    # The fork server ends with the process that started it, and takes its children along.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        rank = Rank(engine, role, config, shape, port)
    except Exception as error:  # noqa: BLE001  the parent raises it again
        pipe.send((False, repr(error)))
        return
    pipe.send((True, rank.address))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        signal.alarm(LIFE)
        try:
            if method == "reborn":  # as a new engine, on the old port
                port = rank.address.port
                rank.close()
                rank = Rank(arguments[0], role, config, shape, port)
                pipe.send((True, None))
                continue
            pipe.send((True, getattr(rank, method)(*arguments)))
        except Exception as error:  # noqa: BLE001  the parent raises it again
            pipe.send((False, repr(error)))
