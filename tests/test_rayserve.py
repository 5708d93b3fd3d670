"""The backend for Ray Serve LLM, on stand-ins for the parts of Ray that it builds on."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

KV = "ray.llm._internal.serve.engines.vllm.kv_transfer"


class Base:
    def __init__(self, llm_config):
        self.llm_config = llm_config

    @property
    def kv_transfer_config(self):
        return self.llm_config.engine_kwargs["kv_transfer_config"]

    def _get_unique_suffix(self):
        return "abc"

    def _compute_port_offset(self):
        return 2


class Factory:
    known: ClassVar[dict[str, object]] = {}

    @classmethod
    def is_registered(cls, name):
        return name in cls.known

    @classmethod
    def register_backend(cls, name, path):
        cls.known[name] = path


class Request:
    def __init__(self, request_id="r", **fields):
        self.request_id, self.fields = request_id, fields
        self.max_tokens, self.kv_transfer_params = 99, None

    def model_copy(self, deep):
        assert deep
        return Request(self.request_id)


def clamp(request):
    request.max_tokens = 1


@pytest.fixture
def rayserve(monkeypatch):
    modules = {
        "ray": {"util": SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")},
        f"{KV}.base": {
            "BaseConnectorBackend": Base,
            "base_prefill_kv_transfer_params": lambda: {"do_remote_decode": True},
            "clamp_request_to_single_token": clamp,
        },
        f"{KV}.factory": {"KVConnectorBackendFactory": Factory},
        "ray.serve.llm": {"build_pd_openai_app": lambda args: ("app", args)},
    }
    for name in [*modules, "ray.serve", *(KV.rsplit(".", n)[0] for n in range(6)), KV]:
        module = ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "neuron_push.rayserve", raising=False)
    Factory.known = {}
    yield importlib.import_module("neuron_push.rayserve")
    sys.modules.pop("neuron_push.rayserve", None)


def config(**experimental):
    kwargs = {"kv_transfer_config": {"kv_connector": "NeuronPushConnector"}}
    return SimpleNamespace(engine_kwargs=kwargs, experimental_configs=experimental)


def test_an_application_registers_the_backend_once(rayserve):
    assert rayserve.app({"a": 1}) == ("app", {"a": 1})
    rayserve.register()
    assert Factory.known == {"NeuronPushConnector": "neuron_push.rayserve:PushBackend"}


def test_each_replica_gets_a_side_channel_and_a_name_of_its_own(rayserve):
    backend = rayserve.PushBackend(config(NIXL_SIDE_CHANNEL_PORT_BASE=22000))
    backend.setup()
    assert backend.replica_metadata() == {
        "remote_engine_id": "abc-10.0.0.7-22002", "remote_host": "10.0.0.7", "remote_port": 22002,
    }  # fmt: skip


def test_both_legs_are_shaped_before_either_leaves_and_share_a_transfer(rayserve):
    backend = rayserve.PushBackend(config())
    assert backend.requires_peer_binding and backend.concurrent_handoff
    backend.setup()
    peer, request = backend.replica_metadata(), Request("one")
    prefill = backend.prepare_prefill_request(request=request, peer=peer)
    decode = backend.prepare_decode_request(request=request, peer=peer, prefill_response=None)
    assert prefill.max_tokens == 1 and decode.max_tokens == 99
    first, second = prefill.kv_transfer_params, decode.kv_transfer_params
    assert first["transfer_id"] == second["transfer_id"]
    assert first["transfer_mode"] == second["transfer_mode"] == "push"
    assert first["do_remote_decode"] and second["do_remote_prefill"]
    assert {**second, **peer} == second
    other = backend.prepare_prefill_request(request=Request("two"), peer=peer)
    assert other.kv_transfer_params["transfer_id"] != first["transfer_id"]
    assert request.kv_transfer_params is None


def test_the_connector_reads_what_the_backend_writes(rayserve):
    pytest.importorskip("vllm")
    from neuron_push.vllm.params import parse

    backend = rayserve.PushBackend(config())
    backend.setup()
    request, peer = Request("one"), backend.replica_metadata()
    prefill = backend.prepare_prefill_request(request=request, peer=peer)
    decode = backend.prepare_decode_request(request=request, peer=peer, prefill_response=None)
    ours = parse(prefill.kv_transfer_params, "kv_producer")
    theirs = parse(decode.kv_transfer_params, "kv_consumer")
    assert ours.transfer == theirs.transfer and not (ours.pull or theirs.pull)
    assert (theirs.prefill.host, theirs.prefill.port) == ("10.0.0.7", 20002)
    assert theirs.engine == peer["remote_engine_id"]


def test_without_a_prefill_replica_decode_says_so(rayserve):
    with pytest.raises(ValueError, match="no prefill replica"):
        rayserve.PushBackend(config()).prepare_decode_request(
            request=Request(), peer={}, prefill_response=None
        )
