"""Rows move what they say and nothing else, whatever the unit, the order and the density."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_push import transform
from neuron_push.transform import HostMover, Rows


@st.composite
def moves(draw):
    unit = draw(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 256]))
    align = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8, 16, 256) if unit % n == 0]))
    count = draw(st.integers(1, 20))
    scale = unit // align
    order = draw(st.permutations(range(30)))
    shift = draw(st.integers(0, scale))
    places = [[(n * scale + shift) * align for n in order[:count]] for _ in "sd"]
    places[1] = [(n * scale) * align for n in draw(st.permutations(range(30)))[:count]]
    dense = draw(st.sampled_from(["source", "destination", "both", "neither"]))
    return unit, align, count, places, dense


@given(moves())
def test_rows_arrive_and_nothing_else_changes(case):
    unit, align, count, places, dense = case
    rng = np.random.default_rng(1)
    memory = [rng.integers(0, 256, 32 * unit, dtype=np.uint8) for _ in "sd"]
    starts = [
        [i * unit for i in range(count)] if dense in (side, "both") else places[index]
        for index, side in enumerate(("source", "destination"))
    ]
    expected = memory[1].copy()
    for read, write in zip(*starts, strict=True):
        expected[write : write + unit] = memory[0][read : read + unit]
    ends = [
        array.ctypes.data
        if dense in (side, "both")
        else array.ctypes.data + np.array(places[index], np.int64)
        for index, (side, array) in enumerate(zip(("source", "destination"), memory, strict=True))
    ]
    rows = Rows(unit, align, count, *ends)
    assert rows.nbytes == unit * count
    assert HostMover().move([rows]).done()
    assert np.array_equal(memory[1], expected)


def test_large_moves_go_in_batches(monkeypatch):
    monkeypatch.setattr(transform, "BATCH_BYTES", 64)
    source = np.arange(1000, dtype=np.uint32)
    target = np.zeros_like(source)
    order = np.random.default_rng(2).permutation(1000)
    rows = Rows(4, 4, 1000, source.ctypes.data + order * 4, target.ctypes.data + order * 4)
    HostMover().move([rows])
    assert np.array_equal(source, target)


@pytest.mark.parametrize("rows", [[], [Rows(8, 8, 0, np.empty(0, np.int64), 4096)]])
def test_no_rows_touch_no_memory(rows):
    assert HostMover().move(rows).done()
