"""`neuron-push bench faults`: how soon a fault is told, and how soon blocks come back.

First transfer threads over real NIXL on loopback, one of them in a process that is killed; no
engine, so what an engine's step loop adds is not in there. Each case runs on a link that is in use.
Then the same script for this connector and vLLM's NixlPushConnector, driven by vLLM's scheduler
(rival.py), in two columns.
"""

from __future__ import annotations

import argparse
import json as jsonlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from neuron_push.bench import rival
from neuron_push.bench.child import Child
from neuron_push.bench.rank import ENVIRONMENT, Rank, Shape
from neuron_push.config import Config
from neuron_push.protocol import Register, decode_notification

__all__ = ["add_arguments", "main", "run"]

# 2 MiB per block: a transfer of 16 blocks is more than sockets hold.
LARGE: Final = Shape(blocks=24, width=8192)
BLOCKS: Final = list(range(1, 17))
WARM: Final = [20, 21]
Figures = dict[str, list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeat", type=int, default=3, help="times each fault is made (3)")
    parser.add_argument(
        "--rival-wait", type=float, default=30.0, metavar="S",
        help="how long either connector is waited for with engines, seconds (30)",
    )  # fmt: skip
    parser.add_argument("--no-engines", action="store_true", help="transfer threads only")
    parser.add_argument(
        "--only", choices=sorted(CASES), help="one fault, of transfer threads (default: all)"
    )


def main(args: argparse.Namespace) -> int:
    """Entry for the command line; exit status 1 if the median of a figure misses its target."""
    cases = [CASES[args.only]] if args.only else list(CASES.values())
    wait = 0.0 if args.no_engines or args.only else args.rival_wait
    report = run(args.json, repeat=args.repeat, wait=wait, cases=cases)
    return 0 if all(row["within_target"] is not False for row in report["figures"]) else 1


@dataclass
class Bench:
    """A prefill and a decode rank, one here and one in a child, with a link in use."""

    stack: ExitStack
    config: Config
    figures: Figures = field(default_factory=dict)

    def decode_here(self) -> tuple[Child, Rank]:
        child = Child("P", "producer", self.config, LARGE)
        self.stack.callback(child.kill)
        rank = self._rank("D", "consumer")
        _warm(child, rank)
        return child, rank

    def prefill_here(self) -> tuple[Rank, Child]:
        child = Child("D", "consumer", self.config, LARGE)
        self.stack.callback(child.kill)
        rank = self._rank("P", "producer")
        _warm(rank, child)
        return rank, child

    def both_here(self) -> tuple[Rank, Rank]:
        prefill, decode = self._rank("P", "producer"), self._rank("D", "consumer")
        _warm(prefill, decode)
        return prefill, decode

    def add(self, name: str, seconds: float) -> None:
        self.figures.setdefault(name, []).append(seconds * 1000)

    def _rank(self, engine: str, role: str) -> Rank:
        rank = Rank(engine, role, self.config, LARGE)
        self.stack.callback(rank.close)
        return rank


def prefill_killed(bench: Bench) -> None:
    """P dies with a WRITE half landed: fail tells D at once, recompute when it is fenced."""
    for policy in ("fail", "recompute"):
        with ExitStack() as stack:
            _kill_prefill(Bench(stack, bench.config, bench.figures), policy)


def _kill_prefill(bench: Bench, policy: str) -> None:
    prefill, decode = bench.decode_here()
    prefill.call("arm", "posted", "stop", "D")
    prefill.call("offer", "hit", BLOCKS, 1)
    attempt = decode.want("hit", BLOCKS, prefill.address, hold=policy == "recompute")
    prefill.wait_until("T")
    killed = time.monotonic()
    prefill.kill()
    bench.add(f"P killed, {policy}: D told", decode.hears("ReceiveFailed", attempt) - killed)
    bench.add(f"P killed, {policy}: D's blocks back", decode.hears("Unpinned", attempt) - killed)


def prefill_hangs(bench: Bench) -> None:
    """P stands still with a WRITE half landed, and its connections stay."""
    prefill, decode = bench.decode_here()
    prefill.call("arm", "posted", "stop", "D")
    prefill.call("offer", "hit", BLOCKS, 1)
    attempt = decode.want("hit", BLOCKS, prefill.address)
    prefill.wait_until("T")
    stopped = time.monotonic()
    bench.add("P hangs: D told", decode.hears("ReceiveFailed", attempt) - stopped)
    bench.add("P hangs: D's blocks back", decode.hears("Unpinned", attempt) - stopped)


def prefill_aborts(bench: Bench) -> None:
    """The prefill request is aborted while its first half is already there."""
    prefill, decode = bench.both_here()
    source = prefill.offer("hit", BLOCKS, 1, 8)
    attempt = decode.want("hit", BLOCKS, prefill.address)
    decode.until(lambda: decode.exact(BLOCKS[:8], 1), what="half of it")
    aborted = time.monotonic()
    prefill.retire(source, "aborted")
    bench.add("P aborts: D told", decode.hears("ReceiveFailed", attempt) - aborted)
    bench.add("P aborts: D's blocks back", decode.hears("Unpinned", attempt) - aborted)


def decode_killed(bench: Bench) -> None:
    """D dies with P's WRITE half landed."""
    prefill, decode = bench.prefill_here()
    decode.call("arm", "half landed", "stop", "P", BLOCKS)
    prefill.arm("posted", lambda: decode.wait_until("TZ"), "D")
    source = prefill.offer("hit", BLOCKS, 1)
    decode.call("want", "hit", BLOCKS, prefill.address)
    decode.wait_until("T")
    killed = time.monotonic()
    decode.kill()
    bench.add("D killed: P's blocks back", prefill.hears("Unpinned", source) - killed)


def restarted(bench: Bench) -> None:
    """A rank dies and is back on its port at once; the other has noticed nothing yet."""
    for side in "PD":
        with ExitStack() as stack:
            again = Bench(stack, bench.config, bench.figures)
            here, child = again.prefill_here() if side == "D" else again.decode_here()[::-1]
            child.kill()
            fresh = child.again()
            stack.callback(fresh.kill)
            prefill, decode = (here, fresh) if side == "D" else (fresh, here)
            began = time.monotonic()
            prefill.call("offer", "first", WARM, 3)
            decode.call("hears", "Received", decode.call("want", "first", WARM, prefill.address))
            again.add(f"{side} restarted: first request", time.monotonic() - began)


def decode_aborts(bench: Bench) -> None:
    """D gives up while a WRITE is in flight, and P lets that end."""
    prefill, decode = bench.both_here()
    prefill.arm("posted", "hold", "D")
    source = prefill.offer("hit", BLOCKS, 1)
    attempt = decode.want("hit", BLOCKS, prefill.address)
    decode.until(lambda: bool(prefill.trap.holding), what="a WRITE in flight")
    aborted = time.monotonic()
    decode.abandon(attempt)
    bench.add("D aborts: engine told", decode.hears("ReceiveFailed", attempt) - aborted)
    decode.until(lambda: prefill.tally("cancellations", "decode") > 0, what="the cancellation")
    if decode.has("Unpinned", attempt):
        raise AssertionError("a pin was dropped with a WRITE in flight")
    let_go = time.monotonic()
    prefill.let_go()
    drained = prefill.hears("Unpinned", source)
    bench.add("D aborts: WRITE drained", drained - let_go)
    bench.add("D aborts: pins back after that", decode.hears("Unpinned", attempt) - drained)


def registration_lost(bench: Bench) -> None:
    """The transport loses a registration."""
    prefill, decode = bench.both_here()
    sent: list[float] = []
    decode.trap.lose(lambda payload: _is_first_register(payload, sent))
    attempt = decode.want("hit", BLOCKS, prefill.address)
    decode.until(lambda: len(sent) > 1, what="the registration again")
    bench.add("registration lost: sent again", sent[1] - sent[0])
    prefill.offer("hit", BLOCKS, 1)
    decode.hears("Received", attempt)


Case = Callable[[Bench], None]
CASES: Final[dict[str, Case]] = {
    case.__name__.replace("_", "-"): case
    for case in (
        prefill_killed, prefill_hangs, prefill_aborts, decode_killed, decode_aborts,
        registration_lost, restarted,
    )
}  # fmt: skip


def targets(config: Config) -> dict[str, float]:
    """What the issue asks for, in milliseconds; figures that are not here have no target."""
    detection = config.silence * 1000
    return {
        "P killed, fail: D told": detection,
        "P killed, recompute: D told": detection + 1000,
        "P hangs: D told": detection + 200,
        "P hangs: D's blocks back": detection + 1000,
        "P aborts: D told": 100,
        "D killed: P's blocks back": detection,
        "D aborts: pins back after that": 100,
        "registration lost: sent again": 50,
    }


def run(
    json: bool, *, repeat: int = 3, wait: float = 0.0, cases: Sequence[Case] = ()
) -> dict[str, Any]:
    """Make faults (all of them), print and return the report; times in milliseconds.

    With a `wait`, engines of both connectors too; null is what took longer than it.
    """
    config = Config()
    figures: Figures = {}
    with _environment():
        for case in cases or CASES.values():
            for _ in range(repeat):
                with ExitStack() as stack:
                    case(Bench(stack, config, figures))
        engines = rival.run(wait, lambda text: print(text, file=sys.stderr)) if wait else {}
    wanted = targets(config)
    rows = [_row(name, values, wanted.get(name)) for name, values in figures.items()]
    settings = {k: getattr(config, k) for k in ("silence", "alive_interval", "resend")}
    report = {"bench": "faults", "config": {**settings, "repeat": repeat}, "figures": rows}
    if engines:
        report["engines"] = {"wait_s": wait, "ms": engines}
    if json:
        print(jsonlib.dumps(report))
    else:
        print(f"{'milliseconds':<34} {'median':>9} {'worst':>9} {'target':>9}")
        for row in rows:
            print(_line(row))
        for line in rival.table(engines, wait):
            print(line)
    return report


def _row(name: str, values: list[float], target: float | None) -> dict[str, Any]:
    median = statistics.median(values)
    return {
        "name": name,
        "median_ms": round(median, 1),
        "worst_ms": round(max(values), 1),
        "target_ms": target,
        "within_target": None if target is None else median <= target,
    }


def _line(row: dict[str, Any]) -> str:
    target = "-" if row["target_ms"] is None else f"{row['target_ms']:.0f}"
    missed = "  missed" if row["within_target"] is False else ""
    return f"{row['name']:<34} {row['median_ms']:>9.1f} {row['worst_ms']:>9.1f} {target:>9}{missed}"


def _is_first_register(payload: bytes, sent: list[float]) -> bool:
    if not isinstance(decode_notification(payload), Register):
        return False
    sent.append(time.monotonic())
    return len(sent) == 1


def _warm(prefill: Rank | Child, decode: Rank | Child) -> None:
    source = prefill.call("offer", "warm", WARM, 9)
    attempt = decode.call("want", "warm", WARM, prefill.address)
    decode.call("hears", "Received", attempt)
    prefill.call("hears", "Unpinned", source)


@contextmanager
def _environment() -> Iterator[None]:
    """What UCX, NIXL and vLLM read, set for a while."""
    # What vLLM logs must not stand before the report.
    stream = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    wanted = {**ENVIRONMENT, **stream}
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
