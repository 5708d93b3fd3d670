"""Kinds of trouble, from none to all at once."""

from __future__ import annotations

from dataclasses import replace

from tests.stack.fabric import Weather
from tests.stack.shape import Shape
from tests.stack.world import Profile

P, D, BOTH = Shape("kv_producer"), Shape("kv_consumer"), Shape("kv_both")
WILD = Weather(
    slow=0.01, land=0.01, drop=0.06, dup=0.1, reorder=0.3, stuck=0.003, mute=0.02, late=0.02
)
EVERYBODY = {
    "routed": 6.0, "sequential": 2.0, "orphan": 1.0, "widow": 1.0, "plain": 1.0, "hostile": 1.0,
    "repeater": 1.0,
}  # fmt: skip
TIGHT = {"blocks": 14}
ONE_SLAB = (("min_run", 16_384), ("staging_slabs", 1), ("staging_slab_bytes", 1 << 12))
# Few tokens to a slab, and every run of scattered blocks too short.
TWO_SLABS = (("min_run", 1 << 20), ("staging_slabs", 2), ("staging_slab_bytes", 1 << 13))
CHAOS = Profile(
    weather=WILD, clients=EVERYBODY, leave=0.2, crashes=1, freezes=2, quarrels=2, resets=1,
)  # fmt: skip

PROFILES = {
    "healthy": Profile(),
    "pull": Profile(mode="pull"),
    "crowds": Profile(crowds=5, long=60, prefills=(replace(P, tokens=256),)),
    "sequential proxies": Profile(clients={"sequential": 1.0}),
    "everybody": Profile(clients=EVERYBODY, leave=0.3),
    "losses": Profile(weather=WILD, leave=0.1),
    "pull, losses": Profile(weather=WILD, leave=0.1, mode="pull"),
    # Prefill takes decode for dead, and its blocks back, under READs that go on.
    "pull, freezes": Profile(
        weather=Weather(land=0.05, late=0.3), mode="pull", freezes=6, requests=40,
        prefills=(replace(P, **TIGHT),), settings=(("drain_timeout", 4.0),),
    ),
    "small pools": Profile(
        prefills=(replace(P, **TIGHT),), decodes=(replace(D, **TIGHT),), resets=2, leave=0.2
    ),
    "overlapping steps": Profile(
        prefills=(replace(P, overlapping=True, **TIGHT),),
        decodes=(replace(D, overlapping=True, **TIGHT),), leave=0.3, resets=1, clients=EVERYBODY,
    ),
    "layers": Profile(weather=WILD, leave=0.1, settings=(("streaming", "layer"),)),
    "crashes": Profile(weather=replace(WILD, stuck=0.0), crashes=3),
    "freezes": Profile(freezes=4, prefills=(P, P), decodes=(D, D)),
    "quarrels": Profile(weather=Weather(land=0.03, late=0.02), quarrels=8, clients=EVERYBODY),
    "recompute": Profile(
        weather=WILD, decodes=(replace(D, policy="recompute", blocks=24),), crashes=1, quarrels=3
    ),
    # A proxy that repeats both legs under one id, while the first may still be under way.
    "repeats": Profile(weather=WILD, clients={"repeater": 1.0}, leave=0.1, long=200),
    "repeats, crashes": Profile(
        weather=replace(WILD, land=0.03), clients={"repeater": 3.0, "routed": 1.0}, crashes=2,
        quarrels=2, prefills=(replace(P, **TIGHT), P), decodes=(D, replace(D, **TIGHT)),
    ),
    # Engines end while others wait for what they had posted.
    "drains, crashes": Profile(
        weather=Weather(land=0.05, drop=0.03, late=0.1), leave=0.6, crashes=5, long=300,
        prefills=(P, P), decodes=(D, D),
    ),
    "slabs run out": Profile(
        weather=Weather(land=0.02, drop=0.03, late=0.02), prefills=(P, P),
        decodes=(replace(D, order="NHD"),), crowds=3, leave=0.2, requests=40, settings=ONE_SLAB,
    ),
    "slabs run out, both ways": Profile(
        weather=replace(WILD, land=0.02), prefills=(replace(BOTH, order="NHD"), BOTH),
        decodes=(replace(BOTH, order="NHD"), BOTH), crowds=3, requests=40, quarrels=2, crashes=1,
        settings=ONE_SLAB,
    ),
    "from slab to slab": Profile(
        weather=replace(WILD, land=0.02), prefills=(P, replace(P, order="NHD")), decodes=(D, D),
        crowds=3, requests=40, leave=0.2, settings=TWO_SLABS,
    ),
    "from slab to slab, both ways": Profile(
        weather=replace(WILD, land=0.02), prefills=(BOTH, BOTH), decodes=(BOTH, BOTH), crowds=3,
        requests=40, quarrels=2, crashes=1, resets=2, settings=TWO_SLABS,
    ),
    "wrong bytes": Profile(
        weather=replace(WILD, turn=0.1), leave=0.1, settings=(("kv_digest", True),)
    ),
    "wrong bytes, pull": Profile(
        weather=replace(WILD, turn=0.1), leave=0.1, mode="pull", settings=(("kv_digest", True),)
    ),
    # What prefill has finished is read while its blocks are wanted by others.
    "pull, small pools": Profile(
        weather=Weather(land=0.02, late=0.05), mode="pull", prefills=(replace(P, **TIGHT),),
        clients={"routed": 3.0, "sequential": 2.0, "widow": 2.0}, crowds=4, requests=50, resets=2,
        leave=0.1,
    ),
    # Prompts that are alike, computed in pieces where there is no room for all of them.
    "prefix hits, preemption": Profile(
        weather=Weather(land=0.01, late=0.02),
        prefills=(replace(P, tokens=32, **TIGHT),), crowds=4, requests=40, resets=3, leave=0.1,
    ),
    "overlapping steps, recompute": Profile(
        weather=WILD, decodes=(replace(D, overlapping=True, policy="recompute", **TIGHT),),
        crashes=1, quarrels=3, freezes=1, resets=1, leave=0.2,
    ),
    "chaos": CHAOS,
    "chaos, pull": replace(CHAOS, mode="pull"),
    "chaos, both ways": replace(
        CHAOS, prefills=(BOTH,), decodes=(replace(BOTH, overlapping=True, blocks=20),)
    ),
    "chaos, many": replace(
        CHAOS, prefills=(P, replace(P, overlapping=True)),
        decodes=(D, replace(D, policy="recompute")), requests=40,
    ),
    "chaos, TP 2 to 1, larger blocks": replace(
        CHAOS, prefills=(replace(P, ranks=2),), decodes=(replace(D, block=32, blocks=24),)
    ),
    "chaos, TP 1 to 2, layers": replace(
        CHAOS, decodes=(replace(D, ranks=2, late_hooks=True),), settings=(("streaming", "layer"),)
    ),
    "chaos, staged": replace(
        CHAOS, decodes=(replace(D, order="NHD"),),
        settings=(("min_run", 16_384), ("staging_slabs", 2), ("staging_slab_bytes", 1 << 14)),
    ),
}  # fmt: skip
