"""The core of one worker rank: one function from (event, time) to actions.

It joins the consumer (attempts), the producer (sources, sendings), the links with their
liveness, the routes and the generations. It holds no thread, socket or clock. The driver
feeds every event through `handle`, calls `tick` often, and carries the actions out in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from neuron_push.commands import (
    Abandon,
    Compute,
    Layers,
    Near,
    Offer,
    Receive,
    Retire,
    Settle,
)
from neuron_push.config import Config
from neuron_push.errors import ProtocolError
from neuron_push.plan import Ask, Plan, Stripe
from neuron_push.protocol import (
    Alive,
    Cancel,
    Cancelled,
    Done,
    Failed,
    Grant,
    Hello,
    Kept,
    Lend,
    Move,
    Moved,
    Need,
    Refusal,
    Register,
    Registered,
    Return,
    Side,
    Soon,
    Taken,
    Welcome,
)
from neuron_push.rendezvous.admission import admit_hello, crowded
from neuron_push.rendezvous.consumer import Consumer
from neuron_push.rendezvous.events import (
    Action,
    Answer,
    Closed,
    EngineFound,
    EngineMissing,
    Event,
    Garbage,
    Greeted,
    HelloArrived,
    Notified,
    Opened,
    ReadEnded,
    Sealed,
    Unpacked,
    Unreachable,
    WriteEnded,
)
from neuron_push.rendezvous.fence import Generations
from neuron_push.rendezvous.links import Context, Identity, Link, Links
from neuron_push.rendezvous.parts import part_plans
from neuron_push.rendezvous.routes import Routes, Verdict
from neuron_push.rendezvous.sender import Producer
from neuron_push.transport import AgentName

Tempo = Literal["busy", "announced", "waiting", "idle", "empty"]
# Who sends what; Move and Moved say it, and Alive goes both ways.
SENDERS: dict[type, Side] = {
    Register: "decode",
    Cancel: "decode",
    Registered: "prefill",
    Soon: "prefill",
    Done: "prefill",
    Failed: "prefill",
    Cancelled: "prefill",
    Need: "prefill",
    Return: "prefill",
    Lend: "prefill",
    Kept: "prefill",
    Taken: "decode",
    Grant: "decode",
}
FROM_PREFILL = tuple(kind for kind, side in SENDERS.items() if side == "prefill")


class Core:
    """Everything one worker rank knows about its transfers."""

    def __init__(self, config: Config, identity: Identity) -> None:
        self._context = Context(config, identity)
        self.links = Links(self._context)
        self.consumer = Consumer(self._context)
        self.producer = Producer(self._context, self.links)
        self.generations = Generations(self._context, self.links)
        self._routes = Routes(self._context, self.links)
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            Receive: self._receive,
            Abandon: lambda event, now: self.consumer.abandon(event, now),
            Offer: lambda event, now: self.producer.offer(event, now),
            Near: lambda event, now: self.producer.near(event),
            Compute: lambda event, now: self.producer.compute(event),
            Layers: lambda event, now: self.producer.layers(event, now),
            Settle: lambda event, now: self.producer.settle(event, now),
            Retire: lambda event, now: self.producer.retire(event, now),
            Opened: lambda event, now: self.generations.on_opened(event, now),
            Closed: self._closed,
            EngineFound: self._engine_found,
            EngineMissing: self._engine_missing,
            Greeted: self._greeted,
            HelloArrived: self._hello,
            Notified: self._notified,
            Garbage: lambda event, now: self._context.count("rejected_messages", label="garbage"),
            Unreachable: self._unreachable,
            WriteEnded: self._write_ended,
            ReadEnded: self._read_ended,
            Unpacked: lambda event, now: self.consumer.unpacked(event, now),
            Sealed: lambda event, now: self.producer.sealed(event, now),
        }
        self._messages: dict[type, Callable[[Link, Any, float], None]] = {
            **dict.fromkeys(FROM_PREFILL, self.consumer.on_message),
            Register: self._register,
            Cancel: self.producer.on_cancel,
            Grant: self.producer.on_grant,
            Taken: self.producer.on_taken,
            Alive: lambda link, message, now: self.links.on_alive(link, message),
            Move: self._moved_peer,
            Moved: lambda link, message, now: self.generations.on_moved(link, message.agent),
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event at time `now` (seconds, monotonic); carry out what is returned."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise ProtocolError(f"no handler for {type(event).__name__}")
        handler(event, now)
        return self._take(now)

    def tick(self, now: float) -> list[Action]:
        """Let time pass: repeats, silences, leases, rotations."""
        silent, stuck = self.links.tick(now), [*self.consumer.tick(now), *self.producer.tick(now)]
        for link, reason in (*silent, *stuck):
            self._lose(link, reason, now)
        for link, reason in self.generations.tick(now):
            self._lose(link, reason, now)
        return self._take(now)

    @property
    def tempo(self) -> Tempo:
        """How soon the driver should look again."""
        if self.producer.writes or self.consumer.reads or self.consumer.landings.busy:
            return "busy"
        if self.consumer.announced or self.producer.loans:
            return "announced"
        if self.generations.pending or self.consumer.attempts or self.producer.sendings:
            return "waiting"
        return "idle" if self.producer.sources else "empty"

    def _take(self, now: float) -> list[Action]:
        self._look_after(now)
        self._context.slabs.serve(now)
        actions, self._context.actions = self._context.actions, []
        return actions

    # ------------------------------------------------------------------ routes and links

    def _look_after(self, now: float) -> None:
        """Registrations that nobody answers: ask who is there, and go there."""
        said = self.consumer.registrations
        doubtful, said.doubtful = said.doubtful, []
        for attempt in doubtful:
            self._routes.doubt(attempt.command.prefill)
        astray, said.astray = said.astray, []
        for attempt in astray:
            command = attempt.command
            verdict = self._routes.want(command.attempt, command.prefill, command.engine, now)
            self._link(verdict, now)

    def _receive(self, command: Receive, now: float) -> None:
        self.consumer.receive(command, now)
        self._link(self._routes.want(command.attempt, command.prefill, command.engine, now), now)

    def _engine_found(self, event: EngineFound, now: float) -> None:
        for link in self._routes.replaced_at(event):
            self._lose(link, "it was restarted", now, there=True)
        self._link(self._routes.found(event, now), now)

    def _engine_missing(self, event: EngineMissing, now: float) -> None:
        self._link(self._routes.missing(event.address, event.reason), now)

    def _greeted(self, event: Greeted, now: float) -> None:
        for old in self._routes.replaced_by(event.link, event.answer):
            self._lose(old, "it was greeted again", now)
        self._link(self._routes.greeted(event.link, event.answer, now), now)

    def _link(self, verdict: Verdict | None, now: float) -> None:
        """Tell attempts that their prefill engine is linked, or why it is not."""
        if verdict is None:
            return
        numbers, outcome = verdict
        for number in numbers:
            try:
                self._link_one(number, outcome, now)
            except Exception as error:  # noqa: BLE001  one attempt's defect is not another's
                self.consumer.defect(number, error)

    def _link_one(self, number: int, outcome: list[Link] | str, now: float) -> None:
        attempt = self.consumer.attempts.get(number)
        if attempt is None:
            return
        wanted, found = attempt.command.engine, self._routes.engine_at(attempt.command.prefill)
        if isinstance(outcome, str):
            self.consumer.unlinked(number, outcome, now)
        elif wanted and found != wanted:
            where = f"{attempt.command.prefill.host}:{attempt.command.prefill.port}"
            reason = f"the engine at {where} is {found}, not {wanted}"
            self.consumer.unlinked(number, reason, now)
        else:
            self.consumer.linked(number, outcome, now)

    def _hello(self, event: HelloArrived, now: float) -> None:
        """A decode rank wants a link: check that we can serve it, and replace its old one."""
        hello, context = event.hello, self._context
        agent = AgentName(hello.agent)
        plan = admit_hello(hello, context)
        if isinstance(plan, str):
            context.count("handshake_failures")
            context.note(f"hello of rank {hello.rank} of {hello.engine} refused: {plan}")
            context.act(Answer(event.token, Refusal(plan)))
            return
        for old in self.links.of_rank("decode", hello.engine, hello.rank):
            if old.incarnation == hello.incarnation and old.hello >= hello.link:
                context.act(Answer(event.token, Refusal("a newer hello has arrived before")))
                return
            self._lose(old, "it greeted again", now)
        if refusal := crowded(self.links, context):
            context.act(Answer(event.token, Refusal(refusal)))
            return
        link = Link(
            self.links.new_id(), "decode", hello.engine, hello.rank, hello.incarnation, agent,
            hello.metadata, hello.geometry, context.generation, heard=now, spoke=now,
            hello=hello.link, plan=plan, parts=self._parts(hello, plan),
            ask=Ask(hello.ask, Stripe(*hello.stripe)), sharers=hello.sharers, slabs=hello.slabs,
        )  # fmt: skip
        self.links.add(link)
        me = context.identity
        welcome = Welcome(me.engine, me.rank, me.incarnation, context.agent, context.metadata,
                          plan.way, readable=not (me.slabs and me.slabs.sole))  # fmt: skip
        context.act(Answer(event.token, welcome, context.generation, hello.metadata))

    def _parts(self, hello: Hello, plan: Plan) -> tuple[Plan, ...]:
        """Plans for parts of our layers, if those are streamed over this link."""
        config, me = self._context.config, self._context.identity
        if config.streaming != "layer" or config.kv_digest or plan.way != "direct":
            return ()
        ask = Ask(hello.ask, Stripe(*hello.stripe))
        return part_plans(me.geometry, hello.geometry, ask, config.min_run)

    def _lose(self, link: Link, reason: str, now: float, *, there: bool = False) -> None:
        """A link is over: fail what depends on it, and fence it if bytes may be on the way.

        `there` says that its engine may well be there all the same.
        """
        if link.lost:
            return
        there = there or self._routes.answers(link)
        link.lost = reason
        self.links.drop(link)
        self._context.count("links_lost")
        self._context.note(f"{link.peer} rank {link.rank} of {link.engine} is lost: {reason}")
        loud = self.consumer.link_lost(link, reason, now, there=there)
        loud = self.producer.link_lost(link) or loud
        self._link(self._routes.lost(link, reason), now)
        if loud:
            self.generations.want(link)
        else:
            self.generations.forget(link)
            self.links.forget(link.generation, link.agent)

    # ------------------------------------------------------------------ from the transport

    def _notified(self, event: Notified, now: float) -> None:
        kind, links = type(event.message), self.links.find(event.agent)
        for link in links:
            link.heard = link.spoke = now
        sender = SENDERS.get(kind) or getattr(event.message, "by", None)
        meant = [link for link in links if sender in (None, link.peer)]
        for link in meant:
            self._messages[kind](link, event.message, now)
        if not meant:
            self._context.count("stale_messages", label=kind.__name__)

    def _register(self, link: Link, message: Register, now: float) -> None:
        if message.link > link.hello:
            # Ours comes from a hello that was overtaken, and the peer's link is gone here: fall
            # silent, so that it notices and greets again.
            self._lose(link, "it speaks over a link that is gone", now)
        else:
            self.producer.on_register(link, message, now)

    def _moved_peer(self, link: Link, message: Move, now: float) -> None:
        self.links.moved_to(link, AgentName(message.agent), message.metadata)

    def _unreachable(self, event: Unreachable, now: float) -> None:
        for link in self.links.find(event.agent):
            if event.agent == link.agent:
                # By a transport that knows: the agent is gone. Its engine may be back.
                self._lose(link, event.reason, now, there=True)

    def _write_ended(self, event: WriteEnded, now: float) -> None:
        sending = self.producer.writes.sending(event.write)
        self.producer.write_ended(event, now)
        if event.outcome == "broken" and sending is not None:
            self._lose(sending.link, event.reason, now)

    def _read_ended(self, event: ReadEnded, now: float) -> None:
        _, link = self.consumer.reads.find(event.read) or (0, None)
        self.consumer.read_ended(event, now)
        if link is None:
            return
        if event.outcome == "broken":
            self._lose(link, event.reason, now)
        elif link.leaving:
            self.links.settle_move(link)

    def _closed(self, event: Closed, now: float) -> None:
        fenced = self.generations.on_closed(event.generation)
        self.consumer.fenced(fenced)
        self.producer.fenced(fenced)
