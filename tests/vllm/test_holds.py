"""What a decode engine says to a router that asks whether it still holds blocks for a transfer."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from neuron_push.commands import pack_ids
from neuron_push.vllm import decodes as module
from neuron_push.vllm.decodes import Decode, Decodes
from neuron_push.vllm.params import DecodeLeg
from neuron_push.vllm.pins import Pins


class Block:
    def __init__(self, number):
        self.number = number


class Pool:
    def __init__(self):
        self.blocks = [Block(n) for n in range(50)]
        self.freed = []

    def touch(self, blocks):
        """Takes references."""

    def free_blocks(self, blocks):
        self.freed += blocks


def leg(transfer):
    return DecodeLeg(transfer, None, "", "", None)


def test_blocks_are_held_until_every_rank_is_quiet():
    pins = Pins(Pool(), world=2)
    pin = pins.new()
    pins.promise(pin, [1, 2, 3], pack_ids([1, 2, 3]))
    pins.hold(pin)
    assert pins.held(pin) == 3
    pins.quiet(pin, 0)
    assert pins.held(pin) == 3
    pins.quiet(pin, 1)
    assert pins.held(pin) == 0 == pins.held(-1)


def test_promised_blocks_count_too():
    pins = Pins(Pool(), world=1)
    pin = pins.new()
    pins.promise(pin, [4, 5], pack_ids([4, 5]))
    assert pins.held(pin) == 2


def test_all_prompts_of_one_transfer_count_and_the_table_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MOST_PINS", 3)
    found = Decodes([], [], [16], patience=1.0, recompute=False)
    for number, transfer in enumerate(("a", "a", "b", "c", "d", "")):
        found._remember_pin(Decode(leg(transfer), None, pin=number))
    assert found.pins_of("a") == [] and found.pins_of("b") == [2] and found.pins_of("d") == [4]
    found._remember_pin(Decode(leg("d"), None, pin=9))
    assert found.pins_of("d") == [4, 9]
    assert found.pins_of("nobody") == []
