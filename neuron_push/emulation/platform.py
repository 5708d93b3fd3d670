"""vLLM's CPU platform, with what an accelerator's platform decides otherwise."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

from neuron_push.emulation import WORKER
from neuron_push.emulation.devices import DEVICES
from neuron_push.emulation.options import wanted

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class EmulatedPlatform(CpuPlatform):
    """Active only while NEURON_PUSH_EMULATE is set."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """The CPU platform's defaults, but for scheduling, executor and block size.

        That platform forces async scheduling off, replaces the single-process executor and
        rounds block sizes for its own kernels.
        """
        import vllm.config.vllm as checks

        # vLLM refuses the V2 runner's protocol between scheduler and worker where Triton has no
        # backend; the emulated worker speaks it without any kernel.
        checks.HAS_TRITON = True
        options = wanted()
        assert options is not None
        scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
        cache = vllm_config.cache_config
        asynchronous = scheduler.async_scheduling and options.runner != "cpu"
        executor = parallel.distributed_executor_backend
        block = cache.block_size if cache.user_specified_block_size else None
        super().check_and_update_config(vllm_config)
        # That platform has each process import everything anew, for the sake of OpenMP threads
        # that are not used here: forking halves the time to start.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        scheduler.async_scheduling = asynchronous
        parallel.distributed_executor_backend = executor
        parallel.worker_cls = WORKER
        cache.block_size = block or DEVICES[options.device].block_tokens
        if cache.mamba_cache_mode == "align":  # a state per block, for the prefix cache
            cache.mamba_block_size = cache.block_size

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Emulated attention takes any block size."""

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Plain gloo: the CPU's needs its own worker's set-up of shared memory."""
        return (
            "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
        )

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        """The emulated device's backend, for code that asks before layers exist."""
        from neuron_push.emulation.layers import backend_path

        return backend_path()
