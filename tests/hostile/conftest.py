"""The scene fixture."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from neuron_push.bench.rank import ENVIRONMENT
from neuron_push.config import Config
from tests.hostile.scene import SMALL, Scene


@pytest.fixture
def stage(monkeypatch):
    """Makes a scene of a shape and with settings."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack:
        # Halves of short prompts travel at once.
        yield lambda shape=SMALL, **settings: Scene(
            stack, Config(**{"batch_tokens": 0, **settings}), shape
        )
