"""Which way a pair of ranks goes: direct, packed by prefill, unpacked by decode, or not at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from neuron_push.errors import IncompatiblePair, NeedsStaging
from neuron_push.geometry import Geometry
from neuron_push.plan.assign import Ask
from neuron_push.plan.pair import MIN_RUN, PairPlan, pair
from neuron_push.plan.staged import StagedPlan
from neuron_push.plan.staging import staged

__all__ = ["GOOD_RUN", "MOST_COPIES", "PROMPT", "Means", "Plan", "decide"]

# Copies per prompt beyond which a staged way is preferred to a direct one that exists: 200,000
# cost 4 ms to plan and 2 to 6 us each to carry out (NIXL over UCX, as below).
MOST_COPIES: Final = 200_000
# Copies shorter than this go through a slab where one can be had. Measured with NIXL 1.5 over UCX
# on two cores, 16 MiB in scattered runs, against packing first and then writing 64 KiB runs. Direct
# takes, over shared memory, 3.2 times as long with runs of 2 KiB, 1.8 with 8 KiB, 1.2 with 16 KiB,
# 0.7 with 64 KiB; over tcp 3.0, 1.4, 1.8 and 0.9.
GOOD_RUN: Final = 16_384
# The prompt that the limit is applied to, in tokens.
PROMPT: Final = 32_768
# A slab in which every piece has room, to see what one would gain.
AMPLE: Final = 1 << 36

Plan = PairPlan | StagedPlan


@dataclass(frozen=True, slots=True)
class Means:
    """What the two sides can do; slabs in bytes, 0 where a side cannot reorder."""

    prefill_slab: int = 0
    decode_slab: int = 0
    min_run: int = GOOD_RUN
    most_copies: int = MOST_COPIES
    # True if decode's pages are not registered: everything goes through a slab there.
    decode_sole: bool = False


def decide(source: Geometry, destination: Geometry, ask: Ask, means: Means) -> Plan:
    """The plan between a prefill and a decode rank; deterministic, so both sides agree on it.

    Unpacked by decode if its pages are not registered; else direct if runs are long enough and few
    enough; else the staged way with the fewest copies, packed by prefill if both are equal; else
    direct by any runs of at least MIN_RUN bytes, if they are few enough. Too many are accepted only
    where no side can reorder or where a slab would not make them fewer.

    Raises:
        IncompatiblePair: no way exists; the text says why for each.
    """
    if means.decode_sole:
        return _through_decode(source, destination, ask, means)
    try:
        direct = pair(source, destination, ask, min_run=means.min_run)
    except NeedsStaging:
        return _without_good_runs(source, destination, ask, means)
    if not _too_many(direct, means):
        return direct
    return _fewest(source, destination, ask, means, direct)


def _too_many(direct: Plan, means: Means) -> bool:
    """Whether a direct plan has more copies than it may where a side can reorder."""
    able = means.prefill_slab or means.decode_slab
    return bool(able) and _copies(direct) > means.most_copies


def _fewest(
    source: Geometry, destination: Geometry, ask: Ask, means: Means, direct: PairPlan
) -> Plan:
    """For a direct plan of too many copies: through a slab, unless that makes them no fewer.

    Raises:
        IncompatiblePair: a slab would, but has no room for the smallest piece.
    """
    count = _copies(direct)
    reason = (
        f"directly, a prompt of {PROMPT:,} tokens takes {count:,} copies, more than "
        f"{means.most_copies:,}"
    )
    try:
        indirect = _staged(source, destination, ask, means, reason)
    except IncompatiblePair:
        ample = replace(
            means,
            prefill_slab=means.prefill_slab and AMPLE,
            decode_slab=means.decode_slab and AMPLE,
        )
        # Says the same again if pages meet too rarely for any slab.
        if _copies(_staged(source, destination, ask, ample, reason)) >= count:
            return direct
        raise
    return indirect if _copies(indirect) < count else direct


def _through_decode(source: Geometry, destination: Geometry, ask: Ask, means: Means) -> Plan:
    """Unpacked by decode, whatever the runs: it stages through host memory."""
    groups = zip(ask.heads, source.groups, strict=False)
    if any(heads and group.kind == "state" for heads, group in groups):
        raise IncompatiblePair(
            "no way to copy",
            differences=["state pages go from page to page, but decode has host_staging on"],
        )
    least = min(means.min_run, MIN_RUN)
    return staged(source, destination, ask, "unpacked", means.decode_slab, min_run=least)


def _without_good_runs(source: Geometry, destination: Geometry, ask: Ask, means: Means) -> Plan:
    """Through a slab, or with runs that are merely bearable if no side can reorder."""
    least = min(means.min_run, MIN_RUN)
    try:
        bearable = pair(source, destination, ask, min_run=least)
    except NeedsStaging as error:
        return _staged(source, destination, ask, means, str(error))
    try:
        return _staged(source, destination, ask, means, "")
    except IncompatiblePair:
        if not _too_many(bearable, means):
            return bearable
    return _fewest(source, destination, ask, means, bearable)


def _copies(plan: Plan) -> int:
    """Copies for a prompt of PROMPT tokens in scattered blocks."""
    return plan.describe()["copies_per_1000_tokens"] * PROMPT // 1000


def _staged(
    source: Geometry, destination: Geometry, ask: Ask, means: Means, reason: str
) -> StagedPlan:
    ways: tuple[tuple[Literal["packed", "unpacked"], int, str], ...] = (
        ("packed", means.prefill_slab, "prefill cannot pack"),
        ("unpacked", means.decode_slab, "decode cannot unpack"),
    )
    plans: list[StagedPlan] = []
    reasons = [reason] if reason else []
    for way, slab, words in ways:
        if not slab:
            reasons.append(f"{words}: it does not reorder")
            continue
        try:
            plans.append(
                staged(source, destination, ask, way, slab, min_run=min(means.min_run, MIN_RUN))
            )
        except IncompatiblePair as error:
            reasons.append(f"{words}: {error}")
    if not plans:
        raise IncompatiblePair("no way to copy", differences=reasons)
    return min(plans, key=_copies)
