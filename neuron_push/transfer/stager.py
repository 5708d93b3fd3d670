"""Packs before WRITEs and unpacks after them, on the transfer thread or beside it.

Host memory is reordered on the calling thread, a few MiB at a time; a device does it on a stream
of its own, and `poll` asks whether it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from neuron_push.errors import PlanError
from neuron_push.geometry import Geometry
from neuron_push.plan import Copies, StagedPlan, bind
from neuron_push.protocol import Slabs
from neuron_push.rendezvous.events import Event, Fetch, Post, Unpack, Unpacked, WriteEnded
from neuron_push.transform import Moved, Mover, Rows
from neuron_push.transport import Descriptors

__all__ = ["Stager", "bound", "bound_read"]


@dataclass(frozen=True, slots=True)
class Task:
    """A move under way, and what it is for."""

    action: Post | Unpack
    moved: Moved


class Stager:
    """All moves of one rank. `make_mover` is called on the owning thread, once it is needed."""

    def __init__(self, slabs: Slabs | None, make_mover: Callable[[], Mover] | None) -> None:
        self._slabs = slabs
        self._make_mover = make_mover
        self._mover: Mover | None = None
        self._tasks: list[Task] = []

    def pack(self, action: Post) -> None:
        """Gather a piece into its slab; `poll` yields the action when the slab is ready."""
        plan, done = action.plan, action.done
        assert isinstance(plan, StagedPlan) and action.slab is not None
        lists = action.source_blocks, action.destination_blocks
        self._start(action, plan.rows(done.start, done.stop, *lists, action.slab.base, pack=True))

    def unpack(self, action: Unpack) -> None:
        """Scatter a piece from its slab; `poll` yields the answer."""
        if self._slabs is None:
            raise PlanError("this rank has no slabs")
        base = self._slabs.slab(action.slab).base
        span = action.start, action.stop
        self._start(action, action.plan.unpack_rows(*span, action.blocks, base))

    def poll(self) -> Iterator[Post | Event]:
        """WRITEs whose slabs are packed, and answers to what has ended."""
        for task in list(self._tasks):
            try:
                if not task.moved.done():
                    continue
            except Exception as error:  # noqa: BLE001  whatever a device's runtime raises
                self._tasks.remove(task)
                yield failed(task.action, error)
            else:
                self._tasks.remove(task)
                yield task.action if isinstance(task.action, Post) else Unpacked(task.action.job)

    def finish(self, generation: int) -> None:
        """Wait for packing towards WRITEs of a generation that is being closed, and drop it."""
        for task in list(self._tasks):
            if isinstance(task.action, Post) and task.action.generation == generation:
                while not task.moved.done():
                    pass
                self._tasks.remove(task)

    def _start(self, action: Post | Unpack, rows: list[Rows]) -> None:
        if self._mover is None:
            if self._make_mover is None:
                raise PlanError("this rank cannot reorder")
            self._mover = self._make_mover()
        self._tasks.append(Task(action, self._mover.move(rows)))


def failed(action: Post | Unpack, error: Exception) -> Event:
    """The answer to an action that could not be carried out; nothing has left this rank."""
    if isinstance(action, Post):
        return WriteEnded(action.write, "unposted", str(error))
    return Unpacked(action.job, f"cannot unpack: {str(error) or type(error).__name__}")


def bound(action: Post, own: Geometry) -> tuple[Copies, Descriptors, Descriptors]:
    """The copies of a WRITE with their addresses: what is read, what is written.

    Raises:
        NeuronPushError: they do not fit the plan, the block lists or the memory.
    """
    plan, done = action.plan, action.done
    copies = plan.copies(
        done.start, done.stop, action.source_blocks, action.destination_blocks, last=action.last
    )
    ends = own, action.destination
    if isinstance(plan, StagedPlan):
        ends = plan.ends(action.slab, action.granted)
    return copies, *bind(copies, *ends)


def bound_read(action: Fetch, own: Geometry) -> tuple[Copies, Descriptors, Descriptors]:
    """The copies of a READ with their addresses; raises NeuronPushError as `bound`."""
    plan = action.plan
    copies = plan.copies(
        action.start, action.stop, action.source_blocks, action.destination_blocks, last=action.last
    )
    ends = action.source, own
    if isinstance(plan, StagedPlan):
        ends = plan.ends(None, action.slab)
    return copies, *bind(copies, *ends)
