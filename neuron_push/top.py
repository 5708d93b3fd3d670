"""`neuron-push top`: a router's engines, pairs, rates and slow requests, live in a terminal."""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from neuron_push.errors import NeuronPushError, TransportError

TIMEOUT: Final = 2.0
# Engines whose metrics are read at once; of a larger fleet the first ones.
MOST_ENGINES: Final = 64
ROWS: Final = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = "Show a router and its engines, live. Ctrl-C ends it."
    add = parser.add_argument
    add("router", metavar="URL", help="the router, such as http://127.0.0.1:8000")
    add("--key-file", type=Path, help="bearer token for the router")
    add("--every", type=float, default=1.0, help="seconds between looks (1)")
    add("--once", action="store_true", help="print one look, over one second, and end")


@dataclass
class Look:
    """What was seen at one moment."""

    at: float
    pairs: Mapping[str, Any] = field(default_factory=dict)
    requests: Mapping[str, Any] = field(default_factory=dict)
    # Totals of the router's metrics, and of each engine's by URL, by sample name.
    router: Mapping[str, float] = field(default_factory=dict)
    engines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def main(args: argparse.Namespace) -> int:
    """Entry for the command line."""
    key = args.key_file.read_text().strip() if args.key_file else ""
    before = look(args.router, key)
    if args.once:
        time.sleep(1.0)
        Console().print(render(look(args.router, key), before))
        return 0
    with Live(render(before, before), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(args.every)
            try:
                now = look(args.router, key)
            except NeuronPushError as error:
                live.update(Text(str(error), style="red"), refresh=True)
                continue
            live.update(render(now, before), refresh=True)
            before = now


def look(url: str, key: str = "") -> Look:
    """Ask the router and its engines; raises TransportError if the router does not answer."""
    url = url.rstrip("/")
    pairs = json.loads(_get(f"{url}/pairs", key))
    found = Look(
        time.monotonic(), pairs, json.loads(_get(f"{url}/requests", key)),
        totals(_get(f"{url}/metrics", key)),
    )  # fmt: skip
    urls = list(dict.fromkeys(e["url"] for e in (*pairs["prefill"], *pairs["decode"])))
    with ThreadPoolExecutor(8) as pool:
        found.engines = dict(pool.map(_engine, urls[:MOST_ENGINES]))
    return found


def _engine(url: str) -> tuple[str, Mapping[str, float]]:
    try:
        return url, totals(_get(f"{url}/metrics", ""))
    except TransportError:
        return url, {}


def _get(url: str, key: str) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return str(answer.read().decode())
    except OSError as error:
        raise TransportError(f"{url}: {error}") from None


def totals(text: str) -> dict[str, float]:
    """Samples by name, summed over their labels; and by name{value} for each label's value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            keys = {sample.name, *(f"{sample.name}{{{v}}}" for v in sample.labels.values())}
            for key in keys:
                found[key] = found.get(key, 0.0) + sample.value
    return found


def rate(now: Look, before: Look, name: str) -> float:
    """Per second, of a router's counter."""
    seconds = now.at - before.at
    grown = now.router.get(name, 0.0) - before.router.get(name, 0.0)
    return grown / seconds if seconds > 0 else 0.0


def render(now: Look, before: Look) -> RenderableType:
    """The whole view."""
    return Group(
        _head(now, before), _engines(now, before), _unusable(now.pairs), _requests(now.requests)
    )


def _head(now: Look, before: Look) -> Text:
    prefix = "neuron_push_router_"
    modes = "  ".join(
        f"{mode} {rate(now, before, f'{prefix}modes_total{{{mode}}}'):.1f}/s"
        for mode in ("disagg", "pull", "local")
    )
    resting = now.router.get(f"{prefix}pairs_quarantined", 0)
    text = Text.assemble(
        ("neuron-push  ", "bold"),
        f"{now.router.get(prefix + 'in_flight', 0):.0f} in flight  {modes}  ",
        f"retries {rate(now, before, prefix + 'retries_total'):.1f}/s  ",
        f"usable pairs {now.pairs.get('usable_pairs', 0)}  ",
        (f"quarantined {resting:.0f}", "red" if resting else "green"),
    )
    waiting = now.router.get(f"{prefix}waiting_for_room", 0)
    return text.append(f"  {waiting:.0f} wait for KV blocks", "yellow") if waiting else text


def _engines(now: Look, before: Look) -> Table:
    names = ("leg", "engine", "device", "in flight", "load", "free KV", "promised", "pinned")
    table = _table("", *names, "oldest pin", "MB/s", "state")
    for leg in ("prefill", "decode"):
        for engine in now.pairs.get(leg, []):
            url = engine["url"]
            mine, old = now.engines.get(url, {}), before.engines.get(url, {})
            table.add_row(
                leg, engine["engine"] or url, engine["device"] or "-", str(engine["in_flight"]),
                f"{engine['load']:g}", _blocks(engine), str(engine["promised_blocks"]),
                f"{mine.get('neuron_push_pinned_blocks', 0):.0f}",
                f"{mine.get('neuron_push_pinned_age_seconds', 0):.1f} s",
                f"{_megabytes(leg, mine, old, now.at - before.at):.1f}", _state(engine),
            )  # fmt: skip
    return table


def _blocks(engine: Mapping[str, Any]) -> str:
    free, total = engine["free_blocks"], engine["total_blocks"]
    return "?" if free < 0 else f"{free}/{total}"


def _megabytes(
    leg: str, now: Mapping[str, float], before: Mapping[str, float], seconds: float
) -> float:
    name = "neuron_push_bytes_total" if leg == "prefill" else "neuron_push_received_bytes_total"
    return (now.get(name, 0.0) - before.get(name, 0.0)) / seconds / 1e6 if seconds > 0 else 0.0


def _state(engine: Mapping[str, Any]) -> Text:
    return Text("ready", "green") if engine["ready"] else Text(engine["trouble"], "red")


def _unusable(pairs: Mapping[str, Any]) -> RenderableType:
    rows = [row for row in pairs.get("pairs", []) if not row["usable"]]
    if not rows:
        return Text()
    table = _table(f"pairs that cannot serve ({len(rows)})", "prefill", "decode", "why")
    for row in rows[:ROWS]:
        table.add_row(row["prefill"], row["decode"], "; ".join(row["reasons"]))
    return table


def _requests(seen: Mapping[str, Any]) -> RenderableType:
    return Group(
        _flights("oldest under way", seen.get("in_flight", [])),
        _flights("slow lately", list(reversed(seen.get("slow", [])))),
    )


def _flights(title: str, flights: Sequence[Mapping[str, Any]]) -> RenderableType:
    if not flights:
        return Text()
    table = _table(title, "request", "mode", "phase", "age", "first byte", "prompt", "to")
    for each in flights[:ROWS]:
        first = each["first_byte"]
        table.add_row(
            each["request"], each["mode"] or "-", each["phase"], f"{each['age']:.2f} s",
            "-" if first is None else f"{first:.2f} s", str(each["prompt_tokens"]),
            f"{each['prefill'] or '-'} -> {each['decode'] or '-'}",
        )  # fmt: skip
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="ellipsis", no_wrap=True)
    return table


__all__ = ["add_arguments", "look", "main", "render", "totals"]
