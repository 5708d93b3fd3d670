"""`neuron-push trace`: collect, and write a Perfetto trace and a page."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from neuron_push.errors import ConfigError, NeuronPushError
from neuron_push.protocol import Address
from neuron_push.sidechannel import Keyring, add_option
from neuron_push.trace.chrome import trace
from neuron_push.trace.collect import Asker, collect, engines_of, processes_of, router
from neuron_push.trace.otel import export, otlp
from neuron_push.trace.page import page
from neuron_push.trace.phases import requests, summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = (
        "Collect trace events of a router and its engines, and write them as a Perfetto trace"
        " and as one HTML page. Processes trace when they were started with the setting"
        " trace_events (engines) or --trace-events (router)."
    )
    add = parser.add_argument
    add("--router", metavar="URL", help="also tells the engines, unless they are named")
    add("--engine", metavar="HOST:PORT", action="append", default=[], help="a side channel")
    add("--key-file", type=Path, help="bearer token for the router")
    add_option(parser)
    add("--wait", type=float, default=0.0, help="seconds to let pass before collecting")
    add("--request", default="", help="only those with this in their request or transfer id")
    add("--out", type=Path, default=Path("trace"), help="folder to write to (trace)")
    add("--otlp", metavar="URL", help="also send spans there (OTLP over HTTP)")


def main(args: argparse.Namespace) -> int:
    """Entry for the command line; exit status 1 if there was nothing to show."""
    askers = _askers(args)
    if args.wait:
        time.sleep(args.wait)
    tracks, complaints = collect(askers)
    for complaint in complaints:
        print(f"not asked: {complaint}")
    for track in tracks:
        if not track.tracing:
            print(f"{track.source} does not trace: start it with trace_events or --trace-events")
    found = requests(tracks, args.request)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "trace.json").write_text(json.dumps(trace(tracks, found)))
    (args.out / "timeline.html").write_text(page(tracks, found), encoding="utf-8")
    if args.otlp and found:
        print(f"{export(found, otlp(args.otlp))} spans sent to {args.otlp}")
    for line in table(summary(found)):
        print(line)
    print(f"{len(found)} requests: {args.out / 'timeline.html'}, {args.out / 'trace.json'}")
    return 0 if found else 1


def table(rows: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Phases by mode, for a terminal."""
    lines = []
    for mode, phases in rows.items():
        lines.append(f"{mode:<20}{'p50':>10}{'p90':>10}{'mean':>10}  ms")
        for name, each in phases.items():
            figures = "".join(f"{each[q] * 1e3:>10.2f}" for q in ("p50", "p90", "mean"))
            lines.append(f"  {name:<18}{figures}")
    return lines


def _askers(args: argparse.Namespace) -> list[Asker]:
    key = args.key_file.read_text().strip() if args.key_file else ""
    engines = [_address(text) for text in args.engine]
    askers: list[Asker] = []
    if args.router:
        askers.append(router(args.router, key))
        engines = engines or engines_of(args.router, key)
    ring = Keyring.of(args.side_channel_keys)
    if not engines:
        raise ConfigError("name a --router URL or an --engine HOST:PORT")
    return askers + _of_engines(engines, ring)


def _of_engines(engines: Sequence[Address], ring: Keyring | None) -> list[Asker]:
    askers: list[Asker] = []
    for engine in engines:
        try:
            askers += processes_of(engine, ring)
        except NeuronPushError as error:
            print(f"not asked: {engine.host}:{engine.port}: {error}")
    return askers


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal():
        raise ConfigError(f"--engine {text!r} is not HOST:PORT")
    return Address(host.strip("[]"), int(port))
