"""Plans are proved by replay: bytes are moved as planned and read back by the oracle."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_push.errors import IncompatiblePair, PlanError
from neuron_push.geometry import Geometry, GeometryError, Group, Plane, Region, check
from neuron_push.plan import Ask, Blocks, assign, bind, decode_runs, encode_runs, pair
from tests import fleet, oracle

STRIDED = (
    "interleaved",
    "token_major",
    "blocks_outermost",
    "heads_outermost",
    "neuron",
    "nhd",
    "old_hnd",
    "block_first",
    "contiguous",
    "block",
    "tiled_block",
)
# Layouts that exist only as whole pages, at least in part.
BY_PAGE = ("vec", "amx", "transposed", "tiled", "fp8")
PROVE = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def moved(prefill, decode, start, stop, **options):
    """Fill prefill, push, compare decode; returns the copies."""
    for cache in prefill.caches:
        oracle.fill(cache, prefill.blocks, prefill.block_tokens, prefill.first, stop)
    before = [oracle.snapshot(cache) for cache in decode.caches]
    done = fleet.push(prefill, decode, start, stop, **options)
    for cache, was in zip(decode.caches, before, strict=True):
        oracle.compare(cache, was, decode.blocks, decode.block_tokens, decode.first, start, stop)
    return done


@st.composite
def block_list(draw, tokens, stop):
    count = -(-stop // tokens)
    if draw(st.booleans()):
        first = draw(st.integers(1, 3))
        return list(range(first, first + count))
    return draw(st.permutations(range(1, count + 3)))[:count]


@st.composite
def pairs(draw):
    """Any two layouts that can talk directly once short runs are allowed."""
    family = draw(st.sampled_from(["strided"] * 6 + [*BY_PAGE, "mla"]))
    names = [draw(st.sampled_from(STRIDED)) if family == "strided" else family for _ in "pd"]
    sizes = st.sampled_from([1, 3, 4, 5, 6, 16, 32, 48, 128])
    tokens = [draw(sizes), draw(sizes)]
    if family in BY_PAGE:
        tokens = [draw(st.sampled_from([2, 4, 16, 32]))] * 2
    per_block = [draw(st.sampled_from([1, 1, 2, 3])) for _ in "pd"]
    stop = draw(st.integers(1, 150))
    start = draw(st.integers(0, stop - 1))
    if family in BY_PAGE:
        start -= start % tokens[1]
    heads = draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.integers(1, 3))
    shape = {"heads": heads, "layers": layers, "width": draw(st.integers(1, 4))}
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
    return engines, start, stop


@PROVE
@given(pairs())
def test_decode_reads_every_wanted_element_once_and_nothing_else_changes(case):
    (prefill, decode), start, stop = case
    moved(prefill, decode, start, stop)


@PROVE
@given(st.data())
def test_chunks_of_a_prompt_together_equal_the_whole(data):
    layout = data.draw(st.sampled_from(["neuron", "interleaved", "vec", "mla"]))
    tokens = data.draw(st.sampled_from([4, 16]))
    stop = data.draw(st.integers(2, 80))
    prefill, decode = (
        fleet.engine(layout, tokens=tokens, blocks=data.draw(block_list(tokens, stop)))
        for _ in "pd"
    )
    for cache in prefill.caches:
        oracle.fill(cache, prefill.blocks, tokens, 0, stop)
    before = [oracle.snapshot(cache) for cache in decode.caches]
    step = fleet.one_pair(prefill, decode).start_granularity(0)
    cuts = sorted({0, *(c - c % step for c in data.draw(st.lists(st.integers(0, stop - 1)))), stop})
    for begin, end in reversed(list(pairwise(cuts))):
        fleet.push(prefill, decode, begin, end)
    oracle.compare(decode.caches[0], before[0], decode.blocks, tokens, 0, 0, stop)


@PROVE
@given(st.data())
def test_a_sliding_window_moves_only_what_decode_lists(data):
    sizes = [data.draw(st.sampled_from([4, 8, 12])) for _ in "pd"]
    stop = data.draw(st.integers(20, 90))
    window = data.draw(st.integers(1, stop))
    oldest = stop - window
    engines = []
    for size in sizes:
        full = data.draw(block_list(size, stop))
        held = [0 if (i + 1) * size <= oldest else block for i, block in enumerate(full)]
        skip = data.draw(st.integers(0, next(i for i, block in enumerate(held) if block)))
        engines.append(
            fleet.engine("neuron", tokens=size, blocks=held[skip:], first=skip, kind="sliding")
        )
    prefill, decode = engines
    for cache in prefill.caches:
        oracle.fill(cache, prefill.blocks, sizes[0], prefill.first, stop)
    before = oracle.snapshot(decode.caches[0])
    fleet.push(prefill, decode, 0, stop)

    def at_both(token):
        source = prefill.caches[0], prefill.blocks, sizes[0], prefill.first, token
        return oracle.place(*source) is not None

    oracle.compare(
        decode.caches[0], before, decode.blocks, sizes[1], decode.first, 0, stop, at_both
    )


def test_two_groups_with_their_own_blocks_go_in_one_plan():
    full, window = (
        [oracle.Cache("neuron", layers, (0, 1), 9, 4, 3) for layers in ((0,), (1,))] for _ in "pd"
    )
    sides = []
    for caches in (full, window):
        regions = tuple(fleet.region_of(store) for cache in caches for store in cache.stores)
        groups = (
            fleet.group_of(caches[0], 4),
            fleet.group_of(caches[1], 4, "sliding", first_region=1, window=5),
        )
        sides.append(Geometry(regions, groups, fleet.ELEMENT))
    lists = [
        ([1, 2, 3], [0, 5, 6]),
        ([4, 2, 7], [0, 8, 1]),
    ]
    for cache, blocks in zip(full, lists[0], strict=True):
        oracle.fill(cache, blocks, 4, 0, 10)
    before = [oracle.snapshot(cache) for cache in window]
    plan = pair(*sides, fleet.everything(sides[1]), min_run=1)
    given_lists = [[Blocks(0, np.array(b, np.int32)) for b in side] for side in lists]
    copies = plan.copies(0, 10, *given_lists)
    memory = [[m for cache in caches for m in cache.memory()] for caches in (full, window)]
    oracle.replay(*memory, fleet.rows(copies), [np.zeros(len(m), np.uint8) for m in memory[1]])
    for cache, was, blocks in zip(window, before, lists[1], strict=True):
        oracle.compare(cache, was, blocks, 4, 0, 0, 10)


# -- how many copies -----------------------------------------------------------------------


def count(prefill, decode, start, stop, **options):
    return sum(copies.count for copies in moved(prefill, decode, start, stop, **options))


def both(layout, blocks=None, tokens=16, other=None, **options):
    """Two equal engines, decode possibly with other blocks."""
    blocks = blocks or list(range(1, 7))
    return (
        fleet.engine(layout, tokens=tokens, blocks=blocks, heads=4, width=4, **options),
        fleet.engine(layout, tokens=tokens, blocks=other or blocks, heads=4, width=4, **options),
    )


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        ("interleaved", 2),  # one per layer
        ("token_major", 2),
        ("blocks_outermost", 1),  # all layers of neighbouring blocks are one run
        ("heads_outermost", 1),
        ("neuron", 4),  # K and V lie apart
        ("nhd", 4),
        ("vec", 2),
        ("amx", 2),
        ("mla", 2),
    ],
)
def test_contiguous_blocks_become_one_copy_per_layer(layout, copies):
    assert count(*both(layout), 0, 96) == copies


@pytest.mark.parametrize(
    ("layout", "copies"),
    [("interleaved", 12), ("blocks_outermost", 6), ("neuron", 24), ("vec", 12)],
)
def test_scattered_blocks_become_one_copy_per_page(layout, copies):
    assert count(*both(layout, other=[5, 3, 1, 6, 4, 2]), 0, 96) == copies


def test_neighbours_on_one_side_only_do_not_join():
    assert count(*both("interleaved", other=[1, 3, 5, 7, 9, 11]), 0, 96) == 2 * 6


@pytest.mark.parametrize(
    ("blocks", "other", "runs"),
    [
        ([6, 5, 4, 3, 2, 1], None, 1),
        ([6, 5, 4, 3, 2, 1], [9, 8, 7, 6, 5, 4], 1),
        ([6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6], 6),  # one rises while the other falls
        ([1, 2, 3, 6, 5, 4], None, 2),
        ([5, 6, 4, 3, 1, 2], None, 3),
    ],
)
def test_falling_blocks_join_as_rising_ones_do(blocks, other, runs):
    assert count(*both("interleaved", blocks=blocks, other=other), 0, 96) == 2 * runs


def test_a_partial_page_of_whole_heads_costs_one_copy_per_head():
    # Five whole pages join; the sixth holds 10 of 16 tokens of 4 heads; two layers.
    assert count(*both("interleaved"), 0, 90) == 2 * (1 + 4)


def test_a_partial_page_joins_where_tokens_run_through_pages():
    assert count(*both("token_major"), 7, 90) == 2
    assert count(*both("mla"), 7, 90) == 2


def test_transposed_k_is_widened_to_its_page_and_v_is_not():
    prefill, decode = both("vec")
    (copies,) = moved(prefill, decode, 80, 90)
    # K of four heads is widened, V of four heads is not; two layers.
    assert sorted(set(copies.length.tolist())) == [10 * 4 * 4, 16 * 4 * 4]
    assert copies.count == 2 * (4 + 4)


def test_unequal_tensor_parallel_sizes_keep_runs_of_whole_head_slices():
    prefill = fleet.engine("interleaved", tokens=16, blocks=[2, 1], heads=4, degree=2)
    decode = fleet.engine("interleaved", tokens=16, blocks=[1, 2], heads=4)
    done = moved(prefill, decode, 0, 32)
    assert [copies.count for copies in done] == [2 * 2, 2 * 2]
    assert set(np.concatenate([c.length for c in done]).tolist()) == {2 * 16 * 2 * 3 * 4}


def test_different_block_sizes_cut_at_both_grids():
    prefill = fleet.engine("neuron", tokens=16, blocks=[2, 1, 3], heads=1, layers=1)
    decode = fleet.engine("neuron", tokens=48, blocks=[1], heads=1, layers=1)
    assert count(prefill, decode, 0, 48) == 2 * 3
    # Neighbouring source pages fill one destination page in one run.
    prefill = fleet.engine("neuron", tokens=16, blocks=[1, 2, 3], heads=1, layers=1)
    assert count(prefill, decode, 0, 48) == 2


def test_pages_that_run_through_on_one_side_join_within_the_larger_page():
    narrow = {"tokens": 16, "blocks": [1, 2, 3], "degree": 2, "layers": 1}
    wide = {"tokens": 48, "blocks": [1], "layers": 1}
    split, joined = fleet.engine("neuron", **narrow), fleet.engine("neuron", **wide)
    assert count(split, joined, 0, 48) == 2 * 2
    split, joined = fleet.engine("neuron", **narrow), fleet.engine("neuron", **wide)
    assert count(joined, split, 0, 48) == 2 * 2


def test_neighbouring_offsets_of_two_regions_do_not_join():
    planes = tuple(Plane(i, "k", i, i * 16, 64, 64, 16, 4, 4) for i in range(2))
    regions = tuple(Region(4096 * (i + 1), 4096, "DRAM", 3 * i) for i in range(2))
    side = Geometry(regions, (Group("full", 4, 4, 4, (0,), planes),), 4)
    copies = pair(side, side, Ask(((0,),))).copies(0, 4, *[[Blocks(0, np.array([1]))]] * 2)
    assert fleet.rows(copies) == [[0, 64, 0, 64, 64], [1, 80, 1, 80, 64]]
    for bound in bind(copies, side, side):
        assert bound.tolist() == [[4096 + 64, 64, 0], [8192 + 80, 64, 3]]


def test_an_empty_range_has_no_copies():
    prefill, decode = both("neuron")
    copies = fleet.one_pair(prefill, decode).copies(5, 5, prefill.lists, decode.lists)
    assert (copies.count, copies.nbytes, len(copies.source_offset)) == (0, 0, 0)
    read, written = bind(copies, prefill.geometries[0], decode.geometries[0])
    assert read.shape == written.shape == (0, 3)


def test_describe_tells_way_run_and_count():
    prefill, decode = both("neuron")
    assert fleet.one_pair(prefill, decode).describe() == {
        "way": "direct",
        "run_bytes": 16 * 4 * 4 * 4,
        "copies_per_1000_tokens": 250,
        "bytes_per_1000_tokens": 1000 * 2 * 2 * 4 * 4 * 4,
    }


# -- refusals ------------------------------------------------------------------------------


def refusal(prefill, decode, **options):
    with pytest.raises(IncompatiblePair) as caught:
        fleet.one_pair(prefill, decode, **options)
    return str(caught.value)


def test_transposed_against_plain_k_is_refused_in_words():
    prefill = fleet.engine("vec", tokens=16, blocks=[1])
    decode = fleet.engine("interleaved", tokens=16, blocks=[1])
    assert refusal(prefill, decode) == (
        "K of layer 0 is stored [channel, token] on prefill and [token, channel] on decode"
    )


def test_transposed_k_in_other_pages_is_refused_in_words():
    prefill = fleet.engine("vec", tokens=16, blocks=[1])
    decode = fleet.engine("vec", tokens=32, blocks=[1])
    assert "[channel, token] in pages of 16 tokens on prefill and 32 on decode" in refusal(
        prefill, decode
    )


def test_runs_below_the_minimum_are_refused_in_words():
    prefill = fleet.engine("neuron", tokens=16, blocks=[1], width=4)
    decode = fleet.engine("interleaved", tokens=16, blocks=[1], width=4)
    text = refusal(prefill, decode, min_run=17)
    assert "the longest run common to both sides is 16 bytes, less than 17" in text
    assert "16 bytes after the previous one on prefill and 32 on decode" in text
    assert fleet.one_pair(prefill, decode, min_run=16).describe()["run_bytes"] == 16


def test_packed_pages_go_only_to_the_same_packing():
    amx = fleet.engine("amx", tokens=16, blocks=[1])
    wide = fleet.engine("amx", tokens=32, blocks=[1])
    plain = fleet.engine("interleaved", tokens=16, blocks=[1])
    assert "packed as cpu_attn:amx:k:16x3x4 on prefill and plain on decode" in refusal(amx, plain)
    assert "packed as cpu_attn:amx:k:16x3x4 on prefill and cpu_attn:amx:k:32x3x4" in refusal(
        amx, wide
    )


def one_plane(plane, heads=(0, 1), tokens=4, kind="full"):
    return Geometry(
        (Region(4096, 4096, "DRAM", 0),), (Group(kind, 4, tokens, 4, heads, (plane,)),), 4
    )


def opaque(tag="x", size=64, head=0):
    return Plane(0, "k", 0, 0, 256, head, 0, 0, 4, tag, size)


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        (opaque(size=64), opaque(size=32), "in pages of 64 bytes on prefill and 32 on decode"),
        (opaque(), opaque(head=64), "with all heads of a rank in one page"),
        (
            Plane(0, "k", 0, 0, 256, 64, 16, 4, 4),
            Plane(0, "k", 0, 0, 256, 64, 16, 4, 2),
            "has 4 channels per head on prefill and 2 on decode",
        ),
        (
            Plane(0, "k", 0, 0, 256, 64, 16, 8, 2),
            Plane(0, "k", 0, 0, 256, 64, 16, 8, 2),
            "with gaps between its channels",
        ),
        (
            Plane(0, "v", 0, 0, 256, 64, 16, 4, 4),
            Plane(0, "k", 0, 0, 256, 64, 16, 4, 4),
            "K of layer 0 is stored on decode but not on prefill",
        ),
    ],
)
def test_planes_that_mean_different_things_are_refused(prefill, decode, words):
    with pytest.raises(IncompatiblePair, match=words):
        pair(one_plane(prefill), one_plane(decode), Ask(((0, 1),)))


def test_a_whole_opaque_page_moves_when_all_heads_agree():
    side = one_plane(opaque())
    copies = pair(side, side, Ask(((0, 1),))).copies(0, 3, *[[Blocks(0, np.array([2]))]] * 2)
    assert fleet.rows(copies) == [[0, 512, 0, 512, 64]]
    with pytest.raises(IncompatiblePair, match="all heads of a rank in one page"):
        pair(side, side, Ask(((1,),)))


def test_geometries_that_cannot_be_compared_are_refused():
    plane = Plane(0, "k", 0, 0, 256, 64, 16, 4, 4)
    side = one_plane(plane)
    with pytest.raises(IncompatiblePair, match="elements have 4 bytes on prefill and 2 on decode"):
        pair(side, msgspec.structs.replace(side, element_bytes=2), Ask(((0,),)))
    with pytest.raises(IncompatiblePair, match="KV groups"):
        pair(side, one_plane(plane, kind="sliding"), Ask(((0,),)))
    with pytest.raises(IncompatiblePair, match="KV groups"):
        pair(side, side, Ask(()))
    with pytest.raises(IncompatiblePair, match="prefill does not hold head 7"):
        pair(side, side, Ask(((7,),)))
    with pytest.raises(IncompatiblePair, match="asked for twice"):
        pair(side, side, Ask(((0, 0),)))


# -- state pages ---------------------------------------------------------------------------


def state_side(tag="mamba:4x3x2", tokens=4, heads=(0,)):
    plane = Plane(0, "state", 0, 0, 256, 0, 0, 0, 1, tag, 64)
    group = Group("state", tokens, tokens, 4, heads, (plane,))
    return Geometry((Region(4096, 4096, "DRAM", 0),), (group,), 4)


def state_copies(prefill, decode, source, destination, **options):
    plan = pair(prefill, decode, fleet.everything(decode))
    lists = [[Blocks(0, np.array(ids, np.int32))] for ids in (source, destination)]
    return plan.copies(0, 9, *lists, **options)


def test_state_pages_travel_once_with_the_last_range():
    # The two engines may count different tokens in the one block of a request.
    sides = state_side(), state_side(tokens=4096)
    assert state_copies(*sides, [2], [3]).count == 0
    assert fleet.rows(state_copies(*sides, [1, 2], [3], last=True)) == [[0, 512, 0, 768, 64]]


@pytest.mark.parametrize(("source", "destination"), [([], [1]), ([1], []), ([1, 0], [1])])
def test_a_request_without_a_state_block_is_an_error(source, destination):
    with pytest.raises(PlanError, match="lists no block for the state"):
        state_copies(state_side(), state_side(), source, destination, last=True)


def test_states_of_another_shape_or_share_of_heads_are_refused():
    with pytest.raises(IncompatiblePair, match="the state of layer 0 is packed as mamba:4x3x2"):
        state_copies(state_side(), state_side(tag="mamba:2x3x2"), [1], [1])
    with pytest.raises(IncompatiblePair, match="all heads of a rank in one page"):
        state_copies(state_side(heads=(0, 1)), state_side(), [1], [1])


def test_state_blocks_do_not_hold_ranges_to_their_boundaries():
    plan = pair(state_side(), state_side(), Ask(((0,),)))
    assert plan.start_granularity(0) == 1 and plan.grain == 1


# -- bad requests --------------------------------------------------------------------------


def planned(start, stop, source, destination, layout="neuron", first=(0, 0), kind="full"):
    engines = [fleet.engine(layout, tokens=16, blocks=range(1, 7), kind=kind) for _ in "pd"]
    lists = [
        [Blocks(begin, np.array(ids, np.int32))]
        for begin, ids in zip(first, (source, destination), strict=True)
    ]
    return fleet.one_pair(*engines).copies(start, stop, *lists)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((5, 4, [1], [1]), "malformed"),
        ((-1, 4, [1], [1]), "malformed"),
        ((0, 33, [1, 2, 3], [1, 2]), "decode lists blocks for tokens 0 to 32, not for 0 to 33"),
        ((0, 33, [1, 2], [1, 2, 3]), "decode wants token 32, whose block prefill does not hold"),
        ((0, 32, [1, 0], [1, 2]), "decode wants token 16"),
        ((0, 32, [], [1, 2]), "decode wants token 16"),
        ((0, 32, [1, 2], [1, 99]), "decode block list names blocks outside its cache of 7"),
        ((0, 32, [1, 7], [1, 2]), "prefill block list names blocks outside"),
        ((0, 32, [1, 2], [1, -1]), "outside"),
    ],
)
def test_a_request_that_does_not_fit_is_an_error(arguments, words):
    with pytest.raises(PlanError, match=words):
        planned(*arguments)


def test_lists_must_begin_where_the_range_does_unless_a_window_slides():
    with pytest.raises(PlanError, match="decode lists blocks for tokens 16 to 32"):
        planned(0, 32, [1, 2], [2], first=(0, 1))
    assert planned(0, 32, [1, 2], [2], first=(0, 1), kind="sliding").nbytes == 16 * 2 * 2 * 2 * 12


def test_a_window_may_lack_only_the_oldest_block_that_decode_lists():
    assert planned(0, 48, [0, 2, 3], [1, 2, 3], kind="sliding").count
    with pytest.raises(PlanError, match="decode wants token 16"):
        planned(0, 48, [0, 0, 3], [1, 2, 3], kind="sliding")


def test_blocks_that_decode_leaves_out_are_not_written():
    assert planned(0, 48, [1, 2, 3], [1, 0, 3]).nbytes == 32 * 2 * 2 * 2 * 12


def test_the_number_of_lists_must_match_the_groups():
    prefill, decode = both("neuron")
    with pytest.raises(PlanError, match="block lists for 2 and 1 groups, not 1"):
        fleet.one_pair(prefill, decode).copies(0, 1, prefill.lists * 2, decode.lists)


def test_a_start_inside_a_page_that_cannot_be_cut_names_the_boundary():
    with pytest.raises(PlanError, match="start at the page boundary, token 16"):
        planned(20, 30, [1, 2], [1, 2], layout="vec")


@pytest.mark.parametrize(("layout", "step"), [("vec", 16), ("amx", 16), ("neuron", 1), ("nhd", 1)])
def test_start_granularity_is_the_page_only_where_pages_cannot_be_cut(layout, step):
    assert fleet.one_pair(*both(layout)).start_granularity(0) == step


def test_binding_refuses_a_copy_that_leaves_its_region():
    prefill, decode = both("neuron")
    copies = fleet.one_pair(prefill, decode).copies(0, 96, prefill.lists, decode.lists)
    source, destination = prefill.geometries[0], decode.geometries[0]
    small = tuple(
        msgspec.structs.replace(region, length=region.length - 1) for region in source.regions
    )
    with pytest.raises(PlanError, match="of region 0, which has"):
        bind(copies, msgspec.structs.replace(source, regions=small), destination)
    below = one_plane(Plane(0, "k", 0, -512, 256, 64, 16, 4, 4))
    early = pair(below, below, Ask(((0,),))).copies(0, 4, *[[Blocks(0, np.array([1]))]] * 2)
    with pytest.raises(PlanError, match="covers bytes -256 to -192"):
        bind(early, below, below)
    few = msgspec.structs.replace(destination, regions=destination.regions[:1])
    with pytest.raises(PlanError, match="a region that the geometry does not have"):
        bind(copies, source, few)


# -- who provides what ---------------------------------------------------------------------


def asks(prefill, decode):
    """Heads and share that the first decode rank asks of each prefill rank."""
    (mine, *_) = assign(decode.geometries, prefill.geometries)
    return [ask and (ask.heads[0], ask.stripe.count) for ask in mine]


def test_every_stage_provides_its_layers():
    prefill = fleet.engine("neuron", tokens=4, blocks=[1], heads=2, stages=2, layers=4)
    decode = fleet.engine("neuron", tokens=4, blocks=[1], heads=2, layers=4)
    assert asks(prefill, decode) == [((0, 1), 1)] * 2


def test_missing_layers_and_heads_are_named():
    decode = fleet.engine("neuron", tokens=4, blocks=[1], heads=4, layers=5)
    prefill = fleet.engine("neuron", tokens=4, blocks=[1], heads=4, layers=2, degree=2)
    prefill.caches = prefill.caches[:1]
    with pytest.raises(IncompatiblePair) as caught:
        asks(prefill, decode)
    assert caught.value.differences == (
        "group 0: no prefill rank holds layers 2-4",
        "group 0: no prefill rank holds heads 2-3 of layers 0-1",
    )


def test_stages_that_overlap_in_part_are_refused():
    decode = fleet.engine("neuron", tokens=4, blocks=[1], layers=3)
    prefill = fleet.engine("neuron", tokens=4, blocks=[1], layers=2)
    prefill.caches.append(oracle.Cache("neuron", (1, 2), (0, 1), 2, 4, 3))
    with pytest.raises(IncompatiblePair, match="overlap in part"):
        asks(prefill, decode)


def test_engines_with_other_groups_are_refused():
    decode = fleet.engine("neuron", tokens=4, blocks=[1], kind="sliding")
    prefill = fleet.engine("neuron", tokens=4, blocks=[1])
    with pytest.raises(IncompatiblePair, match="KV groups: prefill rank 0"):
        asks(prefill, decode)


# -- runs on the wire ----------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), max_size=60))
def test_runs_give_back_the_same_ids(ids):
    assert decode_runs(encode_runs(ids), 60).tolist() == ids


def test_runs_are_short_for_neighbours_and_for_holes():
    assert encode_runs([0] * 1000 + list(range(5, 900))) == [0, 1000, 5, 895]
    assert encode_runs([0, 1, 2]) == [0, 1, 1, 2]
    assert encode_runs([]) == [] and decode_runs([], 0).tolist() == []


@pytest.mark.parametrize(
    "runs",
    [
        [1],
        [1, 0],
        [1, -1],
        [-1, 1],
        [1, 11],
        [1, 6, 9, 6],
        [2**31, 1],
        [2**31 - 1, 2],
        [1, 2**62, 1, 2**62],
        [2**80, 1],
        [1, "x"],
    ],
)
def test_malformed_runs_are_refused(runs):
    with pytest.raises(PlanError):
        decode_runs(runs, 10)


# -- mutation ------------------------------------------------------------------------------

NUMBERS = {
    "amx": ("offset", "page", "head", "page_bytes"),
    "fp8": ("offset", "page", "head", "page_bytes"),
    "mla": ("offset", "page", "token"),
}
FALSIFIED = [
    (layout, number)
    for layout in (*STRIDED, *BY_PAGE, "mla")
    for number in NUMBERS.get(layout, ("offset", "page", "head", "token", "channel"))
]


def falsify(geometry, index, field, change):
    group = geometry.groups[0]
    planes = list(group.planes)
    wrong = getattr(planes[index], field) + change
    planes[index] = msgspec.structs.replace(planes[index], **{field: wrong})
    group = msgspec.structs.replace(group, planes=tuple(planes))
    spoilt = msgspec.structs.replace(geometry, groups=(group,))
    check(spoilt)
    return spoilt


@pytest.mark.parametrize(("layout", "field"), FALSIFIED)
@pytest.mark.parametrize("change", [-4, 0, 4, 64])
@pytest.mark.parametrize("index", [0, -1])
def test_a_wrong_number_in_a_plane_is_refused_or_seen(layout, field, change, index):
    """The proof above would notice: no falsified number leads to the right bytes."""
    options = {"tokens": 4, "blocks": [3, 1, 2], "spare": 1, "heads": 2, "width": 4}
    prefill, decode = (fleet.engine(layout, **options) for _ in "pd")

    def attempt():
        moved(prefill, decode, 0, 11, spoil=lambda true: falsify(true, index, field, change))

    if change == 0:
        attempt()
        return
    with pytest.raises((AssertionError, GeometryError, IncompatiblePair, PlanError)):
        attempt()
