"""Child processes that serve HTTP on loopback: started, watched and stopped.

Each is the leader of a process group of its own, and stopping it signals that group and nothing
else.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Final, Self

from neuron_push.errors import NeuronPushError
from neuron_push.ports import HOST

# A cold start of vLLM on two busy cores takes about a minute.
START_TIMEOUT: Final = 300.0
# vLLM ends in two to five seconds after SIGTERM.
STOP_TIMEOUT: Final = 20.0
_ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Progress = Callable[[str], None]


class ServerFailed(NeuronPushError):
    """A server ended, or did not become ready in time; the text ends with its log's tail."""


class Server:
    """A child process that serves HTTP and writes a log. Leaving its `with` block stops it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.port = port
        self.log = log
        self._command = list(command)
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    @property
    def url(self) -> str:
        """Root of its HTTP interface."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id, which is also its process group's."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the process; `wait_ready` tells when it serves."""
        assert not self.running, f"{self.name} is running"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = _spawn(self._command, self._environment, output)
        self._started = time.monotonic()
        return self

    def healthy(self) -> bool:
        """Whether /health answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, http.client.HTTPException, OSError):
            # HTTPException: somebody else has taken the port and speaks another protocol.
            return False

    def wait_ready(self, timeout: float = START_TIMEOUT, progress: Progress | None = None) -> None:
        """Return when it serves; raise ServerFailed when it ends before or takes too long."""
        wait_ready([self], timeout, progress)

    def check(self, timeout: float) -> bool:
        """Whether it is ready; raises ServerFailed when it never will be."""
        assert self._process is not None, "not started"
        status = self._process.poll()
        if status is not None:
            raise ServerFailed(f"{self.name} ended with status {status}{self.tail()}")
        if self.healthy():
            return True
        if self.elapsed > timeout:
            raise ServerFailed(f"{self.name} was not ready after {timeout:.0f} s{self.tail()}")
        return False

    @property
    def elapsed(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._started

    def tail(self, lines: int = 25) -> str:
        """The end of its log, introduced by where the whole log is."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        last = "\n".join("    " + line for line in text.splitlines()[-lines:])
        return f"; the end of {self.log}:\n{last}"

    def terminate(self) -> None:
        """Ask it to end, without waiting."""
        if self.running:
            self._signal(signal.SIGTERM)
            # One that is paused would not hear it.
            self._signal(signal.SIGCONT)

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """End it and whatever it started. Returns when it is gone; may be called again."""
        if self._process is None:
            return
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        # Children that outlive the leader, or a leader that does not listen.
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._signal(signal.SIGKILL)
        self.stop()

    def pause(self) -> None:
        """Stop it in its tracks (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def __enter__(self) -> Self:
        return self if self.running else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def wait_ready(
    servers: Sequence[Server],
    timeout: float = START_TIMEOUT,
    progress: Progress | None = None,
) -> None:
    """Return when all serve. Raises ServerFailed as soon as one has ended or takes too long."""
    waiting = list(servers)
    said = time.monotonic()
    while waiting:
        for server in list(waiting):
            if server.check(timeout):
                waiting.remove(server)
                if progress:
                    progress(f"{server.name} is ready after {server.elapsed:.0f} s")
        if waiting and progress and time.monotonic() - said >= 5:
            said = time.monotonic()
            names = ", ".join(server.name for server in waiting)
            progress(f"{names} starting, {waiting[0].elapsed:.0f} s")
        if waiting:
            time.sleep(0.1)


@contextmanager
def running(
    servers: Sequence[Server],
    timeout: float = START_TIMEOUT,
    progress: Progress | None = None,
) -> Iterator[None]:
    """Start all side by side, wait until all serve, and stop them together at the end."""
    try:
        for server in servers:
            server.start()
        wait_ready(servers, timeout, progress)
        yield
    finally:
        stop(servers)


def stop(servers: Sequence[Server]) -> None:
    """Stop several at once; one that fails to stop does not keep the others."""
    errors = []
    with _uninterrupted():
        for server in servers:
            server.terminate()
        for server in servers:
            try:
                server.stop()
            except OSError as error:
                errors.append(f"{server.name}: {error}")
    if errors:
        raise ServerFailed("could not stop " + "; ".join(errors))


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back the signals that would end us in the middle: a second Ctrl-C is common.

    Handlers and not the signal mask, which covers one thread while a signal may take any.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    # None is a handler that Python did not install and could not put back.
    heard = [number for number in _ENDINGS if signal.getsignal(number) is not None]
    before = {
        number: signal.signal(number, lambda which, _: came.append(which)) for number in heard
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for which in came[:1]:
            signal.raise_signal(which)


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Make a polite end from outside unwind like Ctrl-C, so that everything is stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    # One that is ignored, as under nohup, stays ignored.
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
