"""One engine: vLLM's scheduler and both halves of the connector, around a played model."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import neuron_push.vllm.scheduler as scheduler_module
from neuron_push.commands import Receive, decode, unpack_ids
from neuron_push.vllm.metadata import StepMeta
from tests.stack.device import HEADS, WIDTH, Golden, Stream, Work
from tests.stack.shape import Shape, config_for
from tests.stack.wire import MemoryListener
from tests.stack.worker import Worker
from tests.vllm.kit import LAYERS


@dataclass(eq=False)
class Batch:
    """One step between its schedule and its end."""

    output: Any
    works: list[Work]
    told: list[Any]  # by rank: KVConnectorOutput
    eventful: bool  # whether it carries anything: work, commands, news
    ended: bool = False


@dataclass(eq=False)
class Call:
    """A request at the engine's door: `tell` hears (tokens, finish reason, parameters)."""

    name: str
    prompt: list[int]
    output: int
    params: Any
    tell: Any

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.output, ignore_eos=True, extra_args={"kv_transfer_params": self.params}
        )


@dataclass(eq=False)
class Engine:
    """A process group; a restart makes a new one with the same name."""

    world: Any
    name: str
    shape: Shape
    up: bool = True
    frozen_until: float = 0.0
    unasked: bool = False  # vLLM let go of blocks unasked since it last scheduled
    epochs: Counter = field(default_factory=Counter)  # how often each block was handed out
    # (attempt, block) -> hand-outs of it when it was registered
    registered: dict[tuple[int, int], int] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    _asleep: deque = field(default_factory=deque)  # what happens when it thaws
    _inbox: deque = field(default_factory=deque)
    _batches: deque = field(default_factory=deque)
    _due: bool = False

    def __post_init__(self) -> None:
        shape, world = self.shape, self.world
        config = config_for(shape, self.name, world.settings)
        spec = FullAttentionSpec(
            block_size=shape.block, num_kv_heads=HEADS // shape.ranks, head_size=WIDTH,
            dtype=config.model_config.dtype,
        )  # fmt: skip
        kv = KVCacheConfig(
            num_blocks=shape.blocks, kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
        )  # fmt: skip
        listener = lambda *given: MemoryListener(*given, process=self)  # noqa: E731
        kind = AsyncScheduler if shape.overlapping else Scheduler
        with mock.patch.object(scheduler_module, "Listener", listener):
            self.scheduler = kind(
                config, kv, StructuredOutputManager(config), shape.block,
                hash_block_size=shape.block,
            )  # fmt: skip
        self._hasher = get_request_block_hasher(shape.block, sha256)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.pool.get_num_free_blocks()
        self._watch_pool()
        self.stream = Stream(world.clock)
        self.workers = [Worker(self, rank, config, kv) for rank in range(shape.ranks)]
        self._aggregate = KVOutputAggregator(shape.ranks).aggregate
        self.half = self.scheduler.connector._scheduler

    def __str__(self) -> str:
        return self.name

    # ------------------------------------------------------------------ life

    def when_awake(self, action) -> None:
        """Do something now, or when this engine thaws, unless it is dead by then."""
        if not self.up:
            return
        if self.frozen_until > self.world.clock.now:
            self._asleep.append(action)
        else:
            action()

    def freeze(self, seconds: float) -> None:
        clock = self.world.clock
        clock.log(f"{self} freezes for {seconds:.2f} s")
        self.frozen_until = max(self.frozen_until, clock.now + seconds)
        clock.at(seconds, "fault", self.thaw)

    def thaw(self, *, now: bool = False) -> None:
        if now:
            self.frozen_until = 0.0
        while self.up and self._asleep and self.frozen_until <= self.world.clock.now:
            self._asleep.popleft()()

    def crash(self) -> None:
        self.world.clock.log(f"{self} dies")
        self.up = False
        self.half._listener.close()
        for worker in self.workers:
            worker.crash()

    # ------------------------------------------------------------------ blocks

    def held(self, block: int) -> bool:
        return self.pool.blocks[block].ref_cnt > 0

    def _watch_pool(self) -> None:
        hand_out = self.pool.get_new_blocks
        receives = "consumer" in self.shape.role or "both" in self.shape.role

        def watched(number):
            blocks = hand_out(number)
            ids = [block.block_id for block in blocks]
            self.epochs.update(ids)
            if receives:  # what may be written into from outside is quiet when it is handed out
                self.poison(ids)
            elif ids:  # a step under way may still read them
                self._soil(ids)
            return blocks

        self.pool.get_new_blocks = watched

    def poison(self, ids: list[int]) -> None:
        for worker in self.workers:
            worker.memory.poison(ids)

    def _soil(self, ids: list[int]) -> None:
        self.stream.launch(0.0, lambda: self.poison(ids))
        self.world.clock.at(self.stream._free_at - self.world.clock.now, "device",
                            lambda: self.stream.advance() if self.up else False)  # fmt: skip

    # ------------------------------------------------------------------ the door

    def submit(self, call: Call) -> None:
        self._told_to(lambda: self._add(call))

    def _told_to(self, action) -> None:
        self._inbox.append(action)
        self.news()
        self.poke()

    def abort(self, name: str) -> None:
        def end() -> None:
            self.calls.pop(name, None)
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

        self._told_to(end)

    def _add(self, call: Call) -> None:
        self.calls[call.name] = call
        self.scheduler.add_request(
            Request(
                request_id=call.name, prompt_token_ids=list(call.prompt),
                sampling_params=call.sampling(), pooling_params=None, block_hasher=self._hasher,
            )
        )  # fmt: skip

    # ------------------------------------------------------------------ the loop

    def poke(self, delay: float = 0.0) -> None:
        """The engine has something to do."""
        if self._due or not self.up:
            return
        self._due = True
        clock = self.world.clock
        clock.at(delay + clock.wait(0.0001), "engine", self._come)

    def news(self) -> None:
        """What an empty step waited for is there."""
        for batch in self._batches:
            if not batch.works:
                self._end_soon(batch, self.world.clock.wait(0.0002))

    def _end_soon(self, batch: Batch, delay: float) -> None:
        def ends() -> bool:
            self.when_awake(lambda: self._ended(batch))
            return False  # the turn that it leads to counts

        self.world.clock.at(delay, "engine", ends)

    def _come(self) -> bool:
        """Whether the engine may take its turn now, and found something to do."""
        if self.up and self.frozen_until <= self.world.clock.now:
            return self._turn()
        self.when_awake(self._turn)
        return False

    def _turn(self) -> bool:
        """One look at what may be done: whether anything was."""
        self._due = False
        heard = bool(self._inbox)
        while self._inbox:
            self._inbox.popleft()()
        room = 2 if self.shape.overlapping else 1
        if self._batches and self._batches[0].ended and (
            len(self._batches) == room or self.world.clock.chance(0.5)
        ):  # fmt: skip
            batch = self._end(self._batches.popleft())
        elif len(self._batches) < room and self.scheduler.has_requests():
            batch = self._begin()
        elif self._batches and self._batches[0].ended:
            batch = self._end(self._batches.popleft())
        else:
            return heard
        self.poke()
        return heard or batch.eventful

    def _begin(self) -> Batch:
        """Schedule and launch one step."""
        clock = self.world.clock
        output = self.scheduler.schedule()
        self.unasked = False
        meta, output.kv_connector_metadata = output.kv_connector_metadata, None
        told = StepMeta(*meta)
        for command in decode(told.now):
            if isinstance(command, Receive) and command.start < command.stop:
                for block in unpack_ids(command.blocks[0]):
                    self.registered[command.attempt, block] = self.epochs[block]
        works = [self._work(name, count) for name, count in output.num_scheduled_tokens.items()]
        batch = Batch(
            output,
            works,
            [],
            eventful=bool(works or told.now or told.due or told.rejected or told.handed),
        )
        packed = pickle.dumps(meta)
        self._batches.append(batch)
        seconds = clock.rng.uniform(0.0005, 0.004) if works else 0.0
        for worker in self.workers:
            worker.begin(pickle.loads(packed))
        if works:
            for layer in range(2):
                for worker in self.workers:
                    worker.layer(layer)
                at = self.stream.launch(seconds / 2, lambda n=layer: self._compute(n, works))
                clock.at(at - clock.now, "device", self._tick)
        for worker in self.workers:
            batch.told.append(worker.end(output, forward=bool(works)))
        batch.eventful = batch.eventful or any(batch.told)
        # A step that computes nothing waits a moment for news; an engine that nobody told anything
        # may be slow about it.
        nap = 0.0015 if clock.chance(0.2) else clock.rng.uniform(0.0015, 0.03)
        self._end_soon(batch, (self.stream._free_at - clock.now if works else nap) + 1e-6)
        return batch

    def _work(self, name: str, count: int) -> Work:
        request = self.scheduler.requests[name]
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        stop = request.num_computed_tokens
        golden = Golden.of(request.prompt_token_ids)
        return Work(name, golden, list(table), stop - count, stop, not request.is_prefill_chunk)

    def _tick(self) -> bool | None:
        """The device goes on although its process stands still; it ends with it."""
        if not self.up:
            return False
        self.stream.advance()
        return None

    def _compute(self, layer: int, works: list[Work]) -> None:
        """One layer of a step; behind the last, everything that was read must have been right."""
        for worker in self.workers:
            for work in works:
                worker.memory.write(layer, work.golden, work.table, work.start, work.stop)
            if layer:
                for work in works:
                    self._judge(worker, work)

    def _judge(self, worker: Worker, work: Work) -> None:
        wrong = worker.memory.wrong(work.golden, work.table, work.stop)
        self.world.clock.check(
            wrong is None,
            f"{worker}: {work.name} computes [{work.start}, {work.stop}) over wrong bytes of token "
            f"{wrong}, in block {work.table[(wrong or 0) // self.shape.block]}",
        )
        self.world.notes["tokens read"] += work.stop

    def _ended(self, batch: Batch) -> None:
        if not batch.ended:
            batch.ended = True
            self.poke()

    def _end(self, batch: Batch) -> Batch:
        names = [work.name for work in batch.works]
        sampled = [[w.golden.token(w.stop)] if w.samples else [] for w in batch.works]
        index = {name: number for number, name in enumerate(names)}
        outputs = [
            ModelRunnerOutput(names, index, sampled, kv_connector_output=told)
            for told in batch.told
        ]
        runner = self._aggregate(outputs)
        for each in self.scheduler.update_from_output(batch.output, runner).values():
            for out in each.outputs:
                call = self.calls.get(out.request_id)
                if call is None:
                    continue
                if out.finish_reason is not None:
                    del self.calls[out.request_id]
                call.tell(list(out.new_token_ids), out.finish_reason, out.kv_transfer_params)
        return batch
