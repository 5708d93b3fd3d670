"""Whether vLLM's own references keep a running prompt's blocks until we have taken ours.

The promise: a block is never handed out while a WRITE that reads it is in flight or may be
posted. References of our own cost time per block, so a running prompt gets them only when vLLM
is about to let go of it. vLLM 0.30 to 0.32 (v1/core/sched/scheduler.py) frees a running
request's blocks in these places only, and hands blocks out (`allocate_slots`) in `schedule`
only, which asks as follows:

* `schedule` preempts a victim right after `has_pending_block_frees` was asked in the same
  iteration: all running prompts are held there, whoever the victim is, under either policy.
  Beside other connectors (MultiConnector) the question may stop at one that says yes, and then
  nobody is preempted.
* `reset_prefix_cache(reset_running_requests=True)` preempts everything that runs, between two
  calls of `schedule`, and asks nobody. The next `schedule` finds nothing running, and before it
  allocates for a waiting request it asks `get_num_new_matched_tokens`, where preempted prompts
  are held: their blocks are free by then, but still ours to take. It does not ask for a request
  that waits with blocks and computed tokens: one whose KV was loaded asynchronously, by us or by
  another connector, or a session of streamed input. While there is any of them, running prompts
  are held from each step's end on, as they were before.
* A request that ends is shown to `request_finished` first. A complete prompt stays vLLM's own
  until the workers report it sent; any other is held there.
* Groups that let blocks go while a request runs (sliding windows, states) are not trusted at
  all, and neither are schedulers that are not vLLM's, nor vLLM 0.29, which does not ask before
  it preempts. Tables of full attention only grow while a request runs.

Pipeline stages and asynchronous scheduling change when results come back, not this order. Frees
that vLLM defers until a step is over come later still.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_push.vllm.compat import ASKS_BEFORE_PREEMPTING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# Specs whose block tables only grow while a request runs; subclasses may not.
_GROWING = ("FullAttentionSpec", "MLAAttentionSpec")


class Custody:
    """True while vLLM's references are enough for running prompts."""

    def __init__(self, config: VllmConfig, kv_config: KVCacheConfig) -> None:
        self._possible = (
            ASKS_BEFORE_PREEMPTING
            and config.scheduler_config.scheduler_cls is None
            and all(_grows(group.kv_cache_spec) for group in kv_config.kv_cache_groups)
        )
        self.unsettled = False  # whether `scheduled` has anything to look at
        self._admitted: list[str] = []  # allocated blocks in the schedule under way
        self._waiting: set[str] = set()  # wait with blocks, or may
        self._sessions: set[str] = set()

    def __bool__(self) -> bool:
        return self._possible and not self._waiting and not self._sessions

    def session(self, request: Request) -> None:
        """A session of streamed input keeps its blocks while it waits for more."""
        self._sessions.add(request.request_id)

    def admitted(self, request: Request) -> None:
        """A waiting request was given blocks."""
        self._admitted.append(request.request_id)
        self.unsettled = True

    def scheduled(self, output: SchedulerOutput) -> None:
        """A schedule is complete: who was given blocks and computes nothing waits with them."""
        if self._waiting:
            self._waiting.difference_update(output.num_scheduled_tokens)
        if self._admitted:
            computing = output.num_scheduled_tokens
            self._waiting.update(name for name in self._admitted if name not in computing)
            self._admitted.clear()
        self.unsettled = bool(self._waiting)

    def finished(self, request: Request) -> None:
        """A request has left."""
        self._waiting.discard(request.request_id)
        self._sessions.discard(request.request_id)


def _grows(spec: object) -> bool:
    inner = getattr(spec, "kv_cache_specs", None)
    specs = inner.values() if inner else (spec,)
    return all(type(each).__name__ in _GROWING for each in specs)


__all__ = ["Custody"]
