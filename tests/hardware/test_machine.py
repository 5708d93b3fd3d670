"""The hardware checks under pytest, one test each: `pytest -m cuda tests/hardware`."""

from __future__ import annotations

import pytest

from tests.hardware import fabric, gpu, neuron  # noqa: F401  they register their checks
from tests.hardware.suite import CHECKS, Skip


@pytest.mark.parametrize(
    "each",
    [pytest.param(each, id=each.name, marks=getattr(pytest.mark, each.needs)) for each in CHECKS],
)
def test_machine(each, record_property):
    try:
        record_property("detail", each.run())
    except Skip as reason:
        pytest.skip(str(reason))
