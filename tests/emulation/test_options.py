"""One variable says what is emulated; without it nothing of this is there."""

import os
from typing import get_args

import pytest

from neuron_push import accelerator
from neuron_push.emulation import VARIABLE, plugin
from neuron_push.emulation.accelerator import EmulatedAccelerator, use
from neuron_push.emulation.devices import DEVICES
from neuron_push.emulation.options import DeviceName, Options, encode, parse, wanted
from neuron_push.errors import ConfigError
from tests.emulation import kit


def test_a_device_name_is_enough():
    assert parse("trn2") == Options(device="trn2")


def test_every_device_has_facts_and_a_backend():
    pytest.importorskip("vllm")
    from neuron_push.emulation import layers

    assert set(DEVICES) == set(layers._BACKENDS) == set(get_args(DeviceName))
    assert all(layers._BACKENDS[name].get_name() == DEVICES[name].backend for name in DEVICES)


def test_options_travel_as_json():
    options = Options(device="p5en", runner="gpu-v1", verify="sampled", profile="quick")
    assert parse(encode(options)) == options


@pytest.mark.parametrize("text", ["h100", '{"devise": "p5en"}', '{"runner": "v3"}', "{"])
def test_nonsense_is_refused_by_name(text):
    with pytest.raises(ConfigError, match=VARIABLE):
        parse(text)


def test_without_the_variable_the_platform_is_not_there(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert wanted() is None and plugin.platform() is None
    assert not EmulatedAccelerator().probe().available


@pytest.mark.parametrize(("runner", "v2"), [("gpu-v2", "1"), ("gpu-v1", "0"), ("cpu", "0")])
def test_the_plugin_fixes_the_dialect_of_the_scheduler(monkeypatch, runner, v2):
    monkeypatch.setenv(VARIABLE, encode(Options(runner=runner)))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "?")
    assert plugin.platform() == plugin.PLATFORM
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == v2


def test_the_accelerator_reorders_as_the_device_does(monkeypatch):
    for device, can in (("trn2", False), ("p5en", True)):
        monkeypatch.setenv(VARIABLE, device)
        assert EmulatedAccelerator().can_reorder is can


def test_fences_are_the_devices(monkeypatch):
    monkeypatch.setenv(VARIABLE, "p5en")
    found = accelerator.lookup("emulated")
    assert found.record_fence().done()
    engine = kit.Engine()
    use(engine.writer)
    try:
        engine.launch(new=[("r", kit.prompt(5), [1], 0)], scheduled={"r": 5})
        fence = found.record_fence()
        assert not fence.done()
        engine.work()
        assert fence.done()
    finally:
        use(None)


def test_trn2_has_nothing_that_packs(monkeypatch):
    monkeypatch.setenv(VARIABLE, "trn2")
    for ask in (EmulatedAccelerator().mover, lambda: EmulatedAccelerator().slab(64)):
        with pytest.raises(ConfigError, match="does not move"):
            ask()
    monkeypatch.setenv(VARIABLE, "p5en")
    assert EmulatedAccelerator().mover() is not None and EmulatedAccelerator().slab(64).base
