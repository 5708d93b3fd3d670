"""Pins against vLLM's own block pool."""

import pytest
from vllm.v1.core.block_pool import BlockPool

from neuron_push.commands import pack_ids
from neuron_push.vllm import pins as module
from neuron_push.vllm.pins import Pins


@pytest.fixture
def pool():
    return BlockPool(num_gpu_blocks=16, enable_caching=True, hash_block_size=16)


def take(pool, number):
    blocks = pool.get_new_blocks(number)
    return blocks, [block.block_id for block in blocks]


def hold(pins, number, ids):
    pins.promise(number, ids, pack_ids(ids))
    pins.hold(number)


def test_pinned_blocks_are_not_handed_out_after_vllm_frees_them(pool):
    pins = Pins(pool, world=1)
    blocks, ids = take(pool, 5)
    pin = pins.new()
    hold(pins, pin, ids)
    pool.free_blocks(blocks)
    free = pool.get_num_free_blocks()
    others, other_ids = take(pool, free)
    assert not set(other_ids) & set(ids)
    pins.quiet(pin, 0)
    assert pool.get_num_free_blocks() == 5
    assert {block.block_id for block in pool.get_new_blocks(5)} == set(ids)
    assert len(others) == free
    assert not pins


def test_the_request_keeps_its_own_reference(pool):
    pins = Pins(pool, world=1)
    blocks, ids = take(pool, 3)
    before = pool.get_num_free_blocks()
    pin = pins.new()
    hold(pins, pin, ids)
    pins.quiet(pin, 0)
    assert pool.get_num_free_blocks() == before
    assert all(block.ref_cnt == 1 for block in blocks)


def test_the_last_rank_frees_and_repeats_are_harmless(pool):
    pins = Pins(pool, world=3)
    blocks, ids = take(pool, 4)
    pin = pins.new()
    hold(pins, pin, ids)
    pool.free_blocks(blocks)
    start = pool.get_num_free_blocks()
    for rank in (0, 0, 2, 2, 0):
        pins.quiet(pin, rank)
        assert pool.get_num_free_blocks() == start
    pins.quiet(pin, 1)
    assert pool.get_num_free_blocks() == start + 4
    pins.quiet(pin, 1)
    pins.quiet(77, 0)
    assert pool.get_num_free_blocks() == start + 4


def test_a_pin_grows_and_null_blocks_are_not_held(pool):
    pins = Pins(pool, world=1)
    _, ids = take(pool, 4)
    pin = pins.new()
    hold(pins, pin, [0, *ids[:2]])
    hold(pins, pin, [0, 0, *ids[2:]])
    assert pins.blocks == 4
    pins.quiet(pin, 0)
    assert pins.blocks == 0


def test_two_pins_on_one_block_both_count(pool):
    pins = Pins(pool, world=1)
    blocks, ids = take(pool, 1)
    first, second = pins.new(), pins.new()
    hold(pins, first, ids)
    hold(pins, second, ids)
    pool.free_blocks(blocks)
    pins.quiet(first, 0)
    assert blocks[0].ref_cnt == 1
    pins.quiet(second, 0)
    assert blocks[0].ref_cnt == 0


def test_cached_blocks_are_freed_from_the_end_of_the_prompt(pool):
    """vLLM evicts in the order of the free list: a prompt's beginning is worth most."""
    pins = Pins(pool, world=1)
    blocks, ids = take(pool, 3)
    pin = pins.new()
    hold(pins, pin, ids)
    pool.free_blocks(blocks)
    freed = []
    pool.free_blocks = lambda blocks: freed.extend(block.block_id for block in blocks)
    pins.quiet(pin, 0)
    assert freed == ids[::-1]


def test_only_ended_transfers_promise_blocks_and_only_for_a_moment(pool, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    pins = Pins(pool, world=1)
    pin = pins.new()
    assert not pins.soon()
    now[0] += 5
    assert pins.oldest_age() == 5
    pins.ends(pin)
    pins.ends(-1)
    assert pins.soon()
    now[0] += module.SOON + 0.01
    assert not pins.soon()
    pins.quiet(pin, 0)
    assert pins.oldest_age() == 0


def test_promised_blocks_are_held_when_vllm_is_about_to_let_go(pool):
    pins = Pins(pool, world=1)
    blocks, ids = take(pool, 4)
    free = pool.get_num_free_blocks()
    kept, quiet = pins.new(), pins.new()
    pins.promise(kept, [0, *ids[:2]], pack_ids([0, *ids[:2]]))
    pins.promise(quiet, ids[2:], pack_ids(ids[2:]))
    assert pins.blocks == 4
    assert all(block.ref_cnt == 1 for block in blocks)
    pins.quiet(quiet, 0)
    pins.hold(quiet)
    pins.hold(kept)
    pins.hold(kept)
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == free + 2
    assert pins.blocks == 2
    pins.quiet(kept, 0)
    assert pool.get_num_free_blocks() == free + 4
    assert pins.blocks == 0
