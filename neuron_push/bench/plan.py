"""`neuron-push bench plan`: what planning costs per copy.

One decode rank of a 64-layer model with one KV head per rank (K and V apart, as on Trainium)
registers a prompt; each case plans and binds it. The baseline copies arrays of the size of the
result once within memory, so the ratio holds on machines of any speed.

What a pair of ranks computes once is measured too, for all peers of one rank of a mixed fleet, and
which way a pair goes whose prompts would take too many copies.
"""

from __future__ import annotations

import argparse
import json as jsonlib
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from neuron_push.geometry import Geometry, Group, Plane, Region, check
from neuron_push.layouts import Place, View, split_first
from neuron_push.plan import (
    MOST_COPIES,
    PROMPT,
    Ask,
    Blocks,
    Means,
    PairPlan,
    assign,
    bind,
    decide,
    pair,
)
from neuron_push.shapes import PLATFORMS, geometries, load_model

__all__ = ["add_arguments", "main", "run"]

LAYERS: Final = 64
TOKENS: Final = 32  # per block
CHANNELS: Final = 128
ELEMENT: Final = 2
# Far below any real address; nothing is read or written.
BASE: Final = 1 << 40
# What the design allows, per copy and per call.
TARGET_NS: Final = 20.0
TARGET_MS: Final = 0.5
# And for all peers of a rank together.
TARGET_SETUP_MS: Final = 200.0
SLAB: Final = 16 << 20
MODEL: Final = "Qwen/Qwen3-32B"
FLEETS: Final = (("trn2", 64, "p5en", 8), ("p5en", 8, "trn2", 64), ("trn2", 64, "trn2", 8))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--blocks", type=int, default=512, help="blocks of the prompt (512)")
    parser.add_argument("--repeat", type=int, default=200, help="timed calls per case (200)")


def main(args: argparse.Namespace) -> int:
    """Entry for the command line; exit status 1 if a case misses its target."""
    report = run(args.json, blocks=args.blocks, repeat=args.repeat)
    judged = (*report["cases"].values(), *report["setup"].values(), *report["many_copies"])
    return 0 if all(case["within_target"] for case in judged) else 1


def run(json: bool, *, blocks: int = 512, repeat: int = 200) -> dict[str, Any]:
    """Measure, print and return the report; 512 fragmented blocks make 65,536 copies.

    Times are in milliseconds unless a name says ns.
    """
    lists = _block_lists(blocks)
    cases = {name: _case(ids, repeat) for name, ids in lists.items()}
    report = {
        "bench": "plan",
        "config": {
            "layers": LAYERS,
            "heads_per_rank": 1,
            "block_tokens": TOKENS,
            "head_size": CHANNELS,
            "element_bytes": ELEMENT,
            "blocks": blocks,
            "repeat": repeat,
        },
        "cases": cases,
        "setup": {f"{p} {n} to {d} {m}": _setup(p, n, d, m) for p, n, d, m in FLEETS},
        "many_copies": [
            _many_copies("trn2", 128, 8, Means(decode_slab=SLAB, min_run=1)),
            # Where the insides of pages are alike too, only slabs on both sides help.
            _many_copies("cuda-before-0.28", 16, 1, Means(SLAB, SLAB, min_run=1, both=True)),
        ],
    }
    if json:
        print(jsonlib.dumps(report))
    else:
        _print(report)
    return report


def _print(report: dict[str, Any]) -> None:
    for name, case in report["cases"].items():
        print(_line(name, case))
    for name, each in report["setup"].items():
        print(
            f"set-up of {name}: prefill rank {each['prefill_ms']:.1f} ms for {each['decode_peers']}"
            f" peers, decode rank {each['decode_ms']:.1f} ms for {each['prefill_peers']}  "
            f"{'ok' if each['within_target'] else 'OVER TARGET'}"
        )
    for many in report["many_copies"]:
        print(
            f"{many['direct']:,} copies directly: goes {many['way']} with {many['copies']:,}  "
            f"{'ok' if many['within_target'] else 'OVER TARGET'}"
        )


def _setup(prefill: str, prefill_ranks: int, decode: str, decode_ranks: int) -> dict[str, Any]:
    """What the busiest rank of either side computes before its first transfer, once."""
    model = load_model(MODEL)
    sources = geometries(model, PLATFORMS[prefill], prefill_ranks)
    targets = geometries(model, PLATFORMS[decode], decode_ranks)
    means = Means(
        SLAB if PLATFORMS[prefill].reorders else 0, SLAB if PLATFORMS[decode].reorders else 0
    )

    def as_decode() -> int:
        """Judge all ranks, divide what is wanted, plan each pair that lands in slabs."""
        for each in sources:
            check(each)
        asks = [(i, ask) for i, ask in enumerate(assign(targets, sources)[0]) if ask]
        for index, ask in asks:
            decide(sources[index], targets[0], ask, means)
        return len(asks)

    table = assign(targets, sources)
    served = [(seat, row[0]) for seat, row in enumerate(table) if row[0] is not None]

    def as_prefill() -> int:
        """Judge and plan each decode rank that says hello."""
        for seat, ask in served:
            check(targets[seat])
            decide(sources[0], targets[seat], ask, means)
        return len(served)

    took = [_fastest(call) for call in (as_prefill, as_decode)]
    return {
        "prefill_ms": took[0],
        "decode_ms": took[1],
        "decode_peers": len(served),
        "prefill_peers": as_decode(),
        "within_target": max(took) <= TARGET_SETUP_MS,
    }


def _many_copies(prefill: str, tokens: int, ranks: int, means: Means) -> dict[str, Any]:
    """A pair whose runs are long enough, and of which a prompt takes too many."""
    model = load_model(MODEL)
    source = geometries(model, PLATFORMS[prefill], ranks, tokens)[0]
    target = geometries(model, PLATFORMS["cuda-before-0.28"], ranks, 16)[0]
    ask = Ask(tuple(group.heads for group in target.groups))
    direct = pair(source, target, ask).describe()["copies_per_1000_tokens"] * PROMPT // 1000
    plan = decide(source, target, ask, means)
    copies = plan.describe()["copies_per_1000_tokens"] * PROMPT // 1000
    staged = plan.way != "direct" and copies < direct
    return {
        "direct": direct,
        "copies": copies,
        "way": plan.way,
        "within_target": staged or direct <= MOST_COPIES,
    }


def _line(name: str, case: dict[str, Any]) -> str:
    return (
        f"{name:<12} {case['copies']:>7} copies  p50 {case['plan_and_bind']['p50']:.3f} ms  "
        f"p99 {case['plan_and_bind']['p99']:.3f} ms  {case['ns_per_copy']:.1f} ns/copy  "
        f"{case['ratio_to_memcpy']:.1f}x memcpy  "
        f"{'ok' if case['within_target'] else 'OVER TARGET'}"
    )


def _block_lists(blocks: int) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Source and destination ids: neighbours on both sides, and no neighbours at all."""
    rng = np.random.default_rng(1)
    rows = np.arange(1, blocks + 1, dtype=np.int32)
    scattered = (rng.permutation(blocks).astype(np.int32) * 2 + 1 for _ in range(2))
    return {"contiguous": (rows, rows), "fragmented": (next(scattered), next(scattered))}


def _geometry(blocks: int) -> Geometry:
    pool = 2 * blocks + 2
    half = pool * TOKENS * CHANNELS
    regions: list[Region] = []
    planes: list[Plane] = []
    for layer in range(LAYERS):
        base = BASE + layer * 2 * half * ELEMENT
        regions.append(Region(base, 2 * half * ELEMENT, "VRAM", 0))
        page = TOKENS * CHANNELS
        view = View((2, pool, 1, TOKENS, CHANNELS), (half, page, page, CHANNELS, 1), base, ELEMENT)
        planes += split_first(view, Place(layer, layer, base))
    group = Group("full", TOKENS, TOKENS, pool, (0,), tuple(planes))
    return Geometry(tuple(regions), (group,), ELEMENT)


def _case(ids: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]], repeat: int) -> dict[str, Any]:
    geometry = _geometry(len(ids[0]))
    plan = pair(geometry, geometry, Ask(((0,),)))
    source, destination = ([Blocks(0, side)] for side in ids)
    stop = len(ids[0]) * TOKENS

    def whole() -> int:
        copies = plan.copies(0, stop, source, destination)
        bind(copies, geometry, geometry)
        return copies.count

    began = time.perf_counter_ns()
    count = whole()
    first = (time.perf_counter_ns() - began) / 1e6
    taken = _percentiles(whole, repeat)
    memcpy = _percentiles(_baseline(count), repeat)
    return {
        "copies": count,
        "bytes": plan.copies(0, stop, source, destination).nbytes,
        # With the page faults of memory that malloc has not handed out before.
        "first_call": first,
        "plan_only": _percentiles(lambda: _count(plan, stop, source, destination), repeat),
        "plan_and_bind": taken,
        "memcpy": memcpy,
        "ns_per_copy": taken["p50"] * 1e6 / count,
        "ratio_to_memcpy": taken["p50"] / memcpy["p50"],
        "within_target": taken["p50"] <= TARGET_MS + count * TARGET_NS / 1e6,
    }


def _count(plan: PairPlan, stop: int, source: list[Blocks], destination: list[Blocks]) -> int:
    return plan.copies(0, stop, source, destination).count


def _baseline(count: int) -> Callable[[], int]:
    """Copy two (count, 3) arrays into fresh memory, as bind fills two such arrays."""
    filled = [np.ones((count, 3), np.uint64) for _ in range(2)]

    def copy() -> int:
        return sum(array.copy().shape[0] for array in filled)

    return copy


def _fastest(call: Callable[[], int], repeat: int = 5) -> float:
    """Milliseconds of the fastest call: what else the machine does is not the plan's."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1e6)
    return min(times)


def _percentiles(call: Callable[[], int], repeat: int) -> dict[str, float]:
    times = []
    for _ in range(repeat):
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1e6)
    return {f"p{q}": float(np.percentile(times, q)) for q in (50, 90, 99)}
