"""`neuron-push plan explain`: whether two kinds of engines can talk, how, and at what cost.

Everything is computed by the planner that engines use, over geometries made from a model's shape.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from neuron_push.config import Config
from neuron_push.errors import ConfigError, IncompatiblePair
from neuron_push.geometry import Geometry
from neuron_push.plan import GOOD_RUN, Ask, Means, Plan, StagedPlan, assign, decide
from neuron_push.shapes import PLATFORMS, Model, Platform, geometries, load_model

__all__ = ["add_arguments", "explain", "main"]

# A change is worth mentioning if it saves this share of the copies.
WORTH: Final = 0.25
# Block sizes that every platform here accepts.
SIZES: Final = (16, 32, 64, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--from", dest="prefill", required=True, choices=PLATFORMS)
    parser.add_argument("--to", dest="decode", required=True, choices=PLATFORMS)
    parser.add_argument("--model", required=True, help="a known name, or a path of a config.json")
    parser.add_argument("--prefill-tp", type=int, default=1, help="prefill ranks (1)")
    parser.add_argument("--decode-tp", type=int, default=1, help="decode ranks (1)")
    parser.add_argument(
        "--block-sizes", default="", help="tokens per block on both sides, e.g. 32,16"
    )
    parser.add_argument("--dtype", default="", help="of the KV cache, if the config is not right")
    parser.add_argument("--min-run", type=int, default=GOOD_RUN, help=f"bytes ({GOOD_RUN})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """Entry for the command line; exit status 1 if the pair cannot talk."""
    sizes = _sizes(args.block_sizes)
    if args.min_run < 1:
        raise ConfigError(f"--min-run must be positive, not {args.min_run}")
    sides = [
        Side(PLATFORMS[name], ranks, size or PLATFORMS[name].block_tokens)
        for name, ranks, size in (
            (args.prefill, args.prefill_tp, sizes[0]),
            (args.decode, args.decode_tp, sizes[1]),
        )
    ]
    report = explain(load_model(args.model, args.dtype), *sides, min_run=args.min_run)
    text = json.dumps(report) if args.json else "\n".join(_lines(report))
    sys.stdout.write(text + "\n")
    return 0 if report["can_talk"] else 1


def _sizes(text: str) -> tuple[int, int]:
    if not text:
        return 0, 0
    try:
        first, second = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--block-sizes takes two numbers such as 32,16, not {text!r}") from None
    if min(first, second) < 1:
        raise ConfigError("--block-sizes must be positive")
    return first, second


@dataclass(frozen=True, slots=True)
class Side:
    """One engine."""

    platform: Platform
    ranks: int
    block_tokens: int

    def geometries(self, model: Model) -> list[Geometry]:
        return geometries(model, self.platform, self.ranks, self.block_tokens)


@dataclass(frozen=True, slots=True)
class Pairs:
    """All pairs of ranks that exchange bytes: (prefill rank, decode rank) -> plan."""

    plans: dict[tuple[int, int], Plan]

    @property
    def copies(self) -> int:
        """Per 1,000 tokens, all pairs together."""
        return sum(plan.describe()["copies_per_1000_tokens"] for plan in self.plans.values())

    @property
    def nbytes(self) -> int:
        """Per 1,000 tokens, all pairs together."""
        return sum(plan.describe()["bytes_per_1000_tokens"] for plan in self.plans.values())


def explain(
    model: Model, prefill: Side, decode: Side, *, min_run: int = GOOD_RUN
) -> dict[str, Any]:
    """The report as plain data; sizes in bytes, rates per 1,000 tokens."""
    report: dict[str, Any] = {
        "model": model.name,
        "kv_bytes_per_token": _token_bytes(model),
        "prefill": _describe(prefill),
        "decode": _describe(decode),
    }
    if model.states:
        report["state_layers"] = model.states
    try:
        if model.states and prefill.ranks != decode.ranks:
            raise IncompatiblePair(
                f"{model.states} layers keep a state per request, which is never taken apart: both "
                "sides need the same parallel degree"
            )
        pairs = _pairs(model, prefill, decode, min_run)
    except IncompatiblePair as error:
        reasons = list(error.differences) or [str(error)]
        return {**report, "can_talk": False, "reasons": reasons,
                "faster": _refused_hints(prefill, decode)}  # fmt: skip
    plan = next(iter(pairs.plans.values()))
    report |= {
        "can_talk": True,
        "way": plan.way,
        "per_pair": dict(plan.describe()),
        "copies_per_1000_tokens": pairs.copies,
        "bytes_per_1000_tokens": pairs.nbytes,
        "staging": _staging(plan),
        "stripe": {"replicas": plan.stripe.count, "unit_tokens": plan.stripe.unit},
        "links": [list(link) for link in sorted(pairs.plans)],
        "idle_prefill_ranks": prefill.ranks - len({link[0] for link in pairs.plans}),
    }
    report["faster"] = list(_hints(model, prefill, decode, pairs, report, min_run))
    return report


def _describe(side: Side) -> dict[str, Any]:
    platform = side.platform
    return {
        "platform": platform.name,
        "layout": platform.words,
        "ranks": side.ranks,
        "block_tokens": side.block_tokens,
        "reorders": platform.reorders,
    }


def _token_bytes(model: Model) -> int:
    sides = 1 if model.latent else 2
    return model.layers * model.kv_heads * model.head_size * model.element * sides


def _pairs(model: Model, prefill: Side, decode: Side, min_run: int) -> Pairs:
    slab = Config().staging_slab_bytes
    means = Means(
        slab if prefill.platform.reorders else 0,
        slab if decode.platform.reorders else 0,
        min_run=min_run,
        both=Config().staging_slabs > 1,
    )
    sources = prefill.geometries(model)
    plans: dict[tuple[int, int], Plan] = {}
    targets = decode.geometries(model)
    # Ranks differ in which heads they hold, rarely in how: equal pairs are planned once.
    known: dict[tuple[int, tuple[int, ...], int], Plan] = {}
    for seat, (target, asks) in enumerate(zip(targets, assign(targets, sources), strict=True)):
        for rank, ask in enumerate(asks):
            if ask is not None:
                shape = _shape(sources[rank], target, ask)
                if shape not in known:
                    known[shape] = decide(sources[rank], target, ask, means)
                plans[rank, seat] = known[shape]
    return Pairs(plans)


def _shape(source: Geometry, target: Geometry, ask: Ask) -> tuple[int, tuple[int, ...], int]:
    """What a plan's numbers depend on: where the heads lie on either side, and their share."""
    places = [
        group.heads.index(head)
        for side in (source, target)
        for group, heads in zip(side.groups, ask.heads, strict=True)
        for head in heads
    ]
    return len(ask.heads[0]), tuple(places), ask.stripe.count


def _staging(plan: Plan) -> dict[str, Any] | None:
    if not isinstance(plan, StagedPlan):
        return None
    return {
        "side": {"packed": "prefill", "unpacked": "decode", "both": "both"}[plan.way],
        "slab_bytes": plan.slab_bytes,
        "tokens_per_slab": plan.tokens,
        "straight": plan.straight.plan.way if plan.straight else None,
        "slabs": Config().staging_slabs,
        "bytes_per_rank": Config().staging_slabs * Config().staging_slab_bytes,
    }


def _hints(
    model: Model, prefill: Side, decode: Side, pairs: Pairs, report: dict[str, Any], min_run: int
) -> Iterator[str]:
    copies = report["copies_per_1000_tokens"]
    best = min(
        (
            (_copies(model, prefill, Side(decode.platform, decode.ranks, size), min_run), size)
            for size in SIZES
            if size != decode.block_tokens
        ),
        default=(copies, 0),
    )
    if best[0] < copies * (1 - WORTH):
        yield (
            f"decode blocks of {best[1]} tokens: {best[0]} copies per 1,000 tokens instead of "
            f"{copies}"
        )
    if report["way"] != "direct" and prefill.platform.layout != decode.platform.layout:
        yield (
            "the same page layout on both sides: no staging. Page layouts belong to the engines; "
            "block sizes and parallel degrees do not matter for that"
        )
    if report["idle_prefill_ranks"]:
        yield (
            f"{report['idle_prefill_ranks']} of {prefill.ranks} prefill ranks hold replicas and "
            f"send nothing, as blocks of {prefill.block_tokens} and {decode.block_tokens} tokens "
            "meet too rarely to divide a prompt: choose sizes with a smaller common multiple"
        )


def _copies(model: Model, prefill: Side, decode: Side, min_run: int) -> int:
    """Copies of a pair that need not bring its bytes through two slabs to have so few."""
    try:
        pairs = _pairs(model, prefill, decode, min_run)
    except IncompatiblePair:
        return sys.maxsize
    staged = any(plan.way == "both" for plan in pairs.plans.values())
    return sys.maxsize if staged else pairs.copies


def _refused_hints(prefill: Side, decode: Side) -> list[str]:
    hints = []
    if not prefill.platform.reorders and not decode.platform.reorders:
        hints.append("one side that can reorder: cuda and cpu can, Trainium cannot")
    if prefill.platform.layout != decode.platform.layout:
        hints.append("the same page layout on both sides")
    return hints


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for side in ("prefill", "decode"):
        facts = report[side]
        yield (
            f"{side:<8} {facts['ranks']} x {facts['platform']}: {facts['layout']}, blocks of "
            f"{facts['block_tokens']} tokens, {'can' if facts['reorders'] else 'cannot'} reorder"
        )
    yield f"model    {report['model']}: {report['kv_bytes_per_token']:,} bytes of KV per token"
    if states := report.get("state_layers"):
        yield (
            f"states   {states} layers keep a state per request beside that: it goes whole, with "
            "the last tokens, and is not counted below"
        )
    if not report["can_talk"]:
        yield "talk     no"
        yield from (f"         {reason}" for reason in report["reasons"])
    else:
        yield from _way_lines(report)
    hints = report["faster"] or ["nothing known"]
    yield from (f"{'faster' if not i else '':<8} {hint}" for i, hint in enumerate(hints))


WAYS: Final = {
    "direct": "direct: pages are written from pages, nobody reorders",
    "packed": "packed by prefill: it gathers decode's pages in a slab and writes whole pages",
    "unpacked": "unpacked by decode: prefill writes its own order into a slab, decode scatters",
    "both": "packed by prefill and unpacked by decode: scattered blocks go from slab to slab",
}


def _way_lines(report: dict[str, Any]) -> Iterator[str]:
    pair, staging = report["per_pair"], report["staging"]
    yield f"talk     yes, {WAYS[report['way']]}"
    yield f"runs     {pair['run_bytes']:,} bytes"
    yield (
        f"per 1,000 tokens: {pair['copies_per_1000_tokens']:,} copies and "
        f"{pair['bytes_per_1000_tokens']:,} bytes per pair of ranks; "
        f"{report['copies_per_1000_tokens']:,} and {report['bytes_per_1000_tokens']:,} in all"
    )
    if staging is None:
        yield "staging  none"
    else:
        side = "" if staging["side"] == "both" else f"{staging['side']} "
        yield (
            f"staging  {staging['slabs']} slabs of {staging['slab_bytes']:,} bytes on each "
            f"{side}rank ({staging['bytes_per_rank']:,} set aside), "
            f"{staging['tokens_per_slab']} tokens each"
        )
        if straight := staging["straight"]:
            yield (
                f"         blocks that follow each other on both sides go {straight}, piece by "
                "piece as that takes fewer or longer copies"
            )
    if (replicas := report["stripe"]["replicas"]) > 1:
        yield (
            f"stripes  {replicas} prefill ranks hold what a decode rank needs and take turns every "
            f"{report['stripe']['unit_tokens']} tokens of a prompt"
        )
    yield from _writers(report["links"])


def _writers(links: list[list[int]]) -> Iterator[str]:
    """Which ranks write to which, one line per rank of the engine that uses fewer."""
    by_prefill: dict[int, list[int]] = {}
    by_decode: dict[int, list[int]] = {}
    for prefill, decode in links:
        by_prefill.setdefault(prefill, []).append(decode)
        by_decode.setdefault(decode, []).append(prefill)
    fewer = min(by_decode, by_prefill, key=len)
    for index, (rank, others) in enumerate(sorted(fewer.items())):
        ends = ([rank], others) if fewer is by_prefill else (others, [rank])
        words = " -> ".join(map(_ranks, ("prefill", "decode"), ends))
        yield f"{'writes' if not index else '':<8} {words}"


def _ranks(side: str, ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"{side} rank {ranks[0]}"
    runs = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{side} ranks " + (f"{ranks[0]}-{ranks[-1]}" if runs else ", ".join(map(str, ranks)))
