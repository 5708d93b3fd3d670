"""What differs between the supported vLLM versions, in one place.

| | 0.29 | 0.30 and later |
|---|---|---|
| a failed load is told by | block ids (one KV group only) | request id |
| results are asked through | get_finished | get_transfer_results |
| before it preempts, it asks | nobody | has_pending_block_frees |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from neuron_push.errors import ConfigError


@dataclass
class Results:
    """What a step reports, as vLLM 0.30 and later have it."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


# vLLM's own where it has them.
new_results: Callable[[], Results] = getattr(base, "KVConnectorTransferResults", Results)

# Whether a failed load can be reported by request, whatever the cache groups.
FAILS_BY_REQUEST = new_results is not Results

# Whether the scheduler asks `has_pending_block_frees` right before each preemption (custody.py).
ASKS_BEFORE_PREEMPTING = hasattr(base.KVConnectorBase_V1, "has_pending_block_frees")


def check_groups(groups: int) -> None:
    """Refuse what this vLLM cannot fail safely.

    vLLM 0.29 stops its engine when a load fails and the model has several KV cache groups
    (scheduler.py, _update_requests_with_invalid_blocks).
    """
    if groups > 1 and not FAILS_BY_REQUEST:
        raise ConfigError(
            f"this model has {groups} KV cache groups, and this vLLM cannot fail a KV load of "
            "such a model without stopping: start it with --disable-hybrid-kv-cache-manager, "
            "or use vLLM 0.30 or later"
        )
