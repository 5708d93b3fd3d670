"""The engine half of `bench faults`: engines without models in processes of their own."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from neuron_push.bench import rival
from neuron_push.bench.pair import OURS
from neuron_push.bench.rank import ENVIRONMENT

pytestmark = [pytest.mark.real_nixl, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def environment(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")


def test_decode_hears_of_an_aborted_prefill_and_gives_its_blocks_back(environment):
    with ExitStack() as stack:
        figures = rival.prefill_aborts(rival.Duel(stack, OURS, "fail", 30.0))
    assert all(seconds is not None for seconds in figures.values()), figures


def test_what_took_too_long_is_said_with_the_wait():
    lines = list(
        rival.table({"P aborts": dict(zip(rival.CONNECTORS, (12.3, None), strict=True))}, 30)
    )
    assert len(lines) == 2 and lines[1].split()[2:] == ["12", ">", "30", "s"]
