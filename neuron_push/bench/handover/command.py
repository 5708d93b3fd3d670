"""`neuron-push bench handover`: from the end of P's last forward to D's first step.

One request at a time on an emulated pair per connector, rounds interleaved. The end of P's last
forward and the launch of D's first step are what the emulated devices saw, alike for every
connector; for this one, trace events say where the time between went. The limit is a single NIXL
WRITE of the bytes that chunk streaming leaves, its notification, and one decode step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec

from neuron_push import processes
from neuron_push.bench.handover import limit
from neuron_push.bench.handover.drive import Driver, Seen, milliseconds, traced
from neuron_push.bench.sweep import columns, engines, proxy, setup, statistics
from neuron_push.bench.sweep.churn import churn
from neuron_push.bench.sweep.command import KV_BYTES, SHIPPED
from neuron_push.emulation import cost, fleet, models
from neuron_push.emulation.devices import DEVICES
from neuron_push.errors import ConfigError
from neuron_push.ports import free_ports
from neuron_push.processes import Server
from neuron_push.trace.phases import requests

COLUMNS: Final = ("push", "nixl-push", "nixl-pull")
LENGTHS: Final = (1024, 4096, 16384)
# What the trace calls it, and what this benchmark does.
PARTS: Final = {
    "registration wait": "match", "match": "plan", "post": "post", "wire": "wire",
    "notify": "notify",
}  # fmt: skip
# Prompts are so much shorter than their name says: the answer then ends in the prompt's last block.
ANSWER: Final = 8
Figures = dict[str, dict[str, dict[str, Any]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = __doc__
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/sweep"), help="folder of handover.json (out/sweep)")
    add("--lengths", type=int, nargs="+", default=list(LENGTHS), help="prompt tokens")
    add("--columns", nargs="+", default=list(COLUMNS), help=f"({' '.join(COLUMNS)})")
    add("--repeat", type=int, default=10, help="requests per case and round (10)")
    add("--rounds", type=int, default=2, help="interleaved rounds (2)")
    add("--fleet", type=Path, default=SHIPPED, help="fleet file (shipped one)")
    add("--contiguous-only", action="store_true", help="leave scattered blocks out")


def main(args: argparse.Namespace) -> int:
    """Entry for the command line; results also go to handover.json."""
    chosen = columns.chosen(args.columns)
    if min(args.lengths) <= ANSWER:
        raise ConfigError(f"--lengths must be larger than {ANSWER}")
    if any(column.floor for column in chosen.values()):
        raise ConfigError("floors have no handover")
    template = aligned(traced(engines.Template.of(fleet.load(args.fleet))))
    if template.model not in KV_BYTES:
        known = ", ".join(KV_BYTES)
        raise ConfigError(
            f"the limit needs a model whose KV is known, not {template.model}: {known}"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    with processes.signals_as_interrupts(), ExitStack() as stack:
        figures = _measure(args, chosen, template, stack)
    report = {
        "bench": "handover", **figures,
        "setup": setup.describe(template, setup.command_line(), chosen),
    }  # fmt: skip
    (args.out / "handover.json").write_text(json.dumps(report, indent=1))
    for line in _lines(figures):
        print(line)
    return 0


def aligned(template: engines.Template) -> engines.Template:
    """The same engines with as many blocks on either side.

    vLLM frees a prompt's blocks last first. With equal pools and equally many blocks per request
    both sides' pools turn round together, and what lies side by side here does so there: in any
    other case copies become one block long, about half of them, once a pool was used up.
    """
    most = max(template.prefill.blocks, template.decode.blocks)
    prefill, decode = (
        msgspec.structs.replace(spec, blocks=most) for spec in (template.prefill, template.decode)
    )
    return engines.Template(prefill, decode, template.model)


def _measure(
    args: argparse.Namespace, chosen: dict[str, columns.Column], template: engines.Template,
    stack: ExitStack,
) -> Figures:  # fmt: skip
    (port,) = free_ports(1)
    logs = (args.out / "logs").absolute()
    words = [sys.executable, "-m", proxy.__name__, "--port", str(port)]
    server = stack.enter_context(Server("proxy", words, port, logs / "proxy.log"))
    kinds = list(dict.fromkeys(column.kind for column in chosen.values()))
    needed = engines.memory_needed(kinds, template, KV_BYTES.get(template.model, 32 << 10))
    together = needed < engines.memory_free()
    up = stack.enter_context(engines.pairs(template, logs, print, together=together))
    server.wait_ready(60)
    figures: Figures = {}
    for arrangement in ("contiguous",) if args.contiguous_only else ("contiguous", "fragmented"):
        figures[arrangement] = _arranged(args, chosen, up, server, arrangement)
        for tokens in args.lengths:
            print(f"limit, {arrangement}, {tokens} tokens")
            figures[arrangement][str(tokens)]["limit"] = _limit(
                template, tokens - ANSWER, arrangement
            )
    return figures


def _arranged(
    args: argparse.Namespace, chosen: dict[str, columns.Column], up: engines.Pairs,
    server: Server, arrangement: str,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """All columns and lengths with blocks arranged one way; rounds take turns."""
    seen: dict[tuple[str, int], list[Seen]] = defaultdict(list)
    parts: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    copies: dict[tuple[str, int], list[float]] = defaultdict(list)
    scattered: set[str] = set()

    def warm(pair: engines.Pair) -> None:
        driver = Driver(server, pair, "pull" if pair.kind == "nixl-pull" else "push")
        for _ in range(4):
            driver.one(max(args.lengths) - ANSWER)

    for turn in range(args.rounds):
        for name in _rotated(list(chosen), turn):
            column = chosen[name]
            pair = up.awake(column.kind, warm)
            if arrangement == "fragmented" and (column.kind not in scattered or not up.together):
                scattered.add(column.kind)
                print(f"scattering the blocks of {column.kind}")
                churn(pair.engines)
            driver = Driver(server, pair, column.dispatch)
            for tokens in args.lengths:
                print(f"round {turn + 1}: {name}, {arrangement}, {tokens} tokens", flush=True)
                before = driver.copies()
                found = driver.several(tokens - ANSWER, args.repeat)
                seen[name, tokens] += found
                copies[name, tokens].append((driver.copies() - before) / args.repeat)
                if column.kind.startswith("ours") and column.dispatch == "push":
                    _breakdown(driver, found, parts[name, tokens])
    figures: dict[str, dict[str, Any]] = defaultdict(dict)
    for (name, tokens), found in seen.items():
        figure = _figure(found, parts.get((name, tokens), {}))
        figure["copies"] = round(statistics.median(copies[name, tokens]))
        figures[str(tokens)][name] = figure
    return figures


def _rotated(names: list[str], turn: int) -> list[str]:
    turn %= len(names)
    return names[turn:] + names[:turn]


def _breakdown(driver: Driver, found: Sequence[Seen], parts: dict[str, list[float]]) -> None:
    """Add each request's phases, in seconds."""
    by_name = {each.transfer: each for each in requests(driver.tracks())}
    for one in found:
        request = by_name.get(one.request)
        if request is None:
            continue
        lengths = {phase.name: phase.seconds for phase in request.phases}
        for traced_name, name in PARTS.items():
            parts[name].append(lengths.get(traced_name, 0.0))
        # The clock of all processes of a machine is one.
        received = [phase.stop for phase in request.phases if phase.name == "notify"]
        if received:
            parts["schedule"].append(max(0.0, one.decode.launched - received[0]))


def _figure(found: Sequence[Seen], parts: dict[str, list[float]]) -> dict[str, Any]:
    handover = milliseconds([each.handover for each in found])
    token = statistics.median([each.first_token for each in found])
    figure: dict[str, Any] = {
        "handover_ms": handover.pop("p50_ms"), **handover,
        "first_token_ms": round(token * 1e3, 3),
    }  # fmt: skip
    if parts:
        figure["parts_ms"] = {
            name: round(statistics.median(values) * 1e3, 3) for name, values in parts.items()
        }
    return figure


def _limit(template: engines.Template, tokens: int, arrangement: str) -> dict[str, float]:
    """Bytes of the last chunk in one WRITE, and one decode step."""
    spec = template.prefill
    block = spec.block_size or DEVICES[spec.device].block_tokens
    left = tokens % spec.max_batched or min(tokens, spec.max_batched)
    layers = models.FAMILIES[template.model].get("num_hidden_layers", 4)
    page = KV_BYTES[template.model] // layers * block
    load = limit.Load(left, layers, page, block, arrangement == "fragmented", spec.huge_pages)
    took = statistics.median(limit.measure(load, 12, spec.environment))
    step = cost.profile(template.decode.profile).step(0, 1)
    return {
        "tokens": left, "bytes": load.nbytes, "copies": len(load.rows(0)),
        "write_ms": round(took * 1e3, 3), "step_ms": step * 1e3,
        "total_ms": round((took + step) * 1e3, 3),
    }  # fmt: skip


def _lines(figures: Figures) -> list[str]:
    lines = [
        f"{'':<12}{'tokens':>7} {'':<10}{'handover':>10}{'p90':>9}{'1st token':>11}  parts, ms"
    ]
    for arrangement, by_length in figures.items():
        for tokens, by_name in by_length.items():
            for name, each in by_name.items():
                lines.append(f"{arrangement:<12}{tokens:>7} {name:<10}{_numbers(name, each)}")
    return lines


def _numbers(name: str, each: dict[str, Any]) -> str:
    if name == "limit":
        writing = f"write {each['write_ms']:.1f}, {each['copies']} copies"
        return f"{'':>19}{each['total_ms']:>11.1f}  {writing}"
    parts = ", ".join(f"{part} {value:.1f}" for part, value in each.get("parts_ms", {}).items())
    times = f"{each['handover_ms']:>10.1f}{each['p90_ms']:>9.1f}{each['first_token_ms']:>11.1f}"
    return f"{times}  {each['copies']} copies a request{', ' if parts else ''}{parts}"
