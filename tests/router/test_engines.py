from __future__ import annotations

import pytest

from neuron_push.errors import ConfigError
from neuron_push.protocol import Address
from neuron_push.router.engines import Engine
from neuron_push.router.fleet import Fleet, NoPair
from neuron_push.router.places import Place
from tests.router.fleet import who


@pytest.mark.parametrize(
    ("text", "url", "host", "port"),
    [
        ("http://10.0.0.1:8100", "http://10.0.0.1:8100", "10.0.0.1", 5600),
        ("http://a:8100/", "http://a:8100", "a", 5600),
        ("http://a:8100#side=5700", "http://a:8100", "a", 5700),
        ("https://a/x#side=b:5700", "https://a/x", "b", 5700),
        ("http://a:8100,side=b:5700", "http://a:8100", "b", 5700),
        ("http://[::1]:8100", "http://[::1]:8100", "::1", 5600),
        ("http://[::1]:8100#side=[::2]:9", "http://[::1]:8100", "::2", 9),
    ],
)
def test_places(text, url, host, port):
    assert Place.parse(text, 5600) == Place(url, Address(host, port))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a:8100",
        "ftp://a",
        "http://",
        "http://a#port=1",
        "http://a#side=",
        "http://a#side=b",
        "http://a#side=b:x",
        "http://a#side=0",
        "http://a#side=65536",
    ],
)
def test_wrong_places_are_refused_by_name(text):
    with pytest.raises(ConfigError, match=r".+"):
        Place.parse(text, 5600)


def make(leg, number, free=-1):
    engine = Engine(leg, Place(f"http://{leg}{number}", Address("h", number)))
    role = {"prefill": "kv_producer", "decode": "kv_consumer"}[leg]
    engine.seen(who(f"{leg}{number}", role=role, free_blocks=free))
    return engine


def test_the_least_loaded_pair_is_chosen():
    fleet = Fleet([make("prefill", 0), make("prefill", 1)], [make("decode", 0), make("decode", 1)])
    fleet.prefill[0].in_flight = fleet.decode[1].in_flight = 1
    pair = fleet.choose()
    assert (pair.prefill, pair.decode) == (fleet.prefill[1], fleet.decode[0])


def test_free_blocks_break_a_tie():
    fleet = Fleet([make("prefill", 0)], [make("decode", 0, 10), make("decode", 1, 20)])
    assert fleet.choose().decode is fleet.decode[1]
    fleet.decode[1].in_flight = 1
    assert fleet.choose().decode is fleet.decode[0]


def test_equals_take_turns():
    fleet = Fleet([make("prefill", 0), make("prefill", 1)], [make("decode", 0), make("decode", 1)])
    pairs = [fleet.choose() for _ in range(4)]
    assert {pair.prefill.place.url for pair in pairs} == {"http://prefill0", "http://prefill1"}
    assert {pair.decode.place.url for pair in pairs} == {"http://decode0", "http://decode1"}


def test_an_engine_that_has_not_answered_is_not_chosen():
    silent = Engine("decode", Place("http://silent", Address("h", 1)))
    fleet = Fleet([make("prefill", 0)], [silent])
    with pytest.raises(NoPair, match="http://silent: not asked yet"):
        fleet.choose()


def test_both_serves_either_leg():
    for leg in ("prefill", "decode"):
        engine = Engine(leg, Place("http://x", Address("h", 1)))
        engine.seen(who("x", role="kv_both"))
        assert not engine.trouble
