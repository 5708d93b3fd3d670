"""The vLLM worker class of an emulated engine (`--worker-cls`).

A GPU worker whose model runner computes nothing: the engine core, the scheduler, the executor and
the connector around it are the real ones.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from neuron_push.emulation import accelerator, cost, layers, link, memory, rivals
from neuron_push.emulation.devices import DEVICES
from neuron_push.emulation.faults import Faults
from neuron_push.emulation.options import wanted
from neuron_push.emulation.oracle import Oracle, warm_up
from neuron_push.emulation.report import Reporter
from neuron_push.emulation.requests import Requests
from neuron_push.emulation.runners import ORDERS
from neuron_push.emulation.writer import CHECKING, Writer
from neuron_push.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from neuron_push.emulation.writer import Combine, Step

logger = logging.getLogger(__name__)


class EmulatedRunner:
    """What the worker asks of its model runner."""

    kv_caches: tuple[()] = ()

    def __init__(self, config: VllmConfig) -> None:
        options = wanted()
        assert options is not None
        self.options = options
        self._config = config
        self._device = DEVICES[options.device]
        self._order = ORDERS[options.runner](config, self._launch)
        self._specs: dict[str, KVCacheSpec] = {}
        self._cores = os.sched_getaffinity(0)
        if options.progress_delay:
            rivals.slow_progress(options.progress_delay)
        self._writer: Writer | None = None
        self._requests: Requests | None = None

    # ------------------------------------------------------------------ set-up

    def load_model(self) -> None:
        _refuse(self._config)
        self._specs = layers.build(self._config, self.options.device)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self._specs

    def initialize_kv_cache(self, kv_config: KVCacheConfig, **_: Any) -> None:
        """Allocate, start the device, and hand the tensors to the connector."""
        shapes = tuple(_shape(self._config, group) for group in kv_config.kv_cache_groups)
        options = self.options
        # What sampling leaves unwritten must be copied from real pages all the same.
        touched = options.verify != "full"
        cache = memory.allocate(
            self._device, shapes, kv_config.num_blocks, touched=touched, huge=options.huge_pages
        )
        warm_up(self._device, shapes)
        faults, costs = Faults(cache, options.fault), cost.profile(options.profile)
        if options.link:
            link.install(costs)
        self._writer = Writer(
            Oracle(cache, options.seed), costs, Reporter(options.report, _name(self._config)),
            checking=CHECKING[options.verify], combine=_combine(self._config),
            meddle=faults, early_fence=options.fault == "early-fence",
            layers=len(cache.tensors) if _streams_layers(self._config) else 0,
        )  # fmt: skip
        self._writer.start()
        accelerator.use(self._writer)
        _watch_writes(self._writer)
        self._requests = Requests(
            tuple(group.kv_cache_spec.block_size for group in kv_config.kv_cache_groups),
            tuple(shape.window for shape in shapes), options.seed,
            tuple(number for number, shape in enumerate(shapes) if shape.state),
        )  # fmt: skip
        self._order.register(cache.tensors)
        rivals.spread(self._cores)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def shutdown(self) -> None:
        """What some versions' workers call; `close` comes before."""

    # ------------------------------------------------------------------ each step

    def execute_model(self, output: Any) -> Any:
        assert self._requests is not None
        pieces = self._requests.update(output)
        if not pieces:
            return self._order.idle(output)
        self._order.execute(output, pieces)
        return None

    def sample_tokens(self, grammar: Any) -> Any:
        return self._order.sample(grammar)

    def _launch(self, pieces: Any, drawable: bool) -> Step:
        assert self._writer is not None
        return self._writer.launch(pieces, drawable=drawable)

    # ------------------------------------------------------------------ not emulated

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def update_max_model_len(self, length: int) -> None:
        """Nothing here is sized by it."""

    def reset_mm_cache(self) -> None:
        """No images."""

    def reset_encoder_cache(self) -> None:
        """No encoder."""

    def take_draft_token_ids(self) -> None:
        return None

    def get_encoder_timing_stats(self) -> dict[str, Any]:
        return {}


class EmulatedWorker(Worker):
    """One rank."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        torch.set_num_threads(1)
        self.parallel_config.disable_custom_all_reduce = True
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        self.model_runner = EmulatedRunner(self.vllm_config)

    def load_model(self, **_: Any) -> None:
        self.model_runner.load_model()

    def determine_available_memory(self) -> int:
        return int(self.model_runner.options.kv_bytes)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduler_output: Any) -> Any:
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.model_runner.sample_tokens(grammar_output)

    def execute_dummy_batch(self) -> None:
        """An idle data-parallel rank computes nothing."""

    def synchronize_device(self) -> None:
        """The executor has waited for every step."""

    def shutdown(self) -> None:
        """The connector first: it reads the tensors."""
        super().shutdown()
        if isinstance(self.model_runner, EmulatedRunner):
            self.model_runner.close()


def _refuse(config: VllmConfig) -> None:
    """Raise ConfigError for what would be silently different, or fail in the midst of work."""
    for setting, option in (
        (config.speculative_config, "--speculative-config: an emulated device drafts nothing"),
        (config.lora_config, "--enable-lora: an emulated device has no weights to adapt"),
    ):
        if setting is not None:
            raise ConfigError(f"{option}; leave it out")


def _streams_layers(config: VllmConfig) -> bool:
    """Whether anybody looks before a step has ended: nobody does on an engine that only decodes."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_role == "kv_consumer":
        return False
    return bool(transfer.get_from_extra_config("streaming", "") == "layer")


def _name(config: VllmConfig) -> str:
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    engine = transfer.engine_id if transfer else "alone"
    rank = get_pp_group().rank_in_group * parallel.tensor_parallel_size
    rank += get_tensor_model_parallel_rank()
    return f"{engine}-{rank}"


def _shape(config: VllmConfig, group: Any) -> memory.GroupShape:
    spec = group.kv_cache_spec
    spec = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
    names = tuple(group.layer_names)
    numbers = tuple(
        int(next(part for part in name.split(".") if part.isdecimal())) for name in names
    )
    if "Mamba" in type(spec).__name__:
        dtype, size = spec.dtypes[0], spec.dtypes[0].itemsize
        return memory.GroupShape(
            names, numbers, (get_tensor_model_parallel_rank(),), 1,
            sum(math.prod(shape) for shape in spec.shapes) * size, size, dtype, False, 0,
            True, spec.page_size_bytes,
        )  # fmt: skip
    latent = "MLA" in type(spec).__name__
    element = spec.dtype.itemsize
    return memory.GroupShape(
        names, numbers, (0,) if latent else _heads(config), spec.block_size,
        spec.head_size * element, element, spec.dtype, latent,
        getattr(spec, "sliding_window", None) or 0,
    )  # fmt: skip


def _heads(config: VllmConfig) -> tuple[int, ...]:
    """Numbers of this rank's heads, as vLLM divides or, beyond their number, replicates them."""
    total = config.model_config.get_total_num_kv_heads()
    rank, ranks = get_tensor_model_parallel_rank(), config.parallel_config.tensor_parallel_size
    return tuple(
        head for head in range(total)
        if (head * ranks // total == rank if ranks <= total else rank * total // ranks == head)
    )  # fmt: skip


def _combine(config: VllmConfig) -> Combine | None:
    """Sum over the tensor-parallel ranks, as a model's all-reduce does."""
    ranks = config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return None
    # A group of its own: the engine's threads never use it. Stages make theirs in the same order.
    mine: Any = None
    for stage in range(config.parallel_config.pipeline_parallel_size):
        members = list(range(stage * ranks, (stage + 1) * ranks))
        group = torch.distributed.new_group(members, backend="gloo")
        if torch.distributed.get_rank() in members:
            mine = group

    def total(values: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(values.copy())
        torch.distributed.all_reduce(tensor, group=mine)
        return tensor.numpy()

    return total


def _watch_writes(writer: Writer) -> None:
    """Count posted transfers, whichever connector posts them."""
    for package in ("nixl_cu12", "nixl_cu13", "nixl"):
        try:
            agent = importlib.import_module(f"{package}._api").nixl_agent
        except (ImportError, AttributeError):
            continue
        plain = getattr(agent.transfer, "plain", agent.transfer)

        def transfer(self: Any, *args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
            writer.wrote()
            return _plain(self, *args, **kwargs)

        transfer.plain = plain  # type: ignore[attr-defined]
        agent.transfer = transfer
