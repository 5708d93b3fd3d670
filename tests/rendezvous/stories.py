"""One request, told step by step, so that a world can be stopped in any state of the machines."""

from __future__ import annotations

from neuron_push.protocol import Match
from neuron_push.rendezvous.attempt import AttemptState, number_of
from neuron_push.rendezvous.events import Unreachable
from neuron_push.rendezvous.producer import SendingState
from tests.rendezvous.net import Faults
from tests.rendezvous.shapes import Shape
from tests.rendezvous.world import World

TOKENS = 40


class Story:
    """Prefill of 40 tokens in three chunks on P0, brought to D0; P1 and D1 are busy bystanders."""

    def __init__(self, seed: int = 0, *, hold: bool = False, pull: bool = False):
        self.pull = pull
        roles = {name: ("producer" if name[0] == "P" else "consumer") for name in FLEET}
        shapes = {name: (role, Shape()) for name, role in roles.items()}
        self.world = World(seed, shapes, Faults(write_slow=0.2))
        self.prefill, self.decode = self.world.engines["P0"], self.world.engines["D0"]
        self.match = Match("t", "b", b"prompt", TOKENS)
        self.source, self.retired = -1, False
        self.attempt = self.decode.receive(self.match, "prompt", "P0", hold=hold, pull=pull)
        self.world.at(0.1, self.compute)

    def compute(self):
        self.source, self.retired = self.prefill.offer(self.match), False
        source, edges = self.source, [0, 12, 24, TOKENS]
        for index in range(3):
            self.world.at(0.1 * index, lambda i=index: self.settle(source, edges[i], edges[i + 1]))
        self.world.at(0.25, lambda: self.retire("finished", source))

    def settle(self, source, start, stop):
        if source == self.source and not self.retired and self.prefill.up:
            self.prefill.settle(source, "prompt", start, stop, TOKENS, last=stop == TOKENS)

    def retire(self, outcome, source=None):
        if self.source < 0 or self.retired or not self.prefill.up:
            return
        if source in (None, self.source):
            self.retired = True
            self.prefill.retire(self.source, outcome)
        if outcome == "preempted":
            self.world.at(0.05, self.compute)

    # -------------------------------------------------------------------- looking in

    @property
    def consumer(self):
        return self.decode.processes[0].core.consumer

    @property
    def producer(self):
        return self.prefill.processes[0].core.producer

    def attempt_state(self):
        """State of the attempt, once it was received."""
        live = self.consumer.attempts.get(self.attempt.number)
        if live is not None:
            return live.state
        return AttemptState.ENDED if self.attempt.unpinned else None

    def sending_state(self):
        """State of the sending, once it was registered."""
        for sending in self.producer.sendings.values():
            return sending.state
        links, number = self.prefill.processes[0].core.links, number_of(self.attempt.number)
        ended = any(number in link.over for link in links)
        return SendingState.ENDED if ended else None

    def rotation_phase(self, side):
        """Where the rotation of a side stands."""
        generations = side.processes[0].core.generations
        rotation = generations._rotation
        if rotation is None:
            return "wanted" if generations._wanted else "none"
        if rotation.closing:
            return "closing"
        return "moving" if rotation.opened else "opening"

    def moving(self):
        """Whether bytes are on the way."""
        return self.consumer.reads if self.pull else self.producer.writes

    # -------------------------------------------------------------------- going on

    def until(self, reached, seconds=4.0):
        """Run, one happening at a time, until a condition holds."""
        end = self.world.now + seconds
        while not reached():
            assert self.world.now < end, "the state was not reached"
            self.world.step()

    def abandon(self):
        self.decode.abandon(self.attempt)

    def lose(self, side):
        """A side's transport calls the other one's agent unreachable."""
        process = side.processes[0]
        other = self.prefill if side is self.decode else self.decode
        for link in process.core.links:
            if link.engine == other.name:
                process.later(0.0, Unreachable(link.agent, "injected"))

    def run_out_of_patience(self):
        for attempt in self.consumer.attempts.values():
            attempt.deadline = self.world.now
        for sending in self.producer.sendings.values():
            sending.expires = self.world.now


FLEET = ("P0", "P1", "D0", "D1")


def enter_attempt(story, state):
    """Bring the story's attempt into a state."""
    if state is AttemptState.DRAINING:
        story.until(story.moving)
        story.abandon()
    story.until(lambda: story.attempt_state() is state)


def enter_sending(story, state):
    """Bring the story's sending into a state."""
    if state is SendingState.STOPPING and story.pull:
        story.until(story.moving)
        story.retire("ended")
    elif state is SendingState.STOPPING:
        story.until(story.moving)
        story.abandon()
    story.until(lambda: story.sending_state() is state)


def enter_rotation(story, side, phase):
    """Lose the link with WRITEs in flight, and stop in a phase of the rotation that follows."""
    story.until(story.moving)
    # A rotation has just begun, so that the next one must wait.
    generations = side.processes[0].core.generations
    if phase == "wanted":
        generations._last = story.world.now
    other = story.world.engines["D1" if side is story.prefill else "P1"]
    bystander(story, other)
    story.lose(side)
    story.until(lambda: story.rotation_phase(side) == phase)


def bystander(story, other):
    """A second pair shares a rank with the story, so that somebody must move."""
    decode = other if other.name == "D1" else story.decode
    prefill = other if other.name == "P1" else story.prefill
    match = Match("u", "c", b"other", 8)
    decode.receive(match, "other", prefill.name)
    story.world.run(0.03)
    source = prefill.offer(match)
    prefill.settle(source, "other", 0, 8, 8, last=True)
    prefill.retire(source, "finished")
