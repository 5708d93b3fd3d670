"""Digests of what is READ: both sides hash the same bytes, a wrong one shows, others have turns."""

from __future__ import annotations

import ctypes
from collections import deque

import numpy as np
import pytest

from neuron_push.errors import ConfigError
from neuron_push.geometry import Geometry, Group, Plane, Region, Semantics
from neuron_push.plan import Ask, Blocks, bind, pair
from neuron_push.protocol import Done
from neuron_push.rendezvous import Identity
from neuron_push.rendezvous.events import Check, Seal, Sealed, Unpacked
from neuron_push.transfer import digest
from neuron_push.transfer.digest import Hashing, demand_host_memory

BLOCKS, TOKENS, WIDTH = 16, 16, 64
SEMANTICS = Semantics("m", 1, 1, WIDTH, "float32", ("full",))
LENT = (Blocks(0, np.array([9, 3, 4, 12], np.int32)),)
WANTED = (Blocks(1, np.array([7, 1, 2], np.int32)),)
SPAN = TOKENS, 4 * TOKENS - 3  # behind a prefix hit, and to the middle of a page


class Side:
    """One rank's memory, of K and V of one layer, and its hashing."""

    def __init__(self, engine, memory="DRAM"):
        shape = 2, BLOCKS, TOKENS, WIDTH * 4
        self.kv = np.random.default_rng(len(engine)).integers(0, 256, shape, np.uint8)
        page = TOKENS * WIDTH * 4
        planes = tuple(
            Plane(0, kind, 0, place * BLOCKS * page, page, page, WIDTH * 4, 4, WIDTH)
            for place, kind in enumerate("kv")
        )
        region = Region(int(self.kv.ctypes.data), self.kv.nbytes, memory, 0)
        group = Group("full", TOKENS, TOKENS, BLOCKS, (0,), planes)
        self.geometry = Geometry((region,), (group,), 4)
        self.me = Identity(engine, 0, 1, SEMANTICS, self.geometry)
        self.events = deque()
        self.hashing = Hashing(self.me, self.events)

    def answer(self):
        """Step until it answers; the answer and how many steps that took."""
        for count in range(1, 1000):
            self.hashing.step()
            if self.events:
                return self.events.popleft(), count
        raise AssertionError("no answer")


class Pull:
    """A prompt READ by decode, as a transport does it."""

    def __init__(self):
        self.prefill, self.decode = Side("P"), Side("DD")
        self.plan = pair(self.prefill.geometry, self.decode.geometry, Ask(((0,),)), min_run=1)
        copies = self.plan.copies(*SPAN, LENT, WANTED, last=True)
        self.source, self.destination = bind(copies, self.prefill.geometry, self.decode.geometry)
        self.nbytes = copies.nbytes
        for read, written in zip(self.source, self.destination, strict=True):
            ctypes.memmove(int(written[0]), int(read[0]), int(read[1]))

    def seal(self, lent=LENT):
        """Have prefill hash what it lent."""
        action = Seal(3, 8, self.plan, self.decode.geometry, lent, WANTED, *SPAN)
        self.prefill.hashing.seal(action, 0.0)

    def check(self, sealed, nbytes):
        """Have decode compare what it has READ."""
        done = Done(8, *SPAN, nbytes, digest=sealed)
        self.decode.hashing.check(Check(5, self.plan, *SPAN, WANTED, done, True, LENT))

    def compared(self):
        """The whole of it; decode's answer."""
        self.seal()
        sealed, _ = self.prefill.answer()
        assert (sealed.link, sealed.attempt, sealed.reason) == (3, 8, "")
        self.check(sealed.digest, self.nbytes)
        return self.decode.answer()[0]


@pytest.fixture
def pull():
    return Pull()


def test_what_was_read_is_what_was_lent(pull):
    assert pull.compared() == Unpacked(5)


@pytest.mark.parametrize("place", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_wrong_byte_is_noticed_wherever_it_is(pull, side, place):
    rows = pull.source if side == "prefill" else pull.destination
    row = rows[int(place * (len(rows) - 1))]
    address = int(row[0]) + int(place * (int(row[1]) - 1))
    ctypes.c_ubyte.from_address(address).value ^= 1
    answer = pull.compared()
    assert answer.corrupt
    assert answer.reason == "the KV of tokens 16 to 61 is not what prefill sent (digest)"


def test_bytes_beside_those_wanted_do_not_matter(pull):
    pull.prefill.kv[:, [9, 5]] ^= 1  # the block of the prefix hit, and somebody else's
    pull.decode.kv[:, [8, 9]] ^= 1
    assert pull.compared() == Unpacked(5)


@pytest.mark.parametrize(
    ("sealed", "nbytes", "words"),
    [(b"", 1, "or not: kv_digest is not set there"), (b"d" * 32, 7, "7 bytes instead of")],
)
def test_what_cannot_be_compared_fails_in_words(pull, sealed, nbytes, words):
    pull.check(sealed, nbytes)
    answer, _ = pull.decode.answer()
    assert answer.corrupt
    assert words in answer.reason


def test_blocks_that_cannot_have_been_read_are_said_to_be_so(pull):
    pull.seal(lent=(Blocks(0, np.array([9], np.int32)),))
    answer, _ = pull.prefill.answer()
    assert isinstance(answer, Sealed)
    assert answer.reason and not answer.digest


def test_a_large_prompt_is_hashed_in_steps_and_in_its_turn(pull, monkeypatch):
    whole = pull.compared()
    monkeypatch.setattr(digest, "STEP", 1000)
    pull.seal()
    pull.seal()
    _, steps = pull.prefill.answer()
    assert steps >= pull.nbytes // 1000
    assert not pull.prefill.events, "the second waits for the first"
    again, _ = pull.prefill.answer()
    pull.check(again.digest, pull.nbytes)
    assert pull.decode.answer()[0] == whole


def test_memory_of_a_device_is_refused():
    demand_host_memory(Side("P").me)
    with pytest.raises(ConfigError, match="kv_digest needs a KV cache in host memory"):
        demand_host_memory(Side("P", "VRAM").me)
