"""Packing and unpacking beside the transfer thread: nothing goes on before it has ended."""

import numpy as np
import pytest

from neuron_push.errors import PlanError
from neuron_push.geometry import Region
from neuron_push.plan import staged
from neuron_push.protocol import Done, Slabs
from neuron_push.rendezvous.events import Post, Unpack, Unpacked, WriteEnded
from neuron_push.transfer.stager import Stager, bound, failed
from tests import fleet


class SlowMover:
    """Moves end when the test says so."""

    def __init__(self):
        self.moves = []

    def move(self, rows):
        self.moves.append(move := Move(rows))
        return move


class Move:
    def __init__(self, rows):
        self.rows, self.answers = rows, [False]

    def done(self):
        answer = self.answers[0]
        if len(self.answers) > 1:
            self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def pair(way):
    prefill = fleet.engine("neuron", tokens=16, blocks=[2, 1], heads=1, layers=1)
    decode = fleet.engine("interleaved", tokens=16, blocks=[1, 2], heads=1, layers=1)
    sides = prefill.geometries[0], decode.geometries[0]
    return prefill, decode, staged(*sides, fleet.everything(sides[1]), way, 1 << 14, min_run=1)


MEMORY = np.zeros(2 << 14, np.uint8)
SLABS = Slabs(Region(MEMORY.ctypes.data, MEMORY.nbytes, "DRAM", 0), 1 << 14)


SLAB = SLABS.slab(1)


def post(way="packed", slab=SLAB, generation=1):
    prefill, decode, plan = pair(way)
    return Post(5, generation, "d", plan, decode.geometries[0], tuple(prefill.lists),
                tuple(decode.lists), Done(1, 0, 32), (plan.packs and slab) or None,
                (plan.unpacks and slab) or None)  # fmt: skip


def unpack():
    _, decode, plan = pair("unpacked")
    return Unpack(9, plan, 0, 32, tuple(decode.lists), 1)


def test_a_write_waits_for_its_slab():
    mover = SlowMover()
    stager = Stager(SLABS, lambda: mover)
    action = post()
    stager.pack(action)
    assert list(stager.poll()) == []
    (rows,) = mover.moves[0].rows
    assert np.min(rows.destination) == SLABS.region.base + SLABS.slab_bytes
    mover.moves[0].answers = [True]
    assert list(stager.poll()) == [action] and list(stager.poll()) == []


def test_unpacking_is_answered_when_it_has_ended():
    mover = SlowMover()
    stager = Stager(SLABS, lambda: mover)
    stager.unpack(unpack())
    assert list(stager.poll()) == []
    mover.moves[0].answers = [True]
    assert list(stager.poll()) == [Unpacked(9)]


@pytest.mark.parametrize(
    ("start", "action", "answer"),
    [
        ("pack", post(), WriteEnded(5, "unposted", "device lost")),
        ("unpack", unpack(), Unpacked(9, "cannot unpack: device lost")),
    ],
)
def test_a_move_that_fails_fails_its_transfer(start, action, answer):
    mover = SlowMover()
    stager = Stager(SLABS, lambda: mover)
    getattr(stager, start)(action)
    mover.moves[0].answers = [RuntimeError("device lost")]
    assert list(stager.poll()) == [answer] and list(stager.poll()) == []
    assert failed(action, RuntimeError("device lost")) == answer


def test_a_closed_generation_is_not_packed_for_any_more():
    mover = SlowMover()
    stager = Stager(SLABS, lambda: mover)
    stager.pack(post(generation=1))
    stager.pack(post(generation=2))
    mover.moves[0].answers = [False, False, True]
    stager.finish(1)
    assert mover.moves[0].answers == [True]
    mover.moves[1].answers = [True]
    assert [action.generation for action in stager.poll()] == [2]


def test_a_rank_that_cannot_reorder_says_so():
    with pytest.raises(PlanError, match="cannot reorder"):
        Stager(SLABS, None).pack(post())
    with pytest.raises(PlanError, match="no slabs"):
        Stager(None, SlowMover).unpack(unpack())


@pytest.mark.parametrize(("way", "side"), [("packed", 1), ("unpacked", 2)])
def test_the_staged_end_of_a_write_lies_in_the_slab(way, side):
    action = post(way)
    found = bound(action, pair(way)[0].geometries[0])
    slab = action.slab or action.granted
    rows = found[side]
    assert (rows[:, 0] >= slab.base).all()
    assert (rows[:, 0] + rows[:, 1] <= slab.base + slab.length).all()
    assert found[0].nbytes == int(rows[:, 1].sum())


@pytest.mark.parametrize("slab", [None, Region(4096, 64, "DRAM", 0)])
def test_a_staged_write_needs_a_slab_that_holds_it(slab):
    with pytest.raises(PlanError, match="without a slab"):
        bound(post(slab=slab), pair("packed")[0].geometries[0])
