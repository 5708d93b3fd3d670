"""The prefill side of the scheduler half: prompts computed here for other engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Literal

from vllm.v1.request import RequestStatus

from neuron_push.commands import (
    NO_MATCH,
    Compute,
    Near,
    Offer,
    Retire,
    Sent,
    Settle,
    Unnamed,
    pack_ids,
)
from neuron_push.prompts import Prompt
from neuron_push.protocol import Match
from neuron_push.vllm.custody import Custody
from neuron_push.vllm.pins import Pins

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_FINISHED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt computed here for another engine."""

    request: Request
    match: Match | Prompt
    tokens: int  # that are computed here: the prompt, less what decode must compute itself
    lends: bool = False  # its answer names its blocks
    source: int = 0
    pin: int = -1  # -1: nothing settled
    settled: int = 0
    handed: bool = False  # the workers report it sent, and its end is told already
    given: list[int] = field(init=False)  # blocks already told, per group
    # Blocks that follow, per group; vLLM's own lists.
    fresh: list[Sequence[int]] = field(init=False)


class Prefills:
    """Offers, settles and retires prompts; sees to it that what is settled is held.

    By vLLM itself as long as `custody` says so, by references of ours otherwise.
    """

    def __init__(
        self,
        commands: list[Sent],
        due: list[Sent],
        handed: list[tuple[int, str]],
        sizes: Sequence[int],
        custody: Custody,
        *,
        chunks: bool,
        layers: bool = False,
        backoff: int = 0,
    ) -> None:
        self._commands = commands
        self._due = due  # commands that wait for the step's settle point
        self._handed = handed  # (pin, request) whose blocks vLLM keeps until they are sent
        self._sizes = sizes
        self._custody = custody
        self._chunks = chunks
        self._layers = layers  # what a step computes may travel before the step has ended
        self._steps = 0
        self.layered = 0  # number of the last step, if it computes what travels by layers
        self._backoff = backoff
        self._sources = count(1)
        self.running: dict[str, Prefill] = {}
        self._sending: dict[str, int] = {}  # pins of finished requests whose blocks vLLM keeps
        self._looked = False  # whether this schedule was checked for preemptions

    def begin(self, request: Request, match: Match | Prompt, lends: bool = False) -> None:
        """A new request is a prefill leg; `lends` if its answer names its blocks."""
        if self._backoff:
            shorten(request, self._backoff)
        prefill = Prefill(request, match, request.num_prompt_tokens, lends)
        self.running[request.request_id] = prefill
        self._offer(prefill)

    # ------------------------------------------------------------------ custody

    def before_preemption(self, pins: Pins) -> None:
        """vLLM may let any running prompt go now: hold all of them."""
        for prefill in self.running.values():
            pins.hold(prefill.pin)

    def before_allocation(self, pins: Pins) -> None:
        """vLLM is about to hand out blocks: hold those of prompts that it let go unasked."""
        if self._looked:
            return
        self._looked = True
        for prefill in self.running.values():
            if prefill.request.status == RequestStatus.PREEMPTED:
                pins.hold(prefill.pin)

    def preempted_with_pin(self) -> bool:
        """Whether a preemption is under way whose blocks only our pins still hold."""
        preempted = RequestStatus.PREEMPTED
        return any(p.pin >= 0 and p.request.status == preempted for p in self.running.values())

    # ------------------------------------------------------------------ steps

    def step(self, output: SchedulerOutput, pins: Pins) -> None:
        """A step is scheduled: what it preempts is withdrawn, what it computes is settled."""
        running = self.running
        self._looked = False
        self._steps += 1
        self.layered = 0
        if output.preempted_req_ids:
            self._withdraw(output.preempted_req_ids, pins)
        scheduled = output.num_scheduled_tokens
        # The V2 runner is told of resumed requests as of new ones.
        for new in output.scheduled_new_reqs:
            if (prefill := running.get(new.req_id)) is not None:
                prefill.fresh = list(new.block_ids)
                self._settle(prefill, new.num_computed_tokens + scheduled[new.req_id], pins)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            if (prefill := running.get(name)) is not None:
                ids = cached.new_block_ids[index]
                if name in cached.resumed_req_ids:
                    prefill.fresh = list(ids or ())
                elif ids is not None:
                    for group, more in enumerate(ids):
                        fresh = prefill.fresh[group]
                        prefill.fresh[group] = [*fresh, *more] if fresh else more
                self._settle(prefill, cached.num_computed_tokens[index] + scheduled[name], pins)
        if not self._custody:
            self.before_preemption(pins)

    def finished(
        self, request: Request, blocks: tuple[list[int], ...], pins: Pins
    ) -> tuple[bool, Prefill | None]:
        """A request leaves the engine with these blocks.

        Returns (whether vLLM is to keep them until they are sent, its prompt if that is on offer).
        """
        prefill = self.running.pop(request.request_id, None)
        if prefill is None:
            return False, None
        if request.status not in _FINISHED_WELL or prefill.settled != prefill.tokens:
            reason = f"the prefill request ended: {status_text(request)}"
            self._retire(prefill, "ended", reason, pins)
            return False, None
        keeps = prefill.handed or pins.promised(prefill.pin)
        for ids, told in zip(blocks, prefill.given, strict=True):
            keeps = keeps and len(ids) >= told
        if not keeps:
            if not prefill.handed:
                self._due.append(Retire(prefill.source, "finished"))
            self._hold(prefill, pins)
            return False, prefill
        if not prefill.handed:
            self._hand_over(prefill)
        self._sending[request.request_id] = prefill.pin
        return True, prefill

    def sent(self, name: str, pins: Pins) -> None:
        """Every rank is done with a finished prompt: vLLM lets its blocks go."""
        pin = self._sending.pop(name, None)
        if pin is not None:
            pins.drop(pin)

    # ------------------------------------------------------------------ inside

    def _hand_over(self, prefill: Prefill) -> None:
        """The request is over with this step: vLLM keeps its blocks until they are sent."""
        prefill.handed = True
        self._handed.append((prefill.pin, prefill.request.request_id))
        self._due.append(Retire(prefill.source, "finished", "", prefill.pin))

    def _hold(self, prefill: Prefill, pins: Pins) -> None:
        """vLLM lets go: references of ours take over, until every rank says that it is quiet."""
        pins.hold(prefill.pin)
        if prefill.handed:
            prefill.handed = False
            self._handed.append((prefill.pin, ""))

    def _withdraw(self, preempted: set[str], pins: Pins) -> None:
        for name in preempted:
            if (prefill := self.running.get(name)) is not None:
                self._retire(prefill, "preempted", "", pins)
                self._offer(prefill)

    def _offer(self, prefill: Prefill) -> None:
        prefill.source = next(self._sources)
        prefill.pin, prefill.settled = -1, 0
        prefill.given = [0] * len(self._sizes)
        prefill.fresh = [()] * len(self._sizes)
        name, match = prefill.request.request_id, prefill.match
        if isinstance(match, Prompt):
            self._commands.append(Unnamed(match, Offer(prefill.source, name, NO_MATCH)))
        else:
            self._commands.append(Offer(prefill.source, name, match))

    def _retire(
        self, prefill: Prefill, outcome: Literal["preempted", "ended"], reason: str, pins: Pins
    ) -> None:
        self._hold(prefill, pins)
        pins.ends(prefill.pin)
        self._due.append(Retire(prefill.source, outcome, reason))

    def _settle(self, prefill: Prefill, reached: int, pins: Pins) -> None:
        """With this step's fence, tokens up to `reached` may be read."""
        prompt = prefill.tokens
        stop = min(reached, prompt)
        last = stop == prompt
        if stop <= prefill.settled or not (last or self._chunks):
            return
        if prefill.pin < 0:
            prefill.pin = pins.new()
        given, fresh = prefill.given, prefill.fresh
        first, packed = tuple(given), []
        for group, size in enumerate(self._sizes):
            ids, count = fresh[group], -(-stop // size) - given[group]
            if len(ids) > count:
                fresh[group], ids = ids[count:], ids[:count]
            else:
                fresh[group] = ()
            given[group] += len(ids)
            told = pack_ids(ids)
            pins.promise(prefill.pin, ids, told)
            packed.append(told)
        prefill.settled = stop
        if last:
            self._commands.append(Near(prefill.source))
        blocks = tuple(packed)
        if self._layers:
            self.layered = self._steps
            compute = Compute(prefill.source, stop, first, blocks, prefill.pin, self._steps)
            self._commands.append(compute)
            first, blocks = tuple(given), (b"",) * len(blocks)
        self._due.append(Settle(prefill.source, stop, first, blocks, prefill.pin, last))
        # Its one token comes with this step: its end is told with it, and not a step later.
        ends = last and prefill.request.max_tokens == 1
        if ends and self._custody and pins.promised(prefill.pin):
            self._hand_over(prefill)


def shorten(request: Request, tokens: int) -> None:
    """Take that many tokens off a prompt's end, unless nothing would be left.

    One token is then sampled, which ends the request before it is computed: it stands where
    decode has the prompt's own.
    """
    if not 0 < tokens < request.num_prompt_tokens:
        return
    # A new list, as the old one may be the client's; the other is read through a view.
    if request.prompt_token_ids is not None:
        request.prompt_token_ids = request.prompt_token_ids[:-tokens]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-tokens]
    del request._all_token_ids[-tokens:]
    request.num_prompt_tokens -= tokens
    request.max_tokens = 1


def status_text(request: Request) -> str:
    """How a request ended, for people on the other engine."""
    return str(request.status).removeprefix("RequestStatus.").lower()


__all__ = ["Prefills", "status_text"]
