"""No input crashes a decoder, takes memory without bound, or changes anything if it is invalid."""

from __future__ import annotations

import resource
import time

import msgspec
import pytest

from neuron_push.protocol import Refusal, encode
from tests.fuzz.http import Sketch
from tests.fuzz.loop import MSGPACK, Failed, fuzz
from tests.fuzz.targets import TARGETS, begin

ROUNDS = 1500
FEW = {"http": 400}  # each is a connection
NIGHT = 300.0  # seconds per target
MOST_GROWTH = 256 << 10  # KiB


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_before_is_stood_and_new_inputs_too(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    target, codec = TARGETS[name]
    rounds, corpus, seen = fuzz(
        name, target, codec, begin(name), 7, lambda done: done < FEW.get(name, ROUNDS)
    )
    print(f"seed 7: {rounds} rounds, {seen} edges, {len(corpus)} inputs")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_GROWTH


@pytest.mark.nightly
@pytest.mark.timeout(3 * NIGHT)
@pytest.mark.parametrize("name", TARGETS)
def test_a_night_of_new_inputs(name):
    target, codec = TARGETS[name]
    seed, end = int(time.time()), time.monotonic() + NIGHT
    print(f"seed {seed}")
    fuzz(name, target, codec, begin(name), seed, lambda _: time.monotonic() < end)


def test_a_body_of_any_depth_is_served_or_refused():
    for deep in (100, 300, *range(900, 1010, 2)):
        for field in ("messages", "prompt"):
            body = f'{{"prompt": "p", "{field}": {"[" * deep}{"]" * deep}}}'
            TARGETS["http"][0](msgspec.json.encode(Sketch(body=body)))


def test_the_loop_finds_what_hides_behind_a_few_conditions():
    def target(data):
        import neuron_push.protocol.codec as codec

        codec.clip("")
        try:
            message = codec.decode_side_channel(data)
        except codec.PeerError:
            return
        assert type(message).__name__ != "Refusal" or len(message.reason) < 600

    with pytest.raises(Failed, match="replay: python -m tests"):
        fuzz("found", target, MSGPACK, [encode(Refusal("no"))], 1, lambda done: done < 20_000)
