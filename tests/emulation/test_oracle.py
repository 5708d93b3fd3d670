"""What goes wrong with KV is reported where it is, and changes the output."""

import json

import numpy as np
import pytest

from neuron_push.emulation import pattern
from neuron_push.emulation.devices import DEVICES
from neuron_push.emulation.oracle import Oracle, Slots, warm_up
from neuron_push.emulation.writer import CHECKING
from tests.emulation import kit

PROMPT = kit.prompt(100)
BLOCKS = list(range(1, 12))
RIGHT = pattern.continuation(PROMPT, 6)


def pair(folder, fault="", source="p5en", target="p5en", **options):
    """Prefill here, decode there; what decode answers."""
    prefill = kit.Engine(source, folder=folder, name="prefill")
    decode = kit.Engine(target, fault=fault, folder=folder, name="decode", **options)
    prefill.generate(PROMPT, BLOCKS, 1)
    kit.hand_over(prefill, decode, len(PROMPT), BLOCKS, BLOCKS[::-1])
    answer = decode.generate(PROMPT, BLOCKS[::-1], 6, computed=len(PROMPT) - 1)
    assert prefill.seen.wrong_rows == 0
    return decode, answer


def reports(folder):
    path = folder / "decode.wrong.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("devices", [("p5en", "p5en"), ("trn2", "trn2"), ("trn2", "p5en")])
@pytest.mark.parametrize("options", [{}, {"block": 24}, {"checking": CHECKING["sampled"]}])
def test_kv_from_elsewhere_gives_what_one_engine_answers(tmp_path, devices, options):
    decode, answer = pair(tmp_path, "", *devices, **options)
    assert answer == RIGHT
    assert decode.seen.wrong_rows == 0 and decode.seen.context_tokens == len(PROMPT) - 1
    assert reports(tmp_path) == []


@pytest.mark.parametrize("device", ["p5en", "trn2", "cpu"])
def test_one_flipped_byte_is_found(tmp_path, device):
    decode, answer = pair(tmp_path, "flip-byte", device, device)
    assert answer != RIGHT
    assert decode.seen.wrong_rows
    (wrong, *_) = reports(tmp_path)
    assert (wrong["request"], wrong["position"]) == ("r", 0)
    assert (wrong["layer"], wrong["head"]) == (kit.LAYERS - 1, kit.HEADS - 1)
    assert wrong["expected"] != wrong["seen"]


@pytest.mark.parametrize("fault", ["swap-blocks", "late-block", "drop-layer"])
def test_sampling_finds_what_damages_whole_blocks(tmp_path, fault):
    decode, answer = pair(tmp_path, fault, checking=CHECKING["sampled"])
    assert answer != RIGHT
    assert decode.seen.wrong_rows


@pytest.mark.parametrize("fault", ["swap-blocks", "late-block"])
def test_a_damaged_block_is_found(tmp_path, fault):
    decode, answer = pair(tmp_path, fault)
    assert answer != RIGHT
    blocks = 2 if fault == "swap-blocks" else 1
    # Later steps read some of these slots again; those of a late block are right by then.
    least = blocks * 16 * kit.LAYERS * kit.HEADS * 2
    assert decode.seen.wrong_rows >= least
    assert reports(tmp_path)[0]["moment"] == "context"


def test_a_late_block_shows_bytes_that_are_right_afterwards(tmp_path):
    decode, _ = pair(tmp_path, "late-block")
    before = decode.seen.wrong_rows
    decode.step(cached=[("r", None, len(PROMPT) + 5)], scheduled={"r": 1})
    assert decode.seen.wrong_rows == before


def test_a_dropped_layer_is_found(tmp_path):
    decode, answer = pair(tmp_path, "drop-layer")
    assert answer != RIGHT
    assert {wrong["layer"] for wrong in reports(tmp_path)} == {kit.LAYERS - 1}
    assert decode.seen.wrong_rows >= (len(PROMPT) - 1) * kit.HEADS * 2


def test_a_chunk_sent_before_its_fence_is_found(tmp_path):
    for fault, right in (("", True), ("early-fence", False)):
        prefill = kit.Engine(fault=fault)
        decode = kit.Engine(folder=tmp_path / fault, name="decode")
        fence = prefill.launch(new=[("r", PROMPT, BLOCKS, 0)], scheduled={"r": len(PROMPT)})
        if not fence.done():
            prefill.work()
        assert fence.done()
        kit.hand_over(prefill, decode, len(PROMPT), BLOCKS, BLOCKS)
        answer = decode.generate(PROMPT, BLOCKS, 6, computed=len(PROMPT) - 1)
        assert (answer == RIGHT) is right
        assert (decode.seen.wrong_rows == 0) is right


def test_a_replica_that_differs_shows_through_the_sum_over_ranks():
    total = []

    def combine(values):
        total.append(values.copy())
        return values

    decode = kit.Engine(combine=combine)
    decode.step(new=[("r", PROMPT, BLOCKS, 0)], scheduled={"r": 50})
    decode.cache.views[0][0].tensor[BLOCKS[0], 3] += 1
    decode.requests.states["r"].next = 0  # as if that KV had come from elsewhere
    decode.step(cached=[("r", None, 50)], scheduled={"r": 50})
    assert total[0].tolist() == [0] and total[1].tolist() != [0]


def test_a_window_hides_what_nobody_looks_at():
    decode = kit.Engine(window=32)
    decode.step(new=[("r", PROMPT, BLOCKS, 0)], scheduled={"r": len(PROMPT)})
    fresh = kit.Engine(window=32)
    kit.hand_over(decode, fresh, len(PROMPT), BLOCKS, BLOCKS)
    fresh.cache.views[0][0].tensor[BLOCKS[0]] = 0  # outside the window of the last token
    answer = fresh.generate(PROMPT, BLOCKS, 1, computed=len(PROMPT) - 1)
    assert fresh.seen.wrong_rows == 0
    assert answer == pattern.continuation(PROMPT, 1)


@pytest.mark.parametrize("device", ["p5en", "trn2", "cpu"])
@pytest.mark.parametrize("blocks", [[4, 5, 6, 7], [7, 6, 5, 4], [9, 2, 3, 5]])
def test_blocks_are_filled_alike_in_any_order(device, blocks):
    """Neighbours, going up or down, and strangers: all slots hold what they must, and no other."""
    cache = kit.cache(device)
    oracle, size = Oracle(cache, 0), cache.shapes[0].block_tokens
    positions = np.arange(size * len(blocks))
    slots = Slots(positions % 90, positions, (np.repeat(blocks, size),))
    oracle.fill(slots)
    assert oracle.read(slots).wrong_rows == 0
    rest = np.setdiff1d(np.arange(16), blocks).tolist()
    assert not any(view.tensor[rest].any() for view in cache.views[0])


@pytest.mark.parametrize("device", ["p5en", "trn2", "cpu"])
def test_warming_up_touches_a_cache_aside(device):
    warm_up(DEVICES[device], (kit.shape(device),))
    warm_up(DEVICES[device], (kit.shape(device), kit.shape(device, window=20)))
