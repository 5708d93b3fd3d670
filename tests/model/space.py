"""Every state that a prefill engine, a decode engine, a router and a network can reach.

A state is two processes and what is between them, in small numbers: processes, messages, WRITEs
and questions are numbered as they are first met, and sets of them are bits of an integer. What a
process does on an event depends on that process alone, so it is run once and remembered: the
real code runs tens of thousands of times for millions of states.

The network keeps whatever was sent to an agent that still exists: it may arrive at any time, any
number of times, in any order, or never. A posted WRITE may land, whole or torn, at any time until
one of its agents is gone, so no step lands bytes: in *every* state the blocks of every WRITE that
flies must be its attempt's, and the bytes that it reads its prompt's.

A posted READ changes decode's blocks likewise, until decode's own agent is gone. Prefill may take
back the blocks that it reads, if it takes decode for dead: then the READ is *spoilt*, it may have
brought anything, and decode must never decode over what it brought.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from neuron_push.protocol import decode_notification
from tests.model.engines import DecodeEngine, PrefillEngine
from tests.model.freeze import Key, clone
from tests.model.processes import SHARED, Broken, Process, Read

P, D = 0, 1
NAMES = "PD"
# Times in which every timeout falls due that anything may take to end, faults being over.
MOST_LATES = 8
# Steps between two of those.
MOST_STEPS = 400
# A WRITE flies until it has landed; then prefill has yet to see that. One that was called broken
# may still land, but nobody is told. A READ flies until decode has seen its end.
FLYING, LANDED, BROKEN, SPOILT = "flying", "landed", "broken", "spoilt"


@dataclass(frozen=True)
class Leg:
    """One leg that the router may send; `after` names a leg that must be over by then."""

    side: int
    name: str
    transfer: str | None
    prompt: str = "prompt"
    tokens: int = 8
    after: str = ""
    pull: bool = False  # of decode: READ what prefill lends

    def args(self):
        return (self.side, self.name, self.transfer, self.prompt, self.tokens, self.pull)


@dataclass(frozen=True)
class Bounds:
    """What may happen, how often at most. Repeats and network trouble are never bounded."""

    legs: tuple[Leg, ...]
    crashes: tuple[int, int] = (0, 0)  # of prefill, of decode
    lates: tuple[int, int] = (0, 0)  # times in which every timeout falls due
    deaf: bool = False  # whether such a time may pass without signs of life of a living peer
    aborts: tuple[int, int] = (0, 0)
    preempts: int = 0
    alarms: tuple[int, int] = (0, 0)  # transports that call a living peer unreachable
    # WRITEs and READs whose failure their poster is told of while they may still land.
    broken: int = 0
    overtaken: int = 0  # hellos that decode gave up and that arrive all the same
    blocks: tuple[int, int] = (2, 2)
    recompute: bool = False
    # Things that take their time here, so that others come in between; elsewhere they are instant.
    slow: frozenset[str] = frozenset()  # of "greetings", "generations", "steps", "unpacking"
    # Who reorders, in slabs: "packed" by prefill, "unpacked" by decode, or "both".
    staged: str = ""


class Table:
    """Numbers for things, as they are first met."""

    def __init__(self):
        self.things, self._numbers = [], {}

    def bit(self, thing) -> int:
        number = self._numbers.setdefault(thing, len(self.things))
        if number == len(self.things):
            self.things.append(thing)
        return 1 << number

    def of(self, bits):
        """(bit, thing) for every bit."""
        while bits:
            bit = bits & -bits
            bits ^= bit
            yield bit, self.things[bit.bit_length() - 1]


@dataclass(slots=True)
class Local:
    """One state of one process, and what others look at of it."""

    process: Process
    events: tuple
    open: tuple[str, ...]
    bases: frozenset[str]
    peers: tuple[str, ...]
    memory: frozenset
    leftovers: tuple[str, ...]
    incarnation: int
    inbox: int = 0  # messages known to be for it
    known: int = 0  # of the messages looked at
    idle: int = 0  # messages that change nothing


@dataclass(slots=True)
class Change:
    """What one event does to a process and to the world, in numbers."""

    local: int
    sent: int = 0
    posted: int = 0
    asked: int = 0
    closed: tuple[str, ...] = ()
    received: tuple = ()
    unpacks: tuple = ()
    unpacked: tuple = ()
    broken: Exception | None = None


class Space:
    """The states within some bounds, explored breadth first."""

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self.locals: list[Local] = []
        self._keys: dict[tuple, int] = {}
        self._changes: dict[tuple, Change] = {}
        self.messages, self.writes, self.asked, self.landed = Table(), Table(), Table(), Table()
        self.names = [leg.name for leg in bounds.legs]
        self.pulls = any(leg.pull for leg in bounds.legs)
        self._starts: dict[tuple[int, int], int] = {}
        self.parents: dict[tuple, tuple | None] = {}
        self._ends: set[tuple] = set()
        self.whole = False  # every state was visited
        self.steps = 0

    # -------------------------------------------------------------------- one process

    def start(self, side: int, incarnation: int) -> int:
        """A fresh process."""
        if (side, incarnation) not in self._starts:
            role = ("producer", "consumer")[side]
            process = Process(NAMES[side], role, incarnation, self.bounds.staged)
            count, process.prompt = self.bounds.blocks[side], "steps" not in self.bounds.slow
            if side == P:
                process.engine = PrefillEngine(process, count)
            else:
                process.engine = DecodeEngine(process, count, recompute=self.bounds.recompute)
            self._starts[side, incarnation] = self._intern(process)
        return self._starts[side, incarnation]

    def _intern(self, process: Process) -> int:
        shared = {id(thing): thing for thing in (*SHARED, process.identity)}
        key = Key(process.now, 13, shared).of(process)
        number = self._keys.setdefault(key, len(self.locals))
        if number == len(self.locals):
            engine = process.engine
            decode = isinstance(engine, DecodeEngine)
            self.locals.append(Local(
                process, tuple(engine.enabled()), tuple(process.open.values()),
                frozenset(base(agent) for agent in process.open.values()),
                tuple(process.peers()),
                engine.writable() | process.granted() if decode else engine.readable(),
                tuple(process.leftovers()), process.incarnation,
            ))  # fmt: skip
        return number

    def change(self, number: int, key, event: tuple) -> Change:
        """What an event does to a process in a state; `key` stands for the event."""
        found = self._changes.get((number, key))
        if found is None:
            found = self._changes[number, key] = self._run(number, event)
        return found

    def _run(self, number, event) -> Change:
        original = self.locals[number].process
        memo = {id(thing): thing for thing in (*SHARED, original.identity)}
        process = clone(original, memo)
        try:
            effects = process.apply(event)
        except Exception as error:  # noqa: BLE001  told with its story
            return Change(number, broken=error)
        sent = posted = asked = 0
        for item in effects.sent:
            sent |= self.messages.bit(item)
        for item in effects.posted:
            posted |= self.writes.bit((item, FLYING))
        for item in effects.asked:
            asked |= self.asked.bit(item)
        return Change(
            self._intern(process), sent, posted, asked, tuple(effects.closed),
            tuple(effects.received), tuple(effects.unpacks), tuple(effects.unpacked),
        )  # fmt: skip

    # -------------------------------------------------------------------- one state

    def first(self) -> tuple:
        """Both engines are up and nothing was asked of them."""
        bounds = self.bounds
        budget = (
            *bounds.crashes, *bounds.lates, *bounds.aborts, bounds.preempts, *bounds.alarms,
            bounds.overtaken, bounds.broken,
        )  # fmt: skip
        return (self.start(P, 1), self.start(D, 1), 0, 0, 0, budget, 0, 0)

    def after(self, state, side, change: Change, **parts):
        """The state after a process did something; `parts` are what the event took away."""
        if change.broken is not None:
            raise change.broken
        ps, ds, net, writes, asked, budget, sent, landed = state
        net = parts.get("net", net) | change.sent
        writes = parts.get("writes", writes) | change.posted
        asked = parts.get("asked", asked) | change.asked
        budget, sent = parts.get("budget", budget), parts.get("legs", sent)
        landed = parts.get("landed", landed)
        ps, ds = (change.local, ds) if side == P else (ps, change.local)
        if self.bounds.staged:
            landed = self._staged(ds, change, writes, landed)
        if change.closed:
            writes = self._close(side, change.closed, writes)
        if self.pulls:
            writes = self._spoil(ps, writes)
        if change.received:
            self._check_received(ds, change.received, landed)
        net &= self._deliverable(ps, ds)
        return (ps, ds, net, writes, asked, budget, sent, landed)

    def _deliverable(self, ps, ds) -> int:
        """Messages whose agent exists: for a process that is down there are none."""
        bits = 0
        for number in (ps, ds):
            if number >= 0:
                bits |= self._inbox(self.locals[number])
        return bits

    def _inbox(self, local) -> int:
        total = len(self.messages.things)
        if local.known < total:
            for index in range(local.known, total):
                if self.messages.things[index][1] in local.open:
                    local.inbox |= 1 << index
            local.known = total
        return local.inbox

    def _close(self, side, agents, writes):
        """Agents are gone: what they moved is gone too, what they were sent may be missed."""
        for bit, (item, _) in self.writes.of(writes):
            reads = isinstance(item, Read)
            if side == (D if reads else P) and (item.reader if reads else item.writer) in agents:
                writes ^= bit
        return writes

    def _spoil(self, ps, writes):
        """READs in flight whose blocks prefill holds no more, while it could still be read."""
        p = self.locals[ps] if ps >= 0 else None
        for bit, (item, phase) in self.writes.of(writes if p else 0):
            if not isinstance(item, Read) or phase != FLYING or item.owner not in p.open:
                continue
            if not {fact[1:] for fact in p.memory}.issuperset(item.source):
                writes = writes & ~bit | self.writes.bit((item, SPOILT))
        return writes

    def _staged(self, ds, change, writes, landed):
        """Slabs are filled when nothing reads them, and unpacked when all of a piece is there."""
        for _, (write, _) in self.writes.of(change.posted):
            for _, (other, phase) in self.writes.of(writes):
                both = write is not other and not isinstance(other, Read) and phase != LANDED
                if both and 0 <= write.own == other.own and write.writer == other.writer:
                    raise Broken(
                        f"tokens {write.start}..{write.stop} are packed into slab {write.own}, of "
                        f"which tokens {other.start}..{other.stop} are still being sent"
                    )
        for attempt, start, stop, piece in change.unpacks:
            here = (self.locals[ds].incarnation, attempt, start, stop, piece)
            if not landed & (self.landed.bit(here) | self.landed.bit((*here, SPOILT))):
                raise Broken(f"tokens {start}..{stop} of attempt {attempt} are unpacked too early")
        for attempt, start, stop, piece in change.unpacked:
            here = (self.locals[ds].incarnation, attempt, start, stop)
            if landed & self.landed.bit((*here, piece)):
                landed |= self.landed.bit(here)
        return landed

    def _check_received(self, ds, received, landed):
        incarnation = self.locals[ds].incarnation
        for attempt, start, stop in received:
            tokens = set(range(start, stop))
            for _, (who, number, low, high, *slab) in self.landed.of(landed):
                if (who, number) == (incarnation, attempt) and not slab:
                    tokens -= set(range(low, high))
            if tokens:
                raise Broken(
                    f"D decodes over attempt {attempt}, of which tokens {sorted(tokens)} "
                    "have not landed"
                )

    def check(self, state):
        """Promises 1 and 2 for every WRITE that flies, and 1 for every READ."""
        ps, ds, _, writes, *_ = state
        d = self.locals[ds] if ds >= 0 else None
        p = self.locals[ps] if ps >= 0 else None
        for _, (write, phase) in self.writes.of(writes):
            if phase == LANDED or d is None or write.into not in d.open:
                continue
            if write.slab >= 0:
                self._check_slab(write, d)
            for block in write.blocks:
                if (write.attempt, block) not in d.memory:
                    kind = type(write).__name__.upper()
                    raise Broken(
                        f"a {kind} of tokens {write.start}..{write.stop} for attempt "
                        f"{write.attempt} may land in block {block} of D, which is not held for it"
                    )
            if isinstance(write, Read) or p is None or write.writer not in p.open:
                continue
            for block, content in write.source:
                if (write.pin, block, content) not in p.memory:
                    raise Broken(
                        f"a WRITE for attempt {write.attempt} may read block {block} of P, which "
                        f"is not held, or does not hold block {content[1]} of {content[0]!r}"
                    )

    def _check_slab(self, write, d):
        """Promise 1 for slabs: one that may change is kept for that piece, and for no other."""
        kept = {each for each in d.memory if each[0] == "slab" and each[3] == write.slab}
        if kept != {("slab", write.attempt, write.piece, write.slab)}:
            raise Broken(
                f"tokens {write.start}..{write.stop} of attempt {write.attempt} may land in slab "
                f"{write.slab} of D, which is not kept for them alone"
            )

    # -------------------------------------------------------------------- what may happen

    def successors(self, state, *, calm=False):
        """(what happens, the state after it) for all that may happen; `calm`: without faults."""
        found = next(self._instant(state), None)
        if found is not None:
            yield found
            return
        for side in (P, D):
            if state[side] >= 0:
                yield from self._internal(state, side)
                yield from self._deliveries(state, side)
        if state[D] >= 0:
            yield from self._unpacking(state)
        yield from self._questions(state, calm)
        yield from self._landings(state, calm)
        for side in (P, D):
            if state[side] >= 0:
                yield from self._engine(state, side, calm)
                yield from self._unreachable(state, side, calm)
                yield self._tick(state, side)
        if not calm:
            yield from self._router(state)
            yield from self._faults(state)

    def _instant(self, state):
        """What happens at once, in bounds that do not look at the time it takes."""
        if "generations" not in self.bounds.slow:
            for side in (P, D):
                if state[side] >= 0:
                    yield from self._internal(state, side)
        if "greetings" not in self.bounds.slow and state[D] >= 0:
            yield from self._questions(state, True)
        if "unpacking" not in self.bounds.slow and state[D] >= 0:
            yield from self._unpacking(state)

    def _internal(self, state, side):
        number = state[side]
        process = self.locals[number].process
        for waiting, name in ((process.opening, "opened"), (process.closing, "closed")):
            if waiting:
                change = self.change(number, name, (name,))
                yield (side, name), self.after(state, side, change)

    def _unpacking(self, state):
        if self.locals[state[D]].process.unpacking:
            change = self.change(state[D], "unpacked", ("unpacked",))
            yield (D, "has unpacked"), self.after(state, D, change)

    def _deliveries(self, state, side):
        number, net = state[side], state[2]
        local = self.locals[number]
        for bit, (sender, _, message) in self.messages.of(net & self._inbox(local) & ~local.idle):
            change = self._changes.get((number, bit))
            if change is None:
                event = ("message", sender, decode_notification(message))
                change = self.change(number, bit, event)
            if change.local == number and not (change.sent | change.posted | change.asked):
                if change.broken is None:
                    local.idle |= bit
                    continue
            elif change.local == number and not (change.sent & ~net | change.posted):
                continue
            yield (side, "hears", bit), self.after(state, side, change)

    def _questions(self, state, calm):
        ps, ds, _, _, asked, budget, *_ = state
        for bit, question in self.asked.of(asked):
            kind, rest = question[0], asked & ~bit
            if ds < 0:
                continue
            d = self.locals[ds]
            if kind == "find":
                peer = self.locals[ps].incarnation if ps >= 0 else 0
                change = self.change(ds, ("found", peer), ("found", peer))
                yield (D, "finds", peer), self.after(state, D, change, asked=rest)
            elif kind == "hello":
                _, incarnation, link, hello = question
                if ps >= 0:
                    token = (incarnation, link)
                    change = self.change(ps, ("hello", bit), ("hello", token, hello))
                    yield (P, "is greeted", link), self.after(state, P, change, asked=rest)
                elif incarnation == d.incarnation:
                    change = self.change(ds, ("greeted", link), ("greeted", link, None))
                    yield (D, "greets nobody", link), self.after(state, D, change, asked=rest)
                if not calm and budget[9] and incarnation == d.incarnation:
                    change = self.change(ds, ("greeted", link), ("greeted", link, None))
                    yield (
                        (D, "waits no longer to be welcome", link),
                        self.after(state, D, change, budget=spend(budget, 9)),
                    )
            elif kind == "answer":
                _, incarnation, link, message = question
                if incarnation == d.incarnation:
                    change = self.change(ds, ("answer", bit), ("greeted", link, message))
                    yield (D, "is answered", link), self.after(state, D, change, asked=rest)

    def _landings(self, state, calm):
        ps, ds, net, writes, _, _, _, landed = state
        d = self.locals[ds] if ds >= 0 else None
        p = self.locals[ps] if ps >= 0 else None
        for bit, (write, phase) in self.writes.of(writes):
            if isinstance(write, Read):
                yield from self._reading(state, bit, write, phase, calm)
                continue
            mine = p is not None and write.writer in p.open
            rest = writes & ~bit
            if phase == LANDED:
                change = self.change(ps, ("ended", bit), ("ended", write.number, "done"))
                yield (P, "sees a WRITE done", bit), self.after(state, P, change, writes=rest)
            elif d is not None and write.target in d.open:
                known = mine and phase == FLYING
                after = rest | (self.writes.bit((write, LANDED)) if known else 0)
                fact = self._fact(d, write)
                done = self.messages.bit((write.writer, write.target, write.done))
                yield (D, "has a WRITE landed", bit), (
                    ps, ds, net | done, after, *state[4:7], landed | fact,
                )  # fmt: skip
            if mine and phase == FLYING and not calm:
                yield from self._break(state, bit, write, d is not None and write.target in d.open)

    def _reading(self, state, bit, read, phase, calm):
        """Decode sees a READ end well, or is told that it is broken; bytes may move until then.

        With prefill gone it may have ended before; faults being over, it just never ends.
        """
        ps, ds, _, writes, _, budget, _, landed = state
        if phase == BROKEN or ds < 0 or read.reader not in self.locals[ds].open:
            return
        there = ps >= 0 and read.owner in self.locals[ps].open
        rest = writes & ~bit
        if there or not calm:
            change = self.change(ds, ("read", bit), ("read", read.number, "done"))
            good = self._fact(self.locals[ds], read, spoilt=phase == SPOILT)
            after = self.after(state, D, change, writes=rest, landed=landed | good)
            yield (D, "sees a READ done", bit), after
        if calm or (there and not budget[10]):
            return
        change = self.change(ds, ("broken READ", bit), ("read", read.number, "broken"))
        rest |= self.writes.bit((read, BROKEN))
        spent = spend(budget, 10) if there else budget
        after = self.after(state, D, change, writes=rest, budget=spent)
        yield (D, "sees a READ broken", bit), after

    def _fact(self, d, moved, *, spoilt=False):
        """That tokens have landed: in blocks, or as a piece in a slab; spoilt ones for nothing."""
        fact = (d.incarnation, moved.attempt, moved.start, moved.stop)
        if moved.slab < 0:
            return 0 if spoilt else self.landed.bit(fact)
        return self.landed.bit((*fact, moved.piece, SPOILT) if spoilt else (*fact, moved.piece))

    def _break(self, state, bit, write, there):
        """The transport calls a WRITE broken: its target is gone, or only the connection is."""
        budget, told = state[5], self.writes.bit((write, BROKEN))
        if there and not budget[10]:
            return
        change = self.change(state[P], ("broken", bit), ("ended", write.number, "broken"))
        yield (
            (P, "sees a WRITE broken", bit),
            self.after(
                state, P, change, writes=state[3] & ~bit | told,
                budget=spend(budget, 10) if there else budget,
            ),
        )  # fmt: skip

    def _engine(self, state, side, calm):
        number, budget = state[side], state[5]
        for event in self.locals[number].events:
            name = event[0]
            spent = budget
            if name in ("abort", "preempt", "reset"):
                slot = 4 + side if name == "abort" else 6
                if calm or not budget[slot]:
                    continue
                spent = spend(budget, slot)
            change = self.change(number, event, event)
            yield (side, *event), self.after(state, side, change, budget=spent)

    def _unreachable(self, state, side, calm):
        number, budget, other = state[side], state[5], state[1 - side]
        there = self.locals[other].open if other >= 0 else ()
        for agent in self.locals[number].peers:
            spent = budget
            if agent in there:
                if calm or not budget[7 + side]:
                    continue
                spent = spend(budget, 7 + side)
            elif calm:
                continue
            change = self.change(number, ("unreachable", agent), ("unreachable", agent))
            yield (side, "cannot reach", agent), self.after(state, side, change, budget=spent)

    def _tick(self, state, side):
        change = self.change(state[side], "soon", ("soon",))
        return (side, "repeats"), self.after(state, side, change)

    def late(self, state, side, deaf=False, **parts):
        """All timeouts of a side fall due; it hears its peers if they are there and know it."""
        local, alive = self.locals[state[side]], ()
        if state[1 - side] >= 0 and not deaf:
            there = self.locals[state[1 - side]]
            if any(base(agent) in local.bases for agent in there.peers):
                alive = there.open
        change = self.change(state[side], ("late", alive), ("late", alive))
        return (side, "waits", alive), self.after(state, side, change, **parts)

    def _router(self, state):
        sent = state[6]
        for index, leg in enumerate(self.bounds.legs):
            number = state[leg.side]
            if sent >> index & 1 or number < 0:
                continue
            if leg.after and not self._over(state, leg.after):
                continue
            change = self.change(number, leg, ("new", leg.args()))
            yield (
                (leg.side, "is sent", leg.name),
                self.after(state, leg.side, change, legs=sent | 1 << index),
            )

    def _over(self, state, name):
        index = self.names.index(name)
        leg = self.bounds.legs[index]
        local = self.locals[state[leg.side]] if state[leg.side] >= 0 else None
        running = local is not None and name in local.process.engine.requests
        return state[6] >> index & 1 and not running

    def _faults(self, state):
        budget = state[5]
        for side in (P, D):
            if state[side] < 0:
                yield (
                    (side, "starts again"),
                    self._replace(state, side, self.start(side, 1 - state[side])),
                )
                continue
            if budget[2 + side]:
                spent = spend(budget, 2 + side)
                yield self.late(state, side, budget=spent)
                if self.bounds.deaf:
                    yield self.late(state, side, True, budget=spent)
            if budget[side]:
                yield (side, "dies"), self._die(state, side, spend(budget, side))

    def _replace(self, state, side, number):
        ps, ds = (number, state[D]) if side == P else (state[P], number)
        return (ps, ds, *state[2:])

    def _die(self, state, side, budget):
        ps, ds, net, writes, asked, _, sent, landed = state
        dead = -self.locals[state[side]].incarnation
        if side == P:
            ps = dead
            for bit, (_, phase) in self.writes.of(writes):
                if phase == LANDED:
                    writes ^= bit
        else:
            ds, asked, landed = dead, 0, 0
        net &= self._deliverable(ps, ds)
        return (ps, ds, net, writes, asked, budget, sent, landed)

    # -------------------------------------------------------------------- all states

    def explore(self, most=10**7, *, ends=True, whole=True) -> int:
        """Visit every state; raises Counterexample. Returns how many there are.

        `ends`: whether each must lead to an end as well. `whole`: whether more than `most` states
        are an error; else those that the fewest steps lead to are visited.
        """
        first = self.first()
        self.parents = {first: None}
        frontier = deque([first])
        while frontier and len(self.parents) < most:
            state = frontier.popleft()
            try:
                for label, after in self.successors(state):
                    self.steps += 1
                    if after not in self.parents:
                        after = self._prune(after)
                        if after in self.parents:
                            continue
                        self.parents[after] = (state, label)
                        self.check(after)
                        if ends:
                            self.settle(after)
                        frontier.append(after)
            except Exception as error:
                raise Counterexample(self, error, self._blamed(state)) from error
        self.whole = not frontier
        if frontier and whole:
            raise Unbounded(f"there are more than {most} states")
        return len(self.parents)

    def _blamed(self, state):
        """The state that was being looked at: the newest one, unless none was reached."""
        newest = next(reversed(self.parents))
        parent = self.parents[newest]
        return newest if parent is not None and parent[0] == state else state

    # -------------------------------------------------------------------- the end

    def quiescent(self, state) -> bool:
        """Nothing is under way or held on any side that lives."""
        held = any(number >= 0 and self.locals[number].leftovers for number in state[:2])
        return not held and not state[4] and not (state[3] and state[P] >= 0)

    def settle(self, state):
        """Promise 4: from here, without faults, everything ends and every block comes back.

        Raises Broken. States on the way are remembered: most runs end after a step or two.
        """
        way, lates = {state: None}, 0
        while state not in self._ends and not self.quiescent(state):
            after = self._next(state, way)
            if len(way) > MOST_STEPS:
                raise Broken(f"this goes on for more than {MOST_STEPS} steps without a fault")
            if after is None:
                lates += 1
                if lates > MOST_LATES:
                    left = {
                        NAMES[s]: self.locals[state[s]].leftovers for s in (P, D) if state[s] >= 0
                    }
                    raise Broken(f"this never ends without a fault: {left}")
                way.clear()
                after = state
                for side in (P, D):
                    if after[side] >= 0:
                        _, after = self.late(after, side)
            state = self._prune(after)
            self.check(state)
            way[state] = None
        self._ends.update(way)

    def _next(self, state, way):
        for _, after in self.successors(state, calm=True):
            if after not in way:
                return after
        return None

    def _prune(self, state):
        """Leave out WRITEs of the dead that cannot land any more, and READs of the dead."""
        ps, ds, net, writes, *rest = state
        if not writes:
            return state
        p_open = self.locals[ps].open if ps >= 0 else ()
        d_open = self.locals[ds].open if ds >= 0 else ()
        for bit, (write, phase) in self.writes.of(writes):
            told = isinstance(write, Read) or phase == BROKEN or write.writer not in p_open
            if told and write.into not in d_open:
                writes ^= bit
        return (ps, ds, net, writes, *rest)


def base(agent: str) -> str:
    return agent.rpartition("/")[0]


def spend(budget, slot):
    return (*budget[:slot], budget[slot] - 1, *budget[slot + 1 :])


class Unbounded(AssertionError):
    """There are more states than one cares to look at."""


class Counterexample(AssertionError):
    """A promise was broken: the shortest way there, step by step."""

    def __init__(self, space, error, state):
        self.error = error
        self.story = story(space, state)
        super().__init__("\n".join([f"{type(error).__name__}: {error}", *self.story]))


def story(space, state):
    """The steps that lead to a state."""
    steps = []
    while space.parents.get(state) is not None:
        state, label = space.parents[state]
        steps.append(describe(space, label))
    return [f"{index:3}. {text}" for index, text in enumerate(reversed(steps), 1)]


def describe(space, label):
    side, what, *rest = label
    text = f"{NAMES[side]} {what}"
    if what == "hears":
        sender, _, message = space.messages.things[rest[0].bit_length() - 1]
        return f"{text} {decode_notification(message)} from {sender}"
    if "WRITE" in what or "READ" in what:
        write, _ = space.writes.things[rest[0].bit_length() - 1]
        return f"{text}: tokens {write.start}..{write.stop} of attempt {write.attempt}"
    return " ".join([text, *map(str, rest)])
