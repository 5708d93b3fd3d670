"""What the server that seats are forked from has loaded: an engine then starts in seconds."""

from __future__ import annotations

from importlib import import_module


def _load() -> None:
    for name in (
        "vllm.config",
        "vllm.engine.arg_utils",
        "vllm.v1.core.sched.scheduler",
        "vllm.distributed.kv_transfer.kv_connector.factory",
    ):
        import_module(name)


_load()
