"""Staged ways are proved like direct ones: carried out on real memory, read back by the oracle."""

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from neuron_push.errors import IncompatiblePair, PlanError
from neuron_push.geometry import GeometryError
from neuron_push.plan import Blocks, Means, decide, grids, staged, ways
from tests import fleet, oracle
from tests.test_plan import STRIDED, block_list, falsify

# Every layout that keeps whole elements; packed ones go only to themselves.
ELEMENTS = (*STRIDED, "vec", "transposed", "tiled")
PROVE = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
SLAB = 1 << 20
WAYS = ("packed", "unpacked", "both")


def moved(prefill, decode, start, stop, choose, **options):
    """Fill prefill, push, compare decode; returns what push_by returns."""
    for cache in prefill.caches:
        oracle.fill(cache, prefill.blocks, prefill.block_tokens, prefill.first, stop)
    before = [oracle.snapshot(cache) for cache in decode.caches]
    done = fleet.push_by(prefill, decode, start, stop, choose, **options)
    for cache, was in zip(decode.caches, before, strict=True):
        oracle.compare(cache, was, decode.blocks, decode.block_tokens, decode.first, start, stop)
    return done


@st.composite
def cases(draw):
    """Any two layouts of whole elements, any shapes, a way, and slabs from tight to ample."""
    names = [draw(st.sampled_from(ELEMENTS)) for _ in "pd"]
    sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32, 48])
    tokens = [draw(sizes), draw(sizes)]
    per_block = [draw(st.sampled_from([1, 1, 2, 3])) for _ in "pd"]
    stop = draw(st.integers(1, 120))
    start = draw(st.integers(0, stop - 1))
    way = draw(st.sampled_from(WAYS))
    if way == "packed" and names[1] in ("vec", "transposed", "tiled"):
        start -= start % tokens[1]
    heads = draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.integers(1, 3))
    shape = {"heads": heads, "layers": layers, "width": draw(st.integers(1, 5))}
    engines = [
        fleet.engine(
            name,
            tokens=size,
            per_block=factor,
            blocks=draw(block_list(size * factor, stop)),
            degree=draw(st.sampled_from([1, 2, 4])),
            stages=draw(st.integers(1, layers)) if side == 0 else 1,
            **shape,
        )
        for side, (name, size, factor) in enumerate(zip(names, tokens, per_block, strict=True))
    ]
    slab = draw(st.sampled_from([1 << 12, 1 << 14, 1 << 20]))
    return engines, start, stop, way, slab


def by(way, slab=SLAB):
    """Staged, whether or not a direct way exists."""
    return lambda *sides: staged(*sides, way, slab, min_run=1)


def decided(means):
    return lambda *sides: decide(*sides, means)


@pytest.fixture(params=["rows", "grids"])
def form(request, monkeypatch):
    """Small pieces are moved row by row; grids must do the same."""
    if request.param == "grids":
        monkeypatch.setattr(grids, "LEAST_GRID", 0)
    return request.param


@PROVE
@given(case=cases())
def test_every_wanted_element_arrives_once_by_either_way(form, case):
    (prefill, decode), start, stop, way, slab = case
    try:
        done = moved(prefill, decode, start, stop, by(way, slab))
    except IncompatiblePair as error:
        assume("raise staging_slab_bytes" not in str(error))
        raise
    assert {plan.way for plan, _ in done} == {way}
    assert all(plan.slab_bytes <= slab for plan, _ in done)


@PROVE
@given(data=st.data())
def test_each_piece_goes_as_its_blocks_lie_and_every_element_arrives_once(data, monkeypatch):
    """Runs of blocks that follow each other go straight, what lies scattered from slab to slab."""
    monkeypatch.setattr(ways, "FEW_COPIES", 0)
    names = [data.draw(st.sampled_from(["neuron", "interleaved", "nhd"])) for _ in "pd"]
    stop = data.draw(st.integers(1, 120))
    start = data.draw(st.integers(0, stop - 1))
    sides = []
    for name in names:
        size = data.draw(st.sampled_from([2, 4, 8]))
        count = -(-stop // size)
        turn = data.draw(st.integers(0, count))
        ids = [*range(1, turn + 1), *data.draw(st.permutations(range(turn + 1, count + 1)))]
        sides.append(fleet.engine(name, tokens=size, blocks=ids, heads=2, width=4))
    means = Means(1 << 12, 1 << 12, min_run=data.draw(st.sampled_from([64, 256, 1024])), both=True)
    moved(*sides, start, stop, decided(means))


@pytest.mark.parametrize("way", WAYS)
def test_an_opaque_page_in_which_a_prompt_ends_is_copied_once(form, way):
    prefill, decode = (fleet.engine("amx", tokens=16, blocks=[2, 1]) for _ in "pd")
    moved(prefill, decode, 0, 28, by(way))


def test_a_full_slab_of_parts_that_step_unlike_is_in_order():
    """One token per page of `vec`: rows of K and V are alike in length, and in nothing else."""
    shape = {"tokens": 1, "blocks": list(range(1, 9)), "heads": 4, "layers": 3, "width": 5}
    prefill, decode = fleet.engine("vec", **shape), fleet.engine("neuron", **shape)
    ((plan, pieces),) = moved(prefill, decode, 0, 8, by("packed", 1 << 12))
    assert plan.tokens == 8 and len(pieces) == 1


# -- how many copies, and how large the rows -------------------------------------------------


def one(prefill, decode, way, stop, slab=SLAB, start=0):
    """The only pair: (plan, copies per piece, [(unit, rows) per piece])."""
    ((plan, pieces),) = moved(prefill, decode, start, stop, by(way, slab))
    counts = [copies.count for copies, _ in pieces]
    sizes = [[(part.unit, part.count) for part in rows] for _, rows in pieces]
    return plan, counts, sizes


def neuron_and_interleaved(heads=2, decode=16):
    prefill = fleet.engine("neuron", tokens=32, blocks=[2, 3, 1], heads=heads, width=4)
    blocks = [5, 2, 4, 1, 6, 3][: 96 // decode]
    return prefill, fleet.engine("interleaved", tokens=decode, blocks=blocks, heads=heads, width=4)


def test_a_packed_slab_is_written_as_whole_pages():
    plan, counts, sizes = one(*neuron_and_interleaved(), "packed", 96)
    # Two layers of six scattered blocks; K and V rows of every head in one call.
    assert counts == [2 * 6] and plan.wire.describe()["run_bytes"] == 16 * 2 * 2 * 4 * 4
    assert sizes == [[(16, 96 * 2 * 2 * 2)]]


def test_an_unpacked_slab_receives_whole_pages():
    plan, counts, sizes = one(*neuron_and_interleaved(), "unpacked", 96)
    # K and V of two layers; the neighbours 2 and 3 go in one.
    assert counts == [4 * 2] and plan.wire.describe()["run_bytes"] == 32 * 2 * 4 * 4
    assert sizes == [[(16, 96 * 2 * 2 * 2)]]


def test_a_slab_goes_into_a_slab_as_one_copy():
    prefill, decode = neuron_and_interleaved()
    plan, counts, sizes = one(prefill, decode, "both", 96)
    assert counts == [1] and plan.describe()["copies_per_1000_tokens"] == 1
    # Prefill brings elements into decode's order; decode moves whole pages of each layer.
    assert sizes == [[(16, 96 * 2 * 2 * 2), (16 * 2 * 2 * 4 * 4, 6 * 2)]]
    _, counts, _ = one(prefill, decode, "both", 90, start=20)
    assert counts == [1]


def test_rows_join_tokens_where_both_sides_do():
    prefill = fleet.engine("neuron", tokens=16, blocks=[3, 1, 2], heads=1, layers=1, width=4)
    decode = fleet.engine("neuron", tokens=48, blocks=[1], heads=1, layers=1, width=4)
    _, counts, sizes = one(prefill, decode, "packed", 48)
    assert counts == [2]  # direct would be six
    assert sizes == [[(16 * 4 * 4, 6)]]


def test_a_range_is_cut_to_slabs():
    prefill, decode = neuron_and_interleaved()
    token = 2 * 2 * 2 * 4 * 4
    plan, counts, _ = one(prefill, decode, "packed", 96, slab=40 * token)
    assert (plan.grain, plan.tokens, plan.slab_bytes) == (16, 32, 32 * token)
    assert counts == [4, 4, 4]


def test_a_page_of_a_whole_sequence_is_cut_for_the_slab():
    prefill = fleet.engine("contiguous", tokens=4096, blocks=[1], heads=1, layers=1)
    decode = fleet.engine("interleaved", tokens=16, blocks=[4, 1, 3, 2], heads=1, layers=1)
    plan, counts, _ = one(prefill, decode, "unpacked", 64, slab=1 << 16)
    assert plan.grain == 512 and counts == [2]


@pytest.mark.parametrize("way", ["packed", "unpacked"])
def test_all_blocks_contiguous_or_not_the_image_is_dense(way):
    prefill, decode = neuron_and_interleaved(heads=1)
    lists = prefill.lists, decode.lists
    sides = prefill.geometries[0], decode.geometries[0]
    # The slab holds exactly the prompt.
    plan = by(way, 96 * 2 * 2 * 4 * 4)(*sides, fleet.everything(sides[1]))
    (rows,) = plan.rows(0, 96, *lists, 4096, pack=plan.packs)
    assert (rows.destination if way == "packed" else rows.source) == 4096
    assert rows.nbytes == plan.copies(0, 96, *lists).nbytes


# -- groups --------------------------------------------------------------------------------


LAYOUTS = "neuron", "vec", "interleaved"


def sliding(layout, size, stop, window, blocks):
    oldest = stop - window
    held = [0 if (i + 1) * size <= oldest else block for i, block in enumerate(blocks)]
    return fleet.engine(layout, tokens=size, blocks=held, kind="sliding", spare=3)


@PROVE
@given(st.data(), st.sampled_from(WAYS))
def test_a_sliding_window_moves_only_what_both_sides_hold(data, way):
    sizes = [data.draw(st.sampled_from([4, 8, 12])) for _ in "pd"]
    stop = data.draw(st.integers(20, 90))
    window = data.draw(st.integers(1, stop))
    names = [data.draw(st.sampled_from(pair)) for pair in (LAYOUTS[:2], LAYOUTS[1:])]
    prefill, decode = (
        sliding(name, size, stop, window, data.draw(block_list(size, stop)))
        for name, size in zip(names, sizes, strict=True)
    )
    oracle.fill(prefill.caches[0], prefill.blocks, sizes[0], 0, stop)
    before = oracle.snapshot(decode.caches[0])
    fleet.push_by(prefill, decode, 0, stop, by(way, 1 << 12))

    def at_both(token):
        return oracle.place(prefill.caches[0], prefill.blocks, sizes[0], 0, token) is not None

    held = [token for token in range(stop) if at_both(token)]
    # Packed into pages that can be cut, the window arrives to the token.
    exact = way == "packed" and names[1] == "interleaved"
    vague = () if exact or not held else oracle.out_of_window(sizes[1], held[0])
    where = decode.blocks, sizes[1], 0
    oracle.compare(decode.caches[0], before, *where, 0, stop, at_both, vague)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("way", WAYS)
def test_packed_keys_go_through_a_slab_beside_values_that_need_it(way):
    """Packed fp8 keys are copied whole, values in another order are taken apart."""
    prefill, decode = (
        fleet.engine("fp8", tokens=16, blocks=ids, heads=2) for ids in ([2, 3, 1], [1, 2, 3])
    )
    _, _, sizes = one(prefill, decode, way, 40)
    assert {unit for unit, _ in sizes[0]} >= {16 * 3 * 4}


def test_a_start_inside_a_page_that_cannot_be_cut_is_refused_where_it_matters():
    packed = (
        fleet.engine("fp8", tokens=16, blocks=[1, 2]),
        fleet.engine("fp8", tokens=16, blocks=[1, 2]),
    )
    with pytest.raises(PlanError, match="start at the page boundary, token 16"):
        one(*packed, "unpacked", 32, start=20)
    transposed = fleet.engine("vec", tokens=16, blocks=[1, 2])
    plain = fleet.engine("interleaved", tokens=16, blocks=[1, 2])
    one(transposed, plain, "unpacked", 32, start=20)  # lands in the slab with what is before it
    one(plain, transposed, "unpacked", 32, start=20)
    with pytest.raises(PlanError, match="start at the page boundary, token 16"):
        one(plain, transposed, "packed", 32, start=20)


def test_a_piece_that_does_not_fit_into_a_slab_is_an_error():
    prefill, decode = neuron_and_interleaved()
    sides = prefill.geometries[0], decode.geometries[0]
    plan = by("packed", 1 << 13)(*sides, fleet.everything(sides[1]))
    assert plan.tokens < 96
    for plans in (plan.copies, lambda *a: plan.rows(*a, 4096, pack=True)):
        with pytest.raises(PlanError, match="do not fit into a slab"):
            plans(0, 96, prefill.lists, decode.lists)
        with pytest.raises(PlanError, match="malformed"):
            plans(5, 4, prefill.lists, decode.lists)
        with pytest.raises(PlanError, match="block lists for 2 and 1 groups"):
            plans(0, 4, prefill.lists * 2, decode.lists)
        with pytest.raises(PlanError, match="whose block prefill does not hold"):
            plans(0, 16, [Blocks(0, np.array([0], np.int32))], decode.lists)


# -- which way -----------------------------------------------------------------------------


def way_of(prefill, decode, **means):
    sides = prefill.geometries[0], decode.geometries[0]
    return decide(*sides, fleet.everything(sides[1]), Means(**means))


def both_slabs(**more):
    return {"prefill_slab": SLAB, "decode_slab": SLAB, **more}


def test_pages_that_nobody_registers_are_reached_through_decodes_slabs():
    prefill, decode = (fleet.engine("neuron", tokens=16, blocks=[1]) for _ in "pd")
    assert way_of(prefill, decode, **both_slabs(decode_sole=True)).way == "unpacked"
    means = Means(SLAB, SLAB, decode_sole=True)
    ((plan, _),) = moved(prefill, decode, 0, 16, decided(means))
    assert plan.way == "unpacked"


def test_state_pages_that_nobody_registers_are_refused():
    sides = [fleet.engine("amx", tokens=32, blocks=[1], kind="state") for _ in "pd"]
    with pytest.raises(IncompatiblePair, match="host_staging"):
        way_of(*sides, **both_slabs(decode_sole=True))


def test_long_runs_go_direct():
    prefill, decode = (fleet.engine("neuron", tokens=16, blocks=[1]) for _ in "pd")
    plan = way_of(prefill, decode, **both_slabs())
    assert plan.way == "direct" and plan.grain == 16


def test_short_runs_go_through_the_side_that_can_reorder():
    sides = neuron_and_interleaved()
    assert way_of(*sides, prefill_slab=SLAB).way == "packed"
    assert way_of(*sides, decode_slab=SLAB).way == "unpacked"
    # Decode's pages hold K and V side by side: half as many copies, if they are as large.
    assert way_of(*sides, **both_slabs()).way == "packed"
    assert way_of(*neuron_and_interleaved(decode=32), **both_slabs()).way == "packed"
    assert way_of(*sides, min_run=16).way == "direct"


def test_bearable_runs_go_direct_only_where_nobody_can_reorder():
    prefill, decode = (
        fleet.engine(name, tokens=4, blocks=[1], heads=1, width=600)
        for name in ("neuron", "interleaved")
    )
    assert way_of(prefill, decode).way == "direct"
    assert way_of(prefill, decode, prefill_slab=SLAB).way == "packed"
    assert way_of(prefill, decode, prefill_slab=100).way == "direct"


def test_too_many_copies_go_through_a_slab_if_that_makes_them_fewer():
    small = fleet.engine("neuron", tokens=2, blocks=[1], heads=1)
    large = fleet.engine("neuron", tokens=64, blocks=[1], heads=1)
    few = {"most_copies": 1000}
    assert way_of(small, large, **few).way == "direct"  # nobody can
    assert way_of(small, large, **both_slabs()).way == "direct"  # not too many
    assert way_of(small, large, prefill_slab=SLAB, **few).way == "packed"
    assert way_of(large, small, decode_slab=SLAB, **few).way == "unpacked"
    assert way_of(small, large, decode_slab=SLAB, **few).way == "direct"  # no fewer
    assert way_of(small, large, decode_slab=10, **few).way == "direct"  # nor with room
    assert way_of(large, small, prefill_slab=10, **few).way == "direct"


def test_short_or_too_many_copies_go_from_slab_to_slab_where_both_sides_can():
    small = fleet.engine("neuron", tokens=2, blocks=[1], heads=1, width=512)  # pages of 4 KiB
    large = fleet.engine("neuron", tokens=64, blocks=[1], heads=1, width=512)
    able = both_slabs(both=True)
    assert way_of(small, small, **both_slabs()).way == "direct"  # one has a slab to spare at most
    assert way_of(small, small, both=True, decode_slab=SLAB).way == "direct"
    plan = way_of(small, small, **able)
    assert (plan.way, plan.straight.plan.way) == ("both", "direct")
    assert plan.slab_bytes <= SLAB
    assert way_of(small, small, **able, min_run=8192).way == "direct"  # long enough for two passes
    assert way_of(small, small, **able, min_run=1, most_copies=60_000).way == "both"
    assert way_of(large, large, **able).way == "direct"
    # The smaller slab binds.
    tight = {"prefill_slab": SLAB, "decode_slab": SLAB // 4, "both": True}
    assert way_of(small, small, **tight).slab_bytes <= SLAB // 4
    unlike = neuron_and_interleaved()
    plan = way_of(*unlike, **able)
    assert (plan.way, plan.straight.plan.way) == ("both", "packed")


def test_a_piece_goes_straight_where_that_takes_few_or_long_copies(monkeypatch):
    small = fleet.engine("neuron", tokens=2, blocks=[1], heads=1, width=512, spare=600)
    plan = way_of(small, small, **both_slabs(both=True))
    row = [Blocks(0, np.arange(1, 513, dtype=np.int32))]
    apart = [Blocks(0, row[0].ids[::-1].copy() * 1)]
    apart[0].ids[:] = np.random.default_rng(1).permutation(apart[0].ids)
    assert plan.plan_of(0, 1024, row, row).way == "direct"
    assert plan.plan_of(0, 1024, row, apart).way == "both"
    # 64 pages of two planes and two layers are the fewest that are worth it.
    assert plan.plan_of(0, 128, row, apart).way == "direct"
    monkeypatch.setattr(ways, "FEW_COPIES", 0)
    few = way_of(small, small, **both_slabs(both=True))
    assert few.plan_of(0, 128, row, apart).way == "both"
    # Lists that cannot be planned fail where the WRITE is made.
    assert plan.plan_of(0, 4096, row, apart).way == "direct"
    # Long copies, but more per token than a prompt may take.
    many = way_of(small, small, **both_slabs(both=True), min_run=1, most_copies=60_000)
    assert many.plan_of(0, 1024, row, row).way == "direct"
    assert many.plan_of(0, 1024, row, apart).way == "both"


def test_too_many_copies_are_refused_where_slabs_of_both_would_help_but_have_no_room():
    small = fleet.engine("neuron", tokens=2, blocks=[1], heads=1, width=512)
    few = {"both": True, "most_copies": 10_000}
    with pytest.raises(IncompatiblePair) as caught:
        way_of(small, small, prefill_slab=SLAB, decode_slab=100, **few)
    text = str(caught.value)
    assert "takes 65,536 copies, more than 10,000" in text
    assert "slabs of both sides do not do: a staging slab of 100 bytes is less than the" in text
    least = int(re.search(r"less than the (\d+) that", text)[1])
    assert way_of(small, small, prefill_slab=SLAB, decode_slab=least, **few).way == "both"
    # Short copies that are not too many still go direct.
    assert way_of(small, small, prefill_slab=SLAB, decode_slab=100, both=True).way == "direct"


@pytest.mark.parametrize(
    ("prefill", "decode", "copies"),
    [
        ({"layout": "neuron", "tokens": 64}, {"layout": "neuron", "tokens": 2}, "65,536"),
        # Runs of one token, which are bearable only.
        ({"layout": "neuron", "tokens": 64}, {"layout": "interleaved", "tokens": 4}, "131,072"),
    ],
)
def test_too_many_copies_are_refused_if_a_slab_would_help_but_has_no_room(prefill, decode, copies):
    sides = [fleet.engine(blocks=[1], heads=1, width=600, **shape) for shape in (prefill, decode)]
    few = {"most_copies": 10_000}
    assert way_of(*sides, **few).way == "direct"  # nobody can
    assert way_of(*sides, decode_slab=SLAB, **few).way == "unpacked"
    assert way_of(*sides, decode_slab=10).way == "direct"  # not too many
    with pytest.raises(IncompatiblePair) as caught:
        way_of(*sides, decode_slab=10, **few)
    text = str(caught.value)
    assert f"directly, a prompt of 32,768 tokens takes {copies} copies, more than 10,000" in text
    assert "decode cannot unpack: a staging slab of 10 bytes is less than the" in text
    assert "raise staging_slab_bytes there to as much" in text
    least = int(re.search(r"less than the (\d+) that", text)[1])
    assert way_of(*sides, decode_slab=least, **few).way == "unpacked"
    with pytest.raises(IncompatiblePair):
        way_of(*sides, decode_slab=least - 1, **few)


def test_a_refusal_says_why_for_each_way():
    with pytest.raises(IncompatiblePair) as caught:
        way_of(*neuron_and_interleaved())
    assert str(caught.value) == (
        "no way to copy: K of layer 0: the longest run common to both sides is 16 bytes, less "
        "than 2048 (a token is 16 bytes after the previous one on prefill and 32 on decode); "
        "prefill cannot pack: it does not reorder; decode cannot unpack: it does not reorder"
    )
    with pytest.raises(IncompatiblePair, match="a staging slab of 100 bytes is less than"):
        way_of(*neuron_and_interleaved(), decode_slab=100)


def test_pages_that_meet_too_rarely_are_refused():
    prefill = fleet.engine("transposed", tokens=20_000, blocks=[1], heads=1, layers=1, width=1)
    decode = fleet.engine("interleaved", tokens=16, blocks=[1], heads=1, layers=1, width=1)
    with pytest.raises(IncompatiblePair, match="pages meet only every 20000 tokens"):
        way_of(prefill, decode, decode_slab=SLAB)


def test_opaque_pages_are_never_taken_apart():
    amx = fleet.engine("amx", tokens=16, blocks=[1])
    plain = fleet.engine("interleaved", tokens=16, blocks=[1])
    for sides in ((amx, plain), (plain, amx)):
        with pytest.raises(IncompatiblePair, match="never taken apart"):
            way_of(*sides, **both_slabs())
        for way in WAYS:
            with pytest.raises(IncompatiblePair, match="never taken apart"):
                moved(*sides, 0, 16, by(way))


# -- mutation ------------------------------------------------------------------------------


@pytest.mark.parametrize("layouts", [("neuron", "interleaved"), ("vec", "nhd"), ("block", "vec")])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("field", ["offset", "page", "head", "token", "channel"])
@pytest.mark.parametrize("change", [-4, 0, 4])
@pytest.mark.parametrize("index", [0, -1])
def test_a_wrong_number_on_either_side_is_refused_or_seen(layouts, way, side, field, change, index):
    options = {"tokens": 4, "blocks": [3, 1, 2], "spare": 1, "heads": 2, "width": 4}
    prefill, decode = (fleet.engine(layout, **options) for layout in layouts)

    def spoil(which, true):
        return falsify(true, index, field, change) if which == side else true

    def attempt():
        moved(prefill, decode, 0, 11, by(way), spoil=spoil)

    if change == 0:
        attempt()
        return
    with pytest.raises((AssertionError, GeometryError, IncompatiblePair, PlanError)):
        attempt()


# -- grids -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["packed", "unpacked"])
@pytest.mark.parametrize(("blocks", "count"), [([1, 2, 3], 1), ([1, 3, 2], 2), ([1, 3, 5], 1)])
def test_pages_that_step_evenly_are_one_grid(way, blocks, count, monkeypatch):
    monkeypatch.setattr(grids, "LEAST_GRID", 0)
    prefill = fleet.engine("neuron", tokens=32, blocks=blocks, heads=2, width=4, spare=2)
    decode = fleet.engine("blocks_outermost", tokens=32, blocks=blocks, heads=2, width=4, spare=2)
    ((_, pieces),) = moved(prefill, decode, 0, 96, by(way))
    assert [len(part.grids) for _, rows in pieces for part in rows] == [count]


def test_small_grids_are_left_to_rows(form):
    prefill, decode = neuron_and_interleaved()
    plan = by("packed")(prefill.geometries[0], decode.geometries[0], fleet.everything(
        decode.geometries[0]))  # fmt: skip
    (part,) = plan.rows(0, 96, prefill.lists, decode.lists, 4096, pack=True)
    assert bool(part.grids) == (form == "grids")
