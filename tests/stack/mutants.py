"""Defects, one at a time, that the whole stack must notice: the patch, and the trouble it needs."""

from __future__ import annotations

import pytest

from neuron_push.rendezvous.landing import Landings
from neuron_push.transfer import TransferThread
from neuron_push.vllm.pins import Pins
from neuron_push.vllm.prefills import Prefills
from tests.rendezvous import mutants as worlds
from tests.stack.profiles import PROFILES
from tests.stack.world import World


def settle_a_prefix_hit_early(patch):
    """What the prefix cache holds is settled when the request is scheduled, not with its step."""

    def step(self, output, pins, original=Prefills.step):
        self.hits = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        original(self, output, pins)

    def settle(self, prefill, reached, pins, original=Prefills._settle):
        hit = self.hits.get(prefill.request.request_id, 0)
        if not prefill.settled and 0 < hit < reached:
            before = len(self._due)
            original(self, prefill, hit, pins)
            self._commands += self._due[before:]
            del self._due[before:]
        original(self, prefill, reached, pins)

    patch.setattr(Prefills, "step", step)
    patch.setattr(Prefills, "_settle", settle)


def decode_before_all_has_landed(patch):
    """Decode takes the first part of a prompt for the whole."""

    def landed(self, attempt, share, message, original=Landings.landed):
        last = original(self, attempt, share, message)
        share.landed.add(attempt.command.start, attempt.command.stop)
        return last

    patch.setattr(Landings, "landed", landed)


def skip_the_fence(patch):
    """What a step computes is sent when the step is launched."""

    def submit(self, commands, fence=None, *, original=TransferThread.submit, **how):
        original(self, commands, **how)

    patch.setattr(TransferThread, "submit", submit)


def take_no_references(patch):
    """vLLM lets go, and nothing is held for what is in flight."""
    patch.setattr(Pins, "hold", lambda self, number: None)


def keep_pins_for_ever(patch):
    """The scheduler half does not hear that blocks are quiet."""
    patch.setattr(Pins, "quiet", lambda self, number, rank: None)


# The trouble that each defect needs, and a seed from which on it is noticed soon.
MUTANTS = {
    skip_the_fence: ("healthy", 0),
    settle_a_prefix_hit_early: ("crowds", 7),
    decode_before_all_has_landed: ("losses", 2),
    keep_pins_for_ever: ("healthy", 0),
    take_no_references: ("small pools", 2),
    worlds.free_when_the_link_is_lost: ("quarrels", 1),
    worlds.cancelled_before_the_drain: ("losses", 3),
    worlds.decode_without_confirmation: ("pull, freezes", 57),
    worlds.lend_what_may_go: ("pull, freezes", 0),
    worlds.count_instead_of_sets: ("losses", 31),
    worlds.revive_ended_attempts: ("losses", 39),
    worlds.free_on_timeout: ("quarrels", 42),
}  # fmt: skip


def hunt(mutant, profile: str, first: int, patch, seeds: int = 100) -> str:
    """The seed and complaint of the first world that notices a defect; empty if none does."""
    mutant(patch)
    for seed in range(first, first + seeds):
        try:
            World(seed, PROFILES[profile]).run()
        except AssertionError as error:
            return f"seed {seed}: {type(error).__name__}: {str(error)[:150]}"
    return ""


def hunt_all(names: str) -> None:
    """Plant defects in turn ("all", or some with commas), and say whether each was noticed."""
    for mutant, (profile, first) in MUTANTS.items():
        if names != "all" and mutant.__name__ not in names.split(","):
            continue
        with pytest.MonkeyPatch.context() as patch:
            found = hunt(mutant, profile, first, patch)
        told = f"noticed in {profile!r}, {found}" if found else f"NOT NOTICED in {profile!r}"
        print(f"{mutant.__name__}: {told}", flush=True)
