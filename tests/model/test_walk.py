"""Long random runs: the promises hold with many requests and all troubles at once."""

from __future__ import annotations

import time

import pytest

from tests.model.mutants import MUTANTS
from tests.model.walk import Walk, play

SEEDS, STEPS = 24, 3000
NIGHT = 600.0  # seconds
# Defects that need more than one chance in a few runs are left to the exhaustive checks.
NOTICED = (
    "free_on_timeout", "accept_an_old_attempt", "count_instead_of_sets",
    "free_when_the_link_is_lost", "cancelled_before_the_drain", "unpin_a_source_under_a_write",
    "free_when_the_engine_gives_up", "keep_pins_for_ever",
)  # fmt: skip


def test_promises_hold_in_long_runs(say):
    walks = [play(seed, STEPS) for seed in range(SEEDS)]
    steps, received = sum(w.steps for w in walks), sum(w.received for w in walks)
    say(f"tests/model: {steps:,} steps in walks of seeds 0 to {SEEDS - 1}, {received} requests")
    assert steps > SEEDS * STEPS and received > SEEDS


@pytest.mark.nightly
@pytest.mark.timeout(2 * NIGHT)
def test_promises_hold_in_long_runs_all_night():
    end, seed = time.monotonic() + NIGHT, 10**6
    while time.monotonic() < end:
        play(seed, 10 * STEPS)
        seed += 1
    print(f"seeds {10**6} to {seed - 1}")


def test_a_run_replays_from_its_seed():
    assert play(3, STEPS).story == play(3, STEPS).story


@pytest.mark.parametrize("name", NOTICED)
def test_a_planted_defect_is_noticed(name, monkeypatch):
    next(mutant for mutant in MUTANTS if mutant.__name__ == name)(monkeypatch)
    with pytest.raises(Exception, match=r"may|not landed|never ends|internal error|not idle|freed"):
        for seed in range(SEEDS):
            Walk(seed).run(STEPS)
