"""A prefill and a decode engine without models, for `bench hooks`; runs inside one process.

vLLM's own scheduler and block manager drive a connector's scheduler half; the benchmark calls
the worker half's hooks in the order of the V1 runner, over KV caches in host memory and a real
NIXL agent. Only the connector's hooks are timed.
"""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from neuron_push.bench.shells import BLOCK, engine_config, kv_caches

SCHEDULER_HOOKS: Final = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc",
    "get_loaded_kv_cache_group_ids", "build_connector_meta", "update_connector_output",
    "request_finished_all_groups", "has_pending_push_work", "has_pending_block_frees",
    "get_kv_connector_stats", "take_events", "get_external_cache_hit_sources",
)  # fmt: skip
# What the V1 runner calls in each step, in its order (tests/vllm_hooks), without layer hooks.
WORKER_HOOKS: Final = (
    "handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_save",
    "get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events", "build_connector_worker_meta",
    "clear_connector_metadata",
)  # fmt: skip


class Meter:
    """Nanoseconds spent inside the calls it wraps: on the clock, and of the thread's CPU.

    The difference is waiting: for the interpreter lock, which the transfer threads of both
    engines take in turn here, and for a core.
    """

    def __init__(self) -> None:
        self.wall = self.cpu = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        clock, cpu_clock = time.perf_counter_ns, time.thread_time_ns

        def timed(*args: Any, **options: Any) -> Any:
            wall, cpu = clock(), cpu_clock()
            try:
                return call(*args, **options)
            finally:
                self.cpu += cpu_clock() - cpu
                self.wall += clock() - wall

        return timed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls in here do not count."""
        kept = self.wall, self.cpu
        yield
        self.wall, self.cpu = kept

    def take(self) -> tuple[int, int]:
        taken, self.wall, self.cpu = (self.wall, self.cpu), 0, 0
        return taken


@dataclass
class Step:
    """What one engine step cost, and what happened in it."""

    wall: int  # nanoseconds
    cpu: int
    kind: str  # "quiet", "waiting", or the work that was done
    blocks: int = 0
    metadata_bytes: int = 0


@dataclass
class Leg:
    """A request that the benchmark follows."""

    request: Any
    blocks: int
    steps: list[Step] = field(default_factory=list)


class Side:
    """One engine of the pair."""

    def __init__(
        self, connector: str, role: str, blocks: int, port: int, *, engine: str = "",
        policy: str = "fail", model: str = "",
    ) -> None:  # fmt: skip
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.structured_output import StructuredOutputManager

        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        self.port = port
        self.config = engine_config(connector, role, port, engine, policy, model)
        self.config.cache_config.num_gpu_blocks = blocks
        self.engine_id = self.config.kv_transfer_config.engine_id
        self._meter = Meter()
        self._legs: dict[str, Leg] = {}
        # kv_transfer_params of requests that finished.
        self.answers: list[dict[str, Any]] = []
        # Held here as a model runner holds them; connectors may keep addresses only.
        self._caches, kv = kv_caches(self.config, blocks)
        register_all_kvcache_specs(self.config)
        cores = os.sched_getaffinity(0)
        with set_current_vllm_config(self.config):
            self.worker = KVConnectorFactory.create_connector(
                self.config, KVConnectorRole.WORKER, kv
            )
            self.worker.register_kv_caches(self._caches)
            manager = StructuredOutputManager(self.config)
            self.scheduler = Scheduler(self.config, kv, manager, BLOCK)
        # vLLM's NIXL connectors bind the process to one core on CPU platforms.
        os.sched_setaffinity(0, cores)
        half = self.scheduler.connector
        metadata = self.worker.get_handshake_metadata()
        half.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata} if metadata else {})
        self._time_hooks(half)

    def _time_hooks(self, half: Any) -> None:
        around = self._meter.around
        for name in SCHEDULER_HOOKS:
            if hasattr(half, name):
                setattr(half, name, around(getattr(half, name)))
        self._hooks = {
            name: around(getattr(self.worker, name))
            for name in WORKER_HOOKS
            if hasattr(self.worker, name)
        }
        self._pickle = around(lambda what: pickle.dumps(what, pickle.HIGHEST_PROTOCOL))
        self._unpickle = around(pickle.loads)

    @property
    def busy(self) -> bool:
        """Whether vLLM's engine loop would step."""
        with self._meter.paused():
            pending = self.scheduler.connector.has_pending_push_work()
            return bool(self.scheduler.has_requests() or pending)

    def add(self, tokens: list[int], params: dict[str, Any] | None, name: str, output: int) -> Leg:
        """Add a request; its `on_new_request` counts into its first step."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(
            max_tokens=output, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        request = Request(name, tokens, sampling, None)
        leg = self._legs[name] = Leg(request, -(-len(tokens) // BLOCK))
        self.scheduler.add_request(request)
        return leg

    def step(self) -> Step:
        """One engine step; the step is noted in the leg that it worked for."""
        output = self.scheduler.schedule()
        metadata, output.kv_connector_metadata = output.kv_connector_metadata, None
        sent = self._pickle(metadata)
        told = self._worker_step(self._unpickle(sent), output)
        self._end(output, told)
        kind, leg, blocks = self._kind(output, told)
        step = Step(*self._meter.take(), kind, blocks, len(sent))
        if leg is not None:
            leg.steps.append(step)
        return step

    def _worker_step(self, metadata: Any, output: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        hooks = self._hooks
        hooks["handle_preemptions"](metadata)
        hooks["bind_connector_metadata"](metadata)
        hooks["start_load_kv"](None)
        hooks["wait_for_save"]()
        results = hooks["get_transfer_results"](output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=results.finished_sending, finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=hooks["get_block_ids_with_load_errors"](),
            kv_connector_stats=hooks["get_kv_connector_stats"](),
        )  # fmt: skip
        hooks["get_kv_connector_kv_cache_events"]()
        worker_meta = hooks["build_connector_worker_meta"]()
        if worker_meta is not None:
            told.kv_connector_worker_meta = self._unpickle(self._pickle(worker_meta))
        hooks["clear_connector_metadata"]()
        return told

    def _end(self, output: Any, told: Any) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        sampled = [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
        index = {name: number for number, name in enumerate(names)}
        told = None if told.is_empty() else told
        runner = ModelRunnerOutput(names, index, sampled, kv_connector_output=told)
        for each in self.scheduler.update_from_output(output, runner).values():
            self.answers += [o.kv_transfer_params for o in each.outputs if o.kv_transfer_params]

    def _kind(self, output: Any, told: Any) -> tuple[str, Leg | None, int]:
        """What happened, which leg it was for, and how many of its blocks were handled."""
        leg = next(iter(self._legs.values()), None)
        if leg is None:
            return "quiet", None, 0
        reported = told.finished_sending or told.finished_recving or told.kv_connector_worker_meta
        name = leg.request.request_id
        if reported:
            return "report", leg, leg.blocks
        if name in output.num_scheduled_tokens:
            return "chunk", leg, -(-output.num_scheduled_tokens[name] // BLOCK)
        if name in output.finished_req_ids:
            return "end", leg, 0
        if not leg.steps:
            return "admit", leg, leg.blocks
        return "waiting", leg, 0

    def drop(self, leg: Leg) -> None:
        """The leg is over: later steps are not its own."""
        del self._legs[leg.request.request_id]

    def fragment(self) -> None:
        """Put the free blocks into a random order."""
        pool = self.scheduler.kv_cache_manager.block_pool
        blocks = pool.get_new_blocks(pool.get_num_free_blocks())
        random.Random(1).shuffle(blocks)
        pool.free_blocks(blocks)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.connector.shutdown()
