"""What an engine of a world is, and vLLM's configuration for it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

from tests.vllm.kit import engine_config


@dataclass(frozen=True)
class Shape:
    """What an engine is."""

    role: str = "kv_both"
    ranks: int = 1
    blocks: int = 40
    block: int = 16
    tokens: int = 64  # computed in one step at most
    overlapping: bool = False  # asynchronous scheduling
    policy: str = "fail"
    order: str = "HND"
    late_hooks: bool = False  # steps that compute nothing call no hook at their end
    settings: tuple[tuple[str, Any], ...] = ()


@cache
def _config(shape: Shape) -> Any:
    """vLLM's configuration, which takes a while to make."""
    config = engine_config(
        role=shape.role, policy=shape.policy, tensor=shape.ranks, tokens=shape.tokens,
        block=shape.block, model_len=1024,
    )  # fmt: skip
    config.scheduler_config.async_scheduling = shape.overlapping
    config.cache_config.num_gpu_blocks = shape.blocks
    register_all_kvcache_specs(config)
    init_none_hash(sha256)
    return config


def config_for(shape: Shape, name: str, settings: dict[str, Any]) -> Any:
    config = copy.copy(_config(shape))
    transfer = config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    transfer.engine_id = name
    transfer.kv_connector_extra_config = {
        **settings, **dict(shape.settings), "side_channel_host": name, "side_channel_port": 5600,
    }  # fmt: skip
    return config
