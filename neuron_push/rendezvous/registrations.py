"""What a decode rank says to prefill ranks of its attempts, and whether anybody hears it.

A registration is repeated until each prefill rank has answered it, and a cancellation until it is
confirmed. One that nobody answers asks, after a while, who is there now; if its peer turns out to
be lost and its engine may be reached all the same, it is made anew, once.
"""

from __future__ import annotations

from msgspec.structs import replace

from neuron_push.plan import encode_runs
from neuron_push.protocol import BlockList, Cancel, Register, clip
from neuron_push.rendezvous.attempt import Attempt, AttemptState, Share
from neuron_push.rendezvous.links import Context

# A registration sent so often without an answer makes us ask who is there now: after 280 ms.
DOUBTFUL = 4


class Registrations:
    """Registrations and cancellations of all attempts of this rank.

    The core looks after `doubtful` (a prefill engine does not answer registrations) and `astray`
    (attempts to be connected anew).
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.doubtful: list[Attempt] = []
        self.astray: list[Attempt] = []

    def begin(self, attempt: Attempt, now: float) -> None:
        """The links of an attempt are known: register over each."""
        attempt.register = self.build(attempt, now)
        self.send(attempt, now)

    def build(self, attempt: Attempt, now: float) -> Register:
        """The registration of an attempt, but for the link."""
        command = attempt.command
        blocks = tuple(
            BlockList(each.first, tuple(encode_runs(each.ids))) for each in attempt.blocks
        )
        patience = max(0, int((attempt.deadline - now) * 1000))
        return Register(
            attempt.number, 0, command.match, command.start, command.stop, blocks, patience
        )

    def send(self, attempt: Attempt, now: float) -> None:
        """Register with those that have not answered."""
        assert attempt.register is not None
        attempt.sent += 1
        if attempt.sent == DOUBTFUL and not attempt.answered:
            self.doubtful.append(attempt)
        for share in attempt.shares.values():
            if not share.answered:
                register = replace(attempt.register, link=share.link.hello)
                if share.reading is not None:
                    register = replace(register, blocks=self._compared(attempt), pull=True)
                self._context.send(share.link, register)
        attempt.wait_longer(self._context.config, now)

    def _compared(self, attempt: Attempt) -> tuple[BlockList, ...]:
        """The blocks that we READ into, which prefill need know only to take a digest."""
        assert attempt.register is not None
        return attempt.register.blocks if self._context.config.kv_digest else ()

    def cancel(self, attempt: Attempt, now: float) -> None:
        """Cancel with those whose WRITEs may still land."""
        message = Cancel(attempt.number, clip(attempt.reason))
        for share in attempt.shares.values():
            if not share.quiet and share.reading is None:
                self._context.send(share.link, message)
        attempt.wait_longer(self._context.config, now)

    def call_in(self, attempt: Attempt, share: Share) -> None:
        """Give a loan back that is not needed any more.

        Said once: prefill repeats its loan if this is lost, and then hears it again.
        """
        if share.reading is not None and not share.reading.kept:
            self._context.send(share.link, Cancel(attempt.number, clip(attempt.reason)))

    def unheard(self, attempt: Attempt) -> bool:
        """Whether an attempt may be registered anew when a link of it is lost."""
        return not (attempt.answered or attempt.anew or attempt.wants_nothing)

    def start_over(self, attempt: Attempt) -> None:
        """Nothing of the first registration can land: look for the engine again."""
        attempt.move(AttemptState.CONNECTING)
        attempt.again, attempt.anew = False, True
        attempt.reason = ""
        attempt.sent = 0
        attempt.deadline = attempt.began + attempt.command.patience
        self.astray.append(attempt)
