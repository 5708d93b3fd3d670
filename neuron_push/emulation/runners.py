"""Hook order of vLLM's model runners, taken from vLLM's own code where it can be called.

V2     vLLM's `ActiveKVConnector` of the installed version, as its GPU runner calls it: before the
       launch, after it (`finish_forward`), and in `sample_tokens`
V1     vLLM's `KVConnectorModelRunnerMixin`, around a launch, with the per-layer hooks
CPU    the same, around a step that ends before the hooks after it

tests/vllm_hooks holds recordings of the real runners; tests/emulation compares with them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    KVConnectorOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from neuron_push.emulation import sampling
from neuron_push.emulation.requests import Piece
from neuron_push.emulation.writer import Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Launch = Callable[[Sequence[Piece], bool], Step]
"""Pieces, and whether their tokens may be drawn before `sample_tokens`."""
Answer: TypeAlias = Any  # ModelRunnerOutput | AsyncModelRunnerOutput, which mypy sees as Any


class StepOutput(AsyncModelRunnerOutput):
    """A step's tokens, once the device has drawn them."""

    def __init__(self, step: Step, transfers: KVConnectorOutput | None, vocabulary: int) -> None:
        self._step = step
        self._transfers = transfers
        self._vocabulary = vocabulary

    def allow(self, grammar: Any) -> None:
        """Let the device draw, out of what vLLM's GrammarOutput allows (None: anything)."""
        self._step.allow(sampling.allowed(grammar, self._vocabulary))

    def get_output(self) -> ModelRunnerOutput:
        self._step.done.wait()
        if self._step.error is not None:
            raise RuntimeError("the emulated device failed") from self._step.error
        names = [piece.state.request for piece in self._step.pieces]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=self._step.sampled,
            logprobs=self._logprobs(),
            prompt_logprobs_dict=self._prompt_logprobs(),
            kv_connector_output=self._transfers,
        )

    def _logprobs(self) -> LogprobsLists | None:
        """One row per request, chunks of prompts included, as wide as the widest wish."""
        wishes = [self._tops(piece)[0] for piece in self._step.pieces]
        tops = [top for top in wishes if top is not None]
        if not tops:
            return None
        tokens = [tokens[0] if tokens else 0 for tokens in self._step.sampled]
        return LogprobsLists(*sampling.table(tokens, max(tops), self._vocabulary))

    def _prompt_logprobs(self) -> dict[str, LogprobsTensors | None]:
        """Of prompts that this step completes, all at once."""
        found: dict[str, LogprobsTensors | None] = {}
        for piece in self._step.pieces:
            top = self._tops(piece)[1]
            if top is not None and piece.completes_prompt:
                tokens = piece.state.tokens[1 : piece.state.prompt]
                rows = sampling.table(tokens, top, self._vocabulary)
                found[piece.state.request] = LogprobsTensors(*map(torch.from_numpy, rows))
        return found

    def _tops(self, piece: Piece) -> tuple[int | None, int | None]:
        return sampling.wanted(piece.state.sampling, self._vocabulary)


class HookOrder(Protocol):
    """One model runner's `execute_model` and `sample_tokens`, as far as hooks see them."""

    def register(self, tensors: dict[str, torch.Tensor]) -> None: ...
    def idle(self, output: Any) -> ModelRunnerOutput: ...
    def execute(self, output: Any, pieces: Sequence[Piece]) -> None: ...
    def sample(self, grammar: Any) -> Answer: ...


class V2:
    """The CUDA default from vLLM 0.29 on."""

    def __init__(self, config: VllmConfig, launch: Launch) -> None:
        self._config = config
        self._launch = launch
        self._pending: tuple[Step, set[str]] | None = None

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        from vllm.v1.worker.gpu.kv_connector import get_kv_connector

        self._hooks: Any = get_kv_connector(self._config, tensors)
        self._takes_batch = "input_batch" in inspect.signature(self._hooks.pre_forward).parameters

    def idle(self, output: Any) -> ModelRunnerOutput:
        answer: ModelRunnerOutput = self._hooks.no_forward(output)
        return answer

    def execute(self, output: Any, pieces: Sequence[Piece]) -> None:
        if self._takes_batch:
            names = [piece.state.request for piece in pieces]
            batch = SimpleNamespace(
                idx_mapping=list(range(len(names))), req_ids=names,
                num_tokens=output.total_num_scheduled_tokens,
            )  # fmt: skip
            self._hooks.pre_forward(output, batch)
        else:
            self._hooks.pre_forward(output)
        step = self._launch(pieces, not output.has_structured_output_requests)
        if hasattr(self._hooks, "finish_forward"):
            self._hooks.finish_forward()
        self._pending = step, output.finished_req_ids

    def sample(self, grammar: Any) -> Answer:
        assert self._pending is not None
        (step, finished), self._pending = self._pending, None
        vocabulary = self._config.model_config.get_vocab_size()
        answer = StepOutput(step, self._hooks.post_forward(finished), vocabulary)
        answer.allow(grammar)
        return answer


class V1:
    """The GPU runner that Neuron's plugin also derives its hooks from."""

    waits = False

    def __init__(self, config: VllmConfig, launch: Launch) -> None:
        self._config = config
        self._launch = launch
        self._layers: dict[str, torch.Tensor] = {}
        self._pending: StepOutput | None = None

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        self._layers = tensors
        if has_kv_transfer_group():
            from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks

            get_kv_transfer_group().register_kv_caches(tensors)
            get_kv_transfer_group().set_host_xfer_buffer_ops(copy_kv_blocks)

    def idle(self, output: Any) -> ModelRunnerOutput:
        if not has_kv_transfer_group():
            return EMPTY_MODEL_RUNNER_OUTPUT
        get_kv_transfer_group().handle_preemptions(output.kv_connector_metadata)
        answer: ModelRunnerOutput = KVConnectorModelRunnerMixin.kv_connector_no_forward(
            output, self._config
        )
        return answer

    def execute(self, output: Any, pieces: Sequence[Piece]) -> None:
        if has_kv_transfer_group():
            get_kv_transfer_group().handle_preemptions(output.kv_connector_metadata)
        with (
            set_forward_context(None, self._config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as transfers,
        ):
            step = self._launch(pieces, not output.has_structured_output_requests)
            if has_kv_transfer_group():
                self._layer_hooks(step)
            if self.waits:
                step.written.wait()
        vocabulary = self._config.model_config.get_vocab_size()
        self._pending = StepOutput(step, transfers, vocabulary)

    def _layer_hooks(self, step: Step) -> None:
        connector = get_kv_transfer_group()
        for index, (name, tensor) in enumerate(self._layers.items()):
            connector.wait_for_layer_load(name)
            step.layer = index
            connector.save_kv_layer(name, tensor, None)
        step.layer = None

    def sample(self, grammar: Any) -> Answer:
        assert self._pending is not None
        output, self._pending = self._pending, None
        output.allow(grammar)
        return output.get_output() if self.waits else output


class Cpu(V1):
    """The forward has ended when it returns."""

    waits = True


ORDERS: dict[str, type[V2] | type[V1]] = {"gpu-v2": V2, "gpu-v1": V1, "cpu": Cpu}
