"""Replicas of a head take turns along a prompt: every token from exactly one of them."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_push.errors import IncompatiblePair, PlanError
from neuron_push.plan import Ask, Blocks, Stripe, assign, pair, staged
from tests import fleet, oracle
from tests.test_plan import block_list, both, state_side

PROVE = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CHOICES = {
    "direct": lambda *sides: pair(*sides, min_run=1),
    "packed": lambda *sides: staged(*sides, "packed", 1 << 12, min_run=1),
    "unpacked": lambda *sides: staged(*sides, "unpacked", 1 << 12, min_run=1),
    "both": lambda *sides: staged(*sides, "both", 1 << 12, min_run=1),
}


# -- the proof -----------------------------------------------------------------------------


@st.composite
def striped(draw):
    """Engines whose prefill ranks hold replicas, and a prompt of several units."""
    way = draw(st.sampled_from(sorted(CHOICES)))
    names = draw(st.sampled_from([("neuron", "interleaved"), ("nhd", "neuron"), ("mla", "mla")]))
    sizes = [draw(st.sampled_from([4, 8, 16, 24, 48])) for _ in "pd"]
    heads = draw(st.sampled_from([1, 2]))
    degrees = [heads * draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([1, 2, 4]))]
    stop = draw(st.integers(1, 500))
    start = draw(st.integers(0, stop - 1))
    engines = [
        fleet.engine(
            name, tokens=size, blocks=draw(block_list(size, stop)), heads=heads, degree=degree,
            layers=1,
        )
        for name, size, degree in zip(names, sizes, degrees, strict=True)
    ]  # fmt: skip
    return engines, start, stop, way


@PROVE
@given(striped(), st.data())
def test_the_union_of_all_replicas_covers_every_token_exactly_once(case, data):
    """Whatever the way, the start, and the chunks in which the prompt settles."""
    (prefill, decode), start, stop, way = case
    for cache in prefill.caches:
        oracle.fill(cache, prefill.blocks, prefill.block_tokens, 0, stop)
    before = [oracle.snapshot(cache) for cache in decode.caches]
    grain = np.lcm(prefill.block_tokens, decode.block_tokens)
    cuts = {int(cut // grain * grain) for cut in data.draw(st.lists(st.integers(0, stop)))}
    edges = [start, *sorted(cut for cut in cuts if start < cut < stop), stop]
    moved = 0
    for begin, end in reversed(list(pairwise(edges))):
        done = fleet.push_by(prefill, decode, begin, end, CHOICES[way])
        moved += sum(copies.nbytes for _, pieces in done for copies, _ in pieces)
    for cache, was in zip(decode.caches, before, strict=True):
        oracle.compare(cache, was, decode.blocks, decode.block_tokens, 0, start, stop)
    row = 3 * 4 * (1 if decode.caches[0].layout == "mla" else 2)
    wanted = (stop - start) * row * sum(len(cache.heads) for cache in decode.caches)
    # From slab to slab, pages go whole.
    assert moved == wanted or (way == "both" and moved > wanted)


@PROVE
@given(st.data(), st.sampled_from(sorted(CHOICES)))
def test_a_sliding_window_is_striped_too(data, way):
    sizes = [data.draw(st.sampled_from([4, 8])) for _ in "pd"]
    stop = data.draw(st.integers(20, 400))
    oldest = stop - data.draw(st.integers(1, stop))
    engines = []
    for size, degree in zip(sizes, (4, 1), strict=True):
        blocks = data.draw(block_list(size, stop))
        held = [0 if (i + 1) * size <= oldest else block for i, block in enumerate(blocks)]
        engines.append(
            fleet.engine("neuron", tokens=size, blocks=held, kind="sliding", spare=3, heads=1,
                         layers=1, degree=degree)
        )  # fmt: skip
    prefill, decode = engines
    for cache in prefill.caches:
        oracle.fill(cache, prefill.blocks, sizes[0], 0, stop)
    before = oracle.snapshot(decode.caches[0])
    fleet.push_by(prefill, decode, 0, stop, CHOICES[way])

    def at_both(token):
        return oracle.place(prefill.caches[0], prefill.blocks, sizes[0], 0, token) is not None

    held = [token for token in range(stop) if at_both(token)]
    unpacks = way in ("unpacked", "both") and held
    vague = oracle.out_of_window(sizes[1], held[0]) if unpacks else ()
    oracle.compare(decode.caches[0], before, decode.blocks, sizes[1], 0, 0, stop, at_both, vague)


def test_a_window_that_prefill_cut_too_short_is_seen_by_every_replica():
    prefill = fleet.engine(
        "neuron", tokens=64, blocks=[0, 0, 3, 4], kind="sliding", degree=4, heads=1, spare=3
    )
    decode = fleet.engine("neuron", tokens=64, blocks=[1, 2, 3, 4], kind="sliding", heads=1)
    for rank in range(4):
        ask = Ask(((0,),), Stripe(rank, 4, 64))
        plan = pair(prefill.geometries[rank], decode.geometries[0], ask, min_run=1)
        with pytest.raises(PlanError, match="decode wants token 64, whose block prefill does not"):
            plan.copies(0, 256, prefill.lists, decode.lists)


def test_a_slab_holds_as_many_own_tokens_as_without_stripes():
    prefill = fleet.engine("neuron", tokens=16, blocks=range(1, 33), heads=1, degree=4)
    decode = fleet.engine("interleaved", tokens=16, blocks=range(1, 33), heads=1)
    slab = 128 * 2 * 2 * 3 * 4
    whole = staged(prefill.geometries[0], decode.geometries[0], Ask(((0,),)), "packed", slab,
                   min_run=1)  # fmt: skip
    done = fleet.push_by(
        prefill, decode, 0, 512, lambda *sides: staged(*sides, "packed", slab, min_run=1)
    )
    assert whole.tokens == 128
    for plan, pieces in done:
        assert [copies.nbytes for copies, _ in pieces] == [slab]
        assert (
            plan.describe()["bytes_per_1000_tokens"] * 4
            == (whole.describe()["bytes_per_1000_tokens"])
        )


# -- who sends what ------------------------------------------------------------------------


def asks(prefill, decode, seat=0):
    """(heads, share) that a decode rank asks of each prefill rank."""
    mine = assign(decode.geometries, prefill.geometries)[seat]
    return [ask and (ask.heads[0], f"{ask.stripe.index}/{ask.stripe.count}") for ask in mine]


def replicated(degrees, heads=2, tokens=(4, 4)):
    return [
        fleet.engine("neuron", tokens=size, blocks=[1], heads=heads, degree=degree)
        for degree, size in zip(degrees, tokens, strict=True)
    ]


def test_replicas_of_a_head_take_turns():
    prefill, decode = replicated((4, 1))
    assert asks(prefill, decode) == [((0,), "0/2"), ((0,), "1/2"), ((1,), "0/2"), ((1,), "1/2")]
    (row,) = assign(decode.geometries, prefill.geometries)
    assert {ask.stripe.unit for ask in row} == {64}


def test_replicas_on_both_sides_share_each_other_out():
    prefill, decode = replicated((8, 4))
    assert asks(prefill, decode, 1) == [*[None] * 2, ((0,), "0/2"), ((0,), "1/2"), *[None] * 4]
    prefill, decode = replicated((2, 8))
    assert [asks(prefill, decode, seat).index(None) for seat in range(8)] == [1] * 4 + [0] * 4
    prefill, decode = replicated((6, 4))
    for seat in (0, 1):
        assert sum(ask is not None for ask in asks(prefill, decode, seat)) == seat + 1


def test_a_unit_is_made_of_whole_blocks_of_both_sides():
    for tokens, unit in (((16, 48), 96), ((32, 16), 64), ((128, 32), 128), ((3, 5), 75)):
        prefill, decode = replicated((4, 1), tokens=tokens)
        assert assign(decode.geometries, prefill.geometries)[0][0].stripe.unit == unit


def test_what_cannot_be_divided_comes_whole_from_one_replica():
    prefill, decode = replicated((4, 1), tokens=(4, 1 << 15))
    assert asks(prefill, decode) == [((0,), "0/1"), None, ((1,), "0/1"), None]
    states = [state_side() for _ in range(2)]
    assert [ask and ask.stripe.count for ask in assign(states[:1], states)[0]] == [1, None]


def test_replicas_that_meet_in_part_are_not_striped():
    decode = fleet.engine("neuron", tokens=4, blocks=[1], heads=2)
    prefill = fleet.engine("neuron", tokens=4, blocks=[1], heads=2)
    prefill.caches = [
        oracle.Cache("neuron", (0, 1), heads, 2, 4, 3) for heads in ((0,), (1, 0), (1,))
    ]
    assert asks(prefill, decode) == [((0,), "0/1"), ((1,), "0/1"), None]


@pytest.mark.parametrize(
    ("stripe", "words"),
    [
        ((2, 2, 64), "no share"),
        ((-1, 2, 64), "no share"),
        ((0, 5000, 64), "no share"),
        ((0, 2, 0), "no share"),
        ((0, 2, 1 << 40), "no share"),
        ((0, 2, 40), "not whole blocks"),
    ],
)
def test_an_absurd_stripe_of_a_peer_is_refused(stripe, words):
    source, destination = (side.geometries[0] for side in both("neuron"))
    ask = msgspec.structs.replace(fleet.everything(destination), stripe=Stripe(*stripe))
    with pytest.raises(IncompatiblePair, match=words):
        pair(source, destination, ask, min_run=1)


def test_a_state_is_not_striped():
    side = state_side()
    with pytest.raises(IncompatiblePair, match="not whole blocks"):
        pair(side, side, Ask(((0,),), Stripe(0, 2, 64)))


@PROVE
@given(st.data())
def test_stripes_cover_every_token_exactly_once(data):
    count, unit = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 70))
    stripes = [Stripe(index, count, unit) for index in range(count)]
    low, high = sorted(data.draw(st.integers(0, 2000)) for _ in "ab")
    held = [stripe.before(high) - stripe.before(low) for stripe in stripes]
    assert sum(held) == high - low
    tokens = data.draw(st.sampled_from([n for n in range(1, unit + 1) if unit % n == 0]))
    first = data.draw(st.integers(0, 300))
    ids = np.arange(7, 7 + data.draw(st.integers(0, 400)), dtype=np.int32)
    shares = [stripe.blocks(Blocks(first, ids), tokens) for stripe in stripes]
    assert sorted(np.concatenate([share.ids for share in shares]).tolist()) == ids.tolist()
    for stripe, share in zip(stripes, shares, strict=True):
        for place, block in enumerate(share.ids.tolist()):
            token = (first + block - 7) * tokens
            # The block that holds a token of the stripe is where the plan will look for it.
            assert stripe.before(token) == (share.first + place) * tokens


@given(st.integers(1, 9), st.integers(1, 70), st.integers(1, 500), st.integers(0, 1000))
def test_a_span_holds_no_more_of_a_stripe_than_it_may(count, unit, most, start):
    for index in range(count):
        stripe = Stripe(index, count, unit)
        assert stripe.before(start + stripe.span(most)) - stripe.before(start) <= most
