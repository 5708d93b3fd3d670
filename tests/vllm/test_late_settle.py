"""The worker half over a device that hides when a step ends: tokens settle at the next bind."""

from __future__ import annotations

import types

import pytest

from neuron_push.commands import pack_ids
from neuron_push.errors import ConfigError
from neuron_push.vllm import station
from neuron_push.vllm.metadata import StepMeta
from tests.vllm.test_worker import OFFER, RETIRE, SETTLE, half_with, submitted

LAST = SETTLE.__class__(1, 100, (2,), (pack_ids([3]),), 5, True)


@pytest.fixture
def log():
    return []


@pytest.fixture
def half(log):
    made = half_with(log)
    made._accelerator.hides_end = True
    return made


def step(half, *commands, hooks=("finish_forward", "settle")):
    half.bind(StepMeta.of(commands))
    for hook in hooks:
        getattr(half, hook)()
    half.results()


def test_a_chunk_waits_for_the_next_step(half, log):
    step(half, OFFER, SETTLE)
    assert submitted(log) == [OFFER]
    assert ("fence", 1) not in log
    step(half)
    assert submitted(log) == [OFFER, SETTLE]
    # The fence is recorded when the next step begins, not when this one was launched.
    assert log.index(("fence", 1)) > log.index(("submit", type(OFFER), OFFER, None))


def test_the_last_chunk_settles_in_the_step_that_follows_a_finished_request(half, log):
    step(half, SETTLE)
    step(half, LAST)
    step(half, RETIRE)  # the engine always takes this one, without a forward
    assert submitted(log) == [SETTLE, LAST, RETIRE]


def test_what_depends_on_no_output_does_not_wait(half, log):
    step(half, RETIRE)
    assert submitted(log) == [RETIRE]


def test_order_is_kept_where_a_step_has_both(half, log):
    step(half, RETIRE, SETTLE)
    assert submitted(log) == []
    step(half)
    assert submitted(log) == [RETIRE, SETTLE]


def test_a_device_with_events_settles_in_the_step(log):
    step(half_with(log), SETTLE)
    assert submitted(log) == [SETTLE]


def test_a_step_that_begins_before_the_last_output_is_refused(half, monkeypatch):
    """Asynchronous scheduling binds a step while the one before is still on the device."""
    config = half._vllm_config
    config.parallel_config = types.SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    config.model_config = types.SimpleNamespace(get_total_num_kv_heads=lambda: 1)
    config.scheduler_config = types.SimpleNamespace(async_scheduling=True)
    group = types.SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr(station, "get_pp_group", lambda: group)
    monkeypatch.setattr(station, "get_tensor_model_parallel_rank", lambda: 0)
    half._accelerator.environment = lambda present: {}
    with pytest.raises(ConfigError, match="--no-async-scheduling"):
        half.register({})
