"""A hostile process with links of its own to both ends of a live pair harms neither.

Real sockets, real NIXL, three processes. The pair's transfers go on all the time, each compared
byte for byte; blocks that nobody reserved are canaries on both sides.
"""

from __future__ import annotations

import pytest

from neuron_push.limits import Limits
from neuron_push.rendezvous.attempt import number_of
from neuron_push.transfer.complaints import BURST
from tests.hostile.adversary import Attacker
from tests.hostile.scene import FRESH, HIT, transfer

pytestmark = [pytest.mark.real_nixl, pytest.mark.slow]

BAIT, FREE, DECOY = HIT[:4], HIT[4:], [22]
MOST = 64  # registrations of one decode rank
ROUNDS, LIES, FLOOD = 6, 600, 2000
NOWHERE = (999_999_998, 2**63 - 1, 2**64 - 1)
# What a rank may have more afterwards: caches of allocators.
GROWN = {"rss_kib": 48 << 10, "threads": 2, "descriptors": 16}


@pytest.fixture
def pair(stage):
    """A live pair with a stream of transfers, how it was before, and a foe that did nothing yet."""
    scene = stage(silence=1.5, alive_interval=0.25, limits=Limits(registrations=MOST))
    p, d = scene.child("P", "producer"), scene.rank("D", "consumer")
    transfer(scene, p, d, "before")
    scene.stream(p, d)
    d.paint(FREE)
    p.call("paint", HIT)
    before = {"D": d.state(), "P": p.call("state")}
    return scene, p, d, before, Attacker(scene._stack, scene)


def attempts_of(d):
    """Numbers on the wire of what is under way on D, and of what is over."""
    live = [number_of(attempt) for attempt in d.state()["attempts"]]
    return [*live, *range(2, 8), *NOWHERE]


def test_who_lies_on_both_channels_harms_nobody_else(pair, caplog):
    scene, p, d, before, foe = pair
    foe.tell("serve", d.address)
    bait = d.want("bait", BAIT, foe.address)
    assert foe.hear().startswith("D/0/")
    assert foe.call("greet", p.address).startswith("P/0/")

    done = scene.streams[0].done
    others = [n for n in attempts_of(d) if n != number_of(bait)]
    for seed in range(ROUNDS):
        foe.call("lie", "prefill", number_of(bait), others, seed, LIES)
        foe.call("lie", "decode", 1000 + 10 * seed, others, seed, LIES)
        foe.call("batter", [d.address.port, p.address.port], seed)
        foe.call("rest")
    assert scene.streams[0].done > done
    # It all arrived, over open links, and none of it counted.
    assert d.tally("rejected_messages", "Done outside the registration") > 0
    assert d.tally("rejected_messages", "Need over a direct link") > 0
    assert d.tally("rejected_messages", "garbage") > ROUNDS
    for kind in ("Done", "Failed", "Cancelled", "Register", "Grant", "Move"):
        assert d.tally("stale_messages", kind) > 0, kind
    assert p.call("tally", "rejected_messages", "Register") > 0
    assert p.call("tally", "rejected_messages", "garbage") > ROUNDS
    assert not d.has("Received", bait) and d.state()["links"] == 2
    assert d.differing(BAIT, 0) == 0
    assert 0 < len(caplog.records) < 2 * BURST  # nor does it fill the log

    foe.call("leave", "prefill")
    scene.hears(d, "ReceiveFailed", bait)
    scene.hears(d, "Unpinned", bait)  # behind a fence, though the foe is there still
    foe.kill()
    unharmed(scene, p, d, before)


def test_who_floods_is_held_to_the_limits_and_slows_nobody_for_good(pair):
    scene, p, d, before, foe = pair
    foe.call("greet", p.address)
    done = scene.streams[0].done
    for number in range(ROUNDS):
        foe.call("flood", "decode", 1 + number * FLOOD, FLOOD)
    foe.call("rest")
    scene.until(
        lambda: p.call("tally", "rejected_messages", "Register") >= ROUNDS * FLOOD - MOST,
        what=lambda: f"{p.call('state')}",
    )
    assert p.call("state")["sendings"] <= MOST + 2
    assert scene.streams[0].done > done
    foe.kill()
    unharmed(scene, p, d, before)


def test_who_asks_for_a_prompt_into_memory_that_it_does_not_have_gets_nothing(pair):
    scene, p, d, before, foe = pair
    foe.call("greet", p.address)
    decoy = p.call("offer", "decoy", DECOY, 5)
    foe.call("covet", 2, "decoy", 16)
    foe.call("rest")
    scene.until(lambda: p.call("tally", "links_lost") > 0, what="the WRITE is refused")
    p.call("retire", decoy, "ended")
    scene.hears(p, "Unpinned", decoy)
    foe.kill()
    unharmed(scene, p, d, before)


def unharmed(scene, p, d, before):
    """The pair goes on, nothing was written where it should not be, and nothing is left over."""
    scene.finish()
    transfer(scene, p, d, "after", FRESH, 5)
    assert d.differing(FREE) == 0 and p.call("differing", HIT) == 0
    assert d.tally("defects") == p.call("tally", "defects") == 0
    scene.streams.clear()
    for name, end in (("D", d), ("P", p)):
        scene.until(lambda end=end: end.call("state")["links"] == 1, what=f"links of {name}")
        after = end.call("state")
        grown = {key: after[key] - before[name][key] for key in GROWN}
        print(name, grown)
        assert all(grown[key] <= most for key, most in GROWN.items()), (name, grown)
