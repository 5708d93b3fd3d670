"""Where a transfer is cut, and when little waits for more."""

import random

import pytest

from neuron_push.rendezvous.cuts import Cut
from neuron_push.rendezvous.ranges import RangeSet


def ranges(*pairs):
    taken = RangeSet()
    for start, stop in pairs:
        taken.add(start, stop)
    return taken


def test_little_waits_for_more():
    cut = Cut(grain=16, most=512, least=128)
    assert cut.next(ranges((0, 256)), 0, 1000, 256 + 127) is None
    assert cut.next(ranges((0, 256)), 0, 1000, 256 + 128) == (256, 384)


def test_the_end_of_a_prompt_waits_for_nothing():
    cut = Cut(grain=16, most=512, least=128)
    assert cut.next(ranges((0, 992)), 0, 1000, 1000) == (992, 1000)
    assert cut.next(RangeSet(), 0, 5, 5) == (0, 5)
    assert cut.next(ranges((0, 992)), 0, 1000, 1024) == (992, 1000)


def test_a_late_registration_gets_all_that_is_settled_in_as_few_pieces_as_there_may_be():
    cut, taken, pieces = Cut(grain=16, most=512, least=128), RangeSet(), []
    while (piece := cut.next(taken, 0, 4096, 1100)) is not None:
        pieces.append(piece)
        taken.add(*piece)
    assert pieces == [(0, 512), (512, 1024)]


def test_a_gap_between_pieces_that_have_gone_waits_for_nothing():
    assert Cut(16, 512, 128).next(ranges((0, 64), (96, 512)), 0, 4096, 512) == (64, 96)


@pytest.mark.parametrize("seed", range(40))
def test_every_token_goes_once_however_it_settles(seed):
    dice = random.Random(seed)
    grain, stop = dice.choice([1, 16, 48]), dice.randrange(1, 3000)
    most = grain * dice.randrange(1, 20)
    cut = Cut(grain, most, min(dice.choice([0, 1, 100, 10_000]), most))
    start = dice.randrange(stop)
    taken, settled, pieces = RangeSet(), 0, []
    while settled < stop:
        settled = min(stop, settled + dice.randrange(1, 400))
        while (piece := cut.next(taken, start, stop, settled)) is not None:
            assert piece[1] <= settled and piece[1] - piece[0] <= max(most, grain)
            if settled < stop:  # unless it is bounded by what one piece may hold
                assert piece[1] - piece[0] >= min(cut.least, most) - grain
            taken.add(*piece)
            pieces.append(piece)
    assert taken.covers(start, stop)
    assert sum(end - begin for begin, end in pieces) == stop - start
