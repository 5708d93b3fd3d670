"""Every layout into every other, through real NIXL between two processes, in fragmented blocks."""

import random
from itertools import product

import pytest

from neuron_push.protocol import Match
from tests.staging_rank import Rank
from tests.test_staged import ELEMENTS

pytestmark = pytest.mark.real_nixl

OPAQUE = ("amx", "fp8")
PAIRS = [*product(ELEMENTS, ELEMENTS), *((name, name) for name in (*OPAQUE, "mla"))]
# A Mamba state per request beside them: opaque, so from and to the same shape only.
STATES = [("neuron", "neuron"), ("neuron", "interleaved"), ("interleaved", "neuron")]
# In every run: into and out of each layout, with what the two fleets use on the other side.
HUBS = ("neuron", "interleaved")
OFTEN = [pair for pair in PAIRS if pair[0] in HUBS or pair[1] in HUBS or pair[0] == pair[1]]
TOKENS = 90


@pytest.fixture(scope="module")
def ranks():
    pair = Rank(), Rank()
    yield pair
    for rank in pair:
        rank.kill()


def sizes_of(source, target, rng):
    """Tokens per page on both sides; opaque pages go only to pages of the same size."""
    if source in OPAQUE:
        return (16, 16)
    return rng.choice([(32, 16), (16, 32), (32, 48), (16, 16), (48, 32)])


def blocks_of(rng):
    """Pages per block on both sides: a kernel's block may be smaller than the scheduler's."""
    return rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (3, 2)])


def scattered(rng, tokens, stop):
    count = -(-stop // tokens)
    return rng.sample(range(1, count + 4), count)


def push(
    ranks,
    source,
    target,
    *,
    reorders,
    seed,
    slabs=2,
    expected=None,
    behind_host="",
    fault="",
    per_block=(1, 1),
    **more,
):
    """One prompt in chunks from one layout into another, compared element by element.

    With a fault on its way it must not be received; returns what decode said.
    """
    rng = random.Random(seed)
    prefill, decode = ranks
    sizes = sizes_of(source, target, rng)
    shape = {"heads": 2, "layers": 2, "width": 8, "spare": 4}
    if reorders == "both" and slabs > 1:
        shape["min_run"] = 1 << 14  # through slabs on both sides, unless blocks lie well
    sides = []
    for rank, layout, tokens, pages, role, name in (
        (prefill, source, sizes[0], per_block[0], "producer", f"P{seed}"),
        (decode, target, sizes[1], per_block[1], "consumer", f"D{seed}"),
    ):
        staged = behind_host in (role, "both")
        able = slabs if staged or reorders in (role, "both") else 0
        sides.append(
            rank.call("open", name, role, slabs=able, layout=layout, tokens=tokens,
                      per_block=pages, blocks=scattered(rng, tokens * pages, TOKENS),
                      host_staging=staged,
                      fault=fault if role == "producer" else "", **more, **shape)
        )  # fmt: skip
    match = Match(f"t{seed}", "b", b"digest", TOKENS)
    start = rng.choice([0, 0, sizes[1] * per_block[1]])
    try:
        prefill.call("fill", TOKENS)
        decode.call("receive", sides[0], match, start)
        prefill.call("prefill", match, [33, 64, TOKENS])
        told = decode.call("hear", "ReceiveFailed" if fault else "Received")
        if not fault:
            decode.call("compare", start, TOKENS)
        if expected:
            assert prefill.call("way") == expected
        for rank in ranks:
            rank.call("hear", "Unpinned")
    finally:
        left = [rank.call("close") for rank in ranks]
    assert left == [[], []]
    return told


def push_each(ranks, pairs, reorders, first):
    """Pairs of layouts one after the other, each with sizes, blocks and a start of its own."""
    for seed, pair in enumerate(pairs, first):
        pages = blocks_of(random.Random(-seed))
        push(ranks, *pair, reorders=reorders, seed=seed, per_block=pages, kv_digest=seed % 2 == 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("reorders", "pairs"),
    [("producer", OFTEN[::3]), ("consumer", OFTEN[1::3]), ("both", OFTEN[2::3])],
)
def test_pairs_of_layouts_meet_the_two_fleets(ranks, reorders, pairs):
    push_each(ranks, pairs, reorders, 0)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("reorders", ["producer", "consumer", "both"])
def test_every_ordered_pair_of_layouts(ranks, reorders):
    push_each(ranks, PAIRS, reorders, 1000)


@pytest.mark.parametrize(("source", "target"), STATES)
@pytest.mark.parametrize("reorders", ["producer", "consumer", "both"])
def test_a_state_travels_beside_pages_of_tokens(ranks, source, target, reorders):
    push(ranks, source, target, reorders=reorders, seed=31, per_block=(1, 2), state=2)


@pytest.mark.parametrize(
    ("source", "target"), [("neuron", "interleaved"), ("amx", "amx"), ("vec", "neuron")]
)
def test_blocks_of_several_pages_meet_blocks_of_others(ranks, source, target):
    push(ranks, source, target, reorders="both", seed=41, per_block=(3, 2))


@pytest.mark.parametrize(
    ("source", "target", "reorders", "way"),
    [
        ("neuron", "interleaved", "consumer", "unpacked"),
        ("interleaved", "neuron", "producer", "packed"),
        ("vec", "interleaved", "consumer", "unpacked"),
        ("interleaved", "vec", "producer", "packed"),
        ("neuron", "neuron", "both", "direct"),
    ],
)
def test_one_slab_serves_a_whole_prompt(ranks, source, target, reorders, way):
    push(ranks, source, target, reorders=reorders, seed=7, slabs=1, expected=way)


@pytest.mark.parametrize("way", ["unpacked", "packed", "direct", "both"])
def test_a_digest_agrees_for_what_was_sent_and_fails_what_was_turned_on_its_way(ranks, way):
    layouts, reorders = {
        "unpacked": (("neuron", "interleaved"), "consumer"),
        "packed": (("interleaved", "neuron"), "producer"),
        "direct": (("neuron", "neuron"), ""),
        "both": (("interleaved", "neuron"), "both"),
    }[way]
    options = {"reorders": reorders, "expected": way, "kv_digest": True}
    push(ranks, *layouts, seed=21, **options)
    told = push(ranks, *layouts, seed=22, fault="tamper", **options)
    assert "is not what prefill sent (digest)" in told


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("source", "target", "reorders", "behind_host", "way"),
    [
        ("neuron", "neuron", "", "both", "unpacked"),
        ("neuron", "neuron", "", "producer", "direct"),
        ("neuron", "interleaved", "consumer", "producer", "packed"),
        ("neuron", "interleaved", "", "producer", "packed"),
        ("interleaved", "neuron", "producer", "consumer", "unpacked"),
        ("interleaved", "neuron", "", "consumer", "unpacked"),
    ],
)
def test_a_device_that_nobody_registers_is_reached_through_host_memory(
    ranks, source, target, reorders, behind_host, way
):
    """Its memory is unknown to NIXL, and takes narrow and copy_ with host tensors only."""
    push(
        ranks, source, target, reorders=reorders, seed=11, behind_host=behind_host, expected=way,
        slab_bytes=1 << 13,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reorders", "way"), [("consumer", "unpacked"), ("producer", "packed"), ("both", "both")]
)
def test_many_transfers_at_once_use_the_staging_memory_that_was_configured_and_no_more(
    ranks, reorders, way
):
    """Twelve prompts of 8 MiB each through two slabs of 1 MiB."""
    prompts, tokens, slab, slabs = 12, 2048, 1 << 20, 2
    shape = {"heads": 2, "layers": 4, "width": 64}
    prefill, decode = ranks
    sides = []
    for rank, layout, size, role in (
        (prefill, "neuron", 32, "producer"),
        (decode, "interleaved", 16, "consumer"),
    ):
        able = slabs if reorders in (role, "both") else 0
        blocks = scattered(random.Random(size), size, tokens)
        sides.append(
            rank.call("open", f"{role}{way}", role, slabs=able, slab_bytes=slab, layout=layout,
                      tokens=size, blocks=blocks, spare=4, min_run=1 << 16, **shape)
        )  # fmt: skip
    matches = [Match(f"many{number}", "b", b"digest", tokens) for number in range(prompts)]
    staging = prefill if reorders == "producer" else decode
    try:
        prefill.call("fill", tokens)
        decode.call("remember")
        if staging is prefill:
            prefill.call("watch")
        decode.call("receive_many", sides[0], matches)
        prefill.call("prefill_many", matches)
        decode.call("hear", "Received", 50.0, prompts)
        assert prefill.call("way") == way
        most, grown = staging.call("watched")
        decode.call("compare", 0, tokens)
    finally:
        left = [rank.call("close") for rank in ranks]
    assert left == [[], []]
    # All of it is used, but for a slab that is never promised.
    assert most == slabs - (way == "both")
    # Besides, a piece's addresses and NIXL's own buffers; the prompts took 96 MiB together.
    assert grown < 24 << 20, f"{grown >> 20} MiB beyond {slabs * slab >> 20} MiB of staging"
