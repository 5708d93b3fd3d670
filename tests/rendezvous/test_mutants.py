"""The random worlds have teeth: each planted defect is noticed within a few seeds."""

from __future__ import annotations

import pytest

from neuron_push.errors import ProtocolError
from tests.rendezvous.mutants import MUTANTS
from tests.rendezvous.profiles import PROFILES
from tests.rendezvous.scenario import run
from tests.rendezvous.world import Violation

SEEDS = 60
# The kind of trouble that each defect needs.
HUNTING_GROUNDS = {
    "look_again_before_the_fence": "false deaths",
    "free_on_timeout": "rotation under load",
    "free_when_the_link_is_lost": "false deaths",
    "revive_ended_attempts": "reordering",
    "accept_registrations_of_earlier_links": "late registrations",
    "count_instead_of_sets": "twins",
    "unpin_a_source_under_a_write": "preemption",
    "moved_before_the_drain": "a healthy peer during rotations",
    "join_a_rotation_too_late": "rotation under load",
    "cancelled_before_the_drain": "twins",
    "post_again_after_preemption": "preemption",
    "settle_twice_as_far": "healthy",
    "free_slabs_when_cancelling": "unpacked, crashes",
    "free_slabs_when_landed": "unpacked, one slab for many",
    "unpin_while_unpacking": "unpacked, crashes",
    "reuse_a_packed_slab_at_once": "packed",
    "write_into_a_slab_without_a_grant": "unpacked, one slab for many",
    "return_a_slab_whose_write_is_under_way": "unpacked, losses",
    "promise_every_slab": "staged by both, both ways",
    "keep_a_grant_that_is_not_used": "staged by both, preemption",
    "lend_what_may_go": "pulls",
    "decode_without_confirmation": "pulls, false deaths",
    "keep_the_number_of_an_earlier_registration": "pulls, rotation under load",
    "decode_before_the_comparison": "pulls, compared",
    "confirm_whatever_is_asked": "pulls, losses",
    "send_layers_before_their_fence": "layers",
    "complete_by_one_part": "layers",
    "call_a_read_quiet": "pulls, losses",
    "give_a_loan_back_too_early": "pulls, losses",
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_defect_is_noticed(name, monkeypatch):
    MUTANTS[name](monkeypatch)
    for seed in range(SEEDS):
        try:
            run(seed, PROFILES[HUNTING_GROUNDS[name]])
        except (Violation, ProtocolError):
            return
    pytest.fail(f"{SEEDS} worlds did not notice {name}")
