"""The scheduler half: decides what is transferred, holds the blocks, writes the commands.

Runs on vLLM's scheduling thread, so each hook costs a few microseconds and nothing waits.
Blocks that a transfer may touch are pinned from here until every rank has let go; vLLM frees
its own reference whenever it likes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from neuron_push.commands import Abandon, Command, Near, Offer, Receive, Retire, Settle
from neuron_push.config import Config
from neuron_push.protocol import Address, EngineInfo, Match
from neuron_push.sidechannel import Listener
from neuron_push.versions import check as check_versions
from neuron_push.vllm import identity
from neuron_push.vllm.compat import FAILS_BY_REQUEST
from neuron_push.vllm.metadata import IDLE, NOTHING, StepMeta, WorkerMeta
from neuron_push.vllm.params import DecodeLeg, ParamsError, PrefillLeg, parse
from neuron_push.vllm.pins import Pins

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# How long a prefill engine is asked to keep a "nothing wanted" for a prompt it has not seen.
DECLINE_PATIENCE = 10.0


@dataclass(slots=True, eq=False)
class Producing:
    """A prompt computed here for another engine."""

    request: Request
    match: Match
    source: int = 0  # 0: not offered (before the first step, or preempted)
    pin: int = -1
    settled: int = 0
    tables: list[list[int]] = field(default_factory=list)  # block ids per group
    given: list[int] = field(default_factory=list)  # blocks already told, per group
    refused: bool = False


@dataclass(slots=True, eq=False)
class Consuming:
    """A request whose prompt another engine computes."""

    leg: DecodeLeg
    match: Match
    computed: int = 0  # tokens found in the local prefix cache
    attempt: int = 0  # 0: not registered
    reject: str = ""  # why it must fail
    settled: bool = False  # loaded, failed or not wanted: never ask again


class SchedulerHalf:
    """Hooks that vLLM's scheduler calls, in its order, on its thread."""

    def __init__(self, vllm_config: VllmConfig, kv_config: KVCacheConfig, config: Config) -> None:
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        assert transfer is not None and transfer.engine_id is not None
        self._config = config
        self._role = str(transfer.kv_role)
        self._engine = transfer.engine_id
        self._recompute = transfer.kv_load_failure_policy == "recompute"
        self._world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._sizes = [group.kv_cache_spec.block_size for group in kv_config.kv_cache_groups]
        kinds = identity.group_kinds(kv_config)
        self._chunks = config.streaming == "chunk" and all(k in ("full", "mla") for k in kinds)
        self._semantics = identity.semantics(vllm_config, kinds)
        self._parallel = parallel
        self._pins: Pins | None = None
        self._commands: list[Command] = []
        self._rejected: list[tuple[str, str]] = []
        self._producing: dict[str, Producing] = {}
        self._consuming: dict[str, Consuming] = {}
        self._attempts = count(1)
        self._sources = count(1)
        self._software = tuple(check_versions().items())
        self._incarnation = int.from_bytes(os.urandom(6), "big")
        port = config.side_channel_port + parallel.data_parallel_index
        self._listener = Listener(self._engine, config.side_channel_host, port, self._describe)
        self._address = self._listener.address
        logger.info(
            "neuron-push: engine %s (%s) answers at %s:%d", self._engine, self._role,
            self._address.host, self._address.port,
        )  # fmt: skip

    def close(self) -> None:
        """Stop answering the side channel."""
        self._listener.close()

    def bind_pool(self, pool: BlockPool) -> None:
        """vLLM hands over its block pool once, before the first request."""
        self._pins = Pins(pool, self._world, self._config.most_pinned_fraction)
        self._pool = pool

    # ------------------------------------------------------------------ new requests

    def on_new_request(self, request: Request) -> None:
        """Note which leg of a transfer a request is, if any."""
        try:
            leg = parse(request.kv_transfer_params, self._role)
        except ParamsError as error:
            self._consuming[request.request_id] = _rejected(request, str(error))
            return
        if isinstance(leg, PrefillLeg):
            match = identity.match_of(request, leg.transfer)
            producing = Producing(request, match)
            self._producing[request.request_id] = producing
            self._offer(producing)
        elif isinstance(leg, DecodeLeg):
            match = identity.match_of(request, leg.transfer, leg.request)
            self._consuming[request.request_id] = Consuming(leg, match)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """How many prompt tokens beyond `computed` another engine will push."""
        consuming = self._consuming.get(request.request_id)
        if consuming is None or consuming.settled or consuming.attempt:
            return 0, False
        wanted = request.num_prompt_tokens - computed
        consuming.computed = computed
        return (wanted, True) if wanted > 0 else (0, False)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Blocks are allocated: pin and register them, or let the prompt go."""
        consuming = self._consuming.get(request.request_id)
        if consuming is None or consuming.settled or consuming.attempt:
            return
        if external == 0:
            consuming.settled = True
            self._decline(consuming, request.request_id)
            return
        tables = blocks.get_block_ids()
        start, stop = consuming.computed, consuming.computed + external
        first = [start // size for size in self._sizes]
        wanted = tuple(
            list(table[low : -(-stop // size)])
            for table, low, size in zip(tables, first, self._sizes, strict=True)
        )
        assert self._pins is not None
        number = sum(map(len, wanted))
        if not consuming.reject and not self._pins.room(number):
            consuming.reject = f"transfers hold {self._pins.blocks} KV blocks already"
        if consuming.reject:
            self._reject(consuming, request.request_id)
            return
        pin = self._pins.new()
        for table in wanted:
            self._pins.add(pin, table)
        consuming.attempt = next(self._attempts)
        leg = consuming.leg
        self._commands.append(
            Receive(
                consuming.attempt, request.request_id, leg.prefill, leg.engine, consuming.match,
                start, stop, tuple(first), wanted, pin, leg.patience or self._config.patience,
                hold_failure=self._recompute or not FAILS_BY_REQUEST,
            )
        )  # fmt: skip

    # ------------------------------------------------------------------ each step

    def build_meta(self, output: SchedulerOutput) -> StepMeta:
        """Everything the workers must know with this step."""
        if self._producing:
            self._produce(output)
        idle = not output.total_num_scheduled_tokens
        if not self._commands and not self._rejected:
            return IDLE if idle and self._pins else NOTHING
        meta = StepMeta(tuple(self._commands), tuple(self._rejected), idle)
        self._commands.clear()
        self._rejected.clear()
        return meta

    def update(self, output: KVConnectorOutput) -> None:
        """Take what the workers report with a step's results."""
        for request in output.finished_recving or ():
            consuming = self._consuming.get(request)
            if consuming is not None:
                consuming.settled = True
        meta = output.kv_connector_worker_meta
        if isinstance(meta, WorkerMeta) and self._pins is not None:
            for pin, rank in meta.unpinned:
                self._pins.quiet(pin, rank)

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping although no request asks for it."""
        return bool(self._commands or self._rejected or self._pins)

    @property
    def frees_soon(self) -> bool:
        """Whether waiting may bring blocks back, so that nobody need be preempted."""
        return bool(self._pins)

    def pinned(self) -> tuple[int, float]:
        """(blocks held, age in seconds of the oldest hold)."""
        return (self._pins.blocks, self._pins.oldest_age()) if self._pins else (0, 0.0)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """A request leaves the engine; its KV stays on offer if it is a complete prompt."""
        name = request.request_id
        consuming = self._consuming.pop(name, None)
        if consuming is not None and not consuming.settled:
            if consuming.attempt:
                self._commands.append(Abandon(consuming.attempt, _status(request)))
            else:
                self._decline(consuming, name)
        producing = self._producing.pop(name, None)
        return self._retire(producing) if producing is not None else None

    # ------------------------------------------------------------------ prefill side

    def _offer(self, producing: Producing) -> None:
        producing.source = next(self._sources)
        producing.pin, producing.settled = -1, 0
        producing.tables = [[] for _ in self._sizes]
        producing.given = [0] * len(self._sizes)
        self._commands.append(
            Offer(producing.source, producing.request.request_id, producing.match)
        )

    def _produce(self, output: SchedulerOutput) -> None:
        for name in output.preempted_req_ids or ():
            producing = self._producing.get(name)
            if producing is not None and producing.source:
                self._commands.append(Retire(producing.source, "preempted"))
                self._offer(producing)
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            producing = self._producing.get(new.req_id)
            if producing is not None:
                self._grow(producing, new.block_ids, replace=True)
                self._settle(producing, new.num_computed_tokens + scheduled[new.req_id])
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            producing = self._producing.get(name)
            if producing is not None:
                resumed = name in cached.resumed_req_ids
                self._grow(producing, cached.new_block_ids[index], replace=resumed)
                self._settle(producing, cached.num_computed_tokens[index] + scheduled[name])

    @staticmethod
    def _grow(producing: Producing, ids: tuple[list[int], ...] | None, *, replace: bool) -> None:
        if replace:
            producing.tables = [list(table) for table in ids or ()]
        elif ids is not None:
            for table, new in zip(producing.tables, ids, strict=True):
                table.extend(new)

    def _settle(self, producing: Producing, reached: int) -> None:
        """With this step's fence, tokens up to `reached` may be read."""
        prompt = producing.match.tokens
        stop = min(reached, prompt)
        last = stop == prompt
        if producing.refused or stop <= producing.settled or not (last or self._chunks):
            return
        first = tuple(producing.given)
        added = tuple(
            table[low : -(-stop // size)]
            for table, low, size in zip(producing.tables, first, self._sizes, strict=True)
        )
        assert self._pins is not None
        if not self._pins.room(sum(map(len, added))):
            producing.refused = True
            logger.warning("%s is not handed over: too many KV blocks are held",
                           producing.request.request_id)  # fmt: skip
            self._commands.append(Retire(producing.source, "ended", "too many KV blocks are held"))
            return
        if producing.pin < 0:
            producing.pin = self._pins.new()
        for group, ids in enumerate(added):
            self._pins.add(producing.pin, ids)
            producing.given[group] += len(ids)
        producing.settled = stop
        if last:
            self._commands.append(Near(producing.source))
        self._commands.append(Settle(producing.source, stop, first, added, producing.pin, last))

    def _retire(self, producing: Producing) -> dict[str, Any] | None:
        request, complete = producing.request, producing.settled == producing.match.tokens
        good = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED,
        )  # fmt: skip
        if not (good and complete) or producing.refused:
            reason = f"the prefill request ended: {_status(request)}"
            self._commands.append(Retire(producing.source, "ended", reason))
            return None
        self._commands.append(Retire(producing.source, "finished"))
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": None,
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
            "remote_host": self._address.host,
            "remote_port": self._address.port,
            "tp_size": self._parallel.tensor_parallel_size,
            "pp_size": self._parallel.pipeline_parallel_size,
            "transfer_id": (request.kv_transfer_params or {}).get("transfer_id"),
            "transfer_mode": "push",
        }

    # ------------------------------------------------------------------ decode side

    def _decline(self, consuming: Consuming, name: str) -> None:
        """Tell the prefill engine that nothing is wanted, so that it lets the prompt go."""
        if consuming.reject:
            return
        none: tuple[list[int], ...] = tuple([] for _ in self._sizes)
        leg = consuming.leg
        self._commands.append(
            Receive(
                next(self._attempts), name, leg.prefill, leg.engine, consuming.match, 0, 0,
                (0,) * len(none), none, -1, DECLINE_PATIENCE,
            )
        )  # fmt: skip

    def _reject(self, consuming: Consuming, name: str) -> None:
        logger.warning("request %s fails: %s", name, consuming.reject)
        consuming.settled = True
        self._rejected.append((name, consuming.reject))

    def _describe(self) -> EngineInfo:
        """Who this engine is; called on the listener's thread."""
        parallel = self._parallel
        pool = getattr(self, "_pool", None)
        return EngineInfo(
            engine=self._engine,
            incarnation=self._incarnation,
            role={"kv_producer": "producer", "kv_consumer": "consumer"}.get(self._role, "both"),
            world=self._world,
            tensor_parallel=parallel.tensor_parallel_size,
            pipeline_parallel=parallel.pipeline_parallel_size,
            data_rank=parallel.data_parallel_index,
            modes=("push",),
            semantics=self._semantics,
            ranks=(),
            free_blocks=pool.get_num_free_blocks() if pool else -1,
            total_blocks=pool.num_gpu_blocks if pool else -1,
            block_tokens=self._sizes[0] if self._sizes else 0,
            software=self._software,
        )


def _status(request: Request) -> str:
    return str(request.status).removeprefix("RequestStatus.").lower()


def _rejected(request: Request, reason: str) -> Consuming:
    """A request whose parameters cannot be used: it is failed at its first admission."""
    leg = DecodeLeg("", Address("", 0), "", "", None)
    return Consuming(leg, Match("", request.request_id, b"", 0), reject=reason)
