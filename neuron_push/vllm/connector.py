"""NeuronPushConnector: the class vLLM loads, by name or by module path.

A facade. Each hook of vLLM's connector API is a method of the scheduler half or the worker half;
the order in which runners call them is recorded in tests/vllm_hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from neuron_push import versions
from neuron_push.config import Config
from neuron_push.errors import ConfigError
from neuron_push.vllm import compat
from neuron_push.vllm.stats import PushPromMetrics, PushStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from neuron_push.vllm.scheduler import SchedulerHalf
    from neuron_push.vllm.worker import WorkerHalf

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM 0.29
    CacheHitSource = None


class _Hook:
    """A hook that is a method of one half, found there once and on the instance from then on.

    Main loops call some twenty hooks in each step, and what a call costs there is that it passes
    through code that is in no cache any more: one function less for each.
    """

    def __init__(self, half: str, method: str) -> None:
        self._half, self._method = half, method

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, connector: Any, owner: type | None = None) -> Any:
        if connector is None:
            return self
        method = getattr(getattr(connector, self._half), self._method)
        connector.__dict__[self._name] = method
        return method


def _scheduler(method: str) -> Any:
    return _Hook("_in_scheduler", method)


def _worker(method: str) -> Any:
    return _Hook("_in_worker", method)


class NeuronPushConnector(KVConnectorBase_V1, SupportsHMA):
    """Pushes KV from prefill to decode engines; see the package docstring for its parts."""

    # The half of this role; the other half's hooks are not called.
    _in_scheduler: SchedulerHalf
    _in_worker: WorkerHalf
    _half: SchedulerHalf | WorkerHalf

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

            self._scheduler = self._half = self._in_scheduler = SchedulerHalf(
                vllm_config, kv_cache_config, config
            )
        else:
            from neuron_push.vllm.worker import WorkerHalf

            self._worker = self._half = self._in_worker = WorkerHalf(
                vllm_config, kv_cache_config, config
            )

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

    bind_gpu_block_pool = _scheduler("bind_pool")
    get_loaded_kv_cache_group_ids = _scheduler("groups_of")
    on_new_request = _scheduler("on_new_request")
    get_num_new_matched_tokens = _scheduler("matched_tokens")
    update_state_after_alloc = _scheduler("after_alloc")
    build_connector_meta = _scheduler("build_meta")
    update_connector_output = _scheduler("update")
    request_finished_all_groups = _scheduler("finished")

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._in_scheduler.finished(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        return self._in_scheduler.has_work

    def has_pending_block_frees(self) -> bool:
        return self._in_scheduler.frees_soon

    # ------------------------------------------------------------------ worker half

    register_kv_caches = _worker("register")

    bind_connector_metadata = _worker("bind")
    has_connector_metadata = _worker("bound")
    clear_connector_metadata = _worker("clear")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Registrations have left when the metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests are scheduled only when all of their KV is here."""

    save_kv_layer = _worker("layer")
    finish_forward = _worker("finish_forward")
    wait_for_save = _worker("settle")
    get_transfer_results = _worker("results")  # vLLM 0.30 and later: failures go by request
    get_block_ids_with_load_errors = _worker("bad_blocks")
    build_connector_worker_meta = _worker("worker_meta")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The form of vLLM 0.29; failures go by `get_block_ids_with_load_errors`."""
        found = self._in_worker.results(finished_req_ids, by_request=False)
        return found.finished_sending or None, found.finished_recving or None

    def shutdown(self) -> None:
        """Destroy the agents before the tensors they registered go away."""
        self._half.close()

    # ------------------------------------------------------------------ both halves

    get_kv_connector_stats = _Hook("_half", "stats")


def _settings(extra: dict[str, Any] | None) -> dict[str, Any]:
    return dict(extra or {})


__all__ = ["NeuronPushConnector"]
