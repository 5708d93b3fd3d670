"""Prompts are found by what a registration calls them, however many there are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from neuron_push.protocol import Match
from neuron_push.rendezvous import sources as module
from neuron_push.rendezvous.producer import Source
from neuron_push.rendezvous.sources import Sources

LINK = SimpleNamespace(engine="D", rank=0)


def match(number):
    return Match(f"t{number}", f"b{number}", b"prompt", 8)


@pytest.mark.parametrize("count", [10, 3000])
def test_the_cost_of_finding_a_prompt_does_not_grow_with_their_number(monkeypatch, count):
    held = Sources()
    for number in range(count):
        held.add(Source(number, f"r{number}", match(number)))
    looked = []
    original = module.matches

    def counting(wanted, offered):
        looked.append(offered)
        return original(wanted, offered)

    monkeypatch.setattr(module, "matches", counting)
    for number in (0, count // 2, count - 1):
        looked.clear()
        assert held.find(match(number), LINK).number == number
        assert len(looked) <= 2  # by its transfer id, and by its request id
    looked.clear()
    assert held.find(match(count), LINK) is None
    assert not looked
