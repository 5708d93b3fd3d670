"""NeuronPushConnector: the class vLLM loads, by name or by module path.

A facade. Each hook of vLLM's connector API is one line into the scheduler half or the worker
half; the order in which runners call them is recorded in tests/vllm_hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from neuron_push import versions
from neuron_push.config import Config
from neuron_push.errors import ConfigError
from neuron_push.vllm import compat
from neuron_push.vllm.stats import PushPromMetrics, PushStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from neuron_push.vllm.metadata import StepMeta
    from neuron_push.vllm.scheduler import SchedulerHalf
    from neuron_push.vllm.worker import WorkerHalf

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM 0.29
    CacheHitSource = None


class NeuronPushConnector(KVConnectorBase_V1, SupportsHMA):
    """Pushes KV from prefill to decode engines; see the package docstring for its parts."""

    # The half of this role; the other half's hooks are not called.
    _in_scheduler: SchedulerHalf
    _in_worker: WorkerHalf
    _stats: Callable[[], PushStats | None]

    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        versions.check()
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        if transfer.kv_role not in ("kv_producer", "kv_consumer", "kv_both"):
            raise ConfigError(f"kv_role {transfer.kv_role!r} is not one this connector knows")
        config = Config.parse(_settings(transfer.kv_connector_extra_config))
        compat.check_groups(len(kv_cache_config.kv_cache_groups))
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            from neuron_push.vllm.scheduler import SchedulerHalf

            self._scheduler = self._in_scheduler = SchedulerHalf(
                vllm_config, kv_cache_config, config
            )
            self._stats = self._scheduler.stats
        else:
            from neuron_push.vllm.worker import WorkerHalf

            self._worker = self._in_worker = WorkerHalf(vllm_config, kv_cache_config, config)
            self._stats = self._worker.stats

    # ------------------------------------------------------------------ class-wide

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Pages contiguous per head on CUDA, so that unequal TP stays direct; else no wish."""
        from vllm.platforms import current_platform

        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return "LBHNC" if current_platform.is_cuda() else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are told of by code that one graph for all of them would not run."""
        return extra_config.get("streaming") == "layer"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return PushStats(data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PushPromMetrics:
        return PushPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ------------------------------------------------------------------ scheduler half

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._in_scheduler.bind_pool(gpu_block_pool)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All groups: none of the registered blocks may be zeroed after registration."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def on_new_request(self, request: Request) -> None:
        self._in_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._in_scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._in_scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._in_scheduler.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._in_scheduler.update(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._in_scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._in_scheduler.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._in_scheduler.has_work

    def has_pending_block_frees(self) -> bool:
        return self._in_scheduler.frees_soon

    # ------------------------------------------------------------------ worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._in_worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._in_worker.bind(cast("StepMeta", connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Registrations have left when the metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests are scheduled only when all of their KV is here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Where layers are streamed, what lies before this one is settled."""
        self._in_worker.layer(layer_name)

    def finish_forward(self) -> None:
        self._in_worker.finish_forward()

    def wait_for_save(self) -> None:
        self._in_worker.settle()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The form of vLLM 0.29; failures go by `get_block_ids_with_load_errors`."""
        sent, ended, _ = self._in_worker.results()
        return sent or None, ended or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The form of vLLM 0.30 and later: failures go by request, so not by block as well."""
        sent, ended, failed = self._in_worker.results()
        if failed:
            self._in_worker.bad_blocks()
        assert compat.TransferResults is not None
        return compat.TransferResults(sent, ended, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._in_worker.bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._in_worker.worker_meta()

    def shutdown(self) -> None:
        """Destroy the agents before the tensors they registered go away."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # ------------------------------------------------------------------ both halves

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._stats()


def _settings(extra: dict[str, Any] | None) -> dict[str, Any]:
    return dict(extra or {})


__all__ = ["NeuronPushConnector"]
