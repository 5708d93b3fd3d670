"""Whatever happens in whatever state: the promises hold and everything comes back.

The states are enumerated from the code; a new one makes a test fail until it can be entered.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from neuron_push.commands import Retire, Unpinned
from neuron_push.config import Config
from neuron_push.protocol import Welcome
from neuron_push.rendezvous import core
from neuron_push.rendezvous.attempt import AttemptState
from neuron_push.rendezvous.events import Tell
from neuron_push.rendezvous.producer import SendingState
from neuron_push.rendezvous.sender import Producer
from tests.rendezvous.stories import Story, enter_attempt, enter_rotation, enter_sending

MISFORTUNES = {
    "decode abandons": lambda story: story.abandon(),
    "prefill ends": lambda story: story.retire("ended"),
    "prefill is preempted": lambda story: story.retire("preempted"),
    "decode loses the link": lambda story: story.lose(story.decode),
    "prefill loses the link": lambda story: story.lose(story.prefill),
    "patience ends": lambda story: story.run_out_of_patience(),
    "decode freezes": lambda story: story.decode.processes[0].freeze(1.0),
    "prefill freezes": lambda story: story.prefill.processes[0].freeze(1.0),
    "decode crashes": lambda story: story.world.crash("D0"),
    "prefill crashes": lambda story: story.world.crash("P0"),
}
PHASES = ("wanted", "opening", "moving", "closing")


def suffer(story, name):
    MISFORTUNES[name](story)
    story.world.run(1.0)
    story.world.calm()
    story.world.settle_down()
    return story


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("state", AttemptState)
@pytest.mark.parametrize("misfortune", MISFORTUNES)
def test_misfortune_in_every_state_of_an_attempt(state, misfortune, hold, pull):
    for seed in range(2):
        story = Story(seed, hold=hold, pull=pull)
        enter_attempt(story, state)
        suffer(story, misfortune)


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("state", SendingState)
@pytest.mark.parametrize("misfortune", MISFORTUNES)
def test_misfortune_in_every_state_of_a_sending(state, misfortune, pull):
    for seed in range(2):
        story = Story(seed, pull=pull)
        enter_sending(story, state)
        suffer(story, misfortune)


@pytest.mark.parametrize(
    ("side", "pull"), [("decode", False), ("prefill", False), ("decode", True)]
)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("misfortune", MISFORTUNES)
def test_misfortune_in_every_phase_of_a_rotation(side, phase, misfortune, pull):
    for seed in range(2):
        story = Story(seed, pull=pull)
        enter_rotation(story, getattr(story, side), phase)
        suffer(story, misfortune)


def test_a_story_without_misfortune_is_received():
    story = Story()
    story.until(lambda: story.attempt_state() is AttemptState.ENDED)
    assert story.attempt.reported == {0: True}
    story.world.settle_down()


def test_an_abort_with_a_write_in_flight_gives_blocks_back_when_it_drains():
    story = Story()
    story.until(lambda: story.producer.writes)
    story.abandon()
    story.until(lambda: not story.producer.writes)
    drained = story.world.now
    story.until(lambda: not story.decode.holder)
    assert story.world.now - drained < 0.1


def test_decode_hears_of_an_aborted_prefill_at_once():
    story = Story()
    story.until(lambda: story.sending_state() is SendingState.SENDING)
    story.retire("ended")
    told = story.world.now
    story.until(lambda: story.attempt.reported)
    assert story.attempt.reported == {0: False}
    assert story.world.now - told < 0.1


def test_a_lost_registration_is_resent():
    story = Story()
    story.world.faults.drop = 1.0
    story.until(lambda: story.attempt_state() is AttemptState.WAITING)
    story.world.run(0.015)
    story.world.faults.drop = 0.0
    sent = story.world.now
    story.until(lambda: story.sending_state() is not None)
    assert story.world.now - sent < 0.06


def test_a_story_of_a_pull_is_received_and_prefill_pushes_nothing():
    story = Story(pull=True)
    story.until(story.moving)
    assert not story.producer.writes and story.producer.loans
    story.until(lambda: story.attempt_state() is AttemptState.ENDED)
    assert story.attempt.reported == {0: True}
    assert not story.producer.loans
    story.world.settle_down()


@pytest.mark.parametrize("lost", ["Taken", "Kept"])
def test_a_pull_survives_the_loss_of_its_confirmation(lost):
    story = Story(pull=True)
    story.until(story.moving)
    story.until(lambda: not story.moving())
    if lost == "Kept":
        story.until(lambda: not story.producer.loans)
    story.world.faults.drop = 1.0
    story.world.run(0.004)
    story.world.faults.drop = 0.0
    story.until(lambda: story.attempt.reported)
    assert story.attempt.reported == {0: True}


def test_decode_does_not_use_what_it_read_from_a_prefill_that_took_it_for_dead():
    story = Story(pull=True)
    story.until(story.moving)
    story.lose(story.prefill)
    story.until(lambda: not story.producer.loans)
    assert story.moving(), "the READ goes on"
    story.until(lambda: story.attempt.reported)
    assert story.attempt.reported == {0: False}
    story.world.settle_down()


def test_what_cannot_be_read_is_pushed(monkeypatch):
    """Pages that are not registered are lent to nobody: decode asks for a push by itself."""

    def unreadable(*words, readable):
        return Welcome(*words, readable=False)

    monkeypatch.setattr(core, "Welcome", unreadable)
    story = Story(pull=True)
    story.until(lambda: story.attempt_state() is AttemptState.ENDED)
    assert story.attempt.reported == {0: True}
    story.world.settle_down()
    assert story.world.counts["sends", "sent"] == 1 and story.world.counts["sends", "lent"] == 0


def test_whoever_waits_for_a_pin_is_told_even_if_its_source_is_gone():
    """A source that a defect ended early has told its pin before anybody waited for it."""
    told = []
    producer = Producer(SimpleNamespace(act=told.append, config=Config()), None)
    producer.retire(Retire(3, "finished"), 0.0)
    assert not told
    producer.retire(Retire(3, "finished", "", 7), 0.0)
    assert told == [Tell(Unpinned(7))]
