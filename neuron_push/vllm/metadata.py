"""What the two halves tell each other in every step. Empty steps pickle to a few bytes.

Commands travel packed: the main loops pickle and pass on a few byte strings, whatever is in
them, and the transfer thread unpacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from neuron_push.commands import (
    Command,
    Compute,
    Receive,
    Retire,
    Sent,
    Settle,
    Unnamed,
    decode,
    encode,
)

# (request, reason, block ids): a load that fails at once. The block ids are for vLLM versions
# that are told of a failure by block, and whose models then have one group of them.
Rejection = tuple[str, str, tuple[int, ...]]


class StepMeta(KVConnectorMetadata):
    """Scheduler half to worker half, once per step.

    `now`: packed commands that leave before the forward. `due`: those that wait for the step's
    settle point; `urgent` if one of them ends a prompt, so that the transfer thread is to see them
    at once. `attempts`: numbers of the attempts that begin with `now` and whose end is to be
    reported. `handed`: (pin, request) of finished requests whose blocks vLLM keeps until they are
    reported sent, which is when the pin is quiet. `idle` says that the step computes nothing, so
    the worker half may wait a moment for news. `layers` numbers the step if it computes prompts
    whose layers are settled one by one.

    Only what differs from these defaults is set, and so pickled.
    """

    now: bytes = b""
    due: bytes = b""
    urgent: bool = False
    attempts: tuple[int, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    handed: tuple[tuple[int, str], ...] = ()
    idle: bool = False
    layers: int = 0

    @classmethod
    def of(
        cls,
        commands: Sequence[Command],
        rejected: Sequence[Rejection] = (),
        handed: Sequence[tuple[int, str]] = (),
        *,
        idle: bool = False,
    ) -> StepMeta:
        """Sort commands by when they leave, and pack them."""
        due = [command for command in commands if isinstance(command, Settle | Retire)]
        now = [command for command in commands if not isinstance(command, Settle | Retire)]
        layers = max((c.step for c in now if isinstance(c, Compute)), default=0)
        return cls.pack(now, due, rejected, handed, idle=idle, layers=layers)

    @classmethod
    def pack(
        cls,
        now: Sequence[Sent],
        due: Sequence[Sent],
        rejected: Sequence[Rejection] = (),
        handed: Sequence[tuple[int, str]] = (),
        *,
        idle: bool = False,
        layers: int = 0,
    ) -> StepMeta:
        """Pack commands that are sorted already."""
        meta = cls()
        if now:
            meta.now = encode(now)
            if attempts := _begun(now):
                meta.attempts = tuple(attempts)
        if due:
            meta.due = encode(due)
            if any(isinstance(c, Retire) or (isinstance(c, Settle) and c.last) for c in due):
                meta.urgent = True
        if rejected:
            meta.rejected = tuple(rejected)
        if handed:
            meta.handed = tuple(handed)
        if idle:
            meta.idle = True
        if layers:
            meta.layers = layers
        return meta

    @property
    def commands(self) -> tuple[Command, ...]:
        """What is packed, in the order in which it leaves; for whoever reads along."""
        return (*decode(self.now), *decode(self.due))


def _begun(now: Sequence[Sent]) -> list[int]:
    found: list[int] = []
    for each in now:
        command = each.command if isinstance(each, Unnamed) else each
        if isinstance(command, Receive) and command.start < command.stop:
            found.append(command.attempt)
    return found


class _Constant(StepMeta):
    """One of the two below, which are pickled by name and not copied."""

    def __init__(self, name: str, *, idle: bool) -> None:
        self._name = name
        self.idle = idle

    def __reduce__(self) -> str:
        return self._name


NOTHING: Final = _Constant("NOTHING", idle=False)
IDLE: Final = _Constant("IDLE", idle=True)


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
