"""Long random runs of the model's engines: many requests, all troubles at once, from a seed.

The same real code as in world.py, too long to visit every state: each step does one thing that may
happen now. At the end faults stop, and everything must end and every block come back.
"""

from __future__ import annotations

import itertools
import random

from neuron_push.protocol import decode_notification
from tests.model.bounds import NAMES, D, P
from tests.model.effects import check, rank_of
from tests.model.engines import DecodeEngine, PrefillEngine
from tests.model.machines import BROKEN, FLYING, LANDED, seen
from tests.model.pairs import pair
from tests.model.processes import Process

BLOCKS = (9, 7)
# Of prefill and decode, by seed.
RANKS = ((1, 1), (2, 1), (1, 1), (1, 2))
# Of a step: how likely it is a fault, and which.
FAULT = 0.04
# Messages that may still arrive again.
REMEMBERED = 60
MOST_CALM = 40


class Walk:
    """One world; `run` plays it."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.pair = pair(ranks=RANKS[seed % len(RANKS)])
        self.steps = 0
        self.requests = 0
        self.received = 0
        self.processes: list[Process | None] = [None, None]
        self.incarnations = [0, 0]
        self.letters: list[tuple[str, str, bytes]] = []
        self.writes: dict = {}
        self.asked: list[tuple] = []
        self.landed: set[tuple] = set()
        self.story: list[tuple] = []
        for side in (P, D):
            self.start(side)

    def start(self, side):
        self.incarnations[side] += 1
        role = ("producer", "consumer")[side]
        process = Process(NAMES[side], role, self.incarnations[side], self.pair)
        kind = PrefillEngine if side == P else DecodeEngine
        process.engine = kind(process, BLOCKS[side])
        process.prompt = self.rng.random() < 0.7
        self.processes[side] = process

    # -------------------------------------------------------------------- one step

    def do(self, side, *event):
        """One event of one process, and what follows from it."""
        self.steps += 1
        self.story.append((NAMES[side], *event))
        process = self.processes[side]
        effects = process.apply(event)
        self.letters += effects.sent
        del self.letters[:-REMEMBERED]
        self.asked += effects.asked
        for write in effects.posted:
            self.writes[write] = FLYING
        if side == P and effects.closed:
            self.writes = {w: x for w, x in self.writes.items() if w.writer not in effects.closed}
        for attempt, start, stop in effects.received:
            self.received += 1
            for lane, token in itertools.product(self.pair.lanes, range(start, stop)):
                there = (process.incarnation, lane, attempt, token) in self.landed
                check(there, f"D decodes over token {token} of attempt {attempt}, not landed")
        if event[0] != "soon" or effects.posted or self.writes:
            self.judge()

    def open(self, side):
        process = self.processes[side]
        return process.open() if process is not None else ()

    def judge(self):
        """Promises 1 and 2, and WRITEs that nobody can see the end of are dropped."""
        if not self.writes:
            return
        p, d = self.processes
        p_open, d_open = set(self.open(P)), set(self.open(D))
        writable = d.engine.writable() if d else ()
        readable = p.engine.readable() if p else ()
        for write, phase in list(self.writes.items()):
            if write.target not in d_open and (phase == BROKEN or write.writer not in p_open):
                del self.writes[write]
            if phase == LANDED or write.target not in d_open:
                continue
            for block in write.blocks:
                check((write.attempt, block) in writable, f"{write} may land in block {block}")
            for block, content in write.source if write.writer in p_open else ():
                check((write.pin, block, content) in readable, f"{write} may read block {block}")

    # -------------------------------------------------------------------- what may happen

    def choose(self, faults=True):
        """Do one thing."""
        rng = self.rng
        if faults and rng.random() < FAULT:
            return self.fault()
        side = rng.choice((P, D))
        if self.processes[side] is None:
            return self.start(side) if rng.random() < 0.3 else None
        kinds = [self.hear, self.hear, self.engine, self.engine, self.question, self.land,
                 self.internal, self.repeat]  # fmt: skip
        return rng.choice(kinds)(side)

    def hear(self, side):
        """A letter arrives, once or again."""
        here = self.open(side)
        found = [letter for letter in self.letters if letter[1] in here]
        if found:
            letter = self.rng.choice(found)
            if self.rng.random() < 0.8:
                self.letters.remove(letter)
            sender, agent, message = letter
            self.do(side, "at", rank_of(agent), "message", sender, decode_notification(message))

    def engine(self, side):
        engine = self.processes[side].engine
        events = [e for e in engine.enabled() if e[0] not in ("abort", "preempt", "reset")]
        if events:
            self.do(side, *self.rng.choice(events))

    def internal(self, side):
        for rank in self.processes[side].ranks:
            for waiting, name in ((rank.opening, "opened"), (rank.closing, "closed")):
                if waiting:
                    self.do(side, "at", rank.number, name)

    def repeat(self, side):
        self.do(side, "soon")

    def question(self, side):
        if not self.asked:
            return
        kind, asked, rank, *rest = self.asked.pop(self.rng.randrange(len(self.asked)))
        p, d = self.processes
        mine = d is not None and asked == d.incarnation
        if kind == "find" and mine:
            self.do(D, "at", rank, "found", p.incarnation if p else 0)
        elif kind == "hello" and p is not None:
            self.do(P, "at", rest[1], "hello", (asked, rank, rest[0]), rest[2])
        elif kind != "find" and mine:
            answer = rest[1] if kind == "answer" else None
            self.do(D, "at", rank, "greeted", rest[0], answer)

    def land(self, side):
        if not self.writes:
            return
        write = self.rng.choice(list(self.writes))
        phase, mine = self.writes[write], write.writer in self.open(P)
        if phase == LANDED:
            del self.writes[write]
            if mine:
                self.do(P, "at", write.lane[0], "ended", write.number, "done")
        elif write.target in self.open(D):
            incarnation = self.processes[D].incarnation
            tokens = range(write.start, write.stop)
            self.landed |= {(incarnation, write.lane, write.attempt, token) for token in tokens}
            self.letters.append((write.writer, write.target, write.done))
            self.steps += 1
            if mine and phase == FLYING:
                self.writes[write] = LANDED
            else:
                del self.writes[write]

    # -------------------------------------------------------------------- faults

    def fault(self):
        rng = self.rng
        side = rng.choice((P, D))
        process = self.processes[side]
        if process is None:
            return
        what = rng.choice(["request"] * 8 + ["abort", "preempt", "late", "alarm", "break", "die"])
        if what == "request":
            self.request()
        elif what in ("abort", "preempt"):
            events = [e for e in process.engine.enabled() if e[0] in ("abort", "preempt", "reset")]
            if events:
                self.do(side, *rng.choice(events))
        elif what == "late":
            self.late(side, deaf=rng.random() < 0.5)
        elif what == "alarm" and rng.random() < 0.5:
            rank = rng.choice(process.ranks)
            if peers := rank.peers():
                self.do(side, "at", rank.number, "unreachable", rng.choice(peers))
        elif what == "break" and self.writes:
            write = rng.choice(list(self.writes))
            if self.writes[write] == FLYING and write.writer in self.open(P):
                self.writes[write] = BROKEN
                self.do(P, "at", write.lane[0], "ended", write.number, "broken")
        elif what == "die" and rng.random() < 0.3:
            self.processes[side] = None
            self.writes = {w: x for w, x in self.writes.items() if side != P or x != LANDED}

    def request(self):
        """Both legs of a request, or one of them; often a prompt that is known."""
        self.requests += 1
        rng, number = self.rng, self.requests
        prompt, tokens = f"prompt{rng.randrange(number // 2 + 1)}", rng.choice((4, 8, 8, 12))
        prompt = f"{prompt}/{tokens}"
        for side, share in ((P, 0.9), (D, 0.9)):
            if self.processes[side] is not None and rng.random() < share:
                self.do(side, "new", (side, f"r{number}", f"t{number}", prompt, tokens, False))

    def late(self, side, deaf=False):
        process, other = self.processes[side], self.processes[1 - side]
        alive = ((),) * process.world
        if other is not None and not deaf:
            alive = seen(process).hears(seen(other))
        self.do(side, "late", alive)

    # -------------------------------------------------------------------- all of it

    def run(self, steps: int):
        """Play; raises Broken."""
        while self.steps < steps:
            self.choose()
        self.calm()
        return self

    def calm(self):
        """Faults stop, and everything ends."""
        for _ in range(MOST_CALM):
            for _ in range(400):
                self.choose(faults=False)
            if not self.leftovers():
                return
            self.make_room()
            for side in (P, D):
                if self.processes[side] is not None:
                    self.late(side)
        check(False, f"this never ends: {self.leftovers()}")

    def make_room(self):
        """Prompts that wait for each other's blocks: vLLM preempts the newest."""
        process = self.processes[P]
        events = process.engine.enabled() if process is not None else ()
        victims = [event for event in events if event[0] == "preempt"]
        if victims:
            self.do(P, *victims[-1])

    def leftovers(self):
        return [left for p in self.processes if p is not None and (left := p.leftovers())]


def play(seed: int, steps: int) -> Walk:
    """One run; a failure names the command that repeats it."""
    walk = Walk(seed)
    try:
        return walk.run(steps)
    except Exception as error:
        last = "\n".join(map(str, walk.story[-12:]))
        error.add_note(f"{last}\nreplay: python -m tests.model --walk {seed} --steps {steps}")
        raise
