"""`neuron-push emulate`: a fleet of emulated engines, until interrupted."""

from __future__ import annotations

import argparse
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from neuron_push import processes
from neuron_push.emulation import fleet
from neuron_push.emulation.report import PERIOD, timed
from neuron_push.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = (
        "Start the emulated engines (and the router) that a fleet file describes, print their"
        " URLs, and stop them on interrupt. Clients see normal vLLM servers."
    )
    parser.add_argument("file", type=Path, help="fleet file (YAML)")
    parser.add_argument("--logs", type=Path, help="keep logs and reports in this folder")
    parser.add_argument(
        "--measured",
        action="store_true",
        help="durations seen by clients matter: fail if emulating took too much of the time",
    )
    parser.add_argument("--check", action="store_true", help="only say whether the file is valid")


def main(args: argparse.Namespace) -> int:
    """Run until interrupted; 0 if no emulated device has seen a wrong byte."""
    spec = fleet.load(args.file)
    if args.check:
        print(f"{args.file}: {len(spec.engines)} engines, valid")
        return 0
    if not spec.engines:
        raise ConfigError(f"{args.file} lists no engines")
    with ExitStack() as stack:
        logs = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stop = stack.enter_context(_interrupts())
        built = fleet.build(spec, logs.absolute(), print)
        stack.enter_context(built.connected())
        with processes.running(built.engines, progress=print):
            if built.router is not None:
                stack.enter_context(processes.running([built.router], progress=print))
            _show(built)
            while not stop.wait(1.0):
                _check(built)
            time.sleep(2 * PERIOD)  # the reports catch up
        return _conclude(built, args.measured)


def _show(built: fleet.Fleet) -> None:
    for engine in built.engines:
        spec = engine.spec
        inside = f", {engine.place.address} in {engine.place.namespace}" if engine.place else ""
        print(
            f"  {spec.name:12} {engine.url}  {spec.device} TP {spec.tp}, blocks of "
            f"{engine.block_size}, {spec.role}, side channel {engine.side_port}{inside}"
        )
    if built.router is not None:
        print(f"  {'router':12} {built.router.url}")
    print(f"the fleet is up: model {fleet.SERVED!r} at {built.url}/v1; interrupt to stop it")


def _check(built: fleet.Fleet) -> None:
    """Raise ServerFailed when a server has ended by itself."""
    for server in (*built.engines, *([built.router] if built.router else [])):
        if not server.running:
            raise processes.ServerFailed(f"{server.name} has ended{server.tail()}")


def _conclude(built: fleet.Fleet, measured: bool) -> int:
    wrong, unfit = 0, []
    for engine in built.engines:
        for seen in engine.summaries():
            wrong += seen["wrong_rows"]
            print(
                f"{seen['name']}: {seen['steps']} steps, {seen['wrong_rows']} wrong rows, WRITEs "
                f"before the next launch {seen['writes_early']}, after {seen['writes_late']}, own "
                f"time {seen['own_seconds']:.3f} s of {seen['modelled_seconds']:.3f} s modelled"
            )
        if measured or engine.spec.profile != "instant":
            unfit += timed(engine.summaries())
    for why in unfit:
        print(f"unfit for measuring: {why}")
    return 1 if wrong or (measured and unfit) else 0


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    stop = threading.Event()
    before: dict[signal.Signals, Any] = {}
    for caught in (signal.SIGINT, signal.SIGTERM):
        before[caught] = signal.signal(caught, lambda *_: stop.set())
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
