"""The scheduler half: decides what is transferred, holds the blocks, writes the commands.

Runs on vLLM's scheduling thread, so each hook costs a few microseconds and nothing waits.
Blocks that a transfer may touch are pinned from here until every rank has let go; vLLM frees
its own reference whenever it likes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from neuron_push.commands import Sent
from neuron_push.config import Config
from neuron_push.protocol import EngineInfo
from neuron_push.sidechannel import Keyring, Listener
from neuron_push.tracing import Ring
from neuron_push.versions import check as check_versions
from neuron_push.vllm import identity
from neuron_push.vllm.custody import Custody
from neuron_push.vllm.decodes import Decodes
from neuron_push.vllm.metadata import IDLE, NOTHING, Packed, Rejection, Told, WorkerMeta, pack
from neuron_push.vllm.moments import Moments
from neuron_push.vllm.params import DecodeLeg, ParamsError, PrefillLeg, parse
from neuron_push.vllm.pins import Pins
from neuron_push.vllm.prefills import Prefills
from neuron_push.vllm.stats import TOLD, PushStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# Reasons of failed requests that are kept for whoever asks why.
MOST_REASONS = 1024


class SchedulerHalf:
    """Hooks that vLLM's scheduler calls, in its order, on its thread."""

    def __init__(self, vllm_config: VllmConfig, kv_config: KVCacheConfig, config: Config) -> None:
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        assert transfer is not None and transfer.engine_id is not None
        self._config = config
        self._role = str(transfer.kv_role)
        self._engine = transfer.engine_id
        self._world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._sizes = [group.kv_cache_spec.block_size for group in kv_config.kv_cache_groups]
        kinds = identity.group_kinds(kv_config)
        # A window's blocks are freed as it moves on, so those prompts go as a whole.
        chunks = config.streaming != "off" and "sliding" not in kinds
        layers = config.streaming == "layer" and self._knows_layers(vllm_config, kinds)
        backoff = identity.backoff(vllm_config, kinds)
        self._semantics = identity.semantics(vllm_config, kinds)
        self._parallel = parallel
        self._pins: Pins | None = None
        self._commands: list[Sent] = []
        self._due: list[Sent] = []  # wait for the step's settle point
        self._rejected: list[Rejection] = []
        self._handed: list[tuple[int, str]] = []
        self._custody = Custody(vllm_config, kv_config)
        self._prefills = Prefills(
            self._commands, self._due, self._handed, self._sizes, self._custody, chunks=chunks,
            layers=layers, backoff=backoff,
        )  # fmt: skip
        self._decodes = Decodes(
            self._commands, self._rejected, self._sizes, patience=config.patience,
            recompute=transfer.kv_load_failure_policy == "recompute", backoff=backoff,
        )  # fmt: skip
        # Most steps and requests have to do with one side only, or with none.
        self._running, self._waiting = self._prefills.running, self._decodes.waiting
        self._groups = tuple(range(len(self._sizes)))
        self._shown, self._shown_at = False, -TOLD  # whether the gauges show anything, since when
        self._reasons: dict[str, str] = {}
        self._software = tuple(check_versions().items())
        self._incarnation = int.from_bytes(os.urandom(6), "big")
        port = config.side_channel_port + parallel.data_parallel_index
        ring = None
        if config.trace_events:
            ring = Ring(config.trace_events, f"{self._engine} scheduler")
        self._moments = Moments(ring) if ring is not None else None
        self._listener = Listener(
            self._engine, config.side_channel_host, port, self._describe, self._why,
            self._holds, ring, Keyring.of(config.side_channel_keys), config.limits,
        )  # fmt: skip
        self._address = self._listener.address
        self._here = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "remote_host": self._address.host,
            "remote_port": self._address.port,
            "tp_size": parallel.tensor_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
        }
        logger.info(
            "neuron-push: engine %s (%s) answers at %s:%d", self._engine, self._role,
            self._address.host, self._address.port,
        )  # fmt: skip

    @staticmethod
    def _knows_layers(config: VllmConfig, kinds: Sequence[str]) -> bool:
        """Whether layers of a step are computed once each and in order; says so if they are not."""
        reasons = [f"a {kind} cache" for kind in set(kinds) - {"full", "mla"}]
        if identity.draft_model(config):
            reasons.append("a draft model")
        if getattr(config.parallel_config, "enable_dbo", False):
            reasons.append("dual batch overlap")
        if reasons:
            why = " and ".join(sorted(reasons))
            logger.warning('neuron-push: "streaming": "layer" acts as "chunk" with %s', why)
        return not reasons

    def close(self) -> None:
        """Stop answering the side channel."""
        self._listener.close()

    def bind_pool(self, pool: BlockPool) -> None:
        """vLLM hands over its block pool once, before the first request."""
        self._pins = Pins(pool, self._world)
        self._pool = pool

    # ------------------------------------------------------------------ requests

    def groups_of(self, request: Request) -> tuple[int, ...]:
        """All KV groups: none of the registered blocks may be zeroed after registration."""
        return self._groups

    def on_new_request(self, request: Request) -> None:
        """Note which leg of a transfer a request is, if any."""
        if request.resumable:
            self._custody.session(request)
        try:
            leg = parse(request.kv_transfer_params, self._role, self._config.mode)
        except ParamsError as error:
            self._decodes.reject(request, str(error))
            return
        if isinstance(leg, PrefillLeg):
            self._prefills.begin(request, identity.name_of(request, leg.transfer), leg.pull)
        elif isinstance(leg, DecodeLeg):
            name = identity.name_of(request, leg.transfer, leg.request)
            self._decodes.begin(request, leg, name)
        if self._moments is not None and leg is not None:
            self._moments.arrived(request.request_id, leg)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """How many prompt tokens beyond `computed` come from another engine."""
        if self._running:
            assert self._pins is not None
            self._prefills.before_allocation(self._pins)
        return self._decodes.matched_tokens(request, computed) if self._waiting else (0, False)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Blocks are allocated: pin and register them, or let the prompt go."""
        assert self._pins is not None
        self._custody.admitted(request)
        if self._waiting:
            self._decodes.after_alloc(request, blocks, external, self._pins)
        if self._moments is not None and external:
            self._moments.mark(request.request_id, "decode allocated")

    def finished(
        self, request: Request, blocks: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request leaves the engine; its KV stays on offer if it is a complete prompt.

        `blocks` holds the ids of its blocks, group by group. Returns (whether vLLM is to keep
        them until they are reported sent, what the client hears).
        """
        assert self._pins is not None
        self._custody.finished(request)
        if self._moments is not None:
            self._moments.finished(request.request_id)
        if self._waiting:
            self._decodes.finished(request, self._pins)
        if not self._running:
            return False, None
        keep, offered = self._prefills.finished(request, blocks, self._pins)
        if offered is None:
            return keep, None
        return keep, self._coordinates(request, blocks if offered.lends else None)

    def _coordinates(self, request: Request, blocks: Sequence[list[int]] | None) -> dict[str, Any]:
        """Where a decode engine finds the prompt, in the words of vLLM's connectors."""
        return {
            **self._here,
            "remote_block_ids": None if blocks is None else list(blocks),
            "remote_request_id": request.request_id,
            "transfer_id": (request.kv_transfer_params or {}).get("transfer_id"),
            "transfer_mode": "push" if blocks is None else "pull",
        }

    # ------------------------------------------------------------------ each step

    def build_meta(self, output: SchedulerOutput) -> Packed:
        """Everything the workers must know with this step (`StepMeta`)."""
        if self._custody.unsettled:
            self._custody.scheduled(output)
        if self._running:
            assert self._pins is not None
            self._prefills.step(output, self._pins)
        if self._moments is not None:
            self._moments.step(output.num_scheduled_tokens)
        idle = not output.total_num_scheduled_tokens
        if not (self._commands or self._due or self._rejected or self._handed):
            return IDLE if idle and self._pins else NOTHING
        meta = pack(
            self._commands, self._due, self._rejected, self._handed, idle, self._prefills.layered
        )
        self._commands.clear()
        self._due.clear()
        self._rejected.clear()
        self._handed.clear()
        return meta

    def update(self, output: KVConnectorOutput) -> None:
        """Take what the workers report with a step's results."""
        if self._pins is None:
            return
        if (meta := output.kv_connector_worker_meta) is not None:
            unpinned, failures = meta.told if isinstance(meta, WorkerMeta) else cast("Told", meta)
            for pin, rank in unpinned:
                self._pins.quiet(pin, rank)
            for name, reason in failures:
                self._remember(name, reason)
        for request in output.finished_sending or ():
            self._prefills.sent(request, self._pins)
        # After the pins: a load that is quiet by now needs no references of ours.
        for request in output.finished_recving or ():
            self._decodes.loaded(request, self._pins)
            if self._moments is not None:
                self._moments.mark(request, "decode loaded")

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping although no request asks for it."""
        return bool(self._commands or self._due or self._rejected or self._pins)

    @property
    def frees_soon(self) -> bool:
        """Whether waiting may bring blocks back, so that nobody need be preempted.

        vLLM preempts one request after another until an allocation succeeds. A preempted
        prefill's blocks come back only when its pin drains, so its first victim must be
        enough. Running requests' own pins never count: they would wait for themselves.
        It asks right before each preemption, so running prompts are held here (custody.py).
        """
        pins, prefills = self._pins, self._prefills
        if pins is None:
            return False
        prefills.before_preemption(pins)
        return pins.soon() or prefills.preempted_with_pin()

    def stats(self) -> PushStats | None:
        """Gauges: at once when nothing is held any more, and otherwise now and then."""
        held = bool(self._pins)
        if not held and not self._shown:
            return None
        now = monotonic()
        if held and now < self._shown_at + TOLD:
            return None
        self._shown, self._shown_at = held, now
        blocks, age = self.pinned() if held else (0, 0.0)
        gauges = {"pinned_blocks": blocks, "pinned_age_seconds": age}
        return PushStats({"counters": {}, "samples": {}, "gauges": gauges})

    def pinned(self) -> tuple[int, float]:
        """(blocks held, age in seconds of the oldest hold)."""
        return (self._pins.blocks, self._pins.oldest_age()) if self._pins else (0, 0.0)

    # ------------------------------------------------------------------ side channel

    def _remember(self, request: str, reason: str) -> None:
        self._reasons[request] = reason
        while len(self._reasons) > MOST_REASONS:
            del self._reasons[next(iter(self._reasons))]

    def _holds(self, transfer: str) -> int:
        """Blocks held for a transfer that is received here; called on the listener's thread."""
        pins = self._pins
        return sum(map(pins.held, self._decodes.pins_of(transfer))) if pins is not None else 0

    def _why(self, request: str) -> str:
        """Why a request failed, by any part of its id; called on the listener's thread."""
        for name, reason in reversed(list(self._reasons.items())):
            if request and request in name:
                return reason
        return ""

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
            modes=("push", "pull") if self._config.mode == "auto" else (self._config.mode,),
            semantics=self._semantics,
            ranks=(),
            free_blocks=pool.get_num_free_blocks() if pool else -1,
            total_blocks=pool.num_gpu_blocks if pool else -1,
            block_tokens=self._sizes[0] if self._sizes else 0,
            software=self._software,
        )


__all__ = ["SchedulerHalf"]
