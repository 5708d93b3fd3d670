"""What a trace keeps of a hook's arguments and result: numbers and names, no objects.

Request ids become ``r0``, ``r1``, ... when a recording is normalised; here they stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Detail = dict[str, Any]


def _scheduled(output: Any) -> Detail:
    cached = output.scheduled_cached_reqs
    return {
        "scheduled": dict(sorted(output.num_scheduled_tokens.items())),
        "new": [new.req_id for new in output.scheduled_new_reqs],
        "resumed": sorted(cached.resumed_req_ids),
        "preempted": sorted(output.preempted_req_ids or ()),
        "finished": sorted(output.finished_req_ids),
    }


def _reports(output: Any) -> Detail:
    return {
        "finished_sending": sorted(output.finished_sending or ()),
        "finished_recving": sorted(output.finished_recving or ()),
        "failed_recving": sorted(getattr(output, "failed_recving", None) or ()),
    }


def _matched(request: Any, num_computed_tokens: int) -> Detail:
    return {"request": request.request_id, "num_computed_tokens": num_computed_tokens}


def _allocated(request: Any, blocks: Any, num_external_tokens: int) -> Detail:
    return {
        "request": request.request_id,
        "blocks": [len(group) for group in blocks.get_block_ids()],
        "num_external_tokens": num_external_tokens,
    }


def _finished(request: Any, block_ids: Any) -> Detail:
    return {
        "request": request.request_id,
        "status": request.status.name,
        "blocks": [len(group) for group in block_ids],
    }


def _connector_output(output: Any) -> Detail:
    return _reports(output) | {"invalid_blocks": len(output.invalid_block_ids)}


def _request(request: Any, *_: Any) -> Detail:
    return {"request": request.request_id}


def _finished_ids(finished_req_ids: set[str]) -> Detail:
    return {"finished": sorted(finished_req_ids)}


def _layer(layer_name: str, *_: Any, **__: Any) -> Detail:
    return {"layer": layer_name}


def _load(forward_context: Any, **kwargs: Any) -> Detail:
    return {"forward": bool(forward_context.attn_metadata), "kwargs": sorted(kwargs)}


def _layers(caches: dict[str, Any]) -> Detail:
    return {"layers": len(caches)}


_ARGUMENTS: dict[str, Callable[..., Detail]] = {
    "build_connector_meta": _scheduled,
    "get_external_cache_hit_sources": _request,
    "get_finished": _finished_ids,
    "get_loaded_kv_cache_group_ids": _request,
    "get_num_new_matched_tokens": _matched,
    "get_transfer_results": _finished_ids,
    "on_new_request": _request,
    "register_kv_caches": _layers,
    "request_finished_all_groups": _finished,
    "save_kv_layer": _layer,
    "start_load_kv": _load,
    "update_connector_output": _connector_output,
    "update_state_after_alloc": _allocated,
    "wait_for_layer_load": _layer,
}


def arguments(hook: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Detail:
    """The summary of a call, empty for hooks whose arguments say nothing."""
    summarise = _ARGUMENTS.get(hook)
    return summarise(*args, **kwargs) if summarise else {}


def result(hook: str, value: Any) -> Detail:
    """The summary of what the connector answered, where the answer steers vLLM."""
    if hook == "get_num_new_matched_tokens":
        return {"answer": list(value)}
    if hook == "request_finished_all_groups":
        return {"answer": value[0]}
    if hook == "get_finished":
        return {
            "finished_sending": sorted(value[0] or ()),
            "finished_recving": sorted(value[1] or ()),
        }
    if hook == "get_transfer_results":
        return _reports(value)
    if hook == "get_block_ids_with_load_errors":
        return {"invalid_blocks": len(value)}
    return {}


def kv_caches(caches: dict[str, Any]) -> dict[str, Detail]:
    """Shape, strides and dtype of each registered tensor."""
    return {
        name: {
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "dtype": str(tensor.dtype),
        }
        for name, tensor in caches.items()
    }
