"""A real vLLM scheduler with the connector's scheduler half, and no workers.

Model runner outputs are made by hand, so a test decides what the workers say and when.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from msgspec.structs import replace
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from neuron_push.commands import Receive, Settle, unpack_ids
from neuron_push.vllm import compat
from neuron_push.vllm.handovers import Handovers
from neuron_push.vllm.metadata import StepMeta, WorkerMeta

BLOCK = 16
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
DECODE = {
    "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "t1",
    "remote_host": "127.0.0.1", "remote_port": 5600, "remote_engine_id": "p",
}  # fmt: skip
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t1"}

_serial = count(1)


@cache
def model_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="neuron-push-test-"))
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def engine_config(
    *, role: str = "kv_both", policy: str = "fail", tensor: int = 1, tokens: int = 64,
    connector: str = "NeuronPushConnector", extra: dict[str, Any] | None = None,
    speculative: dict[str, Any] | None = None, model_len: int = 4096, block: int = BLOCK,
    prefix_caching: bool = True,
) -> Any:  # fmt: skip
    own = connector == "NeuronPushConnector"
    settings = {"side_channel_port": 0, **(extra or {})} if own else extra
    transfer = KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path=("neuron_push.vllm.connector" if own else None),
        kv_role=role,
        engine_id=f"engine-{next(_serial)}",
        kv_load_failure_policy=policy,
        kv_connector_extra_config=settings,
    )
    config = EngineArgs(
        model=str(model_folder()), skip_tokenizer_init=True, load_format="dummy",
        max_model_len=model_len, max_num_batched_tokens=tokens, max_num_seqs=8,
        block_size=block, kv_transfer_config=transfer, enforce_eager=True,
        speculative_config=speculative, enable_prefix_caching=prefix_caching,
        enable_chunked_prefill=True,
    ).create_engine_config()  # fmt: skip
    config.parallel_config.tensor_parallel_size = tensor
    return config


def cache_config(
    blocks: int, *, groups: int = 1, block: int = BLOCK, state: MambaSpec | None = None
) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=32, dtype=torch.float32)
    listed = [KVCacheGroupSpec(list(LAYERS), spec) for _ in range(groups)]
    if state is not None:
        listed.append(KVCacheGroupSpec(["model.layers.2.mixer"], state))
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=listed)


def state_spec(mode: str = "none", **changes: Any) -> MambaSpec:
    """A state as large as a block of `cache_config`'s attention."""
    return MambaSpec(
        shapes=((3, 64), (4, 8, 16)), dtypes=(torch.float32, torch.float32), block_size=4096,
        page_size_padded=BLOCK * 2 * 2 * 32 * 4, mamba_cache_mode=mode, **changes,
    )  # fmt: skip


class Engine:
    """A scheduler whose model runner the test plays."""

    def __init__(
        self, blocks: int = 64, *, groups: int = 1, block: int = BLOCK,
        state: MambaSpec | None = None, **options: Any,
    ):  # fmt: skip
        self.config = engine_config(block=block, **options)
        self.config.cache_config.num_gpu_blocks = blocks
        register_all_kvcache_specs(self.config)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block, sha256)
        self.scheduler = Scheduler(
            self.config, cache_config(blocks, groups=groups, block=block, state=state),
            StructuredOutputManager(self.config), state.block_size if state else block,
            hash_block_size=block,
        )  # fmt: skip
        self.connector = self.scheduler.connector
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.pool.get_num_free_blocks()
        self.outputs: list[Any] = []
        # What each rank knows of prompts whose blocks vLLM keeps, and which ranks reported them.
        self._handovers = [
            Handovers() for _ in range(self.config.parallel_config.tensor_parallel_size)
        ]
        self._done: dict[str, int] = {}
        self._serial = count(1)

    def close(self) -> None:
        self.connector.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def half(self) -> Any:
        return self.connector._scheduler

    @property
    def held(self) -> int:
        """Blocks that are not free."""
        return self.free_at_start - self.pool.get_num_free_blocks()

    def add(
        self, prompt: int | list[int], params: dict[str, Any] | None = None, *,
        name: str = "", output: int = 1, **sampling: Any,
    ) -> Request:  # fmt: skip
        tokens = list(range(3, 3 + prompt)) if isinstance(prompt, int) else prompt
        settings = SamplingParams(
            max_tokens=output, ignore_eos=True,
            extra_args={"kv_transfer_params": params}, **sampling,
        )  # fmt: skip
        request = Request(
            request_id=name or f"cmpl-{next(self._serial)}-0-{next(_serial):08x}",
            prompt_token_ids=[token % 500 for token in tokens],
            sampling_params=settings, pooling_params=None,
            block_hasher=self._hasher,
        )  # fmt: skip
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> tuple[Any, Any]:
        """A scheduler output and the metadata in it."""
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        if isinstance(meta, tuple):
            meta = StepMeta(*meta)
        self._freed: list[tuple[int, int]] = []
        for pin, name in getattr(meta, "handed", ()):
            for rank, each in enumerate(self._handovers):
                if name:
                    each.add(pin, name)
                elif each.take_back(pin):
                    self._freed.append((pin, rank))
        return output, meta

    def update(self, output: Any, **told: Any) -> None:
        """The step ends: every request whose tokens are all computed samples one."""
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            sampled.append([7] if request.num_computed_tokens >= request.num_tokens else [])
        runner = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output(
                **self._as_workers_say(output.finished_req_ids, **told)
            ),
        )
        for each in self.scheduler.update_from_output(output, runner).values():
            self.outputs += each.outputs

    def _as_workers_say(self, finished: Any, unpinned: Any = (), **told: Any) -> dict[str, Any]:
        """Quiet pins of finished requests go by the name of the request, when all ranks agree."""
        said = [name for each in self._handovers for name in each.left(finished)]
        left = self._freed
        for pin, rank in unpinned:
            name = self._handovers[rank].ended(pin)
            if name is None:
                left.append((pin, rank))
            elif name:
                said.append(name)
        for name in said:
            self._done[name] = self._done.get(name, 0) + 1
        sent = [name for name in {*said} if self._done[name] == len(self._handovers)]
        return {"unpinned": tuple(left), "sent": tuple(sent), **told}

    def step(self, **told: Any) -> Any:
        """Schedule and end one step; returns its metadata."""
        output, meta = self.schedule()
        self.update(output, **told)
        return meta

    def last_output(self, request: Request) -> Any:
        return [out for out in self.outputs if out.request_id == request.request_id][-1]


def connector_output(
    received: tuple[str, ...] = (), failed: tuple[str, ...] = (),
    unpinned: tuple[tuple[int, int], ...] = (), bad_blocks: tuple[int, ...] = (),
    sent: tuple[str, ...] = (),
) -> KVConnectorOutput | None:  # fmt: skip
    """What all workers of an engine say in one step, in the words of the installed vLLM."""
    if not (received or failed or unpinned or sent):
        return None
    by_request = {"failed_recving": set(failed)} if compat.FAILS_BY_REQUEST else {}
    return KVConnectorOutput(
        finished_sending=set(sent),
        finished_recving={*received, *failed},
        invalid_block_ids=set() if compat.FAILS_BY_REQUEST else set(bad_blocks),
        kv_connector_worker_meta=WorkerMeta(unpinned) if unpinned else None,
        **by_request,
    )


def of_kind(meta: Any, kind: type) -> list[Any]:
    """The commands of one kind in a step's metadata, their block ids as lists."""
    return [
        replace(command, blocks=tuple(map(unpack_ids, command.blocks)))
        if isinstance(command, Settle | Receive)
        else command
        for command in meta.commands
        if isinstance(command, kind)
    ]


def preempt_all(engine: Engine) -> None:
    """Between two steps, as a reset does, which also reports that held blocks stay cached."""
    with contextlib.suppress(RuntimeError):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
