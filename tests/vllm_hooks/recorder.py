"""A connector that moves no KV and writes down every call that vLLM makes to it.

Loads by ``kv_connector_module_path`` under any vLLM version. Wrappers are made from the
public methods of the installed base class, so hooks that a newer version adds are recorded
without a change here. One JSON object per line goes to the file named in
``kv_connector_extra_config["record_to"]``; processes append to the same file.

``kv_connector_extra_config["behaviour"]`` chooses what the connector pretends:

- ``idle``: never loads, never holds blocks.
- ``hold``: keeps finished requests' blocks until the worker reports them sent.
- ``load``: claims all but the last prompt token and reports them received.
- ``fail``: like ``load``, but the first attempt fails.
- ``stall``: like ``load``, but reports nothing until the request is finished.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from tests.vllm_hooks import summaries

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# Steps between the metadata that names a request and the worker's report about it: more
# than one, so that every trace with a wait in it also holds a step without news.
REPORT_AFTER_STEPS = 2

LOADING_BEHAVIOURS = ("load", "fail", "stall")


@dataclass
class RecordingMetadata(KVConnectorMetadata):
    """What the scheduler half tells the worker half in one step."""

    step: int
    receive: dict[str, list[int]] = field(default_factory=dict)
    """Requests whose load starts, with the blocks it fills."""
    release: list[str] = field(default_factory=list)
    """Requests that the worker is to report as sent or, if stalled, as received."""


@dataclass
class Pending:
    """A report that the worker half owes."""

    due_step: int
    block_ids: list[int]
    fails: bool


def _recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: RecordingConnector, *args: Any, **kwargs: Any) -> Any:
        outermost = self.log.enter()
        try:
            if outermost:
                self.log.note_metadata(name, args)
            entry = self.log.open(self, name, args, kwargs) if outermost else None
            result = method(self, *args, **kwargs)
            if entry is not None:
                self.log.write(entry, result)
            return result
        finally:
            self.log.leave()

    return call


class CallLog:
    """Appends one line per call that vLLM itself makes; calls between hooks are left out."""

    def __init__(self, path: str, side: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._depth = 0
        self.side = side
        # Number of the latest metadata this half has built or seen.
        self.step = 0

    def enter(self) -> bool:
        self._depth += 1
        return self._depth == 1

    def leave(self) -> None:
        self._depth -= 1

    def note_metadata(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "build_connector_meta":
            self.step += 1
        elif args and isinstance(args[0], RecordingMetadata):
            self.step = args[0].step

    def open(
        self,
        connector: RecordingConnector,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        detail = summaries.arguments(name, args, kwargs)
        if self.side != "scheduler":
            detail["metadata_bound"] = connector.has_metadata
        return {"side": self.side, "step": self.step, "hook": name, "detail": detail}

    def write(self, entry: dict[str, Any], result: Any) -> None:
        entry["detail"] |= summaries.result(entry["hook"], result)
        os.write(self._fd, (json.dumps(entry) + "\n").encode())

    def probe(self, data: dict[str, Any]) -> None:
        """Writes a line of facts that belong to no call."""
        os.write(self._fd, (json.dumps({"probe": data}) + "\n").encode())


class RecordingConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves; see the module's text."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        # Set first: the base constructor may touch recorded properties.
        transfer_config = vllm_config.kv_transfer_config
        assert transfer_config is not None
        extra = transfer_config.kv_connector_extra_config
        rank = vllm_config.parallel_config.rank
        side = "scheduler" if role == KVConnectorRole.SCHEDULER else f"worker{rank}"
        self.log = CallLog(extra["record_to"], side)
        super().__init__(vllm_config, role, kv_cache_config)
        self._behaviour: str = extra["behaviour"]
        self._next = RecordingMetadata(step=0)
        self._claimed: set[str] = set()
        self._pending_recv: dict[str, Pending] = {}
        self._pending_send: dict[str, Pending] = {}
        self._invalid: set[int] = set()

    @property
    def has_metadata(self) -> bool:
        return self._connector_metadata is not None

    # Scheduler half

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        loads = self._behaviour in LOADING_BEHAVIOURS and request.request_id not in self._claimed
        missing = request.num_prompt_tokens - 1 - num_computed_tokens
        return (missing, True) if loads and missing > 0 else (0, False)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self._claimed.add(request.request_id)
            self._next.receive[request.request_id] = list(blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> RecordingMetadata:
        meta, self._next = self._next, RecordingMetadata(step=0)
        meta.step = self.log.step
        return meta

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        holds = self._behaviour == "hold"
        if holds or self._behaviour == "stall":
            self._next.release.append(request.request_id)
        return holds, None

    def has_pending_push_work(self) -> bool:
        return False

    # Worker half

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, RecordingMetadata)
        due = connector_metadata.step + REPORT_AFTER_STEPS
        for request_id, block_ids in connector_metadata.receive.items():
            if self._behaviour == "stall":
                due = 1 << 62
            self._pending_recv[request_id] = Pending(due, block_ids, self._behaviour == "fail")
        for request_id in connector_metadata.release:
            if self._behaviour == "stall":
                self._pending_recv[request_id].due_step = connector_metadata.step
            else:
                self._pending_send[request_id] = Pending(due, [], False)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.log.probe({"kv_caches": summaries.kv_caches(kv_caches)})

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent = {r for r, p in self._pending_send.items() if p.due_step <= self.log.step}
        received = {r for r, p in self._pending_recv.items() if p.due_step <= self.log.step}
        for request_id in sent:
            del self._pending_send[request_id]
        for request_id in received:
            pending = self._pending_recv.pop(request_id)
            if pending.fails:
                self._invalid.update(pending.block_ids)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid


if hasattr(vllm_base, "KVConnectorTransferResults"):

    def _get_transfer_results(self: RecordingConnector, finished_req_ids: set[str]) -> Any:
        """Fails whole requests, the only way that hybrid caches accept."""
        failing = {r for r, p in self._pending_recv.items() if p.fails}
        sent, received = self.get_finished(finished_req_ids)
        self._invalid.clear()
        results: Callable[..., Any] = vllm_base.KVConnectorTransferResults
        return results(
            finished_sending=sent,
            finished_recving=received,
            failed_recving=failing & received,
        )

    RecordingConnector.get_transfer_results = _get_transfer_results


def _record_all_hooks() -> None:
    """Puts a wrapper around each public instance method that the base class has."""
    for name, declared in inspect.getmembers(KVConnectorBase_V1, inspect.isfunction):
        if not name.startswith("_") and name != "has_connector_metadata":
            method = getattr(RecordingConnector, name, declared)
            setattr(RecordingConnector, name, _recorded(name, method))
    name = "request_finished_all_groups"
    setattr(RecordingConnector, name, _recorded(name, getattr(RecordingConnector, name)))


_record_all_hooks()
