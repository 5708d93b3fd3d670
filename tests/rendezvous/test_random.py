"""Random worlds: the five promises hold under every kind of trouble.

Any failure names its profile and seed; `scenario.run(seed, PROFILES[name])` replays it.
"""

from __future__ import annotations

import ast
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import neuron_push.rendezvous as rendezvous
from tests.rendezvous.profiles import PROFILES
from tests.rendezvous.scenario import run
from tests.rendezvous.world import Violation

# Of every run; its million steps are those of the whole stack (tests/stack).
SEEDS = 6
STEPS = 300_000
# Worlds that once broke a promise, by profile.
BROKE_ONCE = {
    "chaos, pulls, TP 4 to 2": (283, 1005),  # a late Cancel ended what was registered anew
    # Spoken to before its agent, gone when it was to be loaded, was known to be.
    "chaos, unpacked, TP 2 to 1": (494,),
}
NIGHT = 600.0  # seconds, over all profiles


def play(name: str, seed: int):
    try:
        return run(seed, PROFILES[name])
    except BaseException as error:
        error.add_note(f"replay with run({seed}, PROFILES[{name!r}])")
        raise


@pytest.fixture(scope="module")
def steps(say):
    """Steps of the seeded worlds by profile; their sum is said when the session ends."""
    counted = Counter()
    yield counted
    say(
        f"tests/rendezvous: {counted.total():,} steps in {SEEDS} worlds of each of {len(counted)} "
        f"profiles, seeds 0 to {SEEDS - 1}"
    )


@pytest.mark.parametrize("name", PROFILES)
def test_promises_hold_in_every_seeded_world(name, steps):
    steps[name] = sum(play(name, seed).steps for seed in range(SEEDS))
    assert steps[name] * len(PROFILES) >= STEPS, "its share of the steps of a run"


@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name, seeds in BROKE_ONCE.items() for seed in seeds]
)
def test_promises_hold_where_they_once_did_not(name, seed):
    play(name, seed)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(PROFILES)), st.integers(SEEDS, 2**32))
def test_promises_hold_in_worlds_that_hypothesis_draws(name, seed):
    play(name, seed)


@pytest.mark.nightly
@pytest.mark.timeout(2 * NIGHT)
@pytest.mark.parametrize("name", PROFILES)
def test_promises_hold_all_night(name):
    start, seed = time.monotonic(), 10**6
    while time.monotonic() < start + NIGHT / len(PROFILES):
        play(name, seed)
        seed += 1
    print(f"{name}: {seed - 10**6} worlds")


def test_a_world_replays_from_its_seed():
    first, second = play("chaos", 3), play("chaos", 3)
    assert (first.steps, first.landed, first.outcomes) == (
        second.steps, second.landed, second.outcomes,
    )  # fmt: skip


QUIET = ["healthy", "healthy, larger decode blocks", "preemption", "striped over replicas"]


@pytest.mark.parametrize("name", QUIET)
def test_without_faults_every_request_is_received_and_no_link_is_lost(name):
    for seed in range(10):
        world = play(name, seed)
        assert world.outcomes["Received"] > 0
        assert world.outcomes["ReceiveFailed"] == 0
        assert world.counts["links_lost", ""] == 0


def test_every_replica_of_a_head_sends_its_share():
    worlds = [play("striped over replicas", seed) for seed in range(5)]
    writers = {cell[3] for world in worlds for cell in world.engines["D0"].cells}
    assert writers == set(range(8))


def test_trouble_really_happens():
    """The profiles are worth their time: rotations, failures, torn and lost traffic occur."""
    worlds = [play("chaos, many engines", seed) for seed in range(10)]
    total = {key: sum(world.counts[key] for world in worlds) for key in worlds[0].counts}
    assert total["rotations", ""] > 10
    assert total["links_lost", ""] > 20
    assert sum(world.outcomes["Received"] for world in worlds) > 20
    assert sum(world.outcomes["ReceiveFailed"] for world in worlds) > 20


def counted_names():
    """What the state machines count: the first argument of every `count(...)` in their sources."""
    for path in Path(rendezvous.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "count" and ast.unparse(node.func.value).endswith("context"):
                yield node.args[0].value


def test_a_wrong_byte_that_was_read_is_noticed_by_its_digest_and_by_nothing_else():
    profile = PROFILES["pulls, compared"]
    worlds = [run(seed, profile) for seed in range(10)]
    assert sum(world.counts["cancellations", "digest"] for world in worlds) > 5
    assert sum(world.outcomes["Received"] for world in worlds) > 20
    with pytest.raises(Violation, match="turned"):
        for seed in range(5):
            run(seed, replace(profile, digests=False))


def test_every_metric_of_the_state_machines_moves():
    moved = set()
    for seed in range(10):
        counts = play("chaos, many engines", seed).counts
        moved |= {name for (name, _), value in counts.items() if value > 0}
    # Messages here carry no sizes: tests/test_transfer.py has bytes. Defects are never honest:
    # tests/hostile has them.
    assert moved == set(counted_names()) - {"received_bytes", "defects"}
