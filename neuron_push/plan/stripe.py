"""Stripes: which tokens one of several prefill ranks sends that hold replicas of the same heads.

Unit after unit of the prompt goes to one replica after the other, by position alone. Both sides
therefore know who sends what, whatever the chunks, the start of the range and the time of the
registration, and a range of tokens has landed when every replica's share of it has.

A rank's own units, numbered without gaps, are a token axis like any other: a plan squeezes range
and block lists onto it and works as if nothing else existed. A unit is made of whole blocks of
both sides, so every token keeps its place inside its page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from neuron_push.errors import IncompatiblePair
from neuron_push.geometry import Geometry
from neuron_push.plan.blocks import Blocks

__all__ = ["WHOLE", "Stripe", "check_stripe", "unit_of"]

# Tokens of a unit, or one least common multiple of the block sizes if that is longer: K of one
# head with 128 channels of 2 bytes is then a run of 16 KiB, which needs no joining.
UNIT: Final = 64
# Beyond it a prompt has too few units to be worth dividing.
MOST_UNIT: Final = 1 << 14
MOST_REPLICAS: Final = 4096


class Stripe(msgspec.Struct, frozen=True, array_like=True):
    """Share number `index` of `count`: every `count`-th unit of `unit` tokens of a prompt."""

    index: int = 0
    count: int = 1
    unit: int = 1

    def before(self, token: int) -> int:
        """How many tokens of this stripe lie before `token`: its number on the squeezed axis."""
        if self.count == 1:
            return token
        rounds, inside = divmod(token, self.unit * self.count)
        return rounds * self.unit + min(max(inside - self.index * self.unit, 0), self.unit)

    def blocks(self, blocks: Blocks, tokens: int) -> Blocks:
        """The listed blocks, of `tokens` each, that belong to this stripe."""
        if self.count == 1:
            return blocks
        starts = (blocks.first + np.arange(len(blocks.ids), dtype=np.int64)) * tokens
        own = starts // self.unit % self.count == self.index
        return Blocks(self.before(blocks.first * tokens) // tokens, blocks.ids[own])

    def span(self, tokens: int) -> int:
        """How long a range may be, wherever it starts, to hold at most `tokens` of its own."""
        return max(tokens, tokens // self.unit * self.unit * self.count)


# A rank that sends everything.
WHOLE: Final = Stripe()


def unit_of(geometries: Iterable[Geometry]) -> int:
    """Tokens of a unit between engines with these ranks; 0 if prompts are not to be divided.

    A state page cannot be divided: it goes with the last tokens, whichever rank has them.
    """
    groups = [group for geometry in geometries for group in geometry.groups]
    if any(group.kind == "state" for group in groups):
        return 0
    blocks = math.lcm(*{group.block_tokens for group in groups})
    return 0 if blocks > MOST_UNIT else blocks * -(-UNIT // blocks)


def check_stripe(stripe: Stripe, source: Geometry, destination: Geometry) -> None:
    """Raise IncompatiblePair unless a stripe, which decode has sent, divides into whole blocks."""
    if stripe.count == 1:
        return
    text = f"share {stripe.index} of {stripe.count} in units of {stripe.unit} tokens"
    if not (0 <= stripe.index < stripe.count <= MOST_REPLICAS and 0 < stripe.unit <= MOST_UNIT):
        raise IncompatiblePair(f"decode asks for {text}, which is no share")
    unit = unit_of((source, destination))
    if not unit or stripe.unit % unit:
        raise IncompatiblePair(f"decode asks for {text}, which are not whole blocks")
