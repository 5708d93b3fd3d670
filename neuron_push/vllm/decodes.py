"""The decode side of the scheduler half: requests whose prompt another engine computes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from msgspec.structs import replace

from neuron_push.commands import NO_MATCH, Abandon, Receive, Sent, Unnamed, pack_ids
from neuron_push.prompts import Prompt
from neuron_push.protocol import Match
from neuron_push.vllm.compat import FAILS_BY_REQUEST
from neuron_push.vllm.metadata import Rejection
from neuron_push.vllm.params import DecodeLeg
from neuron_push.vllm.pins import Pins
from neuron_push.vllm.prefills import status_text

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# How long a prefill engine is asked to keep a "nothing wanted" for a prompt it has not seen.
DECLINE_PATIENCE = 10.0
# Transfers whose pins are remembered by name; a few per request that can be under way.
MOST_PINS = 4096


@dataclass(slots=True, eq=False)
class Decode:
    """A request whose prompt another engine computes, or one that must fail.

    Known until its load has ended, well or not, or is not wanted; nothing is asked for it then.
    """

    leg: DecodeLeg | None
    match: Match | Prompt | None
    reject: str = ""  # why it must fail
    computed: int = 0  # tokens found in the local prefix cache
    attempt: int = 0  # 0: not registered
    pin: int = -1


class Decodes:
    """Registers, declines and abandons; holds the blocks that are written into."""

    def __init__(
        self,
        commands: list[Sent],
        rejected: list[Rejection],
        sizes: Sequence[int],
        *,
        patience: float,
        recompute: bool,
        backoff: int = 0,
    ) -> None:
        self._commands = commands
        self._rejected = rejected
        self._sizes = sizes
        self._patience = patience
        self._backoff = backoff
        # vLLM recomputes into the very blocks: it may hear of a failure only when they are quiet.
        self._hold_failure = recompute or not FAILS_BY_REQUEST
        self._attempts = count(1)
        self.waiting: dict[str, Decode] = {}
        # Newest transfers' pins, which outlive their requests; for routers that ask.
        self._pins_of: dict[str, list[int]] = {}

    def begin(self, request: Request, leg: DecodeLeg, match: Match | Prompt) -> None:
        """A new request is a decode leg."""
        self.waiting[request.request_id] = Decode(leg, match)

    def reject(self, request: Request, reason: str) -> None:
        """A new request cannot be served: its load fails when it is admitted."""
        self.waiting[request.request_id] = Decode(None, None, reason)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """How many prompt tokens beyond `computed` another engine will push."""
        decode = self.waiting.get(request.request_id)
        if decode is None or decode.attempt:
            return 0, False
        prompt = request.num_prompt_tokens
        decode.computed = computed
        if decode.reject:
            return prompt - computed, prompt > computed
        if prompt - computed <= max(1, self._backoff):
            return 0, False  # the last token is computed here in any case
        return prompt - self._backoff - computed, True

    def after_alloc(
        self, request: Request, blocks: KVCacheBlocks, external: int, pins: Pins
    ) -> None:
        """Blocks are allocated: pin and register them, or let the prompt go."""
        decode = self.waiting.get(request.request_id)
        if decode is None or decode.attempt:
            return
        if external == 0:
            del self.waiting[request.request_id]
            self._decline(decode, request.request_id)
            return
        start, stop = decode.computed, decode.computed + external
        tables = blocks.get_block_ids()
        if decode.reject:
            size = self._sizes[0]
            self._fail(decode, request.request_id, tables[0][start // size : -(-stop // size)])
            return
        pin = decode.pin = pins.new()
        first, packed = [], []
        for table, size in zip(tables, self._sizes, strict=True):
            low, high = start // size, -(-stop // size)
            ids = table if not low and high >= len(table) else table[low:high]
            told = pack_ids(ids)
            pins.promise(pin, ids, told)
            first.append(low)
            packed.append(told)
        self._remember_pin(decode)
        attempt = decode.attempt = next(self._attempts)
        leg, match = decode.leg, decode.match
        assert leg is not None and match is not None
        self._register(
            match,
            Receive(
                attempt, request.request_id, leg.prefill, leg.engine, NO_MATCH, start, stop,
                tuple(first), tuple(packed), pin, leg.patience or self._patience,
                self._hold_failure, leg.pull,
            ),
        )  # fmt: skip

    def _register(self, match: Match | Prompt, command: Receive) -> None:
        if isinstance(match, Prompt):
            self._commands.append(Unnamed(match, command))
        else:
            self._commands.append(replace(command, match=match))

    def pins_of(self, transfer: str) -> list[int]:
        """Pins of a transfer's prompts, if that is among the newest. Any thread may ask."""
        return list(self._pins_of.get(transfer, ()))

    def _remember_pin(self, decode: Decode) -> None:
        if decode.leg is not None and decode.leg.transfer:
            self._pins_of.setdefault(decode.leg.transfer, []).append(decode.pin)
            if len(self._pins_of) > MOST_PINS:
                del self._pins_of[next(iter(self._pins_of))]

    def loaded(self, name: str, pins: Pins) -> None:
        """The workers report that a load has ended, well or not; its blocks may still be written.

        Until now vLLM keeps the blocks of a loading request whatever becomes of it, so only
        loads that end before they are quiet cost references of ours.
        """
        decode = self.waiting.pop(name, None)
        if decode is not None:
            pins.hold(decode.pin)
            pins.ends(decode.pin)

    def finished(self, request: Request, pins: Pins) -> None:
        """A request leaves the engine: stop what is under way for it."""
        decode = self.waiting.pop(request.request_id, None)
        if decode is None:
            return
        if decode.attempt:
            self._commands.append(Abandon(decode.attempt, status_text(request)))
            pins.hold(decode.pin)
            pins.ends(decode.pin)
        else:
            self._decline(decode, request.request_id)

    # ------------------------------------------------------------------ inside

    def _decline(self, decode: Decode, name: str) -> None:
        """Tell the prefill engine that nothing is wanted, so that it lets the prompt go."""
        leg, match = decode.leg, decode.match
        if leg is None or match is None:
            return
        none = (b"",) * len(self._sizes)
        self._register(
            match,
            Receive(
                next(self._attempts), name, leg.prefill, leg.engine, NO_MATCH, 0, 0,
                (0,) * len(none), none, -1, DECLINE_PATIENCE,
            ),
        )  # fmt: skip

    def _fail(self, decode: Decode, name: str, ids: list[int]) -> None:
        logger.warning("request %s fails: %s", name, decode.reject)
        del self.waiting[name]
        self._rejected.append((name, decode.reject, tuple(ids)))


__all__ = ["Decodes"]
