"""Every limit has a name, refuses what lies beyond it by that name, and may be set."""

from __future__ import annotations

import time

import msgspec
import pytest

from neuron_push.config import Config
from neuron_push.errors import ConfigError, NeuronPushError
from neuron_push.geometry import check
from neuron_push.limits import Limits
from neuron_push.protocol import (
    Address,
    Alive,
    EngineInfo,
    Match,
    RankInfo,
    Who,
    decode_notification,
    decode_side_channel,
    encode,
)
from neuron_push.rendezvous.routes import check_slabs
from neuron_push.sidechannel import Client
from tests.rendezvous.net import Faults
from tests.rendezvous.shapes import SEMANTICS, Shape
from tests.rendezvous.world import World

SHAPE = Shape(slabs=2)
GEOMETRY = SHAPE.geometry(0)  # one group, two layers: two regions, four planes, four heads
RANK = RankInfo(0, 1, Address("h", 1), GEOMETRY)


def long_notification(limits):
    decode_notification(encode(Alive(True)) + bytes(1 << 16), limits)


def long_question(limits):
    decode_side_channel(encode(Who()) + bytes(1 << 16), limits)


def two_ranks(limits):
    info = EngineInfo("p", 1, "producer", 2, 2, 1, 0, ("push",), SEMANTICS, (RANK, RANK))
    decode_side_channel(encode(info), limits)


def two_questions(limits):
    client = Client(limits=limits)
    try:
        for number in range(2):
            client.ask(number, Address("127.0.0.1", 9), Who(), 1.0, time.monotonic())
    finally:
        client.close()


def two_groups(limits):
    check(msgspec.structs.replace(GEOMETRY, groups=GEOMETRY.groups * 2), limits)


def requests(limits):
    """Two requests of one decode rank and one of another: the first reason that is heard."""
    roles = {"P0": "producer", "D0": "consumer", "D1": "consumer"}
    shapes = {name: (role, Shape()) for name, role in roles.items()}
    world = World(0, shapes, Faults(), limits=limits)
    for number, engine in enumerate(["D0", "D0", "D1"]):
        match = Match(f"t{number}", f"b{number}", b"prompt", 40)
        world.engines[engine].receive(match, f"prompt {number}", "P0")
    world.run(0.5)
    return world.reasons


def refused(limits):
    reasons = requests(limits)
    if reasons:
        raise NeuronPushError(" ".join(map(str, reasons)))


BEYOND = {
    "notification": (1 << 16, long_notification),
    "side_channel": (1 << 16, long_question),
    "questions": (1, two_questions),
    "links": (1, refused),
    "registrations": (1, refused),
    "blocks": (9, refused),
    "blocks_in_all": (19, refused),
    "slabs": (1, lambda limits: check_slabs(SHAPE.staging(), GEOMETRY, limits)),
    "ranks": (1, two_ranks),
    "regions": (1, lambda limits: check(GEOMETRY, limits)),
    "groups": (1, two_groups),
    "planes": (3, lambda limits: check(GEOMETRY, limits)),
    "heads": (3, lambda limits: check(GEOMETRY, limits)),
}


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_what_lies_beyond_a_limit_is_refused_by_its_name(name):
    most, attempt = BEYOND[name]
    with pytest.raises(NeuronPushError, match=rf"limits\.{name}\b"):
        attempt(Limits(**{name: most}))


def test_requests_within_the_limits_are_not_refused():
    assert not requests(Limits(links=2, registrations=2, blocks=10, blocks_in_all=20))


def test_what_has_ended_counts_no_more():
    world = World(0, {"P0": ("producer", Shape()), "D0": ("consumer", Shape())}, Faults(),
                  limits=Limits(registrations=1, blocks_in_all=10))  # fmt: skip
    for number in range(3):
        match = Match(f"t{number}", f"b{number}", b"prompt", 40)
        world.engines["D0"].receive(match, f"prompt {number}", "P0")
        source = world.engines["P0"].offer(match)
        world.engines["P0"].settle(source, f"prompt {number}", 0, 40, 40, last=True)
        world.engines["P0"].retire(source, "finished")
        world.run(1.0)
    assert world.outcomes["Received"] == 3 and not world.reasons


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"limits": {"link": 3}}, r"unknown setting 'limits.link'.* did you mean 'limits.links'"),
        ({"limits": {"links": 0}}, r">= 1.*limits.links"),
        ({"limits": {"links": "many"}}, r"limits.links"),
        ({"limits": 3}, r"limits"),
    ],
)
def test_a_limit_that_is_none_is_refused_in_words(given, words):
    with pytest.raises(ConfigError, match=words):
        Config.parse(given, {})


def test_limits_are_set_by_name_and_the_others_stay():
    assert Config.parse({"limits": {"links": "64"}}, {}).limits == Limits(links=64)
