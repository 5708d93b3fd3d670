"""Rows move what they say and nothing else, whatever the unit, the order and the density."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_push import hostmover, machinecode
from neuron_push.hostmover import HostMover
from neuron_push.transform import Axis, Grid, Rows


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
    monkeypatch.setattr(hostmover, "BATCH_BYTES", 64)
    source = np.arange(1000, dtype=np.uint32)
    target = np.zeros_like(source)
    order = np.random.default_rng(2).permutation(1000)
    rows = Rows(4, 4, 1000, source.ctypes.data + order * 4, target.ctypes.data + order * 4)
    HostMover().move([rows])
    assert np.array_equal(source, target)


@pytest.mark.parametrize("rows", [[], [Rows(8, 8, 0, np.empty(0, np.int64), 4096)]])
def test_no_rows_touch_no_memory(rows):
    assert HostMover().move(rows).done()


@st.composite
def grids(draw):
    """A grid whose places do not overlap on either side, axes in any order, steps of any sign."""
    unit = 8 * draw(st.sampled_from([1, 3, 8, 11, 32, 40, 64, 512]))
    sizes = draw(st.lists(st.integers(1, 4), max_size=machinecode.AXES))
    sides = []
    for _ in "sd":
        order = draw(st.permutations(range(len(sizes))))
        steps, step = [0] * len(sizes), unit
        for axis in order:
            step += draw(st.sampled_from([0, 1, 8, 100]))
            steps[axis] = step * draw(st.sampled_from([1, -1]))
            step *= sizes[axis]
        sides.append((steps, step))
    return unit, sizes, sides


def laid_out(case):
    """The grid of a case, memory of both sides, and what the destination is to hold then."""
    unit, sizes, sides = case
    rng = np.random.default_rng(1)
    memory = [rng.integers(0, 256, 2 * length + unit, dtype=np.uint8) for _, length in sides]
    starts = [length for _, length in sides]  # in the middle, as steps go either way
    expected = memory[1].copy()
    for place in np.ndindex(*sizes):
        read, write = (
            start + sum(n * step for n, step in zip(place, steps, strict=True))
            for start, (steps, _) in zip(starts, sides, strict=True)
        )
        expected[write : write + unit] = memory[0][read : read + unit]
    axes = tuple(map(Axis, sizes, sides[0][0], sides[1][0]))
    source, destination = (m.ctypes.data + start for m, start in zip(memory, starts, strict=True))
    return Grid(unit, source, destination, axes), memory, expected


@given(grids())
def test_a_grid_arrives_by_machine_code_as_by_numpy_and_nothing_else_changes(case):
    for copy in (machinecode.copy, hostmover._copy_grid):
        grid, memory, expected = laid_out(case)
        assert copy(grid) is not False
        assert np.array_equal(memory[1], expected)


@pytest.mark.parametrize(
    ("unit", "axes"), [(12, 1), (machinecode.LONG + 8, 1), (8, machinecode.AXES + 1)]
)
def test_machine_code_leaves_what_it_is_not_for(unit, axes):
    grid, memory, expected = laid_out(
        (unit, [2] * axes, [([unit << n for n in range(axes)], unit << axes)] * 2)
    )
    before = memory[1].copy()
    assert machinecode.copy(grid) is False
    assert np.array_equal(memory[1], before)
    hostmover._copy_grid(grid)
    assert np.array_equal(memory[1], expected)


def moved(monkeypatch, machine):
    """A grid moved by a HostMover with this machine code."""
    monkeypatch.setattr(hostmover, "_machine", machine)
    grid, memory, expected = laid_out((8, [3, 4], [([64, 16], 200), ([8, 24], 200)]))
    HostMover().move([Rows(8, 8, 12, grid.source, grid.destination, (grid,))])
    assert np.array_equal(memory[1], expected)


def test_machine_code_is_loaded_from_the_first_grid_on(monkeypatch):
    machine = hostmover._MachineCode()
    moved(monkeypatch, machine)
    assert hostmover.load_machine_code()
    assert machine.copy is machinecode.copy
    moved(monkeypatch, machine)


def test_without_numba_numpy_copies(monkeypatch):
    monkeypatch.setitem(sys.modules, "neuron_push.machinecode", None)
    monkeypatch.delattr("neuron_push.machinecode")
    machine = hostmover._MachineCode()
    moved(monkeypatch, machine)
    assert not hostmover.load_machine_code()
    moved(monkeypatch, machine)
