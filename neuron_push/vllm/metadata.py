"""What the two halves tell each other in every step. Empty steps pickle to a few bytes.

vLLM passes the scheduler half's metadata on unread, so they travel as a plain tuple: to pickle
and unpickle an object of a class takes several times as long. Commands in it are packed: the main
loops pass on a few byte strings, whatever is in them, and the transfer thread unpacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

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


# The fields of a `StepMeta` in its order, or nothing.
Packed = tuple[Any, ...]


class StepMeta(NamedTuple):
    """Scheduler half to worker half, once per step.

    `now`: packed commands that leave before the forward. `due`: those that wait for the step's
    settle point; `urgent` if one of them ends a prompt, so that the transfer thread is to see them
    at once. `attempts`: numbers of the attempts that begin with `now` and whose end is to be
    reported. `handed`: (pin, request) of prompts whose blocks vLLM keeps until they are reported
    sent, or (pin, "") of one that is taken back (handovers.py). `idle` says that the step computes
    nothing, so the worker half may wait a moment for news. `layers` numbers the step if it computes
    prompts whose layers are settled one by one.
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
        return cls(*pack(now, due, rejected, handed, idle, layers))

    @property
    def commands(self) -> tuple[Command, ...]:
        """What is packed, in the order in which it leaves; for whoever reads along."""
        return (*decode(self.now), *decode(self.due))


def pack(
    now: Sequence[Sent],
    due: Sequence[Sent],
    rejected: Sequence[Rejection],
    handed: Sequence[tuple[int, str]],
    idle: bool,
    layers: int,
) -> Packed:
    """Pack commands that are sorted already. See `StepMeta`."""
    attempts = []
    for each in now:
        command = each.command if type(each) is Unnamed else each
        if type(command) is Receive and command.start < command.stop:
            attempts.append(command.attempt)
    urgent = False
    for each in due:
        urgent = urgent or type(each) is Retire or (type(each) is Settle and each.last)
    return (
        encode(now) if now else b"", encode(due) if due else b"", urgent, tuple(attempts),
        tuple(rejected), tuple(handed), idle, layers,
    )  # fmt: skip


NOTHING: Final[Packed] = ()
IDLE: Final[Packed] = tuple(StepMeta(idle=True))


# What WorkerMeta holds, in its order.
Told = tuple[tuple[tuple[int, int], ...], tuple[tuple[str, str], ...]]


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

    @property
    def told(self) -> Told:
        """Its fields, as they travel where nobody joins them."""
        return self.unpinned, self.failures

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMeta:
        """Join what several ranks say in one step."""
        assert isinstance(other, WorkerMeta)
        return WorkerMeta(self.unpinned + other.unpinned, self.failures + other.failures)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerMeta, self.told
