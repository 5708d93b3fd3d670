"""What `bench hooks` runs instead of models: configurations, KV tensors, a connector of no cost."""

from __future__ import annotations

import functools
import itertools
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

BLOCK: Final = 16
LAYERS: Final = 28
HEAD: Final = 128
CHUNK: Final = 2048
NO_OP: Final = "no-op"

MODEL: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": HEAD, "vocab_size": 4096,
    "max_position_embeddings": 65_536, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

_names = itertools.count(1)


@functools.cache
def model_folder() -> str:
    """A folder with the configuration of a small model, made once per process."""
    folder = tempfile.mkdtemp(prefix="neuron-push-bench-")
    (Path(folder) / "config.json").write_text(json.dumps(MODEL))
    return folder


def _no_op_class() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        SupportsHMA,
    )

    class NoOp(KVConnectorBase_V1, SupportsHMA):
        """Answers every hook and does nothing."""

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
        def wait_for_layer_load(self, layer_name: str) -> None: ...
        def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
        def wait_for_save(self) -> None: ...
        def update_state_after_alloc(self, *args: Any) -> None: ...

        def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
            return 0, False

        def build_connector_meta(self, output: Any) -> Any:
            return KVConnectorMetadata()

        def request_finished_all_groups(self, request: Any, ids: Any) -> tuple[bool, None]:
            return False, None

    return NoOp


def prepare() -> None:
    """What every process needs once before it makes an engine."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.utils.hashing import sha256
    from vllm.utils.network_utils import get_open_port
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)
    # vLLM's connectors check the block size against the attention kernels, which never run here.
    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(
        lambda *_: [MultipleOf(BLOCK)]
    )
    no_op = _no_op_class()
    KVConnectorFactory._registry.setdefault(NO_OP, lambda: no_op)
    cores = os.sched_getaffinity(0)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        initialize_model_parallel()
    os.sched_setaffinity(0, cores)


def engine_config(
    connector: str, role: str, port: int, engine: str = "", policy: str = "fail", model: str = ""
) -> Any:
    """A configuration; without an `engine` id, one that is new in this process.

    `model` is a folder that `model_folder` made, for engines in several processes.
    """
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    own = connector == "NeuronPushConnector"
    # Steps that wait would be timed as if they worked.
    settings = {"side_channel_port": port, "step_wait": 0, "step_wait_idle": 0} if own else {}
    transfer = KVTransferConfig(
        kv_connector=connector, kv_role=role, engine_id=engine or f"engine-{next(_names)}",
        kv_load_failure_policy=policy,
        kv_connector_module_path="neuron_push.vllm.connector" if own else None,
        kv_connector_extra_config=settings,
    )  # fmt: skip
    config = EngineArgs(
        model=model or model_folder(), skip_tokenizer_init=True, load_format="dummy",
        max_model_len=32_768, max_num_batched_tokens=CHUNK, max_num_seqs=8, block_size=BLOCK,
        enable_prefix_caching=False, kv_transfer_config=transfer, enforce_eager=True,
    ).create_engine_config()  # fmt: skip
    config.cache_config.kv_cache_layout = "LBHNC"
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    layer = SimpleNamespace(get_attn_backend=lambda: backend, isa="vec16")
    config.compilation_config.static_forward_context.update(dict.fromkeys(_layer_names(), layer))
    return config


def _layer_names() -> list[str]:
    return [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]


def kv_caches(config: Any, blocks: int) -> tuple[dict[str, Any], Any]:
    """KV tensors as the CPU runner lays them out, and vLLM's description of them."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    names = _layer_names()
    store = torch.zeros((LAYERS, blocks, 1, BLOCK, 2 * HEAD), dtype=torch.bfloat16)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=HEAD, dtype=torch.bfloat16)
    kv = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )
    kv.kv_cache_layout = "LBHNC"
    return dict(zip(names, store, strict=True)), kv
