"""Which way a pair of ranks goes: direct, through a slab of one side or of both, or not at all."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Final, Literal

from neuron_push.errors import IncompatiblePair, NeedsStaging
from neuron_push.geometry import Geometry
from neuron_push.plan.assign import Ask
from neuron_push.plan.pair import MIN_RUN, PairPlan, pair
from neuron_push.plan.staged import StagedPlan, Straight
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
# Through slabs on both sides go copies shorter than `min_run` divided by this, as that takes two
# passes. Measured like GOOD_RUN, on busy cores: direct takes as long as asking for a slab, packing,
# one WRITE and unpacking, times 10 to 40 with runs of 256 bytes, 2.5 to 3.0 with 1 KiB, 1.9 to 4.2
# with 2 KiB, 1.2 to 1.7 with 4 KiB, 0.7 to 1.2 with 8 KiB, 0.6 to 0.7 with 16 KiB.
PASSES: Final = 2
# Fewer copies than this take less time than the question for a slab.
FEW_COPIES: Final = 256
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
    # True if both have slabs enough for one transfer to use one on each side.
    both: bool = False


def decide(source: Geometry, destination: Geometry, ask: Ask, means: Means) -> Plan:
    """The plan between a prefill and a decode rank; deterministic, so both sides agree on it.

    Unpacked by decode if its pages are not registered; else direct if runs are long enough and few
    enough; else through slabs of both, if they can; else the staged way with the fewest copies,
    packed by prefill if both are equal; else direct by any runs of at least MIN_RUN bytes, if they
    are few enough. Too many are accepted only where no side can reorder or where a slab would not
    make them fewer.

    Raises:
        IncompatiblePair: no way exists; the text says why for each.
    """
    if means.decode_sole:
        return _through_decode(source, destination, ask, means)
    if not (means.both and means.prefill_slab and means.decode_slab):
        return _by_one(source, destination, ask, means)
    return _by_both(source, destination, ask, means)


def _by_both(source: Geometry, destination: Geometry, ask: Ask, means: Means) -> Plan:
    """Through slabs of both, unless a simpler way has few enough copies that are long enough.

    Raises:
        IncompatiblePair: all that remains has too many, or there is no way at all.
    """
    sides = source, destination, ask
    endless = replace(means, most_copies=sys.maxsize)
    simple, why = _tried(*sides, endless)
    least = means.min_run // PASSES
    if simple and simple.describe()["run_bytes"] >= least and not _too_many(simple, means):
        return simple
    near = simple
    if simple is None or simple.way == "unpacked":
        near, _ = _tried(*sides, replace(endless, decode_slab=0))
    straight = None
    if near is not None:
        straight = Straight(near, least, means.most_copies / PROMPT, FEW_COPIES)
    slab = min(means.prefill_slab, means.decode_slab)
    try:
        return staged(*sides, "both", slab, min_run=1, straight=straight)
    except IncompatiblePair as error:
        reason = f"slabs of both sides do not do: {error}"
    if simple is None:
        raise IncompatiblePair("no way to copy", differences=[*why, reason])
    if simple.way != "direct" or not _too_many(simple, means):
        return simple
    plan = _by_one(*sides, means)
    if plan.way == "direct" and _tried_both(*sides):
        raise IncompatiblePair("no way to copy", differences=[_count_of(simple, means), reason])
    return plan


def _tried(
    source: Geometry, destination: Geometry, ask: Ask, means: Means
) -> tuple[Plan | None, tuple[str, ...]]:
    """A way without slabs of both, or why there is none."""
    try:
        return _by_one(source, destination, ask, means), ()
    except IncompatiblePair as error:
        return None, error.differences or (str(error),)


def _tried_both(source: Geometry, destination: Geometry, ask: Ask) -> bool:
    """Whether slabs of both sides would do if they were larger."""
    try:
        staged(source, destination, ask, "both", AMPLE, min_run=1)
    except IncompatiblePair:
        return False
    return True


def _by_one(source: Geometry, destination: Geometry, ask: Ask, means: Means) -> Plan:
    """Direct, or through a slab of one side."""
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
    count, reason = _copies(direct), _count_of(direct, means)
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


def _count_of(direct: Plan, means: Means) -> str:
    return (
        f"directly, a prompt of {PROMPT:,} tokens takes {_copies(direct):,} copies, more than "
        f"{means.most_copies:,}"
    )


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
