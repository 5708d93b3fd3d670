"""RangeSet against a plain set of integers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from neuron_push.rendezvous.ranges import EndedAttempts, RangeSet

NUMBERS = st.integers(0, 40)
RANGES = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=12)


def both(ranges):
    mine, oracle = RangeSet(), set()
    for start, stop in ranges:
        mine.add(start, stop)
        oracle |= set(range(start, stop))
    return mine, oracle


@given(RANGES)
def test_ranges_are_the_maximal_runs_in_order(ranges):
    mine, oracle = both(ranges)
    found = list(mine)
    assert [n for start, stop in found for n in range(start, stop)] == sorted(oracle)
    assert all(start < stop for start, stop in found)
    assert all(before < after for (_, before), (after, _) in pairwise(found))


@given(RANGES, NUMBERS, NUMBERS)
def test_covers_and_overlaps_agree_with_a_set(ranges, start, stop):
    mine, oracle = both(ranges)
    wanted = set(range(start, stop))
    assert mine.covers(start, stop) == (wanted <= oracle)
    assert mine.overlaps(start, stop) == bool(wanted & oracle)


@given(RANGES, NUMBERS, NUMBERS)
def test_first_gap_is_the_first_maximal_hole(ranges, start, stop):
    mine, oracle = both(ranges)
    low, high = mine.first_gap(start, stop)
    missing = sorted(set(range(start, stop)) - oracle)
    if not missing:
        assert low >= high
        return
    assert low == missing[0]
    assert set(range(low, high)) <= set(missing)
    assert high == stop or high in oracle


@given(RANGES, st.randoms())
def test_order_and_repetition_do_not_matter(ranges, random):
    again = ranges * 2
    random.shuffle(again)
    assert list(both(ranges)[0]) == list(both(again)[0])


def test_ended_attempts_stay_ended_in_bounded_memory():
    over = EndedAttempts()
    for attempt in range(0, 4 * EndedAttempts.LIMIT, 2):
        over.add(attempt)
        assert attempt in over
    assert len(list(over._over)) <= EndedAttempts.LIMIT + 1
    assert all(attempt in over for attempt in range(0, 4 * EndedAttempts.LIMIT, 2))
    assert 4 * EndedAttempts.LIMIT + 1 not in over
