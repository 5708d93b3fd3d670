"""NeuronPushConnector under Ray Serve LLM: prefill pushes while decode waits, both legs at once.

Ray's decode replica orchestrates: it picks a prefill replica, sends it the prompt, and runs decode
itself. How the two find each other is a connector's *backend*. Ray has none for this connector and
would take its default, which waits for prefill and lets decode READ; the one here pushes.

    # pd.yaml, for `serve run pd.yaml`
    applications:
      - {name: pd, route_prefix: /, import_path: "neuron_push.rayserve:app", args: {...}}

with the arguments of `ray.serve.llm.build_pd_openai_app`; deploy/ray/pd.yaml is a whole one.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import Any, Final

import ray
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
    BaseConnectorBackend,
    base_prefill_kv_transfer_params,
    clamp_request_to_single_token,
)
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.serve.llm import build_pd_openai_app

__all__ = ["PushBackend", "app", "register"]

NAME: Final = "NeuronPushConnector"
# Where Ray's own NIXL backend begins to number side channels; it moves decode's by itself.
PORT_SETTING: Final = "NIXL_SIDE_CHANNEL_PORT_BASE"
PORT: Final = 20_000


def app(args: dict[str, Any]) -> Any:
    """A Serve application of a prefill and a decode deployment, and what clients talk to."""
    register()
    return build_pd_openai_app(args)


def register() -> None:
    """Make the backend known in the whole Ray cluster; needs a connected driver. Idempotent."""
    if not KVConnectorBackendFactory.is_registered(NAME):
        KVConnectorBackendFactory.register_backend(NAME, f"{__name__}:{PushBackend.__name__}")


class PushBackend(BaseConnectorBackend):
    """Names the prefill replica to decode before either leg leaves."""

    requires_peer_binding = True
    concurrent_handoff = True

    def setup(self) -> None:
        """Give this replica's engine a side channel and a name of its own."""
        if "VLLM_NIXL_SIDE_CHANNEL_HOST" not in os.environ:
            os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = ray.util.get_node_ip_address()
        if "VLLM_NIXL_SIDE_CHANNEL_PORT" not in os.environ:
            first = int(self.llm_config.experimental_configs.get(PORT_SETTING, PORT))
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(first + self._compute_port_offset())
        transfer = self.kv_transfer_config
        prefix = transfer.get("engine_id") or self._get_unique_suffix()
        transfer["engine_id"] = f"{prefix}-{'-'.join(map(str, _side_channel()))}"

    def replica_metadata(self) -> dict[str, Any]:
        """What decode needs to know of a prefill replica."""
        host, port = _side_channel()
        return {
            "remote_engine_id": self.kv_transfer_config["engine_id"],
            "remote_host": host,
            # vLLM moves the port by the data-parallel rank.
            "remote_port": port + int(self.llm_config.engine_kwargs.get("data_parallel_rank") or 0),
        }

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        """One token, and the name under which decode waits."""
        leg = request.model_copy(deep=True)
        leg.kv_transfer_params = {
            **base_prefill_kv_transfer_params(),
            "transfer_id": _transfer(request),
            "transfer_mode": "push",
        }
        clamp_request_to_single_token(leg)
        return leg

    def prepare_decode_request(
        self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any
    ) -> Any:
        """Where the prompt is being computed."""
        if not peer:
            raise ValueError("Ray named no prefill replica: is it running with neuron_push too?")
        leg = request.model_copy(deep=True)
        leg.kv_transfer_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": _transfer(request),
            "transfer_mode": "push",
            **peer,
        }
        return leg


def _side_channel() -> tuple[str, int]:
    return (
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"],
        int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
    )


def _transfer(request: Any) -> str:
    """The same for both legs of a request, which Ray shapes one by one."""
    return blake2b(str(request.request_id).encode(), digest_size=16).hexdigest()
