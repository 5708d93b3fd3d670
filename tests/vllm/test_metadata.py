"""What travels between the halves survives pickling, and nothing costs next to nothing."""

import pickle

from neuron_push.commands import Abandon, Near, Offer, Receive, Retire, Settle, pack_ids
from neuron_push.protocol import Address, Match
from neuron_push.vllm.metadata import IDLE, NOTHING, StepMeta, WorkerMeta, pack

IDS = pack_ids([5, 0, 70_000])
MATCH = Match("t#0", "cmpl-1-0", b"\x01" * 16, 100)
COMMANDS = (
    Receive(1, "r", Address("h", 1), "e", MATCH, 16, 100, (1,), (IDS,), 3, 2.5, True),
    Abandon(1, "why"), Offer(2, "q", MATCH), Near(2), Settle(2, 64, (0,), (IDS,), 4, False),
    Retire(2, "finished"),
)  # fmt: skip


def through(meta):
    return pickle.loads(pickle.dumps(meta, protocol=pickle.HIGHEST_PROTOCOL))


def test_a_step_in_which_nothing_happened_is_small():
    for meta in (NOTHING, IDLE):
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert len(pickle.dumps(meta, protocol)) < 200


def test_what_travels_is_plain():
    """Pickling an object of a class costs several times as much, in every step of an engine."""
    for meta in (NOTHING, IDLE, pack(COMMANDS[:4], COMMANDS[4:], (), (), False, 0)):
        assert type(through(meta)) is tuple
        assert through(meta) == meta
        assert b"neuron" not in pickle.dumps(meta)


def test_everything_survives():
    meta = StepMeta.of(COMMANDS, (("r9", "bad params", (1, 2)),), ((4, "q"),), idle=True)
    back = StepMeta(*through(tuple(meta)))
    assert back.commands == COMMANDS
    assert [type(command) for command in back.commands] == [type(c) for c in COMMANDS]
    assert back.commands[0].blocks == (IDS,)
    assert back.attempts == (1,)
    assert back.handed == ((4, "q"),)
    assert back.rejected == meta.rejected
    assert back.idle


def test_ranks_are_joined():
    left, right = WorkerMeta(((1, 0), (2, 0))), WorkerMeta(((1, 1),))
    both = left.aggregate(right)
    assert through(both).unpinned == ((1, 0), (2, 0), (1, 1))
    assert left.unpinned == ((1, 0), (2, 0))
