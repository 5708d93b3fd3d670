"""Messages that nobody should send: they must neither raise nor touch anybody's request."""

from __future__ import annotations

from neuron_push.protocol import (
    Alive,
    BlockList,
    Cancel,
    Cancelled,
    Done,
    Failed,
    Grant,
    Hello,
    Kept,
    Lend,
    Match,
    Move,
    Moved,
    Need,
    Refusal,
    Register,
    Registered,
    Return,
    Soon,
    Taken,
    Welcome,
)
from neuron_push.rendezvous import events as ev
from neuron_push.rendezvous.attempt import number_of
from neuron_push.rendezvous.links import owns
from tests.rendezvous.shapes import BLOCKS, SEMANTICS

SIDES = ("prefill", "decode")
HUGE = 2**63 - 1
NOWHERE = 10**9  # an attempt number that no engine reaches
STRANGERS = ("nobody/0/1/0", "P0/0/7/0", "D0/0/7/0", "", "/", "P0/0/1/" + "9" * 5000, "D0/0/1/x")

BLOCK_LISTS = (
    (),
    (BlockList(0, (1, 3)), BlockList(0, (1, 3))),  # wrong group count
    (BlockList(0, (1, BLOCKS)),),
    (BlockList(0, (BLOCKS, 1)),),
    (BlockList(0, (HUGE, HUGE)),),
    (BlockList(0, (2**63, 1)),),
    (BlockList(0, (-5, 3)),),
    (BlockList(0, (5, -3)),),
    (BlockList(0, (5,)),),
    (BlockList(-1, (1, 9)),),
    (BlockList(HUGE, (1, 9)),),
    (BlockList(0, (1, 1)),),  # too short
)


def registers(rng, link: int = 0):
    """A registration that no prefill rank can serve."""
    match = Match(rng.choice(["", "t0", "x"]), "b0", rng.choice([b"", b"prompt0"]), 40)
    blocks = rng.choice(BLOCK_LISTS)
    return Register(NOWHERE + rng.randrange(5), link, match, 0, 40, blocks,
                    rng.choice([0, 5, 2**62]), bool(blocks) and rng.random() < 0.3)  # fmt: skip


def messages(rng, link: int = 0):
    """One message of any type about an attempt that does not exist."""
    attempt = rng.choice([NOWHERE, HUGE, 2**64 - 1])
    return rng.choice([
        registers(rng, link), Registered(attempt), Soon(attempt), Done(attempt, 0, 4),
        Done(attempt, HUGE - 1, HUGE), Failed(attempt, "?" * 600), Cancel(attempt, "no"),
        Done(attempt, 0, 4, piece=1), Need(attempt, 1), Return(attempt, 1),
        Grant(attempt, 1, rng.choice([0, -1, HUGE])), Cancelled(attempt), Alive(True), Alive(False),
        Move(rng.choice(SIDES), rng.choice(STRANGERS), b"x"),
        Moved(rng.choice(SIDES), rng.choice(STRANGERS)),
        Taken(attempt, link), Kept(attempt, link), Lend(attempt, link, rng.choice(BLOCK_LISTS)),
    ])  # fmt: skip


def about(rng, attempt: int):
    """One message about a real attempt, for a stranger to send."""
    return rng.choice([
        Registered(attempt), Soon(attempt), Done(attempt, 0, 4), Failed(attempt, "forged"),
        Cancel(attempt, "forged"), Cancelled(attempt), Need(attempt, 1), Grant(attempt, 1, 0),
        Return(attempt, 1), Done(attempt, 0, 4, piece=1), Taken(attempt, 1),
        Kept(attempt, 1), Lend(attempt, 1, rng.choice(BLOCK_LISTS)),
    ])  # fmt: skip


def pester(world, process):
    """One absurd event for a process; whatever it does, the promises are checked as ever."""
    rng = world.rng
    links = list(process.core.links)
    known = rng.choice(links) if links else None
    stranger = rng.choice(STRANGERS)
    number = rng.randint(1, 20)
    hello = Hello(
        stranger.partition("/")[0], rng.choice([0, -1, HUGE]), rng.choice([0, -1, 7]), number,
        SEMANTICS, process.identity.geometry, stranger, b"", rng.choice([(), ((99,),), ((0,),)]),
        rng.choice([-1, 1, HUGE]),
    )  # fmt: skip
    welcome = Welcome("D0", 0, 1, rng.choice(STRANGERS), b"")
    # What is drawn unseen of a known link's own traffic would be that peer's own mischief.
    event = rng.choice([
        ev.Garbage(stranger, "noise"), ev.Unreachable(stranger, "who?"),
        ev.Notified(stranger, about(rng, number_of(number))), ev.Notified(stranger, messages(rng)),
        ev.WriteEnded(NOWHERE, rng.choice(["done", "broken", "unposted"])),
        ev.ReadEnded(NOWHERE, rng.choice(["done", "broken", "unposted"])),
        ev.Greeted(NOWHERE, rng.choice([welcome, Refusal("no")])), ev.Closed(NOWHERE),
        ev.HelloArrived(None, hello), ev.EngineMissing(process.address, "?"),
        *([ev.Notified(known.agent, messages(rng, known.hello))] if known else []),
    ])  # fmt: skip
    if isinstance(event, ev.HelloArrived):
        # One that passes for an engine's own, old or new, may end that engine's link.
        passes = owns(hello.engine, hello.rank, hello.incarnation, hello.agent)
        if not passes:
            answer = process.core.handle(event, world.now)[-1]
            world.check(isinstance(answer.message, Refusal), f"{process} welcomed {hello}")
        return
    process.later(0.0, event)
