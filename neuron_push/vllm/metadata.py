"""What the two halves tell each other in every step. Empty steps pickle to a few bytes."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from neuron_push.commands import Command

# (request, reason, block ids): a load that fails at once. The block ids are for vLLM versions
# that are told of a failure by block, and whose models then have one group of them.
Rejection = tuple[str, str, tuple[int, ...]]


class StepMeta(KVConnectorMetadata):
    """Scheduler half to worker half, once per step.

    `idle` says that the step computes nothing, so the worker half may wait a moment for news.
    """

    __slots__ = ("commands", "idle", "rejected")

    def __init__(
        self,
        commands: tuple[Command, ...] = (),
        rejected: tuple[Rejection, ...] = (),
        idle: bool = False,
    ) -> None:
        self.commands = commands
        self.rejected = rejected
        self.idle = idle

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.commands and not self.rejected:
            return _empty, (self.idle,)
        return StepMeta, (self.commands, self.rejected, self.idle)


def _empty(idle: bool) -> StepMeta:
    return IDLE if idle else NOTHING


NOTHING = StepMeta()
IDLE = StepMeta(idle=True)


class WorkerMeta(KVConnectorWorkerMetadata):
    """Worker half to scheduler half, when there is something to say.

    `unpinned`: (pin, rank) pairs whose blocks are quiet on that rank. `failures`: (request,
    reason) of loads that failed, kept for whoever asks why.
    """

    __slots__ = ("failures", "unpinned")

    def __init__(
        self,
        unpinned: tuple[tuple[int, int], ...] = (),
        failures: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.unpinned = unpinned
        self.failures = failures

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMeta:
        """Join what several ranks say in one step."""
        assert isinstance(other, WorkerMeta)
        return WorkerMeta(self.unpinned + other.unpinned, self.failures + other.failures)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerMeta, (self.unpinned, self.failures)
