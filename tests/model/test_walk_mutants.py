"""Defects planted in the model are noticed by its random runs, too."""

from __future__ import annotations

import pytest

from tests.model.mutants import MUTANTS
from tests.model.test_walk import SEEDS, STEPS
from tests.model.walk import Walk

# Defects that need more than one chance in a few runs are left to the exhaustive checks.
NOTICED = (
    "free_on_timeout", "accept_an_old_attempt", "count_instead_of_sets",
    "free_when_the_link_is_lost", "cancelled_before_the_drain", "unpin_a_source_under_a_write",
    "free_when_the_engine_gives_up", "keep_pins_for_ever",
)  # fmt: skip


@pytest.mark.parametrize("name", NOTICED)
def test_a_planted_defect_is_noticed(name, monkeypatch):
    next(mutant for mutant in MUTANTS if mutant.__name__ == name)(monkeypatch)
    with pytest.raises(Exception, match=r"may|not landed|never ends|internal error|not idle|freed"):
        for seed in range(SEEDS):
            Walk(seed).run(STEPS)
