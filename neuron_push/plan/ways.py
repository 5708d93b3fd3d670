"""Which way a pair of ranks goes: direct, packed by prefill, unpacked by decode, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from neuron_push.errors import IncompatiblePair, NeedsStaging
from neuron_push.geometry import Geometry
from neuron_push.plan.assign import Ask
from neuron_push.plan.pair import MIN_RUN, PairPlan, pair
from neuron_push.plan.staged import StagedPlan, staged

__all__ = ["MOST_COPIES", "PROMPT", "Means", "Plan", "decide"]

# Copies per prompt beyond which a staged way is preferred to a direct one that exists: 200,000
# cost 4 ms to plan and, at some 50 ns each to post, more than the bytes of 2 KiB runs take.
MOST_COPIES: Final = 200_000
# The prompt that the limit is applied to, in tokens.
PROMPT: Final = 32_768

Plan = PairPlan | StagedPlan


@dataclass(frozen=True, slots=True)
class Means:
    """What the two sides can do; slabs in bytes, 0 where a side cannot reorder."""

    prefill_slab: int = 0
    decode_slab: int = 0
    min_run: int = MIN_RUN
    most_copies: int = MOST_COPIES


def decide(source: Geometry, destination: Geometry, ask: Ask, means: Means) -> Plan:
    """The plan between a prefill and a decode rank; deterministic, so both sides agree on it.

    Direct if runs are long enough and few enough; else the staged way with the fewest copies,
    packed by prefill if both are equal.

    Raises:
        IncompatiblePair: no way exists; the text says why for each.
    """
    try:
        direct = pair(source, destination, ask, min_run=means.min_run)
    except NeedsStaging as error:
        return _staged(source, destination, ask, means, str(error))
    count = _copies(direct)
    if count <= means.most_copies or not (means.prefill_slab or means.decode_slab):
        return direct
    try:
        indirect = _staged(source, destination, ask, means, "")
    except IncompatiblePair:
        return direct
    return indirect if _copies(indirect) < count else direct


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
            plans.append(staged(source, destination, ask, way, slab, min_run=means.min_run))
        except IncompatiblePair as error:
            reasons.append(f"{words}: {error}")
    if not plans:
        raise IncompatiblePair("no way to copy", differences=reasons)
    return min(plans, key=_copies)
