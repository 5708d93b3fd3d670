"""Processes with one connector each that take turns, for `bench hooks`.

Machines are not the same from one minute to the next: columns measured one after another differ by
more than the connectors do. A process that has no turn is stopped (SIGSTOP), as vLLM's connectors
keep a thread busy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from tempfile import TemporaryFile
from typing import Any, Final, Self

from neuron_push.bench.pair import Pair
from neuron_push.ports import free_ports

__all__ = ["IN_A_TURN", "Turn", "child"]

IN_A_TURN: Final = 3  # requests that count
ANSWER: Final = "answer: "


class Turn:
    """A process with one connector, stopped but for its turns."""

    def __init__(self, name: str, tokens: int) -> None:
        code = "from neuron_push.bench.turns import child; child()"
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "NIXL_LOG_LEVEL": "ERROR"}
        self.error: list[str] = []
        self._errors = TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, name, str(tokens)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=environment,
        )  # fmt: skip
        self._hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def take(self, method: str, *arguments: Any) -> Any:
        """Call a method of `_Child` there; None once it has failed (`error` says why)."""
        if self.error:
            return None
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
            self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._process.send_signal(signal.SIGSTOP)
                return json.loads(line.removeprefix(ANSWER))
        self._errors.seek(0)
        self.error = self._errors.read().strip().splitlines()[-1:] or ["no output"]
        return None


class _Child:
    """What a turn may ask for."""

    def __init__(self, name: str, tokens: int) -> None:
        from neuron_push.bench import rig, shells

        shells.prepare()
        blocks, ports = 2 * tokens // shells.BLOCK + 64, free_ports(2)
        prefill = rig.Side(name, "kv_producer", blocks, ports[0])
        decode = rig.Side(name, "kv_consumer", blocks, ports[1])
        self._sides = prefill, decode
        self._pair = Pair(name, prefill, decode)
        self._arrangement = "contiguous"
        time.sleep(2.0)  # ranks announce themselves

    def quiet(self) -> dict[str, Any]:
        """Steps in which nothing happens."""
        return {label: [*map(asdict, steps)] for label, steps in self._pair.quiet().items()}

    def idle(self) -> tuple[float, float]:
        """Cores used while both engines are parked."""
        return _idle(10.0)

    def case(self, tokens: int, arrangement: str) -> dict[str, Any]:
        """The steps of some requests, after one that does not count."""
        if arrangement != self._arrangement:
            self._arrangement = arrangement
            for each in self._sides:
                each.fragment()
        runs = [self._pair.request(tokens) for _ in range(IN_A_TURN + 1)][1:]
        return {side: [[*map(asdict, run[side])] for run in runs] for side in "PD"}


def child() -> None:
    """Entry of the process that measures one connector."""
    name, tokens = sys.argv[1:]
    here = _Child(name, int(tokens))
    print(f"{ANSWER}null", flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(ANSWER + json.dumps(getattr(here, method)(*arguments)), flush=True)


def _idle(seconds: float) -> tuple[float, float]:
    """Cores used while both engines are parked: by our threads, and by the whole process."""
    time.sleep(3.0)  # what still looks around for news has gone to rest
    own = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name.startswith("neuron-push") and thread.ident is not None
    ]
    before = sum(map(time.clock_gettime, own)), time.process_time()
    time.sleep(seconds)
    after = sum(map(time.clock_gettime, own)), time.process_time()
    return (after[0] - before[0]) / seconds, (after[1] - before[1]) / seconds
