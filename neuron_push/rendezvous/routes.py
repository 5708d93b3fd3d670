"""The decode side's way to a prefill engine: who answers there, and a link to each rank needed.

    (unknown) --wanted--> FINDING --listeners answered--> GREETING --all welcomed--> READY
                             |                                |                        |
                             +----------- refused, silent ----+---- a link is lost ----+
                             v
                         (unknown)

A route that ends takes no blame with it: the next request asks again, which is how a prefill
engine that was restarted on the same port is found. Routes share links: a prefill rank keeps one
link per decode rank, that of the newest hello, so an open link is used and never greeted again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import astuple, replace

from neuron_push.errors import PlanError
from neuron_push.geometry import Geometry, GeometryError, check
from neuron_push.limits import Limits
from neuron_push.plan import MIN_RUN, Ask, Means, Plan, StagedPlan, Stripe, assign, decide, staged
from neuron_push.protocol import (
    Address,
    EngineInfo,
    Hello,
    RankInfo,
    Refusal,
    Slabs,
    Welcome,
)
from neuron_push.rendezvous.events import EngineFound, FindEngine, Greet, Load
from neuron_push.rendezvous.links import Context, Link, Links, owns
from neuron_push.transport import AgentName

Verdict = tuple[list[int], list[Link] | str]  # attempts, and their links or the reason


@dataclass(slots=True, eq=False)
class Greeting:
    """A hello on its way to one prefill rank."""

    peer: RankInfo
    hello: Hello


@dataclass(slots=True, eq=False)
class Route:
    """Everything known about the way to one prefill engine."""

    address: Address
    began: float
    engine: str = ""
    ready: bool = False
    doubted: bool = False  # who is there was asked again, since registrations go unanswered
    answers: bool = False  # and its engine has answered
    waiting: list[int] = field(default_factory=list)  # attempts
    greetings: dict[int, Greeting] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)


class Routes:
    """All routes of a decode rank, by the prefill engine's side-channel address."""

    def __init__(self, context: Context, links: Links) -> None:
        self._context = context
        self._links = links
        self._routes: dict[Address, Route] = {}
        # The newest hello that each prefill rank has not answered; earlier ones are void.
        self._newest: dict[tuple[str, int], int] = {}

    def want(self, attempt: int, address: Address, engine: str, now: float) -> Verdict | None:
        """Ask for links for an attempt; answers at once if the route is ready."""
        route = self._routes.get(address)
        if route is None:
            route = self._routes[address] = Route(address, now)
            self._context.act(FindEngine(address))
        elif route.ready and (self._idle(route, now) or (engine and route.engine != engine)):
            # It may have been restarted, unnoticed by this route: ask again who is there. Links
            # to ranks that are still the same are used on.
            route = self._routes[address] = Route(address, now)
            self._context.act(FindEngine(address))
        if not route.ready:
            route.waiting.append(attempt)
            return None
        return [attempt], route.links

    def _idle(self, route: Route, now: float) -> bool:
        """Whether some rank has not been heard for so long that nobody knows if it lives."""
        silence = self._context.config.silence
        return any(not link.sessions and now - link.spoke > silence for link in route.links)

    def doubt(self, address: Address) -> None:
        """Registrations go unanswered: ask who is there now."""
        route = self._routes.get(address)
        if route is not None and route.ready and not route.doubted:
            route.doubted, route.answers = True, False
            self._context.act(FindEngine(address))

    def replaced_at(self, event: EngineFound) -> list[Link]:
        """Links of a doubted route whose ranks are not there any more."""
        route = self._routes.get(event.address)
        if route is None or not route.doubted:
            return []
        route.doubted, route.answers = False, True
        there = {(event.info.engine, rank.rank, rank.incarnation) for rank in event.info.ranks}
        return [
            link for link in route.links if (link.engine, link.rank, link.incarnation) not in there
        ]

    def answers(self, link: Link) -> bool:
        """Whether an engine that leaves registrations unanswered has said that it is there."""
        return any(route.answers for route in self._routes.values() if link in route.links)

    def engine_at(self, address: Address) -> str:
        """The engine id found at an address, or "" if that is not known."""
        route = self._routes.get(address)
        return route.engine if route else ""

    def found(self, event: EngineFound, now: float) -> Verdict | None:
        """Both engines' listings are here: decide which ranks are needed and greet them."""
        route = self._routes.get(event.address)
        if route is None or route.engine:
            return None
        context, me = self._context, self._context.identity
        theirs, ours = event.info, event.own
        differences = theirs.semantics.differences(me.semantics)
        if differences:
            return self._fail(route, "the engines differ: " + "; ".join(differences))
        if theirs.role == "consumer":
            return self._fail(route, f"engine {theirs.engine} is a decode engine (kv_consumer)")
        if len(theirs.ranks) < theirs.world:
            return self._fail(
                route, f"{len(theirs.ranks)} of {theirs.world} ranks of {theirs.engine} are up"
            )
        try:
            for rank in theirs.ranks:
                check(rank.geometry, context.config.limits)
            asks, sharers = _asks(me.rank, theirs, ours)
        except PlanError as error:
            return self._fail(route, str(error))
        route.engine = theirs.engine
        for (rank, ask), number in zip(asks, sharers, strict=True):
            link = self._open_link(route.engine, rank)
            if link is not None:
                route.links.append(link)
                continue
            self._greet(route, rank, Hello(
                me.engine, me.rank, me.incarnation, 0, me.semantics, me.geometry,
                context.agent, context.metadata, ask.heads, number, me.slabs, astuple(ask.stripe),
            ))  # fmt: skip
        return self._check_ready(route, now)

    def missing(self, address: Address, reason: str) -> Verdict | None:
        route = self._routes.get(address)
        if route is not None and route.ready:
            route.doubted = route.answers = False
            return None
        return self._fail(route, reason) if route else None

    def greeted(self, link: int, answer: Welcome | Refusal, now: float) -> Verdict | None:
        """A prefill rank answered; the route is ready when all have."""
        route = next((r for r in self._routes.values() if link in r.greetings), None)
        if route is None:
            return None
        greeting, context = route.greetings.pop(link), self._context
        newest = self._answered(route, greeting, link)
        name = f"prefill rank {greeting.peer.rank}"
        # Our agent was replaced while the hello travelled: whoever loads it finds nobody.
        stale = newest and greeting.hello.agent != context.agent
        if isinstance(answer, Refusal) and stale:
            self._renew(route, greeting)
            return None
        if isinstance(answer, Refusal):
            return self._fail(route, f"{name} refused: {answer.reason}")
        if not self._welcomes(route, greeting.peer, answer):
            return self._fail(route, f"{name} is not the one that was listed")
        if not newest:
            newer = self._open_link(route.engine, greeting.peer)
            if newer is None:
                return self._fail(route, f"{name} was greeted again meanwhile")
            route.links.append(newer)
            return self._check_ready(route, now)
        if stale:
            self._renew(route, greeting)
            return None
        agent = AgentName(answer.agent)
        ask = Ask(greeting.hello.ask, Stripe(*greeting.hello.stripe))
        try:
            unpack = self._unpack(greeting, answer)
            arrival = self._arrival(greeting, answer)
        except PlanError as error:
            return self._fail(route, f"{name} wants its pages unpacked: {error}")
        opened = Link(
            link, "prefill", answer.engine, answer.rank, answer.incarnation, agent,
            answer.metadata, greeting.peer.geometry, context.generation, heard=now, spoke=now,
            hello=link, arrival=arrival, unpack=unpack, ask=ask,
        )  # fmt: skip
        opened.read = "unknown" if answer.readable else None
        self._links.add(opened)
        route.links.append(opened)
        context.act(Load(context.generation, agent, answer.metadata))
        return self._check_ready(route, now)

    def lost(self, link: Link, reason: str) -> Verdict | None:
        """A link is lost: its routes start over with the next request."""
        routes = [route for route in self._routes.values() if link in route.links]
        waiting = [number for route in routes for number in self._fail(route, reason)[0]]
        return (waiting, reason) if routes else None

    def replaced_by(self, link: int, answer: Welcome | Refusal) -> list[Link]:
        """Open links that end with this answer: those to the rank's earlier incarnations."""
        known = any(link in route.greetings for route in self._routes.values())
        if isinstance(answer, Refusal) or not known:
            return []
        return [
            old
            for old in self._links.of_rank("prefill", answer.engine, answer.rank)
            if old.incarnation != answer.incarnation
        ]

    def _unpack(self, greeting: Greeting, answer: Welcome) -> StagedPlan | None:
        """The plan that the prefill rank has made too, if it writes into our slabs."""
        me = self._context.identity
        if answer.way not in ("unpacked", "both"):
            if me.slabs is not None and me.slabs.sole:
                raise PlanError(
                    "prefill would write into pages that are not registered here: host_staging "
                    "needs a newer neuron-push there"
                )
            return None
        if me.slabs is None:
            raise PlanError("this rank does not reorder")
        size = me.slabs.slab_bytes
        if answer.way == "both":
            size = min(size, greeting.peer.slab_bytes)
        return staged(
            greeting.peer.geometry, me.geometry,
            Ask(greeting.hello.ask, Stripe(*greeting.hello.stripe)), answer.way,
            size, min_run=min(self._context.config.min_run, MIN_RUN),
        )  # fmt: skip

    def _arrival(self, greeting: Greeting, answer: Welcome) -> Plan | None:
        """By what the prefill rank WRITEs into our blocks, if we compare digests of it."""
        me, config = self._context.identity, self._context.config
        if not config.kv_digest:
            return None
        means = Means(
            prefill_slab=greeting.peer.slab_bytes,
            decode_slab=me.slabs.slab_bytes if me.slabs else 0,
            min_run=config.min_run,
            both=answer.way == "both",
        )
        ask = Ask(greeting.hello.ask, Stripe(*greeting.hello.stripe))
        plan = decide(greeting.peer.geometry, me.geometry, ask, means)
        if plan.way != answer.way:
            raise PlanError(
                f"it goes {answer.way} where we would go {plan.way}, so kv_digest cannot be "
                "compared: give both engines the same min_run"
            )
        if isinstance(plan, StagedPlan) and plan.way == "both":
            return plan.straight.plan if plan.straight else None
        return plan

    def _open_link(self, engine: str, rank: RankInfo) -> Link | None:
        links = self._links.of_rank("prefill", engine, rank.rank)
        return next((link for link in links if link.incarnation == rank.incarnation), None)

    def _welcomes(self, route: Route, peer: RankInfo, answer: Welcome) -> bool:
        """Whether the rank that answered is the one that its engine listed."""
        listed = (route.engine, peer.rank, peer.incarnation)
        return (answer.engine, answer.rank, answer.incarnation) == listed and owns(
            *listed, answer.agent
        )

    def _greet(self, route: Route, peer: RankInfo, hello: Hello) -> None:
        link = self._links.new_id()
        self._newest[route.engine, peer.rank] = link
        hello = replace(hello, link=link)
        route.greetings[link] = Greeting(peer, hello)
        self._context.act(Greet(link, peer.address, hello))

    def _renew(self, route: Route, greeting: Greeting) -> None:
        """Say a hello again, with the agent of today."""
        context = self._context
        hello = replace(greeting.hello, agent=context.agent, metadata=context.metadata)
        self._greet(route, greeting.peer, hello)

    def _check_ready(self, route: Route, now: float) -> Verdict | None:
        if route.greetings:
            return None
        route.ready = True
        self._context.count("handshake_seconds", now - route.began)
        waiting, route.waiting = route.waiting, []
        return waiting, route.links

    def _answered(self, route: Route, greeting: Greeting, link: int) -> bool:
        """A hello is over; whether it was the newest to that rank."""
        key = route.engine, greeting.peer.rank
        newest = self._newest.get(key) == link
        if newest:
            del self._newest[key]
        return newest

    def _fail(self, route: Route, reason: str) -> Verdict:
        self._routes.pop(route.address, None)
        for link, greeting in route.greetings.items():
            self._answered(route, greeting, link)
        if route.waiting:
            self._context.count("handshake_failures")
        return route.waiting, reason


def _asks(
    me: int, theirs: EngineInfo, ours: EngineInfo
) -> tuple[list[tuple[RankInfo, Ask]], list[int]]:
    """What this rank asks of which prefill ranks, and how many of ours ask each for anything.

    All of our ranks see the same, in whatever order the listeners name them.
    """
    sources, seats = (sorted(side.ranks, key=lambda info: info.rank) for side in (theirs, ours))
    numbers = [info.rank for info in seats]
    if me not in numbers:
        raise PlanError(f"rank {me} is not among those that {ours.engine} lists: {numbers}")
    table = assign([info.geometry for info in seats], [info.geometry for info in sources])
    mine = table[numbers.index(me)]
    wanted = [(info, ask) for info, ask in zip(sources, mine, strict=True) if ask is not None]
    counts = [sum(row[info] is not None for row in table) for info, ask in enumerate(mine) if ask]
    return wanted, counts


def check_slabs(slabs: Slabs | None, geometry: Geometry, limits: Limits) -> None:
    """Judge the staging memory that a decode rank offers; raises GeometryError."""
    if slabs is None:
        return
    if slabs.slab_bytes < 1 or not 1 <= slabs.count <= limits.slabs:
        raise GeometryError(
            f"slabs of {slabs.slab_bytes} bytes in {slabs.region.length}, where limits.slabs is "
            f"{limits.slabs}"
        )
    # As a region beside one of its caches: sane, and of the same kind of memory.
    check(replace(geometry, regions=(*geometry.regions[:1], slabs.region), groups=()), limits)
