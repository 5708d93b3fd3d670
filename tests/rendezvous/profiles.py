"""Kinds of trouble, from none to all at once."""

from __future__ import annotations

from dataclasses import replace

from tests.rendezvous.net import Faults
from tests.rendezvous.scenario import Profile
from tests.rendezvous.shapes import Shape

LOSSY = Faults(drop=0.1, dup=0.1, slow=0.01, write_slow=0.05)
WILD = Faults(
    drop=0.08, dup=0.15, reorder=True, slow=0.02, lose_done=0.02, hang=0.5, write_slow=0.2,
    false_unreachable=0.001, refuse=0.03, unposted=0.005, stuck=0.002,
)  # fmt: skip
ONE, TWO, FOUR, STAGED = Shape(1), Shape(2, 1, 8), Shape(4, 1, 6), Shape(1, 2)
# Two replicas of each head.
EIGHT, EIGHT_APART = Shape(8), Shape(8, apart=True)

# K and V apart on one side, side by side on the other: somebody has to reorder.
APART, APART_TWO = Shape(apart=True), Shape(2, 1, 8, apart=True)
PACKER, UNPACKER = Shape(apart=True, slabs=2), Shape(slabs=2)
# Runs of 8 KiB, too short where both sides can stage and runs should be LONG.
LONG = 32_768
SHORT = Shape(1, 1, 2, apart=True, slabs=2)
SHORT_TWO = Shape(2, 1, 4, apart=True, slabs=3)

CHAOS = Profile(
    WILD, requests=20, aborts=0.1, missing=0.1, preempt=0.3, twins=0.2,
    crashes=1, freezes=2, false_deaths=2, aliases=0.2, malice=20,
)  # fmt: skip

PROFILES = {
    "healthy": Profile(),
    "healthy, larger decode blocks": Profile(decodes=(Shape(1, 1, 6),)),
    "aborts": Profile(aborts=0.4, missing=0.2),
    "preemption": Profile(preempt=0.6),
    "losses and duplicates": Profile(LOSSY, aborts=0.1),
    "reordering": Profile(replace(LOSSY, reorder=True, slow=0.05), aborts=0.2, preempt=0.2),
    "twins": Profile(LOSSY, twins=0.9, aborts=0.2, preempt=0.2),
    "crashes": Profile(replace(LOSSY, hang=0.5), crashes=3, aborts=0.1),
    "freezes": Profile(replace(LOSSY, hang=0.5, write_slow=0.3), freezes=4, aborts=0.1),
    "false deaths": Profile(replace(LOSSY, write_slow=0.4), false_deaths=6),
    "rotation under load": Profile(
        replace(LOSSY, reorder=True, slow=0.04, write_slow=0.3, false_unreachable=0.01),
        requests=40, decodes=(ONE, ONE), prefills=(ONE, ONE), false_deaths=8,
    ),
    "late registrations": Profile(
        Faults(reorder=True, slow=0.15, write_slow=0.4), requests=80, false_deaths=12
    ),
    "a healthy peer during rotations": Profile(
        Faults(write_slow=0.15), prefills=(ONE, ONE), requests=30, false_deaths=6, spared="P1"
    ),
    "malice": Profile(malice=200, spared="P0"),
    "two addresses of one engine": Profile(LOSSY, aliases=0.5, false_deaths=1),
    "stuck WRITEs": Profile(replace(LOSSY, stuck=0.1)),
    "chaos": CHAOS,
    "chaos, many engines": replace(CHAOS, prefills=(ONE, ONE), decodes=(ONE, ONE), requests=30),
    "chaos, both ways": replace(CHAOS, both=True, requests=30),
    "rotations, both ways": Profile(
        Faults(write_slow=0.15), both=True, prefills=(ONE, ONE), decodes=(ONE,), requests=40,
        false_deaths=6, spared="P1"
    ),
    "packed": Profile(prefills=(PACKER,)),
    "unpacked": Profile(prefills=(APART,), decodes=(UNPACKER,)),
    "unpacked, losses": Profile(LOSSY, prefills=(APART,), decodes=(UNPACKER,), aborts=0.2),
    "unpacked, preemption": Profile(
        Faults(reorder=True, slow=0.02), prefills=(APART,), decodes=(UNPACKER,), preempt=0.6
    ),
    "unpacked, one slab for many": Profile(
        prefills=(APART, APART), decodes=(Shape(slabs=1),), requests=30
    ),
    "unpacked, crashes": Profile(
        replace(LOSSY, hang=0.5, write_slow=0.3), prefills=(APART, APART), decodes=(UNPACKER,),
        crashes=2, freezes=2, false_deaths=3, aborts=0.2,
    ),
    "packed, crashes": Profile(
        replace(LOSSY, hang=0.5, write_slow=0.3), prefills=(PACKER,), decodes=(ONE, ONE),
        crashes=2, freezes=2, false_deaths=3, aborts=0.2, preempt=0.3,
    ),
    "staged by both": Profile(min_run=LONG, prefills=(SHORT,), decodes=(SHORT,)),
    "staged by both, from layout to layout": Profile(
        min_run=LONG, prefills=(SHORT,), decodes=(Shape(1, 1, 1, slabs=2),)
    ),
    "staged by both, both ways": Profile(
        min_run=LONG, prefills=(SHORT,), decodes=(SHORT,), both=True, requests=24, seconds=0.1,
        spared="P0",
    ),
    "staged by both, losses": Profile(
        LOSSY, min_run=LONG, prefills=(SHORT,), decodes=(SHORT,), aborts=0.2, pulls=0.2
    ),
    "staged by both, preemption": Profile(
        Faults(write_slow=0.05), min_run=LONG, prefills=(SHORT,), decodes=(SHORT,) * 4,
        requests=20, seconds=0.2, preempt=0.6, spared="P0",
    ),
    "staged by both, crashes": Profile(
        replace(LOSSY, hang=0.5, write_slow=0.3), min_run=LONG, prefills=(SHORT, SHORT),
        decodes=(SHORT,), crashes=2, freezes=2, false_deaths=3, aborts=0.2, preempt=0.2,
    ),
    "chaos, staged by both": replace(CHAOS, min_run=LONG, prefills=(SHORT,), decodes=(SHORT,)),
    "chaos, staged by both, both ways": replace(
        CHAOS, both=True, min_run=LONG, prefills=(SHORT,), decodes=(SHORT,), requests=30
    ),
    "chaos, staged by both, TP 2 to 1": replace(
        CHAOS, min_run=LONG, prefills=(SHORT_TWO,), decodes=(SHORT,)
    ),
    "layers": Profile(layers=True),
    "layers, larger decode blocks": Profile(layers=True, decodes=(Shape(1, 1, 6),)),
    "layers, losses": Profile(LOSSY, layers=True, aborts=0.2),
    "layers, preemption": Profile(
        Faults(reorder=True, slow=0.02), layers=True, preempt=0.6, pulls=0.2
    ),
    "layers, crashes": Profile(
        replace(LOSSY, hang=0.5, write_slow=0.3), layers=True, crashes=2, freezes=2,
        false_deaths=3, aborts=0.2,
    ),
    "chaos, layers": replace(CHAOS, layers=True, pulls=0.2),
    "chaos, layers, TP 4 to 2": replace(CHAOS, layers=True, prefills=(FOUR,), decodes=(TWO,)),
    "pulls": Profile(pulls=1.0),
    "pulls, larger decode blocks": Profile(pulls=1.0, decodes=(Shape(1, 1, 6),)),
    "pulls, losses": Profile(replace(LOSSY, write_slow=0.2), pulls=0.8, aborts=0.2, preempt=0.2),
    "pulls, false deaths": Profile(replace(LOSSY, write_slow=0.4), pulls=0.8, false_deaths=6),
    "pulls, rotation under load": Profile(
        replace(LOSSY, reorder=True, slow=0.04, write_slow=0.3, false_unreachable=0.01), pulls=0.7,
        requests=20, decodes=(ONE, ONE), prefills=(ONE, ONE), false_deaths=8,
    ),
    "pulls, a healthy peer during rotations": Profile(
        Faults(write_slow=0.15), pulls=0.7, prefills=(ONE, ONE), requests=14, false_deaths=6,
        spared="P1",
    ),
    "pulls, stuck": Profile(replace(LOSSY, stuck=0.1), pulls=0.8),
    "pulls, unpacked": Profile(pulls=0.8, prefills=(APART,), decodes=(UNPACKER,)),
    "pulls, striped over replicas": Profile(
        LOSSY, pulls=0.8, prefills=(EIGHT,), decodes=(TWO,), requests=2, long=True
    ),
    "pulls, packed by prefill": Profile(pulls=0.8, prefills=(PACKER,)),
    "pulls, compared": Profile(
        replace(LOSSY, turned=0.05), pulls=0.8, digests=True, aborts=0.2, preempt=0.2
    ),
    "pulls, compared, packed by prefill": Profile(
        Faults(turned=0.01), pulls=0.8, digests=True, prefills=(PACKER,)
    ),
    "pulls, compared, striped over replicas": Profile(
        replace(LOSSY, turned=0.0002), pulls=0.8, digests=True, prefills=(EIGHT,), decodes=(TWO,),
        requests=2, long=True,
    ),
    "chaos, pulls, compared, both ways": replace(
        CHAOS, faults=replace(CHAOS.faults, turned=0.01), pulls=0.7, digests=True, both=True
    ),
    "chaos, pulls": replace(CHAOS, pulls=0.7),
    "chaos, pulls, both ways": replace(CHAOS, pulls=0.7, both=True),
    "chaos, pulls, unpacked, TP 2 to 1": replace(
        CHAOS, pulls=0.7, prefills=(APART_TWO,), decodes=(UNPACKER,)
    ),
    "chaos, pulls, TP 4 to 2": replace(CHAOS, pulls=0.7, prefills=(FOUR,), decodes=(TWO,)),
    "chaos, pulls, PP 2 to 1": replace(CHAOS, pulls=0.7, prefills=(STAGED,), decodes=(ONE,)),
    "chaos, packed": replace(CHAOS, prefills=(PACKER,)),
    "chaos, unpacked": replace(CHAOS, prefills=(APART,), decodes=(UNPACKER,)),
    "chaos, unpacked, TP 2 to 1": replace(CHAOS, prefills=(APART_TWO,), decodes=(UNPACKER,)),
    "chaos, packed, TP 1 to 2": replace(CHAOS, prefills=(PACKER,), decodes=(TWO,)),
    "chaos, both ways, staged": replace(
        CHAOS, both=True, prefills=(PACKER,), decodes=(UNPACKER,), requests=30
    ),
    "chaos, TP 2 to 1": replace(CHAOS, prefills=(TWO,), decodes=(ONE,)),
    "chaos, TP 1 to 2": replace(CHAOS, prefills=(ONE,), decodes=(TWO,)),
    "chaos, TP 4 to 2": replace(CHAOS, prefills=(FOUR,), decodes=(TWO,)),
    "striped over replicas": Profile(prefills=(EIGHT,), requests=6, long=True),
    "striped, losses": Profile(
        replace(LOSSY, reorder=True), prefills=(EIGHT,), decodes=(TWO,), requests=7, long=True,
        aborts=0.1, preempt=0.2,
    ),
    "striped and unpacked, crashes": Profile(
        replace(LOSSY, hang=0.5), prefills=(EIGHT_APART,), decodes=(UNPACKER,), requests=7,
        long=True, crashes=1, freezes=1,
    ),
    "chaos, PP 2 to 1": replace(CHAOS, prefills=(STAGED,), decodes=(ONE,)),
}  # fmt: skip
