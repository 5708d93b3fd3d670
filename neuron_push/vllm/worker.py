"""The worker half: describes memory, forwards commands at the right moment, reports results.

Decode commands go to the transfer thread when a step's metadata is bound, before the
forward. Prefill commands wait for the step's *settle point*: the first hook after the
forward that is late enough, with a fence recorded there. The main loop never calls NIXL.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from neuron_push.commands import (
    Abandon,
    Layers,
    Receive,
    ReceiveFailed,
    Report,
    Settle,
    Unpinned,
    decode,
    encode,
    unpack_ids,
)
from neuron_push.config import Config
from neuron_push.errors import DeadlineExceeded
from neuron_push.transfer import TransferThread
from neuron_push.vllm import identity
from neuron_push.vllm.compat import FAILS_BY_REQUEST, Results, new_results
from neuron_push.vllm.handovers import Handovers
from neuron_push.vllm.metadata import Packed, Rejection, Told, WorkerMeta
from neuron_push.vllm.station import accelerator_of, open_station
from neuron_push.vllm.stats import TOLD, PushStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

# More parts of layers than there are: none is to be told.
NEVER = 1 << 30
# After this long without any report, empty steps wait longer.
QUIET = 1.0
# A thread must be seen standing still for so long: the whole process may have been stopped.
GRACE = 1.0


class WorkerHalf:
    """Hooks that vLLM's model runner calls, in its order, on its thread."""

    def __init__(self, vllm_config: VllmConfig, kv_config: KVCacheConfig, config: Config) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None and transfer.engine_id is not None
        self._vllm_config = vllm_config
        self._kv_config = kv_config
        self._config = config
        self._engine = transfer.engine_id
        self._drafts = identity.draft_model(vllm_config) != ()
        self._accelerator = accelerator_of(config)
        self._thread: TransferThread | None = None
        self._staging: object = None  # keeps the memory of the slabs
        self._rank = 0
        self._alone = False  # the only rank
        self._in_step = False
        self._idle = False  # whether this step computes nothing
        # Packed commands of the step until its settle point, and whether they are urgent.
        self._due: list[bytes] = []
        self._urgent = False
        # Attempts under way, and the packed commands they came in: read only when one fails.
        self._bound: dict[int, bytes] = {}
        self._bad_blocks: set[int] = set()
        self._handovers = Handovers()
        self._unpinned: list[tuple[int, int]] = []
        self._failures: list[tuple[str, str]] = []
        self._rejected: list[Rejection] = []
        # The transfer thread stands still for so long before that is looked at; since when it does,
        # how long it had at the first look, and whether this was said.
        self._doubt = max(0.0, config.stall - GRACE)
        self._since = self._first = 0.0
        self._stalling = False
        self._last_news = 0.0
        self._told = False  # whether the last step reported anything
        self._last_told = -TOLD
        # Where layers are streamed: parts that lie before a layer, and those told of this step.
        self._part_of: dict[str, int] = {}
        self._parts_done = NEVER
        self._layers = 0  # number of the step that computes what streams by layers

    # ------------------------------------------------------------------ memory

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Describe and register this worker's KV caches, and start the transfer thread."""
        station = open_station(
            self._vllm_config,
            self._kv_config,
            self._config,
            self._accelerator,
            self._engine,
            caches,
        )
        self._thread, self._staging = station.thread, station.staging
        self._rank, self._alone, self._part_of = station.rank, station.alone, station.part_of

    def close(self) -> None:
        """Destroy the agents; after return the KV tensors may go."""
        if self._thread is not None:
            self._thread.close()

    # ------------------------------------------------------------------ each step

    def bind(self, meta: Packed) -> None:
        """A step begins (`StepMeta`): registrations leave now, before the forward."""
        # What a runner that called no later hook left behind, or what had to wait for its output.
        if self._due:
            self._settle()
        self._in_step = True
        if not meta:
            self._idle = False
            return
        now, due, urgent, attempts, rejected, handed, self._idle, self._layers = meta
        if rejected:
            self._rejected += rejected
        if handed:
            self._hear_of(handed)
        if self._layers:
            self._parts_done = 0
        if due:
            self._due.append(due)
            self._urgent |= urgent
        if now:
            thread = self._thread
            assert thread is not None
            for attempt in attempts:
                self._bound[attempt] = now
            # Nobody waits for what is said of prompts before they are settled.
            thread.submit(now, wake=bool(attempts))
            if thread.failure is not None:
                self._fail_all(f"the transfer thread stopped: {thread.failure}")

    def bound(self) -> bool:
        """Whether a step is under way."""
        return self._in_step

    def clear(self) -> None:
        """A step is over."""
        self._in_step = False

    def _hear_of(self, handed: Sequence[tuple[int, str]]) -> None:
        for pin, request in handed:
            if request:
                self._handovers.add(pin, request)
            elif self._handovers.take_back(pin):
                self._unpinned.append((pin, self._rank))

    def layer(self, name: str, *_: object, **__: object) -> None:
        """The forward has come to a layer: all before it are settled with the fence recorded here.

        Parts of layers are told, and the last one not at all: the step's end is next.
        """
        part = self._part_of.get(name, 0)
        if part > self._parts_done:
            self._parts_done = part
            assert self._thread is not None
            told = encode([Layers(self._layers, part)])
            self._thread.submit(told, self._accelerator.record_fence())

    def finish_forward(self) -> None:
        """Settle point of runners that call it; draft layers are written later."""
        if not self._drafts:
            self.settle()

    def settle(self) -> None:
        """What this step computed is settled once the fence recorded here is done. Idempotent.

        Where the device hides its end, tokens wait for the next `bind`: without asynchronous
        scheduling the engine has the step's output by then, and it always takes one more step
        after a request has finished.
        """
        if self._due and not (self._accelerator.hides_end and self._settles()):
            self._settle()

    def _settles(self) -> bool:
        return any(isinstance(each, Settle) for packed in self._due for each in decode(packed))

    def _settle(self) -> None:
        assert self._thread is not None
        self._parts_done = NEVER
        fence = self._accelerator.record_fence()
        for packed in self._due:
            self._thread.submit(packed, fence, wake=self._urgent)
        self._due.clear()
        self._urgent = False

    def results(
        self, finished: Collection[str] = (), by_request: bool = FAILS_BY_REQUEST
    ) -> Results:
        """What is to be reported, each once; `finished` are requests that have left the engine.

        Failures go by request, or else by block as well (`bad_blocks`).
        """
        thread, found = self._thread, new_results()
        if thread is None:
            return found
        if self._idle or self._bound or self._handovers:
            if finished:
                found.finished_sending.update(self._handovers.left(finished))
            self._watch(thread, found)
        if not (thread.news or self._rejected or found.finished_sending):
            self._told = False
            return found
        self._told = True
        self._last_news = time.monotonic()
        self._take(thread.take(), found)
        for request, reason, blocks in self._rejected:
            self._explain(request, reason)
            found.finished_recving.add(request)
            found.failed_recving.add(request)
            if not by_request:
                self._bad_blocks.update(blocks)
        self._rejected.clear()
        return found

    def _watch(self, thread: TransferThread, found: Results) -> None:
        """Something is under way: wait for it if there is nothing else to do, but not for ever."""
        # vLLM may look at what a step reports only after the next one, which must not wait then.
        told = thread.news or self._rejected or self._told or found.finished_sending
        if self._idle and not told:
            self._wait(thread)
        if not thread.news and thread.stands >= self._doubt and self._kept(thread):
            self._stalled(thread)

    def _take(self, reports: list[Report], found: Results) -> None:
        for report in reports:
            if isinstance(report, Unpinned):
                name = self._handovers.ended(report.pin)
                if name:
                    found.finished_sending.add(name)
                elif name is None:
                    self._unpinned.append((report.pin, self._rank))
            elif (packed := self._bound.pop(report.attempt, None)) is not None:
                found.finished_recving.add(report.request)
                if isinstance(report, ReceiveFailed):
                    command = _receive(packed, report.attempt)
                    self._rejected.append(_rejection(command, report.reason))

    def bad_blocks(self) -> set[int]:
        """Blocks whose load failed, for vLLM versions that are told by block."""
        if not self._bad_blocks:
            return set()
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def worker_meta(self) -> WorkerMeta | Told | None:
        """Pins this rank has let go of since the last call; plainly if no other rank's are joined.

        A class is looked up by its name in every process that it comes to.
        """
        if not self._unpinned and not self._failures:
            return None
        told = tuple(self._unpinned), tuple(self._failures)
        self._unpinned.clear()
        self._failures.clear()
        return told if self._alone else WorkerMeta(*told)

    def stats(self) -> PushStats | None:
        """Measurements since they were told last; None when nothing happened.

        Told when something has ended, and otherwise now and then: vLLM's main loop works on
        each telling.
        """
        thread = self._thread
        if thread is None or not thread.tally.dirty:
            return None
        now = time.monotonic()
        if self._last_news <= self._last_told and now < self._last_told + TOLD:
            return None
        self._last_told = now
        return PushStats.of(thread.tally.take())

    # ------------------------------------------------------------------ inside

    def _explain(self, request: str, reason: str) -> None:
        logger.warning("request %s: KV not received: %s", request, reason)
        self._failures.append((request, reason))

    def _fail_all(self, reason: str) -> None:
        """Nobody will answer what is under way; the pins stay, since WRITEs may still land."""
        bound, self._bound = self._bound, {}
        self._rejected += [_rejection(_receive(p, number), reason) for number, p in bound.items()]

    def _kept(self, thread: TransferThread) -> bool:
        """Whether one call keeps the thread: it stands still while this loop goes on.

        A process that was stopped itself finds its thread far behind, and gives it time to come
        round.
        """
        seconds, now = thread.stands, time.monotonic()
        since = now - seconds  # the same at each look while it stands
        if since > self._since + 0.001:
            self._since, self._first, self._stalling = since, seconds, False
        return seconds > self._config.stall and seconds - self._first >= GRACE

    def _stalled(self, thread: TransferThread) -> None:
        """One call keeps the thread: end what waits for it. Blocks stay held until it returns.

        A request that vLLM would compute again, into blocks that a WRITE may still reach, cannot
        end this way, and new ones may find no block free: after a while the engine must stop.
        """
        seconds = thread.stands
        reason = f"the transfer thread is in one call for {seconds:.0f} s ({thread.doing})"
        if seconds > self._config.stall_most:
            raise DeadlineExceeded(f"{reason}: restart this engine")
        if not self._stalling:
            logger.error("%s; what waits for KV fails", reason)
        self._stalling = True
        ended: list[Abandon] = []
        for attempt, packed in list(self._bound.items()):
            command = _receive(packed, attempt)
            if not command.hold_failure:
                del self._bound[attempt]
                self._rejected.append(_rejection(command, reason))
                ended.append(Abandon(attempt, reason))
        if ended:
            thread.submit(encode(ended))

    def _wait(self, thread: TransferThread) -> None:
        config = self._config
        quiet = time.monotonic() - self._last_news > QUIET
        thread.wait(config.step_wait_idle if quiet else config.step_wait)


def _receive(packed: bytes, attempt: int) -> Receive:
    """The command that began an attempt, among those in `packed`."""
    for command in decode(packed):
        if isinstance(command, Receive) and command.attempt == attempt:
            return command
    raise LookupError(f"attempt {attempt} did not come with these commands")


def _rejection(command: Receive, reason: str) -> Rejection:
    """The end of an attempt. A vLLM that is told of failures by block has one group of blocks."""
    return command.request, reason, tuple(unpack_ids(command.blocks[0]))


__all__ = ["WorkerHalf"]
