"""Engines that come back: the next request succeeds, and nobody else has to be restarted."""

from __future__ import annotations

import pytest

from neuron_push.protocol import Hello, Match
from neuron_push.rendezvous.events import HelloArrived, Unreachable
from tests.rendezvous.net import CONFIG, Faults
from tests.rendezvous.shapes import Shape
from tests.rendezvous.world import World

ONE = Shape()


def request(world, number):
    """One request from P0 to D0; returns the attempt."""
    match = Match(f"t{number}", f"b{number}", f"prompt{number}".encode(), 21)
    decode, prefill = world.engines["D0"], world.engines["P0"]
    attempt = decode.receive(match, f"prompt{number}", "P0")
    source = prefill.offer(match)
    prefill.settle(source, f"prompt{number}", 0, 21, 21, last=True)
    prefill.retire(source, "finished")
    world.run(0.5)
    return attempt


def pair(shape=ONE):
    return World(1, {"P0": ("producer", shape), "D0": ("consumer", Shape())}, Faults())


@pytest.mark.parametrize("shape", [Shape(), Shape(2), Shape(1, 2)], ids=str)
@pytest.mark.parametrize("name", ["P0", "D0"])
def test_the_next_request_succeeds_after_a_restart_on_the_same_port(name, shape):
    world = pair(shape)
    for number in range(4):
        assert request(world, number).reported == {0: True}
        world.crash(name, restart_after=CONFIG.silence)
        world.run(1.0)
    assert request(world, 9).reported == {0: True}
    world.settle_down()


def test_an_idle_link_to_the_same_engine_is_used_on():
    world = pair()
    for number in range(3):
        assert request(world, number).reported == {0: True}
        world.run(5.0)
    assert world.counts["links_lost", ""] == 0
    (link,) = world.engines["D0"].processes[0].core.links
    assert link.hello == 1


def test_a_hello_that_was_overtaken_does_not_mute_a_pair_for_ever():
    world = pair()
    request(world, 1)
    prefill, decode = (world.engines[name].processes[0] for name in ("P0", "D0"))
    (link,) = prefill.core.links
    me, agent = decode.identity, decode.open[0]
    late = Hello(me.engine, 0, me.incarnation, 0, me.semantics, me.geometry, agent,
                 agent.encode(), ((0, 1, 2, 3),), 1)  # fmt: skip
    prefill.feed(Unreachable(link.agent, "injected"))
    prefill.feed(HelloArrived((decode, -1, True), late))
    assert request(world, 2).reported == {}
    world.run(2 * CONFIG.silence)
    assert request(world, 3).reported == {0: True}
    world.settle_down()


def test_many_restarts_leave_nothing_behind():
    world = pair()
    for number in range(30):
        request(world, number)
        world.crash("D0" if number % 2 else "P0", restart_after=0.01)
        world.run(CONFIG.silence)
    world.settle_down()
    for engine in world.engines.values():
        for process in engine.processes:
            assert len(process.core.links) <= 1
            assert sum(map(len, process.loaded.values())) <= 1
