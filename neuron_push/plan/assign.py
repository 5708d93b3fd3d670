"""Who provides what: every (layer, head) of a decode rank gets exactly one prefill rank."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from neuron_push.errors import IncompatiblePair
from neuron_push.geometry import Geometry, Group

__all__ = ["Ask", "assign"]


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """What one decode rank wants of one prefill rank.

    `heads` holds, per group of the decode rank, the global KV heads to send. Layers are not
    listed: the prefill rank sends every layer that both hold (its pipeline stage).
    """

    heads: tuple[tuple[int, ...], ...]


def assign(
    destination: Geometry, sources: Sequence[Geometry], *, seat: int = 0
) -> list[Ask | None]:
    """Divide the heads and layers of `destination` among the prefill ranks.

    Pure and deterministic: both engines compute the same answer. `seat` is the decode rank's
    number; where several prefill ranks hold replicas of a head, decode ranks in different seats
    start from different replicas. One replica provides a head whole.

    Returns:
        One entry per source, None where that rank is not needed.

    Raises:
        IncompatiblePair: groups do not correspond, stages overlap, or nobody holds some head of
            some layer; one line per reason.
    """
    _match_groups(destination, sources)
    wanted: list[list[set[int]]] = [[set() for _ in destination.groups] for _ in sources]
    missing: list[str] = []
    for index, group in enumerate(destination.groups):
        layers = _layers(group)
        stages = _stages(index, layers, sources)
        uncovered = layers.difference(*stages)
        if uncovered:
            missing.append(f"group {index}: no prefill rank holds {_name('layer', uncovered)}")
        for stage, ranks in stages.items():
            lost = _choose(group, index, ranks, sources, wanted, seat)
            if lost:
                missing.append(
                    f"group {index}: no prefill rank holds {_name('head', lost)} of "
                    f"{_name('layer', stage)}"
                )
    if missing:
        raise IncompatiblePair("prefill ranks do not hold what decode needs", differences=missing)
    return [_ask(destination, want) if any(want) else None for want in wanted]


def _ask(destination: Geometry, wanted: list[set[int]]) -> Ask:
    """Heads in the order in which the decode rank stores them."""
    return Ask(
        tuple(
            tuple(head for head in group.heads if head in heads)
            for group, heads in zip(destination.groups, wanted, strict=True)
        )
    )


def _match_groups(destination: Geometry, sources: Sequence[Geometry]) -> None:
    decode = tuple(group.kind for group in destination.groups)
    for rank, source in enumerate(sources):
        prefill = tuple(group.kind for group in source.groups)
        if prefill != decode:
            raise IncompatiblePair(
                f"KV groups: prefill rank {rank} has {prefill}, decode has {decode}"
            )


def _layers(group: Group) -> frozenset[int]:
    return frozenset(plane.layer for plane in group.planes)


def _stages(
    index: int, layers: frozenset[int], sources: Sequence[Geometry]
) -> dict[frozenset[int], list[int]]:
    """Prefill ranks by the part of `layers` that they hold; parts are disjoint."""
    stages: dict[frozenset[int], list[int]] = {}
    for rank, source in enumerate(sources):
        if stage := layers & _layers(source.groups[index]):
            stages.setdefault(stage, []).append(rank)
    if sum(map(len, stages)) > len(frozenset[int]().union(*stages)):
        # An Ask names heads only, so two such ranks could not tell their layers apart.
        raise IncompatiblePair(f"group {index}: prefill ranks hold layers that overlap in part")
    return stages


def _choose(
    group: Group,
    index: int,
    ranks: list[int],
    sources: Sequence[Geometry],
    wanted: list[list[set[int]]],
    seat: int,
) -> set[int]:
    """Give each head of one stage to one rank; returns the heads that nobody holds.

    Striping one head's tokens over its replicas would replace the single choice made here.
    """
    holders: dict[int, list[int]] = {head: [] for head in group.heads}
    for rank in ranks:
        for head in sources[rank].groups[index].heads:
            if head in holders:
                holders[head].append(rank)
    for head, replicas in holders.items():
        if replicas:
            wanted[replicas[seat % len(replicas)]][index].add(head)
    return {head for head, replicas in holders.items() if not replicas}


def _name(noun: str, numbers: frozenset[int] | set[int]) -> str:
    """Numbers as ranges: "layers 0-3, 7"."""
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"{noun}{'s' if len(ordered) > 1 else ''} {text}"
