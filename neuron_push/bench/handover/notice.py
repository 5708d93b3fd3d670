"""`neuron-push bench notice`: how soon D learns of a transfer that has landed, with P busy.

engines   an emulated pair under load: while a transfer lands, P computes other prompts. Over
          shared memory the initiating side copies inside the posting call, so the bytes have
          landed when the last post returns; D knows when its transfer thread has everything.
hog       two transfer threads without engines; P's is beside a main loop of pure Python that
          never lets go of the interpreter by itself. A third process watches D's memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from neuron_push import processes
from neuron_push.bench.handover import hog
from neuron_push.bench.handover.drive import Driver, milliseconds, traced
from neuron_push.bench.sweep import engines, proxy, setup
from neuron_push.bench.sweep.command import SHIPPED
from neuron_push.emulation import fleet
from neuron_push.errors import NeuronPushError
from neuron_push.ports import free_ports
from neuron_push.processes import Server
from neuron_push.trace.collect import Track

# Prompts under way at once: one lands, others are computed.
AT_ONCE: Final = 4
TARGET_MS: Final = {"p50_ms": 1.0, "p99_ms": 6.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = __doc__
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/sweep"), help="folder of notice.json (out/sweep)")
    add("--requests", type=int, default=120, help="per part (120)")
    add("--tokens", type=int, default=4096, help="of each prompt (4096)")
    add("--fleet", type=Path, default=SHIPPED, help="fleet file (shipped one)")
    add("--hog-only", action="store_true", help="leave engines out")


def main(args: argparse.Namespace) -> int:
    """Entry for the command line; exit status 1 if a target is missed."""
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"bench": "notice"}
    with processes.signals_as_interrupts():
        report["hog"] = milliseconds(hog.measure(args.requests))
        _say("main loop that hogs the interpreter", report["hog"])
        if not args.hog_only:
            report["busy"] = milliseconds(_engines(args))
            _say("engines, P busy with other prompts", report["busy"])
    report["setup"] = setup.describe(None, setup.command_line(), ["push"])
    (args.out / "notice.json").write_text(json.dumps(report, indent=1))
    parts = [report[name] for name in ("busy", "hog") if name in report]
    return 0 if all(part[key] <= most for part in parts for key, most in TARGET_MS.items()) else 1


def _say(name: str, part: dict[str, float]) -> None:
    print(f"{name}: p50 {part['p50_ms']:.2f} ms, p99 {part['p99_ms']:.2f} ms, n={part['n']}")


def _engines(args: argparse.Namespace) -> list[float]:
    template = traced(engines.Template.of(fleet.load(args.fleet)))
    logs = (args.out / "logs").absolute()
    with ExitStack() as stack:
        (port,) = free_ports(1)
        words = [sys.executable, "-m", proxy.__name__, "--port", str(port)]
        server = stack.enter_context(Server("proxy", words, port, logs / "proxy.log"))
        up = stack.enter_context(engines.pairs(template, logs, print, together=True))
        server.wait_ready(60)
        pair = up.awake("ours", lambda pair: Driver(server, pair, "push").one(args.tokens))
        driver = Driver(server, pair, "push")
        before = delays(driver.tracks()).keys()
        _load(driver, args.tokens, args.requests)
        found = delays(driver.tracks())
    return [seconds for name, seconds in found.items() if name not in before]


def _load(driver: Driver, tokens: int, requests: int) -> None:
    """Some clients, each with one request at a time; raises what one of them met."""
    left = threading.Semaphore(requests)
    errors: list[Exception] = []

    def client() -> None:
        try:
            while not errors and left.acquire(blocking=False):
                driver.one(tokens)
        except Exception as error:  # noqa: BLE001  raised again below
            errors.append(error)

    clients = [threading.Thread(target=client) for _ in range(AT_ONCE)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    if errors:
        raise errors[0]


def delays(tracks: Sequence[Track]) -> dict[str, float]:
    """Seconds from the return of a transfer's last post to D having everything, by transfer."""
    landed: dict[str, float] = defaultdict(float)
    received: dict[str, float] = {}
    for track in tracks:
        for event in track.events:
            if event.name == "posted":
                landed[event.transfer] = max(landed[event.transfer], event.at + event.seconds)
            elif event.name == "received":
                received[event.transfer] = event.at
    found = {name: received[name] - landed[name] for name in received.keys() & landed.keys()}
    if not found and not any(track.tracing for track in tracks):
        raise NeuronPushError("no process of the fleet traces")
    return found
