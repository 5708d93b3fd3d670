"""The only package that imports vLLM: a facade over the core.

connector   NeuronPushConnector, the class vLLM loads
scheduler   its scheduler half: sorts requests, writes each step's metadata
prefills    the scheduler half's prefill legs
decodes     the scheduler half's decode legs
worker      its worker half: geometry, settle points, reports
params      kv_transfer_params, checked
identity    semantics, request ids and prompt fingerprints
explain     middleware: failed transfers answer with their reason
describe    geometry of the KV caches a runner registers
pins        references on KV blocks
custody     whether vLLM's own references are enough
handovers   finished prompts whose blocks vLLM keeps until they are sent
metadata    what travels between the halves each step
stats       Prometheus metrics through vLLM's own hooks
compat      what differs between the supported vLLM versions

Importing this package is cheap: `register` is called in every vLLM process.
"""

from __future__ import annotations

NAME = "NeuronPushConnector"
MODULE = "neuron_push.vllm.connector"


def register() -> None:
    """Entry point `vllm.general_plugins`: make the connector known by name; idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (
        KVConnectorFactory,
    )

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
