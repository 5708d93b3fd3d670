"""What the hooks stand on: the accelerator that the settings name, and host staging before it."""

from __future__ import annotations

import types

import pytest

from neuron_push.accelerator import CpuAccelerator
from neuron_push.bounce import HostStaged
from neuron_push.config import Config
from neuron_push.errors import ConfigError
from neuron_push.vllm.station import accelerator_of


def test_host_staging_is_refused_where_memory_is_registered():
    with pytest.raises(ConfigError, match=r"host_staging is for devices.*leave it off"):
        accelerator_of(Config(accelerator="cpu", host_staging=True))


def test_host_staging_needs_slabs():
    with pytest.raises(ConfigError, match="staging_slabs"):
        accelerator_of(Config(accelerator="cpu", host_staging=True, staging_slabs=0))


def test_host_staging_is_chosen_by_setting_or_variable(monkeypatch):
    neuron = types.SimpleNamespace(name="neuron", can_reorder=False, hides_end=True)
    monkeypatch.setattr("neuron_push.accelerator.lookup", lambda name: neuron)
    assert accelerator_of(Config.parse({}, {})) is neuron
    for config in (
        Config.parse({"host_staging": True}, {}),
        Config.parse({}, {"NEURON_PUSH_HOST_STAGING": "1"}),
    ):
        staged = accelerator_of(config)
        assert isinstance(staged, HostStaged) and staged.can_reorder and staged.hides_end


def test_a_cache_is_staged_as_the_bytes_of_its_whole_allocation(monkeypatch):
    torch = pytest.importorskip("torch")
    neuron = CpuAccelerator()
    neuron.can_reorder = False
    monkeypatch.setattr("neuron_push.accelerator.lookup", lambda name: neuron)
    staged = accelerator_of(Config(host_staging=True))
    cache = torch.arange(64, dtype=torch.int16).view(2, 4, 8)
    base, length = staged.region(cache)
    slab = staged.slab(8)
    staged.copies.copy(slab.base, base + 126, 2)
    assert length == 128 and slab.owner[:2].tolist() == [63, 0]
