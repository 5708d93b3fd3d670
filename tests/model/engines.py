"""vLLM as the connector sees it, small: requests, a block pool, steps. The halves are real.

A block knows who has it (`owner`) and what its bytes are (`content`): the promises are judged by
that. Blocks enter the prefix cache when they are scheduled, before their bytes exist, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from neuron_push.commands import Command
from neuron_push.protocol import Match
from neuron_push.vllm.custody import Custody
from neuron_push.vllm.decodes import Decodes
from neuron_push.vllm.metadata import pack
from neuron_push.vllm.params import DecodeLeg
from neuron_push.vllm.pins import Pins
from neuron_push.vllm.prefills import Prefills
from tests.model.effects import BLOCK, check
from tests.model.pairs import LISTENER, TIMEOUT
from tests.model.processes import Process

VLLM = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=None))
ONE_GROUP = SimpleNamespace(kv_cache_groups=[])  # of which none lets blocks go while it runs


class Block:
    """One KV block."""

    def __init__(self, block_id):
        self.block_id = block_id
        self.ref_cnt = 0
        self.owner = ""  # of decode: the request that it was handed to
        self.content = None  # of prefill: (prompt, index), or None while it is not computed


class Pool:
    """Hands out the lowest free block, as the worst case: whatever was freed is reused first."""

    def __init__(self, count):
        self.blocks = [Block(number) for number in range(count + 1)]

    def free(self):
        return [block for block in self.blocks[1:] if not block.ref_cnt]

    def take(self, count, owner):
        free = self.free()
        if len(free) < count:
            return None
        for block in free[:count]:
            block.ref_cnt, block.owner, block.content = 1, owner, None
        return free[:count]

    def touch(self, blocks: Sequence[Block]):
        """As vLLM's: a free block is taken back, whatever is in it."""
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            check(block.ref_cnt > 0, f"block {block.block_id} is freed twice")
            block.ref_cnt -= 1
            if not block.ref_cnt:
                block.owner = ""


class Request:
    """What the halves look at of a vLLM request."""

    def __init__(self, name, prompt, tokens):
        self.request_id = name
        self.prompt = prompt
        self.num_prompt_tokens = tokens
        self.max_tokens = 1
        self.status = RequestStatus.WAITING
        self.computed = 0  # tokens, whose blocks are allocated
        self.blocks = []
        self.told = []  # prefill: whether the runner knows it
        self.hit = 0  # tokens found in the prefix cache
        self.loading = False
        self.loaded = False


class Engine:
    """What both kinds of engine share: the halves' common part and the step's metadata."""

    def __init__(self, process: Process, blocks: int):
        self.process = process
        self.pool = Pool(blocks)
        self.pins = Pins(self.pool, process.world)
        self.aggregator = KVOutputAggregator(process.world)
        self.commands: list[Command] = []
        self.due: list[Command] = []
        self.handed: list[tuple[int, str]] = []
        self.rejected = []
        self.requests: dict[str, Request] = {}
        self.left: tuple[str, ...] = ()  # requests that have finished since the last step

    def bind(self):
        """The step's metadata goes to the worker halves."""
        meta = pack(self.commands, self.due, self.rejected, self.handed, False, 0)
        self.handed.clear()
        self.due.clear()
        self.commands.clear()
        self.rejected.clear()
        for rank in self.process.ranks:
            rank.worker.bind(meta)
        self.process.submit()

    def results(self):
        """What all worker halves say at the end of a step: (sent, ended, failed)."""
        outputs = [_output(rank.worker, self.left) for rank in self.process.ranks]
        self.left = ()
        told = self.aggregator.aggregate(outputs)
        result = told.kv_connector_output
        meta = result.kv_connector_worker_meta
        for pin, rank in meta.unpinned if meta else ():
            self.pins.quiet(pin, rank)
        return result.finished_sending or (), result.finished_recving or (), result.failed_recving

    def pending(self):
        """Whether a step would change anything."""
        reports = any(rank.thread.reports for rank in self.process.ranks)
        return bool(self.commands or self.due or self.rejected or self.left or reports)

    def waits(self):
        """Whether the next step has something to pass on, and none is running."""
        return self.pending()

    def leftovers(self):
        left = {
            "requests": self.requests, "pins": len(self.pins), "commands": self.commands,
            "blocks": len(self.pool.free()) != len(self.pool.blocks) - 1,
        }  # fmt: skip
        return [name for name, value in left.items() if value]


class DecodeEngine(Engine):
    """Requests whose prompt another engine computes."""

    def __init__(self, process, blocks, *, recompute=False):
        super().__init__(process, blocks)
        self.recompute = recompute
        self.decodes = Decodes(
            self.commands, self.rejected, [BLOCK], patience=TIMEOUT, recompute=recompute
        )
        self.attempts: dict[int, str] = {}

    def new(self, leg):
        _, name, transfer, prompt, tokens, pull = leg
        request = self.requests[name] = Request(name, prompt, tokens)
        match = Match(transfer, "base", prompt.encode(), tokens)
        where = DecodeLeg(transfer, LISTENER, "", "", None, pull)
        self.decodes.begin(request, where, match)

    def step(self):
        """Schedule, run, and take the workers' results."""
        for request in self.requests.values():
            if request.status is RequestStatus.WAITING and not request.loading:
                self._admit(request)
        self.bind()
        _, ended, failed = self.results()
        for name in sorted(ended):
            self.decodes.loaded(name, self.pins)
            self._ended(self.requests[name], name in failed)

    def _admit(self, request):
        external, _ = self.decodes.matched_tokens(request, 0)
        blocks = self.pool.take(-(-request.num_prompt_tokens // BLOCK), request.request_id)
        if blocks is None:
            return
        request.blocks, request.loading = blocks, True
        table = ([block.block_id for block in blocks],)
        self.decodes.after_alloc(
            request, SimpleNamespace(get_block_ids=lambda: table), external, self.pins
        )
        decode = self.decodes.waiting[request.request_id]
        if decode.attempt:
            self.attempts[decode.attempt] = request.request_id

    def _ended(self, request, failed):
        request.loading = False
        if request.status is not RequestStatus.WAITING:  # aborted while it was loading
            self._leave(request)
        elif not failed:
            request.status, request.loaded = RequestStatus.RUNNING, True
            number = next(n for n, who in self.attempts.items() if who == request.request_id)
            self.process.effects.received.append((number, 0, request.num_prompt_tokens))
        elif self.recompute:
            request.status = RequestStatus.RUNNING
            for block in request.blocks:  # computed anew, in place
                block.owner = f"{request.request_id}, recomputed"
        else:
            request.status = RequestStatus.FINISHED_ERROR
            self.decodes.finished(request, self.pins)
            self._leave(request)

    def abort(self, name):
        """The client leaves. Blocks of a loading request stay until its load has ended."""
        request = self.requests[name]
        request.status = RequestStatus.FINISHED_ABORTED
        self.decodes.finished(request, self.pins)
        if not request.loading:
            self._leave(request)

    def finish(self, name):
        """A request has all its output."""
        request = self.requests[name]
        request.status = RequestStatus.FINISHED_STOPPED
        self.decodes.finished(request, self.pins)
        self._leave(request)

    def _leave(self, request):
        del self.requests[request.request_id]
        self.pool.free_blocks(request.blocks)

    def enabled(self):
        """Events that may happen now."""
        waiting = any(
            r.status is RequestStatus.WAITING and not r.loading for r in self.requests.values()
        )
        events = [("step",)] if waiting or self.pending() else []
        for name, request in self.requests.items():
            if request.status is RequestStatus.RUNNING:
                events.append(("finish", name))
            if request.status in (RequestStatus.WAITING, RequestStatus.RUNNING):
                events.append(("abort", name))
        return events

    def writable(self):
        """(attempt, block) pairs that WRITEs may touch."""
        return frozenset(
            (number, block.block_id)
            for number, name in self.attempts.items()
            for block in self.pool.blocks
            if block.ref_cnt and block.owner == name
        )


class PrefillEngine(Engine):
    """Prompts computed in chunks of one block, one chunk per step."""

    def __init__(self, process, blocks):
        super().__init__(process, blocks)
        self.prefills = Prefills(
            self.commands, self.due, self.handed, [BLOCK], Custody(VLLM, ONE_GROUP), chunks=True
        )
        self.sending: dict[str, list[Block]] = {}  # kept until they are reported sent
        self.cached: dict[tuple[str, int], int] = {}  # prefix cache: content -> block
        self.scheduled: list[str] | None = None  # of the step that runs
        self.preempted: list[str] = []

    def new(self, leg):
        _, name, transfer, prompt, tokens, _ = leg
        request = self.requests[name] = Request(name, prompt, tokens)
        if transfer is not None:
            self.prefills.begin(request, Match(transfer, "base", prompt.encode(), tokens))

    def step(self, compute=False):
        """A step is scheduled and begins; `forward` ends it, or nothing was to be computed."""
        new, cached, tokens = [], [], {}
        for request in self.requests.values() if compute else ():
            if request.computed >= request.num_prompt_tokens:
                continue
            if request.request_id in self.preempted:
                continue
            if not request.computed:
                self.prefills.before_allocation(self.pins)
            before = request.computed
            added = self._allocate(request)
            if added is None:
                continue
            tokens[request.request_id] = request.computed - before
            if not request.told:
                tokens[request.request_id] = request.computed - self._hit(request, before)
                new.append(_new(request, self._hit(request, before)))
                request.told.append(True)
            else:
                cached.append((request.request_id, (added,), before))
        self.scheduled = list(tokens)
        output = SimpleNamespace(
            preempted_req_ids=tuple(self.preempted), scheduled_new_reqs=new,
            num_scheduled_tokens=tokens, scheduled_cached_reqs=_cached(cached),
        )  # fmt: skip
        self.preempted = []
        self.prefills.step(output, self.pins)
        self.bind()
        if not self.scheduled:
            self.forward()

    def _hit(self, request, before):
        return request.hit if before == 0 else 0

    def _allocate(self, request):
        """Blocks of the next chunk: a prefix hit, if there is one, and one block more."""
        request.hit = 0
        added = []
        index = request.computed // BLOCK
        if request.computed == 0 and request.num_prompt_tokens > BLOCK:
            found = self._find((request.prompt, 0))
            if found is not None:
                self.pool.touch([found])
                request.hit, index = BLOCK, 1
                added.append(found)
        fresh = self.pool.take(1, request.request_id)
        if fresh is None:
            self.pool.free_blocks(added)
            return None
        added += fresh
        # A block that is handed out anew leaves the prefix cache.
        block = fresh[0].block_id
        self.cached = {c: b for c, b in self.cached.items() if b != block}
        self.cached[request.prompt, index] = block
        request.blocks += added
        request.computed = min(request.num_prompt_tokens, (index + 1) * BLOCK)
        return [block.block_id for block in added]

    def _find(self, content):
        block = self.pool.blocks[self.cached.get(content, 0)]
        mine = block.ref_cnt and self.cached.get(content) == block.block_id
        return block if mine else None

    def forward(self):
        """The step has run: its bytes exist, and its settle point has come."""
        for name in self.scheduled or ():
            request = self.requests.get(name)
            request.status = RequestStatus.RUNNING
            for index, block in enumerate(request.blocks if request else ()):
                block.content = (request.prompt, index)
        self.scheduled = None
        for rank in self.process.ranks:
            rank.worker.settle()
        self.process.submit()
        sent, _, _ = self.results()
        for name in sorted(sent):
            self.prefills.sent(name, self.pins)
            self._free(self.sending.pop(name))
        for request in list(self.requests.values()):
            if request.computed >= request.num_prompt_tokens:
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
                self._leave(request)

    def abort(self, name):
        """The client leaves, between two steps."""
        self.requests[name].status = RequestStatus.FINISHED_ABORTED
        self._leave(self.requests[name])

    def preempt(self, name):
        """There is no room: the connector is asked, and the request starts over later."""
        self.prefills.before_preemption(self.pins)
        self._preempt(self.requests[name])

    def reset(self):
        """The prefix cache is reset with everything that runs; nobody is asked."""
        for request in self.requests.values():
            if request.computed:
                self._preempt(request)

    def _preempt(self, request):
        self._free(request.blocks)
        request.blocks, request.computed, request.told = [], 0, []
        request.status = RequestStatus.PREEMPTED
        self.preempted.append(request.request_id)

    def _leave(self, request):
        table = ([block.block_id for block in request.blocks],)
        keeps, _ = self.prefills.finished(request, table, self.pins)
        del self.requests[request.request_id]
        self.left += (request.request_id,)
        if keeps:
            self.sending[request.request_id] = request.blocks
        else:
            self._free(request.blocks)

    def _free(self, blocks):
        self.pool.free_blocks(blocks)
        for block in blocks:
            if not block.ref_cnt:
                self.cached = {c: b for c, b in self.cached.items() if b != block.block_id}

    def enabled(self):
        """Events that may happen now."""
        if self.scheduled is not None:
            return [("forward",)]
        events = [("step", True)] if self._runnable() else []
        events += [("step",)] if self.pending() else []
        for name, request in self.requests.items():
            if name in self.preempted:
                continue
            events.append(("abort", name))
            if request.computed:
                events.append(("preempt", name))
        if any(request.computed for request in self.requests.values()):
            events.append(("reset",))
        return events

    def waits(self):
        return self.scheduled is None and self.pending()

    def _runnable(self):
        waits = any(r.computed < r.num_prompt_tokens for r in self.requests.values())
        return waits and bool(self.preempted or self.pool.free())

    def pending(self):
        return super().pending() or any(rank.worker._due for rank in self.process.ranks)

    def readable(self):
        """(pin, block, content) triples that WRITEs may read."""
        return frozenset(
            (number, block.block_id, block.content)
            for number, pin in self.pins._pins.items()
            for block in (*pin.blocks, *(self.pool.blocks[i] for i in pin.ids))
            if block.content is not None
        )


def _output(worker, left):
    """What a worker half says at the end of a step, as vLLM passes it on."""
    found = worker.results(left)
    worker.bad_blocks()
    told = KVConnectorOutput(
        finished_sending=found.finished_sending, finished_recving=found.finished_recving,
        failed_recving=found.failed_recving, kv_connector_worker_meta=worker.worker_meta(),
    )  # fmt: skip
    return SimpleNamespace(kv_connector_output=told)


def _new(request, hit):
    table = ([block.block_id for block in request.blocks],)
    return SimpleNamespace(
        req_id=request.request_id, block_ids=table, num_computed_tokens=hit
    )  # fmt: skip


def _cached(entries):
    return SimpleNamespace(
        req_ids=[name for name, _, _ in entries],
        new_block_ids=[added for _, added, _ in entries],
        resumed_req_ids=set(),
        num_computed_tokens=[before for _, _, before in entries],
    )
