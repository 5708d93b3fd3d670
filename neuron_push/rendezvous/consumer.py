"""Drives the decode side: which attempt does what, on which event (states in attempt.py)."""

from __future__ import annotations

from neuron_push.commands import Abandon, Receive, Received, ReceiveFailed, Unpinned
from neuron_push.errors import PeerError, PlanError, ProtocolError
from neuron_push.protocol import (
    Cancel,
    Cancelled,
    Done,
    Failed,
    Kept,
    Lend,
    Need,
    Registered,
    Return,
    Soon,
    clip,
)
from neuron_push.rendezvous.attempt import Attempt, AttemptState, Share, attempt_of
from neuron_push.rendezvous.events import ReadEnded, Tell, Unpacked
from neuron_push.rendezvous.landing import Landings
from neuron_push.rendezvous.links import Context, Link
from neuron_push.rendezvous.reads import Reads
from neuron_push.rendezvous.registrations import Registrations

FromPrefill = Registered | Soon | Done | Failed | Cancelled | Need | Return | Lend | Kept
PUSHED, PULLED = (Done, Need, Return), (Lend, Kept)  # what only one kind of share may hear


class Consumer:
    """All attempts of this decode rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.attempts: dict[int, Attempt] = {}
        self.landings = Landings(context)
        self.reads = Reads(context, self.landings)
        self.registrations = Registrations(context)

    @property
    def announced(self) -> bool:
        """Whether any attempt expects bytes at any moment."""
        return any(attempt.announced for attempt in self.attempts.values())

    # ------------------------------------------------------------------ from the engine

    def receive(self, command: Receive, now: float) -> None:
        """Begin an attempt; the core links it when the prefill engine is known."""
        if command.attempt in self.attempts:
            raise ProtocolError(f"attempt {command.attempt} was begun twice")
        self._context.count("registrations")
        self.attempts[command.attempt] = Attempt(command, now, now + command.patience)

    def linked(self, number: int, links: list[Link], now: float) -> None:
        """The prefill ranks that owe this attempt something are linked: register."""
        attempt = self.attempts.get(number)
        if attempt is None or attempt.state is not AttemptState.CONNECTING:
            return
        attempt.move(AttemptState.WAITING)
        for link in links:
            reading = self.reads.reading(link) if attempt.command.pull else None
            quiet = attempt.wants_nothing or reading is not None
            attempt.shares[link.id] = Share(link, quiet=quiet, reading=reading)
            link.sessions += 1
        attempt.announced = attempt.command.pull  # what is to be READ is there already
        self.registrations.begin(attempt, now)
        self._complete(attempt, now)

    def unlinked(self, number: int, reason: str, now: float) -> None:
        """The prefill engine cannot be reached or refuses."""
        attempt = self.attempts.get(number)
        if attempt is not None and attempt.state is AttemptState.CONNECTING:
            self._fail(attempt, reason, "unreachable", now)

    def abandon(self, command: Abandon, now: float) -> None:
        """The engine gave the request up."""
        attempt = self.attempts.get(command.attempt)
        if attempt is not None:
            self._fail(attempt, command.reason, "abandoned", now)

    # ------------------------------------------------------------------ from the peers

    def on_message(self, link: Link, message: FromPrefill, now: float) -> None:
        """Apply one notification of a prefill rank, if it concerns a live share of its own."""
        attempt = self.attempts.get(attempt_of(message.attempt))
        if attempt is not None and attempt.number != message.attempt:
            attempt = None  # it is registered anew, under another number
        share = attempt.shares.get(link.id) if attempt else None
        if attempt is None or share is None:
            self._context.count("stale_messages", label=type(message).__name__)
            if attempt is None and isinstance(message, Failed | Need | Lend):
                self._context.send(link, Cancel(message.attempt, "this attempt is over"))
            return
        share.answered = True
        if isinstance(message, PUSHED if share.reading else PULLED):
            kind = "pulled" if share.reading else "pushed"
            label = f"{type(message).__name__} of what is {kind}"
            self._context.count("rejected_messages", label=label)
        elif isinstance(message, Lend):
            self._on_lend(attempt, share, message, now)
        elif isinstance(message, Kept):
            self.reads.confirmed(attempt, share, message)
        elif isinstance(message, Need):
            self.landings.on_need(attempt, share, message)
        elif isinstance(message, Return):
            self.landings.on_return(attempt, share, message)
        else:
            self._apply(attempt, share, message, now)
        self._complete(attempt, now)
        self._finish_drain(attempt)

    def _apply(
        self,
        attempt: Attempt,
        share: Share,
        message: Registered | Soon | Done | Failed | Cancelled,
        now: float,
    ) -> None:
        match message:
            case Registered():
                if share.reading is not None:
                    attempt.announced = False  # it is not finished yet, unless the loan follows
            case Soon():
                attempt.announced = attempt.state is AttemptState.WAITING
            case Done():
                if self.landings.landed(attempt, share, message):
                    self._quieten(attempt, share)
            case Cancelled():
                if share.reading is None:
                    self._quieten(attempt, share)
                self._fail(attempt, "the prefill engine dropped it", "prefill", now)
            case Failed():
                self._fail(attempt, clip(message.reason), "prefill", now)

    def link_lost(self, link: Link, reason: str, now: float, *, there: bool) -> bool:
        """A prefill rank is lost; returns whether bytes of it may still land.

        `there` says that its engine may be reached all the same: what it never answered is
        registered anew.
        """
        loud = False
        for attempt in list(self.attempts.values()):
            share = attempt.shares.get(link.id)
            if share is None or not (share.owed or attempt.wants_nothing or not share.quiet):
                continue
            loud = loud or not share.quiet
            if attempt.state is AttemptState.WAITING:
                text = f"prefill rank {link.rank} of {link.engine}: {reason}"
                if there and self.registrations.unheard(attempt):
                    self._drain(attempt, text, now)
                    attempt.again = True
                    self._finish_drain(attempt)
                else:
                    self._fail(attempt, text, "lost", now)
        return loud

    def fenced(self, links: list[Link]) -> None:
        """Nothing of these links can land any more."""
        ids = {link.id for link in links}
        for attempt in list(self.attempts.values()):
            for number in ids & attempt.shares.keys():
                self._quieten(attempt, attempt.shares[number])
            self._finish_drain(attempt)

    def tick(self, now: float) -> list[tuple[Link, str]]:
        """Repeat what is unanswered; returns peers that do not confirm a cancellation."""
        stuck: list[tuple[Link, str]] = []
        for attempt in list(self.attempts.values()):
            try:
                if now >= attempt.deadline:
                    stuck += self._overdue(attempt, now)
                if now >= attempt.send_at:
                    self._repeat(attempt, now)
                shares = attempt.shares.values()
                text = "a READ from it does not end"
                stuck += [(share.link, text) for share in shares if self.reads.stuck(share, now)]
            except Exception as error:  # noqa: BLE001  one attempt's defect is not another's
                self.defect(attempt.command.attempt, error)
        return stuck

    def defect(self, number: int, error: Exception) -> None:
        """An attempt broke inside this code: fail it, keep its pin, leave all others alone."""
        attempt = self.attempts[number]
        self._context.count("defects")
        self._context.note(f"internal error in attempt {number}: {error!r}")
        attempt.reason = attempt.reason or f"internal error: {error}"
        attempt.announced = False
        attempt.deadline = attempt.send_at = float("inf")
        self._report(attempt)

    # ------------------------------------------------------------------ inside

    def _overdue(self, attempt: Attempt, now: float) -> list[tuple[Link, str]]:
        if attempt.state is AttemptState.DRAINING:
            text = "did not confirm a cancellation"
            return [(share.link, text) for share in attempt.shares.values() if not share.quiet]
        patience = f"no KV within {attempt.command.patience:g} s"
        self._fail(attempt, patience, "patience", now)
        return []

    def _on_lend(self, attempt: Attempt, share: Share, message: Lend, now: float) -> None:
        try:
            self.reads.lent(attempt, share, message, now)
        except (PeerError, PlanError) as error:
            self._fail(attempt, f"prefill lends what cannot be: {error}", "prefill", now)

    def read_ended(self, event: ReadEnded, now: float) -> None:
        """A READ is over, was never started, or failed half way."""
        number, link = self.reads.find(event.read) or (0, None)
        attempt = self.attempts.get(number)
        if attempt is None or link is None:
            return
        reason = self.reads.ended(attempt, attempt.shares[link.id], event, now)
        if reason is not None:
            self._fail(attempt, reason, "read", now)
        self._complete(attempt, now)
        self._finish_drain(attempt)

    def unpacked(self, event: Unpacked, now: float) -> None:
        """A piece is in its blocks, or could not be brought there."""
        job = self.landings.take(event.job)
        attempt = self.attempts.get(job.attempt) if job else None
        if job is None or attempt is None:
            return
        share = attempt.shares.get(job.link)
        if share is None:
            return
        self.landings.finished(share, job.piece)
        if not event.reason:
            share.landed.add(job.start, job.stop)
        elif attempt.state is AttemptState.WAITING:
            kind = "digest" if event.corrupt else "unpack"
            self._fail(attempt, clip(event.reason), kind, now)
        self._complete(attempt, now)
        self._finish_drain(attempt)

    def _quieten(self, attempt: Attempt, share: Share) -> None:
        """Nothing of a share can land any more, in blocks or in slabs."""
        self.reads.fenced(share)
        share.quiet = True
        self.landings.quiet(attempt, share)

    def _complete(self, attempt: Attempt, now: float) -> None:
        """End an attempt whose every share has landed (or has answered, if none is wanted)."""
        if attempt.state is not AttemptState.WAITING:
            return
        start, stop = attempt.command.start, attempt.command.stop
        for share in attempt.shares.values():
            if not (share.answered if attempt.wants_nothing else share.holds(start, stop)):
                return
        attempt.move(AttemptState.ENDED)
        if not attempt.wants_nothing:
            attempt.reported = True
            self._context.act(Tell(Received(attempt.command.attempt, attempt.command.request)))
            self._context.count("receive_seconds", now - attempt.began)
            self._context.count("receives", label="received")
        self._forget(attempt)

    def _fail(self, attempt: Attempt, reason: str, kind: str, now: float) -> None:
        """Give an attempt up: drain what may land, and report when the engine may act on it."""
        if attempt.state in (AttemptState.DRAINING, AttemptState.ENDED):
            if kind == "abandoned":
                attempt.again = False
                self._report(attempt)
            return
        attempt.reason = reason
        attempt.announced = False
        self._context.count("receives", label="failed")
        self._context.count("cancellations", label=kind)
        if attempt.state is AttemptState.CONNECTING or attempt.wants_nothing:
            attempt.move(AttemptState.ENDED)
            self._report(attempt)
            self._forget(attempt)
            return
        self._drain(attempt, reason, now)
        if not attempt.command.hold_failure or kind == "abandoned":
            self._report(attempt)
        self._finish_drain(attempt)

    def _drain(self, attempt: Attempt, reason: str, now: float) -> None:
        attempt.move(AttemptState.DRAINING)
        for share in attempt.shares.values():
            self.reads.stop(attempt, share)
        attempt.reason = reason
        attempt.deadline = now + self._context.config.drain_timeout
        attempt.wait = self._context.config.resend
        self._send_cancels(attempt, now)

    def _finish_drain(self, attempt: Attempt) -> None:
        if attempt.state is not AttemptState.DRAINING:
            return
        if attempt.unpacking or not all(share.quiet for share in attempt.shares.values()):
            return
        if attempt.again:
            self._connect_anew(attempt)
        else:
            attempt.move(AttemptState.ENDED)
            self._report(attempt)
            self._forget(attempt)

    def _report(self, attempt: Attempt) -> None:
        if attempt.reported or attempt.wants_nothing:
            return
        attempt.reported = True
        command, quiet = attempt.command, attempt.state is AttemptState.ENDED
        self._context.act(
            Tell(ReceiveFailed(command.attempt, command.request, attempt.reason, quiet))
        )

    def _connect_anew(self, attempt: Attempt) -> None:
        """Nothing of a registration that was never answered can land: look for the engine again."""
        self._context.note(f"attempt {attempt.command.attempt} looks again: {attempt.reason}")
        self._leave(attempt)
        self.registrations.start_over(attempt)

    def _leave(self, attempt: Attempt) -> None:
        for share in attempt.shares.values():
            self.landings.quiet(attempt, share)
            share.link.sessions -= 1
            self.registrations.call_in(attempt, share)
        attempt.shares.clear()

    def _forget(self, attempt: Attempt) -> None:
        del self.attempts[attempt.command.attempt]
        self._leave(attempt)
        if attempt.command.pin >= 0:
            self._context.act(Tell(Unpinned(attempt.command.pin)))

    def _repeat(self, attempt: Attempt, now: float) -> None:
        if attempt.state is AttemptState.WAITING:
            for share in attempt.shares.values():
                self.reads.ask(attempt, share)
            self.registrations.send(attempt, now)
        elif attempt.state is AttemptState.DRAINING:
            self._send_cancels(attempt, now)

    def _send_cancels(self, attempt: Attempt, now: float) -> None:
        self.registrations.cancel(attempt, now)
