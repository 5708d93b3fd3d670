"""The engine half of `bench faults`: engines without models in processes of their own."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from neuron_push.bench import rival
from neuron_push.bench.pair import OURS
from neuron_push.bench.rank import ENVIRONMENT

pytestmark = [pytest.mark.real_nixl, pytest.mark.slow, pytest.mark.timeout(300)]

OTHERS = [case for case, _ in rival.CASES if case is not rival.prefill_aborts]


@pytest.fixture
def environment(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.mark.parametrize(
    "case",
    [
        rival.prefill_aborts,
        *(pytest.param(case, marks=pytest.mark.nightly) for case in OTHERS),
    ],
)
def test_with_this_connector_every_wait_of_a_case_ends(environment, case):
    policy = dict(rival.CASES)[case]
    with ExitStack() as stack:
        figures = case(rival.Duel(stack, OURS, policy, 30.0))
    print(figures)
    assert all(seconds is not None for seconds in figures.values()), figures


def test_what_took_too_long_is_said_with_the_wait():
    lines = list(
        rival.table({"P aborts": dict(zip(rival.CONNECTORS, (12.3, None), strict=True))}, 30)
    )
    assert len(lines) == 2 and lines[1].split()[2:] == ["12", ">", "30", "s"]
