"""State groups (Mamba): a page per request that every step overwrites."""

import json

import pytest
import torch

from neuron_push.emulation import memory, pattern
from neuron_push.emulation.devices import DEVICES
from neuron_push.emulation.requests import Requests
from neuron_push.errors import ConfigError
from tests.emulation import kit

PROMPT = kit.prompt(70)
BLOCKS, STATE = list(range(1, 8)), [9]
LONG = 4096  # tokens per state without prefix caching: a request never fills one


def engine(**options):
    return kit.Engine(state_tokens=LONG, **options)


def hand_over(source, target, tokens):
    """KV of `tokens` tokens, and the state as it is."""
    kit.hand_over(source, target, tokens, BLOCKS, BLOCKS)
    target.cache.views[1][0].tensor[STATE] = source.cache.views[1][0].tensor[STATE]


def two_groups():
    return (BLOCKS, STATE)


@pytest.mark.parametrize("chunk", [9, 16, 1000])
def test_states_follow_the_tokens_whatever_the_chunks(chunk):
    one = engine()
    assert one.generate(PROMPT, two_groups(), 5, chunk=chunk) == pattern.continuation(PROMPT, 5)
    assert one.seen.wrong_rows == 0
    other = engine()
    other.generate(PROMPT, two_groups(), 5)
    page = [e.cache.views[1][0].tensor[STATE] for e in (one, other)]
    assert torch.equal(*page) and page[0].any()


def test_a_state_one_token_short_of_the_prompt_is_what_decode_needs(tmp_path):
    """Decode computes the last token again, so its state must not have seen that token."""
    for stop, right in ((len(PROMPT) - 1, True), (len(PROMPT), False)):
        prefill, decode = engine(), engine(folder=tmp_path, name=f"decode{stop}")
        prefill.step(new=[("r", PROMPT[:stop], two_groups(), 0)], scheduled={"r": stop})
        hand_over(prefill, decode, stop)
        answer = decode.generate(PROMPT, two_groups(), 4, computed=len(PROMPT) - 1)
        assert (answer == pattern.continuation(PROMPT, 4)) is right
        assert (decode.seen.wrong_rows == 0) is right
    line = (tmp_path / f"decode{len(PROMPT)}.wrong.jsonl").read_text().splitlines()[0]
    wrong = json.loads(line)
    assert (wrong["kind"], wrong["moment"], wrong["position"]) == ("state", "context", 68)
    assert wrong["layer"] == kit.LAYERS


def test_one_flipped_bit_of_a_state_changes_the_answer():
    prefill, decode = engine(), engine()
    stop = len(PROMPT) - 1
    prefill.step(new=[("r", PROMPT[:stop], two_groups(), 0)], scheduled={"r": stop})
    hand_over(prefill, decode, stop)
    decode.cache.views[1][0].tensor[STATE[0], 0, 1, -1] ^= 1 << 40
    answer = decode.generate(PROMPT, two_groups(), 4, computed=stop)
    assert answer != pattern.continuation(PROMPT, 4) and decode.seen.wrong_rows == 1


def test_with_a_prefix_cache_a_state_lies_in_the_block_of_its_last_token():
    table = Requests((16, 16), (0, 0), state_groups=(1,))
    new = [("r", PROMPT, ([1, 2, 3, 4, 5], [0, 6, 7, 8, 9]), 32)]
    (piece,) = table.update(kit.output(new=new, scheduled={"r": 32}))
    assert piece.states == {1: (6, 8)}  # of token 31, and of token 63
    (piece,) = table.update(kit.output(cached=[("r", None, 64)], scheduled={"r": 6}))
    assert piece.states == {1: (8, 9)}


def test_a_state_fills_its_page_as_far_as_it_goes():
    one = engine()
    one.step(new=[("r", PROMPT, two_groups(), 0)], scheduled={"r": 70})
    tensor = one.cache.tensors[f"model.layers.{kit.LAYERS}.mixer"]
    assert tensor.shape == (16, 1, 1, 8 * kit.STATE_WORDS) and tensor.dtype == torch.int8
    assert tensor.stride(0) == one.cache.shapes[1].page_bytes == one.cache.shapes[0].page_bytes
    (block,) = STATE
    assert (tensor[block].flatten().view(torch.int64) != 0).all()
    page = next(iter(one.cache.tensors.values()))[block].flatten()  # of the layer it overlays
    assert not page.view(torch.int64)[kit.STATE_WORDS :].any()


def test_ranks_hold_different_parts_of_a_state():
    first, second = (engine(rank=rank) for rank in (0, 1))
    for each in (first, second):
        each.step(new=[("r", PROMPT, two_groups(), 0)], scheduled={"r": 70})
    pages = [each.cache.views[1][0].tensor[STATE] for each in (first, second)]
    assert (pages[0] != pages[1]).all()


def test_halves_of_an_allocation_have_no_room_for_states():
    with pytest.raises(ConfigError, match="emulate models with state layers"):
        memory.allocate(DEVICES["trn2"], (kit.shape("trn2"), kit.state_shape()), 8)
