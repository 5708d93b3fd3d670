"""What a worker rank's hooks stand on: its memory described and registered, its transfer thread."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from neuron_push import accelerator as accelerators
from neuron_push.accelerator import Accelerator
from neuron_push.bounce import HostStaged
from neuron_push.config import Config
from neuron_push.errors import ConfigError
from neuron_push.geometry import Geometry, Region
from neuron_push.nixl import factory
from neuron_push.protocol import Address, Slabs
from neuron_push.rendezvous import Identity
from neuron_push.rendezvous.parts import parts_of
from neuron_push.transfer import TransferThread
from neuron_push.transport import TransportFactory
from neuron_push.vllm import describe, identity

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Station:
    """A rank's transfer thread, and what the hooks must know of the rank."""

    thread: TransferThread
    rank: int
    alone: bool  # the only rank
    staging: object  # keeps the memory of the slabs
    part_of: dict[str, int]  # where layers are streamed: parts that lie before a layer


def open_station(
    vllm_config: VllmConfig,
    kv_config: KVCacheConfig,
    config: Config,
    accelerator: Accelerator,
    engine: str,
    caches: Mapping[str, torch.Tensor],
) -> Station:
    """Describe and register a rank's KV caches and start its transfer thread.

    Raises ConfigError, with what to set instead, if something here cannot work.
    """
    parallel = vllm_config.parallel_config
    tensor_rank, tensor_ranks = get_tensor_model_parallel_rank(), parallel.tensor_parallel_size
    rank = get_pp_group().rank_in_group * tensor_ranks + tensor_rank
    heads = describe.held_heads(
        vllm_config.model_config.get_total_num_kv_heads(), tensor_rank, tensor_ranks
    )
    _check_environment(accelerator)
    describe.refuse_context_parallel(vllm_config)
    _check_end(accelerator, config, vllm_config)
    geometry = describe.describe(
        vllm_config, kv_config, caches, accelerator, heads, tensor_rank, config.limits
    )
    slabs, staging = _slabs(geometry, accelerator, config)
    me = Identity(
        engine, rank, int.from_bytes(os.urandom(6), "big"),
        identity.semantics(vllm_config, identity.group_kinds(kv_config)), geometry, slabs,
    )  # fmt: skip
    backends = accelerator.nixl_backends(config.backends)
    port = config.side_channel_port + parallel.data_parallel_index
    if config.switch_interval:
        sys.setswitchinterval(config.switch_interval)
    thread = TransferThread(
        config, me, _transport(accelerator, config, backends),
        Address(config.side_channel_host, port), make_mover=accelerator.mover,
    )  # fmt: skip
    address = thread.start()
    logger.info(
        "neuron-push: rank %d of %s: %d MiB in %d regions over %s, answers at port %d",
        rank, engine, sum(r.length for r in geometry.regions) >> 20, len(geometry.regions),
        "/".join(backends), address.port,
    )  # fmt: skip
    alone = tensor_ranks * parallel.pipeline_parallel_size == 1
    return Station(thread, rank, alone, staging, _parts(geometry, config, caches))


def accelerator_of(config: Config) -> Accelerator:
    """The accelerator that the settings name, behind host memory if they say so."""
    found = accelerators.lookup(config.accelerator)
    if not config.host_staging:
        return found
    if not config.staging_slabs:
        raise ConfigError("host_staging needs staging_slabs: with 0 there is nothing to stage in")
    import torch

    def allocate(nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def flat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1).view(torch.uint8)

    return HostStaged(found, allocate, flat)


def _check_environment(accelerator: Accelerator) -> None:
    missing = accelerator.environment(os.environ)
    if missing:
        words = " ".join(f"{name}={value}" for name, value in missing.items())
        raise ConfigError(f"set {words} before the engine starts")


def _check_end(accelerator: Accelerator, config: Config, vllm_config: VllmConfig) -> None:
    """Refuse what needs to see when a step ends, on a device that hides it."""
    if not accelerator.hides_end:
        return
    if vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            f"the end of a step is not visible on {accelerator.name}, so a step must not "
            "begin before the last one's output is known: start with --no-async-scheduling"
        )
    if config.streaming == "layer":
        raise ConfigError(
            f"layers are not visible on {accelerator.name}, where one graph computes "
            'them all: set "streaming": "chunk"'
        )


def _slabs(
    geometry: Geometry, accelerator: Accelerator, config: Config
) -> tuple[Slabs | None, object]:
    """Staging memory of the caches' own kind, if this side can bring bytes into order."""
    count, size = config.staging_slabs, config.staging_slab_bytes
    if not (accelerator.can_reorder and count):
        return None, None
    slab = accelerator.slab(count * size)
    like = geometry.regions[0]
    sole = isinstance(accelerator, HostStaged)
    return Slabs(Region(slab.base, count * size, like.memory, like.device), size, sole), slab.owner


def _transport(
    accelerator: Accelerator, config: Config, backends: tuple[str, ...]
) -> TransportFactory:
    parameters = {name: accelerator.nixl_parameters(name) for name in backends}
    opens = factory(
        backends, config.num_threads, config.fault,
        parameters={name: found for name, found in parameters.items() if found},
        enter=accelerator.enter_thread,
    )  # fmt: skip
    if not isinstance(accelerator, HostStaged):
        return opens
    return accelerator.transports(opens, config.staging_slabs, config.staging_slab_bytes)


def _parts(
    geometry: Geometry, config: Config, caches: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    if config.streaming != "layer":
        return {}
    before = {layer: index for index, layers in enumerate(parts_of(geometry)) for layer in layers}
    return {name: before[describe.layer_index(name)] for name in caches}


__all__ = ["Station", "accelerator_of", "open_station"]
