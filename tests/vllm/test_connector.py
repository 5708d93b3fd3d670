"""The class vLLM loads: how it is found, what it refuses, both styles of hooks, beside others."""

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma

import neuron_push.vllm as facade
from neuron_push.commands import Receive, Received, ReceiveFailed, Settle
from neuron_push.config import Config
from neuron_push.errors import ConfigError
from neuron_push.vllm import compat
from neuron_push.vllm.connector import NeuronPushConnector
from neuron_push.vllm.metadata import StepMeta
from neuron_push.vllm.stats import PushStats
from neuron_push.vllm.worker import WorkerHalf
from tests.vllm.kit import DECODE, PREFILL, Engine, cache_config, engine_config, of_kind
from tests.vllm.test_worker import Accelerator, Thread, receive

# A child that never has tokens, and ours after it.
CHILDREN = [
    {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": "/nonexistent/neuron-push"},
    },
    {
        "kv_connector": "NeuronPushConnector",
        "kv_connector_module_path": "neuron_push.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"side_channel_port": 0},
    },
]


def scheduler_side(**options):
    config = engine_config(**options)
    return NeuronPushConnector(config, KVConnectorRole.SCHEDULER, cache_config(8))


def worker_side():
    """A connector whose worker half talks to a stand-in for the transfer thread."""
    connector = NeuronPushConnector(engine_config(), KVConnectorRole.WORKER, cache_config(8))
    log = []
    connector._worker._accelerator, connector._worker._thread = Accelerator(log), Thread(log)
    return connector, log


def step(connector, meta):
    connector.handle_preemptions(meta)
    connector.bind_connector_metadata(meta)
    connector.start_load_kv(None)
    connector.wait_for_save()


# ---------------------------------------------------------------------- found and loaded


def test_it_is_found_by_name_and_registered_once():
    facade.register()
    facade.register()
    found = KVConnectorFactory.get_connector_class(KVTransferConfig(
        kv_connector="NeuronPushConnector", kv_role="kv_both"
    ))  # fmt: skip
    assert found is NeuronPushConnector


def test_it_is_found_by_module_path():
    found = KVConnectorFactory.get_connector_class(KVTransferConfig(
        kv_connector="NeuronPushConnector", kv_role="kv_both",
        kv_connector_module_path="neuron_push.vllm.connector",
    ))  # fmt: skip
    assert found is NeuronPushConnector
    assert supports_hma(found)


def test_the_installed_entry_point_is_the_one_vllm_loads():
    points = importlib.metadata.entry_points(group="vllm.general_plugins", name="neuron_push")
    if not points:
        pytest.skip("neuron-push is not installed here, only on the path")
    assert {point.load() for point in points} == {facade.register}


@pytest.mark.parametrize("module", ["neuron_push.vllm", "neuron_push.vllm.connector"])
def test_loading_the_plugin_touches_no_nixl_and_no_device(module):
    code = (
        f"import {module}, sys, {module}\n"
        "bad = [m for m in sys.modules if m.split('.')[0].startswith('nixl')]\n"
        "torch = sys.modules.get('torch')\n"
        "assert not bad, bad\n"
        "assert torch is None or not torch.cuda.is_initialized()\n"
    )
    if module == "neuron_push.vllm":
        code += "assert 'vllm' not in sys.modules and torch is None\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------- refused


def test_unknown_settings_are_refused_by_name():
    with pytest.raises(ConfigError, match="lease"):
        scheduler_side(extra={"leese": 5})


def test_a_role_must_be_one_of_vllms():
    config = engine_config()
    config.kv_transfer_config.kv_role = None
    with pytest.raises(ConfigError, match="kv_role"):
        NeuronPushConnector(config, KVConnectorRole.SCHEDULER, cache_config(8))


def test_several_groups_are_refused_where_a_failure_would_stop_the_engine(monkeypatch):
    for by_request in (False, True):
        monkeypatch.setattr(compat, "FAILS_BY_REQUEST", by_request)
        compat.check_groups(1)
        if by_request:
            compat.check_groups(2)
        else:
            with pytest.raises(ConfigError, match="disable-hybrid-kv-cache-manager"):
                compat.check_groups(2)


def test_the_installed_vllm_and_several_groups():
    config = engine_config()
    if compat.FAILS_BY_REQUEST:
        NeuronPushConnector(config, KVConnectorRole.SCHEDULER, cache_config(8, groups=2)).shutdown()
    else:
        with pytest.raises(ConfigError, match=r"0\.30"):
            NeuronPushConnector(config, KVConnectorRole.SCHEDULER, cache_config(8, groups=2))


# ---------------------------------------------------------------------- worker side


def test_results_in_the_style_of_the_installed_vllm():
    connector, _ = worker_side()
    step(connector, StepMeta.of((receive(1, "a"), receive(2, "b", blocks=(9, 10)))))
    connector._worker._thread.reports = [
        Received(1, "a"), ReceiveFailed(2, "b", "the prefill engine is gone", True)
    ]  # fmt: skip
    if not compat.FAILS_BY_REQUEST:
        assert connector.get_finished(set()) == (None, {"a", "b"})
        assert connector.get_block_ids_with_load_errors() == {9, 10}
    else:
        found = connector.get_transfer_results(set())
        assert (found.finished_recving, found.failed_recving) == ({"a", "b"}, {"b"})
        assert not found.finished_sending
        assert connector.get_block_ids_with_load_errors() == set()
    connector.clear_connector_metadata()


def test_a_caller_that_knows_only_get_finished_still_hears_of_failures():
    """Silence would mean decoding over bytes that never came."""
    connector, _ = worker_side()
    step(connector, StepMeta.of((receive(2, "b", blocks=(9, 10)),)))
    connector._worker._thread.reports = [ReceiveFailed(2, "b", "why", True)]
    assert connector.get_finished(set()) == (None, {"b"})
    assert connector.get_block_ids_with_load_errors() == {9, 10}


def test_layer_hooks_do_nothing():
    connector, log = worker_side()
    connector.bind_connector_metadata(StepMeta.of((Settle(1, 5, (0,), (b"",), 1, True),)))
    for layer in ("a", "b"):
        connector.wait_for_layer_load(layer)
        connector.save_kv_layer(layer, None, None)
    connector.start_load_kv(None, scheduler_output=None, request_ids=[])
    assert not log
    connector.wait_for_save()
    assert [entry[0] for entry in log] == ["fence", "submit"]


def test_nothing_goes_through_vllms_handshake():
    connector, _ = worker_side()
    assert connector.get_handshake_metadata() is None
    side = scheduler_side()
    side.set_xfer_handshake_metadata_pp_aware({})
    assert side.get_finished_count() is None
    side.shutdown()


def test_stats_are_rebuilt_from_what_crossed_the_wire():
    connector, _ = worker_side()
    connector._worker._thread.tally.add("bytes", 3)
    sent = connector.get_kv_connector_stats().data
    again = NeuronPushConnector.build_kv_connector_stats(sent)
    assert isinstance(again, PushStats)
    assert again.reduce() == {"bytes": 3}
    assert NeuronPushConnector.build_kv_connector_stats().is_empty()


def test_shutdown_closes_either_half():
    connector, log = worker_side()
    connector.shutdown()
    assert log == [("close",)]


def test_the_layout_is_asked_for_on_cuda_only(monkeypatch):
    from vllm import platforms

    config = engine_config()
    assert NeuronPushConnector.get_required_kvcache_layout(config) is None
    monkeypatch.setattr(
        platforms, "current_platform", SimpleNamespace(is_cuda=lambda: True), raising=False
    )
    assert NeuronPushConnector.get_required_kvcache_layout(config) == "LBHNC"
    latent = SimpleNamespace(model_config=SimpleNamespace(use_mla=True))
    assert NeuronPushConnector.get_required_kvcache_layout(latent) is None


def test_a_worker_half_knows_the_draft_model_of_its_engine():
    draft = SimpleNamespace(method="eagle", draft_model_config=SimpleNamespace(model="m"))
    transfer = SimpleNamespace(engine_id="e")
    for speculative, drafts in ((None, False), (draft, True)):
        config = SimpleNamespace(kv_transfer_config=transfer, speculative_config=speculative)
        assert WorkerHalf(config, None, Config(accelerator="cpu"))._drafts is drafts


# ---------------------------------------------------------------------- beside others


@pytest.fixture
def multi():
    with Engine(64, connector="MultiConnector", extra={"connectors": CHILDREN}) as engine:
        yield engine


def ours(meta):
    return StepMeta(*meta.metadata[1])


def test_beside_another_connector_a_decode_leg_loads_and_is_freed(multi):
    half = multi.connector._connectors[1]._scheduler
    request = multi.add(40, DECODE)
    output, meta = multi.schedule()
    (found,) = of_kind(ours(meta), Receive)
    assert found.request == request.request_id
    multi.update(output)
    assert half.pinned()[0] == 3
    assert multi.connector.has_pending_push_work()
    output, meta = multi.schedule()
    multi.update(output, received=(request.request_id,))
    output, _ = multi.schedule()
    assert output.num_scheduled_tokens == {request.request_id: 1}
    half._pins.quiet(found.pin, 0)
    multi.update(output)
    assert multi.held == 0


def test_beside_another_connector_a_prefill_leg_settles(multi):
    request = multi.add(40, PREFILL)
    output, meta = multi.schedule()
    (settle,) = of_kind(ours(meta), Settle)
    assert settle.last
    multi.update(output)
    assert multi.last_output(request).kv_transfer_params["do_remote_prefill"]


def test_when_another_connector_loads_the_prompt_ours_declines(multi):
    first = multi.connector._connectors[0]
    first.get_num_new_matched_tokens = lambda request, computed: (32, False)
    multi.add(40, DECODE)
    _, meta = multi.schedule()
    (none,) = of_kind(ours(meta), Receive)
    assert none.start == none.stop
    assert multi.connector._connectors[1]._scheduler.pinned() == (0, 0.0)


def test_beside_another_connector_on_the_worker_side():
    config = engine_config(connector="MultiConnector", extra={"connectors": CHILDREN})
    both = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config(8))
    mine, log = both._connectors[1], []
    mine._worker._accelerator, mine._worker._thread = Accelerator(log), Thread(log)
    mine.bind_connector_metadata(StepMeta.of((receive(1, "a"),)))
    mine._worker._thread.reports = [ReceiveFailed(1, "a", "why", True)]
    if compat.FAILS_BY_REQUEST:
        found = both.get_transfer_results(set())
        assert (found.finished_recving, found.failed_recving) == ({"a"}, {"a"})
    else:
        assert both.get_finished(set())[1] == {"a"}
        assert both.get_block_ids_with_load_errors() == {7, 8}
