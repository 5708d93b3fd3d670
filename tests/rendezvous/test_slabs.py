"""Slabs are given in order of asking, once each, and none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_push.errors import ProtocolError
from neuron_push.geometry import GeometryError, Region
from neuron_push.limits import LIMITS
from neuron_push.protocol import Slabs
from neuron_push.rendezvous.routes import check_slabs
from neuron_push.rendezvous.slabs import SlabPool
from tests.rendezvous.shapes import Shape


def asker(log, name, wanted=True):
    def serve(slab, now):
        log.append((name, slab))
        return wanted

    return serve


def test_who_asks_first_is_served_first_and_asking_twice_changes_nothing():
    pool, log = SlabPool(1), []
    for name in "abca":
        pool.ask(name, asker(log, name))
    pool.serve(0.0)
    assert log == [("a", 0)] and pool.waiting == 2 and pool.used == {0}
    pool.give(0)
    pool.serve(0.0)
    assert log[-1] == ("b", 0)


def test_one_slab_is_never_promised_and_who_waits_for_a_promise_is_passed_by():
    pool, log = SlabPool(2), []
    for name in "ab":
        pool.ask(name, asker(log, name), promise=True)
    pool.ask("c", asker(log, "c"))
    pool.serve(0.0)
    assert log == [("a", 0), ("c", 1)] and pool.waiting == 1
    pool.give(1)
    pool.serve(0.0)
    assert pool.used == {0}  # the other stays free for what is not promised
    pool.give(0)
    pool.serve(0.0)
    assert log[-1] == ("b", 1) and not pool.waiting


def test_a_promise_keeps_its_turn():
    pool, log = SlabPool(2), []
    pool.ask("a", asker(log, "a"))
    pool.ask("b", asker(log, "b"))
    pool.serve(0.0)
    pool.ask("c", asker(log, "c"), promise=True)
    pool.ask("d", asker(log, "d"))
    pool.give(0)
    pool.serve(0.0)
    assert log[-1] == ("c", 0) and pool.waiting == 1


def test_who_takes_the_request_back_is_passed_over():
    pool, log = SlabPool(1), []
    for name in "abc":
        pool.ask(name, asker(log, name, wanted=name != "b"))
    pool.drop("a")
    pool.drop("nobody")
    pool.serve(0.0)
    assert log == [("b", 0), ("c", 0)] and pool.used == {0} and not pool.waiting


def test_a_slab_is_given_back_once():
    pool = SlabPool(2)
    pool.ask("a", asker([], "a"))
    pool.serve(0.0)
    pool.give(0)
    with pytest.raises(ProtocolError, match="given back twice"):
        pool.give(0)


def test_a_rank_without_slabs_serves_nobody():
    pool, log = SlabPool(0), []
    pool.ask("a", asker(log, "a"))
    pool.serve(0.0)
    assert not log and pool.waiting == 1


@given(st.integers(1, 4), st.lists(st.sampled_from(["ask", "give", "drop"]), max_size=60))
def test_no_slab_is_ever_had_twice_or_lost(count, steps):
    pool, had, number = SlabPool(count), [], 0
    for step in steps:
        if step == "ask":
            pool.ask(number, lambda slab, now: had.append(slab) or True)
            number += 1
        elif step == "give" and had:
            pool.give(had.pop(0))
        elif step == "drop":
            pool.drop(number - 1)
        pool.serve(0.0)
        assert sorted(had) == sorted(pool.used) and len(set(had)) == len(had) <= count
        assert not pool.waiting or len(had) == count


@pytest.mark.parametrize(
    ("slabs", "words"),
    [
        (Slabs(Region(4096, 4096, "DRAM", 0), 0), "slabs of 0 bytes"),
        (Slabs(Region(4096, 4096, "DRAM", 0), 8192), "slabs of 8192 bytes in 4096"),
        (Slabs(Region(4096, 1 << 30, "DRAM", 0), 1), "slabs of 1 bytes"),
        (Slabs(Region(-1, 4096, "DRAM", 0), 4096), "must be positive"),
        (Slabs(Region(4096, 4096, "VRAM", 0), 4096), "mix DRAM and VRAM"),
    ],
)
def test_absurd_staging_memory_of_a_peer_is_refused(slabs, words):
    check_slabs(None, Shape().geometry(0), LIMITS)
    with pytest.raises(GeometryError, match=words):
        check_slabs(slabs, Shape().geometry(0), LIMITS)


def test_slabs_lie_one_after_the_other():
    slabs = Slabs(Region(4096, 1000, "DRAM", 3), 300)
    assert slabs.count == 3 and slabs.slab(2) == Region(4096 + 600, 300, "DRAM", 3)
