"""In small bounds, no order of events breaks a promise, and everything ends from everywhere."""

from __future__ import annotations

import pytest

from tests.model.bounds import D
from tests.model.effects import Broken
from tests.model.mutants import ENDLESS, MUTANTS, hunt
from tests.model.scenarios import MOST, NIGHT, SCENARIOS
from tests.model.space import Counterexample, Space

# Less would mean that something does not happen any more.
LEAST = dict.fromkeys(SCENARIOS, 100)


def explore(bounds, most=10**6, *, whole=True):
    space = Space(bounds)
    states = space.explore(most, whole=whole)
    more = "" if space.whole else " and more"
    print(f"{states} states{more}, {space.steps} steps, {len(space.locals)} states of one process")
    return space


@pytest.mark.parametrize("name", SCENARIOS)
def test_promises_hold_in_every_state(name):
    space = explore(SCENARIOS[name])
    assert len(space.parents) > LEAST[name]
    labels = {label[:2] for entry in space.parents.values() if entry for label in [entry[1]]}
    assert (D, "finish") in labels
    assert space.judge.lanes() == space.machines.pair.lanes


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", NIGHT)
def test_promises_hold_in_every_state_of_larger_bounds(name):
    explore(NIGHT[name], MOST, whole=False)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_defect_is_found_with_the_way_to_it(mutant, monkeypatch):
    found = hunt(mutant, monkeypatch)
    print(found)
    assert isinstance(found.error, Broken)
    assert any(text in str(found) for text in ("never ends", "goes on")) == (mutant in ENDLESS)
    assert 0 < len(found.story) < 30


def test_a_request_can_be_received_and_can_fail_and_every_write_can_land():
    space = Space(SCENARIOS["abort"])
    space.explore(ends=False)
    labels = {label[:2] for entry in space.parents.values() if entry for label in [entry[1]]}
    assert {(0, "sees a WRITE done"), (1, "has a WRITE landed"), (1, "finish")} <= labels
    assert {(0, "abort"), (1, "abort"), (0, "hears"), (1, "hears"), (1, "is sent")} <= labels


def test_a_counterexample_tells_the_steps_in_order(monkeypatch):
    found = next(m for m in MUTANTS if m.__name__ == "count_instead_of_sets")
    story = hunt(found, monkeypatch).story
    assert story[0].startswith("  1. ")
    assert any("D is sent d" in line for line in story)
    assert any("Done(" in line for line in story)
    with pytest.raises(Counterexample):
        Space(SCENARIOS["one request"]).explore()
