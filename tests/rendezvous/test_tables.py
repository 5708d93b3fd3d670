"""The transition tables are the machines: nothing leaves them, and nothing in them is dead."""

from __future__ import annotations

from collections import defaultdict

import pytest

from neuron_push.errors import ProtocolError
from neuron_push.protocol import (
    Alive,
    BlockList,
    Cancel,
    Cancelled,
    Done,
    Failed,
    Grant,
    Kept,
    Lend,
    Match,
    Move,
    Moved,
    Need,
    Notification,
    Register,
    Registered,
    Return,
    Soon,
    Taken,
)
from neuron_push.rendezvous import events as ev
from neuron_push.rendezvous.attempt import ATTEMPT_MOVES, Attempt, AttemptState, number_of
from neuron_push.rendezvous.cuts import Cut
from neuron_push.rendezvous.producer import SENDING_MOVES, Sending, SendingState
from tests.rendezvous.profiles import PROFILES
from tests.rendezvous.scenario import run
from tests.rendezvous.stories import Story, enter_attempt, enter_sending

MATCH = Match("t", "b", b"prompt", 40)
N = number_of(1)
MESSAGES = [
    Register(N, 1, MATCH, 0, 40, (BlockList(0, (1, 10)),), 1000),
    Register(N, 1, MATCH, 40, 40, (BlockList(10, ()),), 1000),
    Register(N, 2, MATCH, 0, 40, (), 0),
    Registered(N), Soon(N), Done(N, 0, 12), Done(N, 0, 4000), Failed(N, "no"), Cancel(N, "no"),
    Done(N, 0, 12, piece=1), Need(N, 1), Grant(N, 1, 0), Return(N, 1),
    Register(N, 1, MATCH, 0, 40, (), 1000, pull=True), Lend(N, 1, (BlockList(0, (1, 10)),)),
    Lend(N, 1, (BlockList(0, (1, 3)),)), Taken(N, 1), Taken(N, 2),
    Register(N, 1, MATCH, 0, 40, (BlockList(0, (1, 10)),), 1000, pull=True), Kept(N, 1, b"d"),
    Kept(N, 1), Lend(N, 2, (BlockList(0, (1, 10)),)),
    Cancelled(N), Alive(True), Alive(False),
    Move("prefill", "P0/0/1/5", b"P0/0/1/5"), Move("decode", "D0/0/1/5", b"D0/0/1/5"),
    Moved("prefill", "D0/0/1/0"), Moved("decode", "P0/0/1/0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "table", "states"),
    [(Attempt, ATTEMPT_MOVES, AttemptState), (Sending, SENDING_MOVES, SendingState)],
    ids=["attempt", "sending"],
)
def test_random_worlds_use_every_transition_of_the_table_and_no_other(
    machine, table, states, monkeypatch
):
    used = defaultdict(set)
    original = machine.move

    def move(self, state):
        used[self.state].add(state)
        original(self, state)

    monkeypatch.setattr(machine, "move", move)
    for name in ("chaos", "preemption", "aborts", "false deaths", "reordering"):
        for seed in range(10):
            run(seed, PROFILES[name])
    assert set(table) == set(states)
    assert dict(used) == {state: moves for state, moves in table.items() if moves}


@pytest.mark.parametrize(("table", "end"), [
    (ATTEMPT_MOVES, AttemptState.ENDED), (SENDING_MOVES, SendingState.ENDED),
], ids=["attempt", "sending"])  # fmt: skip
def test_every_state_leads_to_the_end_and_the_end_to_nothing(table, end):
    assert table[end] == set()
    assert all(end in moves for state, moves in table.items() if state is not end)


@pytest.mark.parametrize("table", [ATTEMPT_MOVES, SENDING_MOVES], ids=["attempt", "sending"])
def test_a_move_outside_the_table_is_a_defect(table):
    for state, moves in table.items():
        for other in set(table) - moves:
            if isinstance(state, AttemptState):
                machine = Attempt(None, 0.0, 0.0, state)
                machine.command = MESSAGES[0]
            else:
                machine = Sending(None, MESSAGES[0], (), Cut(4, 8), Cut(4, 8), 0.0, 0.0, state)
            with pytest.raises(ProtocolError):
                machine.move(other)


def test_a_message_of_every_type_is_tried():
    kinds = {type(message) for message in MESSAGES}
    assert kinds == set(Notification.__args__)


STATES = [(enter_attempt, state) for state in AttemptState]
STATES += [(enter_sending, state) for state in SendingState]


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize(("enter", "state"), STATES, ids=lambda x: getattr(x, "name", None))
def test_every_message_is_handled_in_every_state_on_either_side(enter, state, message, pull):
    story = Story(pull=pull)
    enter(story, state)
    now = story.world.now
    sides = [(story.decode, "P0/0/1/0"), (story.prefill, "D0/0/1/0")]
    for side, agent in sides:
        core = side.processes[0].core
        for _ in range(2):
            core.handle(ev.Notified(agent, message), now)
        core.tick(now + 0.1)
