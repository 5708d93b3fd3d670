"""`neuron-push bench router`: what the router adds, next to a minimal proxy in the same run.

Mock engines answer at once, so all time is the proxy's own and the kernel's. Time to the first
byte is taken with one request under way (added latency) and with many (throughput). The same
load straight to one mock engine is taken off, so that the added figure holds on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from neuron_push.bench.fakes import JSON_ANSWER, STREAM_ANSWER, MockEngine, Tally, load
from neuron_push.errors import ConfigError
from neuron_push.geometry import Geometry, Semantics
from neuron_push.ports import HOST, free_ports
from neuron_push.processes import Server, ServerFailed
from neuron_push.protocol import Address, Announce, EngineInfo, RankInfo
from neuron_push.sidechannel import Listener, ask

TARGET_MS: Final = 1.0
TARGET_RATE: Final = 1000.0
# Seconds that a proxy may take to serve.
START: Final = 60.0
SEMANTICS: Final = Semantics("mock", 1, 1, 1, "float32", ("full",))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = __doc__
    add = parser.add_argument
    add("--requests", type=int, default=5000, help="per measurement of throughput (5000)")
    add("--concurrency", type=int, default=64, help="requests under way (64)")
    add("--single", type=int, default=1000, help="requests one after another (1000)")
    add("--prompt", type=int, default=1024, help="bytes of prompt (1024)")
    add("--engines", type=int, default=2, help="mock engines per leg (2)")
    add("--stream", action="store_true", help="answers are event streams")
    add("--soak", type=int, default=0, help="requests of a last run that watches memory")
    add("--demo-proxy", type=Path, help="vLLM's disagg_proxy_pushconnector_demo.py, to compare")
    add("--json", action="store_true", help="print one JSON object")


@dataclass
class Figures:
    """What one proxy, or an engine without one, did."""

    name: str
    single: Tally
    many: Tally
    # The process's own time per request, which a busy machine does not change.
    cpu: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Milliseconds and requests per second."""
        return {
            "ttft_ms": {
                f"p{round(100 * q)}": self.single.percentile(q) * 1e3 for q in (0.5, 0.9, 0.99)
            },
            "requests_per_second": self.many.rate,
            "ttft_busy_ms": {
                f"p{round(100 * q)}": self.many.percentile(q) * 1e3 for q in (0.5, 0.99)
            },
            "cpu_us_per_request": self.cpu * 1e6,
            "errors": self.single.errors + self.many.errors,
        }


def main(args: argparse.Namespace) -> int:
    """Entry for the command line; exit status 1 if a target is missed or an answer failed."""
    if min(args.requests, args.concurrency, args.single, args.engines) < 1:
        raise ConfigError("counts must be at least 1")
    report = asyncio.run(measure(args))
    if args.json:
        print(json.dumps(report))
    else:
        for line in lines(report):
            print(line)
    return 0 if report["within_target"] else 1


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all; the mock engines and the load live in this process, each proxy in its own."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="neuron-push-bench-")))
        ports = await _engines(args, stack)
        found = [Figures("no proxy", *await _loads(ports[1][0], args))]
        soak: list[int] = []
        for name, command in _proxies(args, ports, stack):
            server = Server(name, command(), command.port, folder / f"{name}.log")
            with server:
                await _serving(server, args)
                before = _cpu_seconds(server)
                single, many = await _loads(server.port, args)
                spent = _cpu_seconds(server) - before
                cpu = spent / max(1, len(single.times) + len(many.times))
                found.append(Figures(name, single, many, cpu))
                if name == "router" and args.soak:
                    soak = await _soak(server, args)
    return _report(args, found, soak)


async def _loads(port: int, args: argparse.Namespace) -> tuple[Tally, Tally]:
    single = await load(port, args.single, 1, args.prompt, args.stream)
    many = await load(port, args.requests, args.concurrency, args.prompt, args.stream)
    return single, many


async def _serving(server: Server, args: argparse.Namespace) -> None:
    """Wait until a request is answered well, then warm it up."""
    deadline = time.monotonic() + START
    while True:
        with suppress(OSError):
            if not (await load(server.port, 1, 1, args.prompt, args.stream)).errors:
                break
        if not server.running or time.monotonic() > deadline:
            raise ServerFailed(f"{server.name} does not serve{server.tail()}")
        await asyncio.sleep(0.1)
    await load(server.port, 200, min(16, args.concurrency), args.prompt, args.stream)


async def _engines(args: argparse.Namespace, stack: ExitStack) -> tuple[list[int], list[int]]:
    """Mock engines; ports of the prefill and of the decode ones."""
    loop = asyncio.get_running_loop()
    ports: tuple[list[int], list[int]] = ([], [])
    for side, answer in enumerate((JSON_ANSWER, STREAM_ANSWER if args.stream else JSON_ANSWER)):
        make = partial(MockEngine, answer)
        for _ in range(args.engines):
            server = await loop.create_server(make, HOST, 0)
            stack.callback(server.close)
            ports[side].append(server.sockets[0].getsockname()[1])
    return ports


@contextmanager
def listener(name: str, role: str) -> Iterator[Address]:
    """A side channel that introduces a mock engine of one rank."""
    geometry = Geometry((), (), 4)
    info = EngineInfo(name, 1, role, 1, 1, 1, 0, ("push",), SEMANTICS, ())
    server = Listener(name, HOST, 0, lambda: info)
    rank = RankInfo(0, 1, Address(HOST, 1), geometry)
    ask(server.address, Announce(name, rank, SEMANTICS), 5.0)
    try:
        yield server.address
    finally:
        server.close()


class _Command:
    """A command line whose port is drawn once."""

    def __init__(self, words: Sequence[str]) -> None:
        (self.port,) = free_ports(1)
        self._words = words

    def __call__(self) -> list[str]:
        return [sys.executable, *self._words, "--port", str(self.port)]


def _proxies(
    args: argparse.Namespace, ports: tuple[list[int], list[int]], stack: ExitStack
) -> Iterator[tuple[str, _Command]]:
    """Names and command lines of what is compared."""
    words, plain = ["-m", "neuron_push.cli", "router"], []
    for leg, role, numbers in (
        ("prefill", "kv_producer", ports[0]),
        ("decode", "kv_consumer", ports[1]),
    ):
        for index, port in enumerate(numbers):
            address = stack.enter_context(listener(f"{leg}-{index}", role))
            words += [f"--{leg}", f"http://{HOST}:{port}#side={address.port}"]
            plain += [f"--{leg}", f"http://{HOST}:{port}"]
    yield "router", _Command([*words, "--log-level", "warning"])
    yield "minimal proxy", _Command(["-m", "neuron_push.bench.serial_proxy", *plain])
    serial = ["-m", "neuron_push.bench.serial_proxy", "--serial", *plain]
    yield "minimal serial proxy", _Command(serial)
    if args.demo_proxy:
        yield "vLLM demo proxy", _Command(_demo(args.demo_proxy, ports))


def _demo(path: Path, ports: tuple[list[int], list[int]]) -> list[str]:
    if not path.is_file():
        raise ConfigError(f"--demo-proxy {path} is not a file")
    words = [str(path), "--model", "m"]
    words += ["--prefill", *(f"{HOST}:{port}" for port in ports[0])]
    words += ["--decode", *(f"{HOST}:{port}" for port in ports[1])]
    words += ["--prefill-engine-id", "prefill-0", "--prefill-kv-host", HOST]
    return [*words, "--prefill-side-channel-port", "5600"]


async def _soak(server: Server, args: argparse.Namespace) -> list[int]:
    """Resident KiB of the router after each tenth of many requests."""
    sizes = []
    for _ in range(10):
        await load(server.port, args.soak // 10, args.concurrency, args.prompt, args.stream)
        sizes.append(_resident(server))
    return sizes


def _cpu_seconds(server: Server) -> float:
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(server: Server) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def _report(args: argparse.Namespace, found: list[Figures], soak: list[int]) -> dict[str, Any]:
    base, router = found[0].single, next(each for each in found if each.name == "router")
    added = (router.single.percentile(0.5) - base.percentile(0.5)) * 1e3
    grown = (soak[-1] - soak[1]) / soak[1] if soak else 0.0
    errors = sum(each.single.errors + each.many.errors for each in found)
    return {
        "bench": "router",
        "config": {
            "requests": args.requests, "concurrency": args.concurrency, "single": args.single,
            "prompt_bytes": args.prompt, "engines_per_leg": args.engines,
            "stream": args.stream, "cpus": os.cpu_count(),
        },
        "figures": {each.name: each.as_json() for each in found},
        "added_ttft_p50_ms": added,
        "soak": {"requests": args.soak, "resident_kib": soak, "grown": grown},
        "within_target": (
            added < TARGET_MS and router.many.rate >= TARGET_RATE and not errors and grown < 0.05
        ),
    }  # fmt: skip


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report as a table."""
    heads = (("", -22), ("TTFT p50", 10), ("p99", 10), ("requests/s", 12), ("busy p50", 10),
             ("p99", 10), ("CPU each", 11))  # fmt: skip
    yield "".join(f"{name:<{-width}}" if width < 0 else f"{name:>{width}}" for name, width in heads)
    for name, each in report["figures"].items():
        one, busy = each["ttft_ms"], each["ttft_busy_ms"]
        yield (
            f"{name:<22}{one['p50']:>7.3f} ms{one['p99']:>7.3f} ms"
            f"{each['requests_per_second']:>12.0f}{busy['p50']:>7.1f} ms{busy['p99']:>7.1f} ms"
            f"{each['cpu_us_per_request']:>8.0f} us"
            + (f"  {each['errors']} ERRORS" if each["errors"] else "")
        )
    yield f"added to TTFT at p50: {report['added_ttft_p50_ms']:.3f} ms (target {TARGET_MS:g} ms)"
    if sizes := report["soak"]["resident_kib"]:
        shown = ", ".join(f"{size / 1024:.1f}" for size in sizes)
        yield f"resident MiB over {report['soak']['requests']} requests: {shown}"
    yield "ok" if report["within_target"] else "OVER TARGET"


__all__ = ["add_arguments", "listener", "main", "measure"]
