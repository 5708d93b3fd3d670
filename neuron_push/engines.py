"""vLLM servers on this machine, for the demo, tests and benchmarks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from neuron_push.ports import HOST, free_ports
from neuron_push.processes import Server

MODULE: Final = "vllm.entrypoints.openai.api_server"
CONNECTOR: Final = {
    "kv_connector": "NeuronPushConnector",
    "kv_connector_module_path": "neuron_push.vllm.connector",
}
EXPLAIN: Final = "neuron_push.vllm.explain.Explain"
# A tiny model gains nothing from more threads, and spinning ones slow the other engine down.
MOST_THREADS: Final = 2


def cpu_share(index: int, of: int) -> str:
    """The `index`-th of `of` servers' cores, as VLLM_CPU_OMP_THREADS_BIND wants them."""
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, min(MOST_THREADS, len(cores) // of))
    start = index * size % len(cores)
    return ",".join(str(core) for core in cores[start : start + size])


def connector(role: Literal["kv_producer", "kv_consumer"], **settings: Any) -> dict[str, Any]:
    """A --kv-transfer-config that loads our connector; `settings` as in neuron_push.config."""
    return {**CONNECTOR, "kv_role": role, "kv_connector_extra_config": settings}


@dataclass(frozen=True)
class EngineOptions:
    """One vLLM server. Sizes are in tokens unless they say otherwise."""

    name: str
    """For messages and the log file."""
    model: Path
    transfer: Mapping[str, Any] | None = None
    """The --kv-transfer-config, or None for an engine that transfers nothing."""
    cpus: str = "nobind"
    """Cores of its OpenMP threads, such as "0" or "0-3"; "nobind" leaves them alone."""
    block_size: int = 32
    """Tokens per KV block: a multiple of 32 for vLLM's CPU attention."""
    kv_blocks: int | None = None
    """KV blocks to allocate; None fills `kv_space`."""
    kv_space: int = 1
    """GiB of KV cache when `kv_blocks` does not say."""
    max_model_len: int = 4096
    max_batched: int = 512
    """Tokens per step; longer prompts are prefilled in chunks of this."""
    prefix_caching: bool = False
    served_name: str = "tiny"
    arguments: Sequence[str] = ()
    """More arguments for the server."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More environment, over everything set here."""

    def command(self, port: int) -> list[str]:
        """The server's command line."""
        caching = "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"
        words = [sys.executable, "-m", MODULE, "--host", HOST, "--port", str(port), caching]
        words += ["--model", str(self.model), "--served-model-name", self.served_name]
        words += ["--dtype", "float32", "--enforce-eager", "--disable-uvicorn-access-log"]
        # Engine core and worker in one process: lighter, and steadier on few cores.
        words += ["--distributed-executor-backend", "uni"]
        words += ["--block-size", str(self.block_size)]
        words += ["--max-model-len", str(self.max_model_len)]
        words += ["--max-num-batched-tokens", str(self.max_batched)]
        if self.kv_blocks is not None:
            words += ["--num-gpu-blocks-override", str(self.kv_blocks)]
        if self.transfer is not None:
            words += ["--kv-transfer-config", json.dumps(dict(self.transfer))]
            if self.transfer.get("kv_connector") == CONNECTOR["kv_connector"]:
                words += ["--middleware", EXPLAIN]
        return [*words, *self.arguments]

    def variables(self, side_port: int) -> dict[str, str]:
        """What is added to the server's environment."""
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_space),
            "VLLM_CPU_OMP_THREADS_BIND": self.cpus,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
            # Plain TCP works wherever loopback does; shared memory needs rights that
            # containers often lack.
            "UCX_TLS": "tcp,self",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "PYTHONUNBUFFERED": "1",
            **self.environment,
        }


class Engine(Server):
    """A vLLM server."""

    def __init__(
        self,
        options: EngineOptions,
        logs: Path,
        port: int | None = None,
        side_port: int | None = None,
    ) -> None:
        free = free_ports(2)
        self.options = options
        self.side_port = side_port or free[1]
        port = port or free[0]
        super().__init__(
            options.name,
            options.command(port),
            port,
            logs / f"{options.name}.log",
            options.variables(self.side_port),
        )
