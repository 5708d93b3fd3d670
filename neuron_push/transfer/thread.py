"""The transfer thread: the one owner of NIXL, sockets and sessions in a worker process.

The main loop appends commands and takes reports; neither call waits for the thread. A
failure inside one session becomes that session's failure; if the thread itself cannot go on
it says so, fails what is pending and keeps every pin.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from neuron_push.accelerator import Fence
from neuron_push.commands import (
    Abandon,
    Command,
    Compute,
    Offer,
    Receive,
    ReceiveFailed,
    Report,
    Retire,
    Settle,
    decode,
)
from neuron_push.config import Config
from neuron_push.errors import TransportError
from neuron_push.protocol import Address
from neuron_push.rendezvous import Core, Identity
from neuron_push.rendezvous.events import Action, Event, Notified, Open, Unreachable
from neuron_push.tracing import Ring
from neuron_push.transfer.driver import Driver
from neuron_push.transfer.pause import Pause
from neuron_push.transfer.tally import Tally
from neuron_push.transfer.tracer import Tracer
from neuron_push.transform import Mover
from neuron_push.transport import TransportFactory
from neuron_push.waiting import take

logger = logging.getLogger(__name__)

TICK = 0.005
# Only leases run while nothing is under way, and they need no better.
IDLE_TICK = 0.1


class TransferThread:
    """Runs one rank's core against real time and a real transport."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        open_transport: TransportFactory,
        listener: Address,
        clock: Callable[[], float] = time.monotonic,
        make_mover: Callable[[], Mover] | None = None,
    ) -> None:
        self.tally = Tally()
        self.news = False  # whether `take` has reports; set after they are there
        self._identity = identity
        self._clock = clock
        self._core = Core(config, identity)
        self._tracer: Tracer | None = None
        if config.trace_events:
            source = f"{identity.engine} rank {identity.rank}"
            self._tracer = Tracer(Ring(config.trace_events, source, clock))
        self._make_driver: Callable[[], Driver] = lambda: Driver(
            config,
            identity,
            open_transport,
            listener,
            self.tally,
            self._tell,
            self._tracer,
            make_mover,
        )
        # Prefill commands in order, each behind the fence of the step that made it true.
        self._fenced: deque[tuple[Fence | None, tuple[Command, ...]]] = deque()
        self._reports: SimpleQueue[Report] = SimpleQueue()
        self._heard: list[Report] = []  # waited for, and not taken yet; the main loop's
        self._pause = Pause(config)
        self._stop = False
        self._ticked = 0.0
        # For whoever watches from another thread: when this one last came round, what it is at.
        self._round = clock()
        self._doing: Action | None = None
        self._destroyed = False  # no agent is left: nothing lands any more
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="neuron-push", daemon=True)
        self._ready: Future[Address] = Future()

    # ------------------------------------------------------------------ main loop's side

    def start(self, timeout: float = 120.0) -> Address:
        """Start, wait until memory is registered; returns this rank's side-channel address."""
        self._thread.start()
        try:
            return self._ready.result(timeout)
        except BaseException:
            self._stop = True  # nobody would hear of it, should it come up after all
            raise

    def submit(self, commands: bytes, fence: Fence | None = None, *, wake: bool = True) -> None:
        """Hand packed commands over; the prefill side's take effect when `fence` is done.

        Waking the thread costs the caller some microseconds: without `wake` they are seen when it
        looks next, within milliseconds while anything is expected.
        """
        self._pause.put(commands, fence, wake)

    def take(self) -> list[Report]:
        """Reports since the last call, in order."""
        self.news = False
        waiting = self._reports
        if waiting.empty() and not self._heard:
            return []
        reports, self._heard = self._heard, []
        while not waiting.empty():
            reports.append(waiting.get_nowait())
        return reports

    def wait(self, timeout: float) -> bool:
        """Wait for a report, at most `timeout` seconds; whether there is one."""
        if not self._heard and timeout > 0:
            with contextlib.suppress(Empty):
                self._heard.append(take(self._reports, timeout))
                self.news = True
        return bool(self._heard) or not self._reports.empty()

    @property
    def failure(self) -> BaseException | None:
        """Why the thread stopped, if it did not stop on request; its agents are destroyed then."""
        return self._failure

    @property
    def stands(self) -> float:
        """Seconds since the thread last came round; 0 once it has ended and its agents too."""
        return 0.0 if self._destroyed else self._clock() - self._round

    @property
    def doing(self) -> str:
        """What the thread is at, for people. A call of NIXL's may block as long as it likes."""
        doing = self._doing
        if doing is None:
            return "asking NIXL for news"
        return f"{type(doing).__name__} {getattr(doing, 'agent', '')}".strip()

    def close(self, timeout: float = 10.0) -> None:
        """Stop; every agent is destroyed on return, so memory may be freed. Idempotent."""
        self._stop = True
        self._pause.ring()
        if self._thread.ident is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TransportError(f"the transfer thread did not stop within {timeout:g} s")
            if not self._destroyed:
                raise TransportError("the transfer thread ended, and an agent of it lives on")

    # ------------------------------------------------------------------ thread's side

    def _main(self) -> None:
        driver: Driver | None = None
        try:
            try:
                driver = self._make_driver()
                self._pause.watch(driver.side)
                self._begin(driver)
                self._ready.set_result(driver.side.server.address)
                self._loop(driver)
            finally:
                self._pause.close()
                if driver is not None:
                    driver.close()
                self._destroyed = True
        except BaseException as error:  # noqa: BLE001  told to whoever asks
            self._fail(error)

    def _begin(self, driver: Driver) -> None:
        """Open the first generation."""
        self._act(driver, [Open(1)])
        while driver.events:
            self._handle(driver, driver.events.popleft())

    def _loop(self, driver: Driver) -> None:
        idle = 0
        while not self._stop:
            idle = 0 if self._turn(driver) else idle + 1
            if idle and not self._stop:
                self._pause.rest(driver, self._core.tempo, idle, urgent=bool(self._fenced))

    def _turn(self, driver: Driver) -> bool:
        """One look at everything that may have happened; whether anything had."""
        now = self._round = self._clock()
        self._doing = None
        worked = self._take_commands(driver)
        worked = driver.poll(now) or worked
        while driver.events:
            self._handle(driver, driver.events.popleft())
        if now - self._ticked >= (IDLE_TICK if self._core.tempo in ("idle", "empty") else TICK):
            self._ticked = now
            self._act(driver, self._core.tick(now))
        return worked or bool(driver.events)

    def _take_commands(self, driver: Driver) -> bool:
        worked = False
        for packed, fence in self._pause.handed():
            prefill: list[Command] = []
            for command in decode(packed):
                if isinstance(command, Receive | Abandon):
                    self._handle(driver, command)
                else:
                    prefill.append(command)
            if prefill:
                self._fenced.append((fence, tuple(prefill)))
            worked = True
        while self._fenced and (self._fenced[0][0] is None or self._fenced[0][0].done()):
            for command in self._fenced.popleft()[1]:
                self._handle(driver, command)
            worked = True
        return worked

    def _handle(self, driver: Driver, event: Event) -> None:
        """Apply one event; what goes wrong fails the peer or the request it belongs to."""
        if self._tracer is not None:
            self._tracer.saw(event, self._clock())
        try:
            self._act(driver, self._core.handle(event, self._clock()))
        except Exception as error:
            logger.exception("handling %s", type(event).__name__)
            self.tally.add("defects")
            remedy = _remedy(event, f"internal error: {error}")
            if remedy is None:
                raise
            self._act(driver, self._core.handle(remedy, self._clock()))

    def _act(self, driver: Driver, actions: list[Action]) -> None:
        failures: list[Exception] = []
        for action in actions:
            began = self._clock()
            self._doing = action
            try:
                driver.carry_out(action, began)
            except Exception as error:  # noqa: BLE001  what follows is for other sessions too
                failures.append(error)
            if self._tracer is not None:
                self._tracer.did(action, began, self._clock())
        if failures:
            raise failures[0]

    def _tell(self, report: Report) -> None:
        self._reports.put(report)
        self.news = True

    def _fail(self, error: BaseException) -> None:
        """The thread cannot go on: say so; requests end, pins stay.

        Its agents are gone by now, as vLLM may compute again into the blocks of what failed. If one
        lives on, nothing is said: the thread stands still, for whoever watches.
        """
        if not self._ready.done():
            self._failure = error
            self._ready.set_exception(error)
            return
        logger.error("the transfer thread stopped; restart this engine", exc_info=error)
        if not self._destroyed:
            return
        self._failure = error
        waiting = [a.command for a in self._core.consumer.attempts.values() if not a.reported]
        submitted = [command for packed, _ in self._pause.handed() for command in decode(packed)]
        waiting += [command for command in submitted if isinstance(command, Receive)]
        for command in waiting:
            if command.start < command.stop:
                reason = f"transfer thread stopped: {error}"
                self._tell(ReceiveFailed(command.attempt, command.request, reason, quiet=False))


def _remedy(event: Event, reason: str) -> Event | None:
    """The event that fails only what a broken event concerns."""
    if isinstance(event, Notified):
        return Unreachable(event.agent, reason)
    if isinstance(event, Receive | Abandon):
        return Abandon(event.attempt, reason)
    if isinstance(event, Offer | Compute | Settle | Retire):
        return Retire(event.source, "ended", reason)
    return None


__all__ = ["TransferThread"]
