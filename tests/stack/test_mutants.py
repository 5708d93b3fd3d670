"""Defects planted in the whole stack are noticed by its worlds."""

from __future__ import annotations

import pytest

from tests.stack.test_stack import stack


@pytest.mark.slow
def test_every_planted_defect_is_noticed():
    told = stack("--steps", 1, "--mutants", "all")
    assert "NOT NOTICED" not in told
    assert told.count(": noticed in ") >= 12
