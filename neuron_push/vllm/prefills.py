"""The prefill side of the scheduler half: prompts computed here for other engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Literal

from vllm.v1.request import RequestStatus

from neuron_push.commands import Command, Near, Offer, Retire, Settle, pack_ids
from neuron_push.protocol import Match
from neuron_push.vllm.pins import Pins

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_FINISHED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt computed here for another engine."""

    request: Request
    match: Match
    tokens: int  # that are computed here: the prompt, less what decode must compute itself
    source: int = 0
    pin: int = -1  # -1: nothing settled
    settled: int = 0
    tables: list[list[int]] = field(default_factory=list)  # block ids per group
    given: list[int] = field(default_factory=list)  # blocks already told, per group


class Prefills:
    """Offers, settles and retires prompts; holds the blocks of what is settled."""

    def __init__(
        self, commands: list[Command], sizes: Sequence[int], *, chunks: bool, backoff: int = 0
    ) -> None:
        self._commands = commands
        self._sizes = sizes
        self._chunks = chunks
        self._backoff = backoff
        self._sources = count(1)
        self._running: dict[str, Prefill] = {}

    def __bool__(self) -> bool:
        return bool(self._running)

    def begin(self, request: Request, match: Match) -> None:
        """A new request is a prefill leg."""
        shorten(request, self._backoff)
        tokens = request.num_prompt_tokens
        prefill = self._running[request.request_id] = Prefill(request, match, tokens)
        self._offer(prefill)

    def preempted_with_pin(self) -> bool:
        """Whether a preemption is under way whose blocks only our pins still hold."""
        preempted = RequestStatus.PREEMPTED
        return any(p.pin >= 0 and p.request.status == preempted for p in self._running.values())

    def step(self, output: SchedulerOutput, pins: Pins) -> None:
        """A step is scheduled: what it preempts is withdrawn, what it computes is settled."""
        running = self._running
        for name in output.preempted_req_ids or ():
            if (prefill := running.get(name)) is not None:
                self._retire(prefill, "preempted", "", pins)
                self._offer(prefill)
        # The V2 runner is told of resumed requests as of new ones.
        for new in output.scheduled_new_reqs:
            if (prefill := running.get(new.req_id)) is not None:
                prefill.tables = [list(table) for table in new.block_ids]
                reached = new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
                self._settle(prefill, reached, pins)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            if (prefill := running.get(name)) is not None:
                ids = cached.new_block_ids[index]
                if name in cached.resumed_req_ids:
                    prefill.tables = [list(table) for table in ids or ()]
                elif ids is not None:
                    for table, more in zip(prefill.tables, ids, strict=True):
                        table.extend(more)
                reached = cached.num_computed_tokens[index] + output.num_scheduled_tokens[name]
                self._settle(prefill, reached, pins)

    def finished(self, request: Request, pins: Pins) -> bool:
        """A request leaves the engine; whether its complete prompt stays on offer."""
        prefill = self._running.pop(request.request_id, None)
        if prefill is None:
            return False
        if request.status in _FINISHED_WELL and prefill.settled == prefill.tokens:
            self._commands.append(Retire(prefill.source, "finished"))
            return True
        reason = f"the prefill request ended: {status_text(request)}"
        self._retire(prefill, "ended", reason, pins)
        return False

    # ------------------------------------------------------------------ inside

    def _offer(self, prefill: Prefill) -> None:
        prefill.source = next(self._sources)
        prefill.pin, prefill.settled = -1, 0
        prefill.tables = [[] for _ in self._sizes]
        prefill.given = [0] * len(self._sizes)
        self._commands.append(Offer(prefill.source, prefill.request.request_id, prefill.match))

    def _retire(
        self, prefill: Prefill, outcome: Literal["preempted", "ended"], reason: str, pins: Pins
    ) -> None:
        pins.ends(prefill.pin)
        self._commands.append(Retire(prefill.source, outcome, reason))

    def _settle(self, prefill: Prefill, reached: int, pins: Pins) -> None:
        """With this step's fence, tokens up to `reached` may be read."""
        prompt = prefill.tokens
        stop = min(reached, prompt)
        last = stop == prompt
        if stop <= prefill.settled or not (last or self._chunks):
            return
        first = tuple(prefill.given)
        added = tuple(
            table[low : -(-stop // size)]
            for table, low, size in zip(prefill.tables, first, self._sizes, strict=True)
        )
        if prefill.pin < 0:
            prefill.pin = pins.new()
        for group, ids in enumerate(added):
            pins.add(prefill.pin, ids)
            prefill.given[group] += len(ids)
        prefill.settled = stop
        if last:
            self._commands.append(Near(prefill.source))
        packed = tuple([pack_ids(ids) for ids in added])
        self._commands.append(Settle(prefill.source, stop, first, packed, prefill.pin, last))


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
