"""Engines that come back: the next request succeeds, and nobody else has to be restarted."""

from __future__ import annotations

import pytest

from neuron_push.protocol import Cancel, Cancelled, Hello, Match, Register, Soon
from neuron_push.rendezvous.events import HelloArrived, Unreachable
from tests.rendezvous.net import CONFIG, Faults
from tests.rendezvous.shapes import Shape
from tests.rendezvous.stories import Story
from tests.rendezvous.world import World

ONE = Shape()


def request(world, number, within=0.5):
    """One request from P0 to D0; returns the attempt."""
    match = Match(f"t{number}", f"b{number}", f"prompt{number}".encode(), 21)
    decode, prefill = world.engines["D0"], world.engines["P0"]
    attempt = decode.receive(match, f"prompt{number}", "P0")
    source = prefill.offer(match)
    prefill.settle(source, f"prompt{number}", 0, 21, 21, last=True)
    prefill.retire(source, "finished")
    world.run(within)
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


@pytest.mark.parametrize("shape", [Shape(), Shape(2), Shape(1, 2)], ids=str)
@pytest.mark.parametrize("name", ["P0", "D0"])
@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
def test_the_first_request_succeeds_even_right_after_a_restart(name, told, shape):
    world = pair(shape)
    for number in range(4):
        world.chance = lambda chance: told and chance > 0  # whether transports know of the death
        world.crash(name, restart_after=0.01)
        world.run(0.1)
        assert request(world, number, within=CONFIG.silence + 1.0).reported == {0: True}
    world.settle_down()
    assert world.counts["registrations", ""] < 40


def test_a_prefill_engine_that_had_given_decode_up_is_greeted_again_for_the_first_request():
    world = pair()
    request(world, 1)
    prefill = world.engines["P0"].processes[0]
    (link,) = prefill.core.links
    prefill.feed(Unreachable(link.agent, "injected"))
    began = world.now
    attempt = request(world, 2, within=2 * CONFIG.silence)
    assert attempt.reported == {0: True} and world.now - began < 3 * CONFIG.silence
    world.settle_down()


def test_a_prefill_engine_that_is_gone_is_told_within_its_silence():
    world = pair()
    request(world, 1)
    world.chance = lambda probability: False
    world.crash("P0", restart_after=1e6)
    decode = world.engines["D0"]
    match = Match("t2", "b2", b"prompt2", 21)
    attempt = decode.receive(match, "prompt2", "P0")
    world.run(CONFIG.silence + 0.3)
    assert attempt.reported == {0: False}


def test_a_client_that_leaves_while_its_request_looks_again_is_told_at_once():
    world = pair()
    request(world, 1)
    world.chance = lambda probability: False
    world.crash("P0", restart_after=0.01)
    attempt = world.engines["D0"].receive(Match("t2", "b2", b"prompt2", 21), "prompt2", "P0")
    core = world.engines["D0"].processes[0].core
    while not any(each.again for each in core.consumer.attempts.values()):
        world.step()
    world.engines["D0"].abandon(attempt)
    world.run(0.01)
    assert attempt.reported == {0: False}
    world.settle_down()


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_what_was_said_of_a_registration_says_nothing_of_the_one_made_anew(pull):
    shapes = {"P0": ("producer", Shape(2)), "D0": ("consumer", Shape())}
    world = World(1, shapes, Faults(write_slow=0.05))
    request(world, 1)
    held, send = [], world.deliver

    def hold_back(sender, target, message):
        """Prefill hears no registration, and the word of its end goes astray for a while."""
        if isinstance(message, Cancel | Cancelled):
            held.append((sender, target, message))
        if not isinstance(message, Register | (Cancel if pull else Soon)):
            send(sender, target, message)

    world.deliver = hold_back
    prefill, decode = world.engines["P0"], world.engines["D0"]
    match = Match("t2", "b2", b"prompt2", 21)
    attempt = decode.receive(match, "prompt2", "P0", pull=pull)
    world.run(0.1)
    decode.processes[0].feed(Unreachable("P0/0/1/0", "injected"))
    world.run(0.1)
    assert held
    world.deliver = send
    source = prefill.offer(match)
    prefill.settle(source, "prompt2", 0, 21, 21, last=True)
    prefill.retire(source, "finished")
    while not any(p.writes for p in prefill.processes) and not decode.processes[0].reads:
        world.step()
    for letter in held:
        send(*letter)
    world.run(1.0)
    assert attempt.reported == {0: True}
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


def test_a_hello_whose_agent_was_replaced_on_its_way_is_said_again():
    story = Story()
    world, decode, other = story.world, story.decode, story.world.engines["P1"]
    story.until(story.moving)
    delays = iter([0.001, 0.001, 1.0])  # who is there, the answer, and a hello that takes its time
    world.side_delay = lambda: next(delays, 0.001)
    match = Match("u", "c", b"other", 8)
    attempt = decode.receive(match, "other", "P1")
    source = other.offer(match)
    other.settle(source, "other", 0, 8, 8, last=True)
    other.retire(source, "finished")
    story.until(lambda: any(route.greetings for route in routes_of(decode)))
    assert story.moving()
    story.lose(decode)
    world.run(3.0)
    assert decode.processes[0].core.generations._context.generation > 0
    assert attempt.reported == {0: True}
    world.settle_down()


def routes_of(engine):
    return engine.processes[0].core._routes._routes.values()


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
