"""Long random runs: the promises hold with many requests and all troubles at once."""

from __future__ import annotations

import time

import pytest

from tests.model.walk import play

SEEDS, STEPS = 24, 3000
NIGHT = 600.0  # seconds


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
