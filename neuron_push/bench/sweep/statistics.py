"""Medians over requests, and intervals of ratios over interleaved rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Student's t, two-sided 95%, by degrees of freedom; beyond the last, the normal's.
T95: Final = (
    math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL95: Final = 1.960


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between ranks, as numpy's default; raises ValueError of nothing."""
    if not values:
        raise ValueError("a percentile of nothing")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def median(values: Sequence[float]) -> float:
    """The middle; raises ValueError of nothing."""
    return percentile(values, 0.5)


def t95(freedom: int) -> float:
    """Student's t for a two-sided 95% interval."""
    return T95[freedom] if freedom < len(T95) else NORMAL95


@dataclass(frozen=True)
class Ratio:
    """A over B: the geometric mean over paired rounds, and its 95% interval."""

    value: float
    low: float
    high: float
    rounds: int


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Paired: the n-th of one belongs to the n-th of the other.

    One round has no interval: it is 0 to infinity. Raises ValueError for unequal or no rounds, or
    values that are not positive.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} rounds cannot be paired with {len(theirs)}")
    if min(*ours, *theirs) <= 0:
        raise ValueError("ratios need positive values")
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    mean = sum(logs) / len(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean), 0.0, math.inf, 1)
    variance = sum((each - mean) ** 2 for each in logs) / (len(logs) - 1)
    half = t95(len(logs) - 1) * math.sqrt(variance / len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))
