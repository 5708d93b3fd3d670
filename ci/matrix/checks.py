"""Runs one cell's load through its engines and says what does not hold."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.matrix import load
from ci.matrix.cells import Cell
from ci.matrix.load import Place, Request
from neuron_push.emulation import pattern
from neuron_push.emulation.fleet import SERVED, EmulatedEngine
from neuron_push.emulation.report import timed
from neuron_push.processes import HOST

REST = 40.0
# Reported counts: of all ranks together, and of one that stands for all.
_SUMMED = ("wrong_rows", "writes_early", "writes_late", "bytes_checked")
_TIMES = ("modelled_seconds", "own_seconds", "late_seconds")
_FIRST = ("context_tokens", "prefill_tokens", "steps", *_TIMES)
COUNTS = _SUMMED + _FIRST
# What an engine says when it will not work with another one.
READABLE = re.compile(r"KV not received: (.*refused.*)")


@dataclass(frozen=True)
class Emulated:
    """An emulated engine as a place to ask."""

    engine: EmulatedEngine
    host: str = HOST
    served: str = SERVED

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def url(self) -> str:
        return self.engine.url

    @property
    def side_port(self) -> int:
        return self.engine.side_port

    @property
    def tp(self) -> int:
        return self.engine.spec.tp

    def totals(self) -> dict[str, Any]:
        """Counts over all ranks; one is enough for tokens, as every rank sees them all."""
        ranks = self.engine.summaries()
        return {name: sum(rank[name] for rank in ranks) for name in _SUMMED} | {
            name: ranks[0][name] for name in _FIRST
        }


@dataclass
class Verdict:
    """`problems` empty: the cell holds. `refusal`: what the engines said instead of working."""

    problems: list[str]
    refusal: str
    figures: dict[str, Any]


def run(cell: Cell, prefill: Emulated, decode: Emulated) -> Verdict:
    """An emulated cell."""
    if cell.timed:  # what happens once, such as the handshake, is not measured
        _send(cell, prefill, decode)
    marks = prefill.totals(), decode.totals()
    place = decode.engine.log
    start = place.stat().st_size if place.exists() else 0
    requests = _send(cell, prefill, decode)
    refusal = _refusal(place, start)
    failed = [request for request in requests if request.error and not request.give_up_after]
    if refusal and len(failed) == len(requests):
        return Verdict([], refusal, {"requests": len(requests)})
    problems = [f"{len(failed)} failed, first: {failed[0].error}"] if failed else []
    wrong = _wrong_answers(requests)
    if wrong:
        problems.append(f"{len(wrong)} answers differ, first: prompt of {len(wrong[0].prompt)}")
    problems += _left([prefill, decode])
    now = _settled(prefill, decode)
    deltas = [
        {name: after[name] - before[name] for name in after}
        for before, after in zip(marks, now, strict=True)
    ]
    problems += _seen(cell, requests, *deltas)
    if cell.timed:
        problems += timed(
            {**seen, "name": place.name}
            for seen, place in zip(deltas, (prefill, decode), strict=True)
        )
    return Verdict(problems, "", {"wrong_answers": len(wrong), **_figures(requests, *deltas)})


def hardware(cell: Cell, prefill: Place, decode: Place) -> Verdict:
    """A cell on real nodes: what one engine answers alone is what the pair must answer."""
    requests = _send(cell, prefill, decode)
    failed = [request for request in requests if request.error and not request.give_up_after]
    problems = [f"{len(failed)} failed, first: {failed[0].error}"] if failed else []
    for request in [r for r in requests if r.answer is not None][:16]:
        single = Request(request.prompt, request.count)
        asyncio.run(load.alone(prefill, single))
        if single.answer != request.answer:
            problems.append(f"prompt of {len(request.prompt)}: not what one engine answers")
    problems += _left([prefill, decode])
    return Verdict(problems, "", {"requests": len(requests)})


def _send(cell: Cell, prefill: Place, decode: Place) -> list[Request]:
    """All of the cell's load, unless the first request already shows that nothing works."""
    requests: list[Request] = []
    for kind in cell.load:
        batches = load.batches(kind, cell.decode.block, cell.name)
        if not requests:
            probe = load.Batch([Request(list(load.ALPHABET), 4)])
            asyncio.run(load.run([probe], prefill, decode, cell.mode))
            requests += probe.requests
            if requests[0].error:
                return requests
        asyncio.run(load.run(batches, prefill, decode, cell.mode))
        requests += load.flat(batches)
    return requests


def _refusal(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        found = READABLE.search(file.read().decode(errors="replace"))
    return found[1] if found else ""


def _wrong_answers(requests: list[Request]) -> list[Request]:
    return [
        request
        for request in requests
        if request.answer is not None
        and request.answer != pattern.continuation(request.prompt, request.count)
    ]


def _left(places: list[Any]) -> list[str]:
    """Blocks that no request uses any more must come back."""
    deadline = time.monotonic() + REST
    while True:
        held = {place.name: _held(place) for place in places}
        if not any(held.values()):
            return []
        if time.monotonic() > deadline:
            return [f"{name} still holds {what}" for name, what in held.items() if what]
        time.sleep(0.2)


def _held(place: Place) -> dict[str, float]:
    names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "neuron_push_pinned_blocks")
    with urllib.request.urlopen(f"{place.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        name = line.split("{")[0]
        if name in names and float(line.rsplit(" ", 1)[1]):
            found[name] = float(line.rsplit(" ", 1)[1])
    return found


def _settled(prefill: Emulated, decode: Emulated) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reports are written with a short delay."""
    time.sleep(0.6)
    return prefill.totals(), decode.totals()


def _seen(
    cell: Cell, requests: list[Request], there: dict[str, Any], here: dict[str, Any]
) -> list[str]:
    """What the emulated devices have seen."""
    problems = []
    for name, seen in (("prefill", there), ("decode", here)):
        if seen["wrong_rows"]:
            problems.append(f"{name}: {seen['wrong_rows']} wrong rows")
    # The decode engine computes the last token of a prompt, and again after a preemption.
    most = 3 * len(requests)
    exact = "aborts" not in cell.load and not cell.short_of_kv
    if exact and here["prefill_tokens"] > most:
        problems.append(f"decode computed {here['prefill_tokens']} prompt tokens itself")
    if not here["context_tokens"]:
        problems.append("no KV from elsewhere was read on decode")
    pushes = cell.connector == "neuron-push" and cell.mode == "push"
    ours = pushes and cell.runner != "cpu"
    if ours and not there["writes_early"]:
        problems.append("no WRITE was posted before the next step's launch")
    return problems


def _figures(
    requests: list[Request], there: dict[str, Any], here: dict[str, Any]
) -> dict[str, Any]:
    return {
        "requests": len(requests),
        "answered": sum(request.answer is not None for request in requests),
        "given_up": sum(request.error == "gave up" for request in requests),
        "context_tokens": here["context_tokens"],
        "bytes_checked": there["bytes_checked"] + here["bytes_checked"],
        "wrong_rows": there["wrong_rows"] + here["wrong_rows"],
        "writes_early": there["writes_early"],
        "writes_late": there["writes_late"],
        "own_share": [_share(there), _share(here)],
    }


def _share(seen: dict[str, Any]) -> float:
    """Emulation's own work, by modelled time."""
    modelled = seen["modelled_seconds"]
    return round(seen["own_seconds"] / modelled, 4) if modelled else 0.0
