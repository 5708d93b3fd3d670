"""Lines said when a session ends: how much was simulated, and from which seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

LINES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Keep a line for the end of the session."""
    return pytestconfig.stash.setdefault(LINES, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say the lines."""
    for line in config.stash.get(LINES, []):
        terminalreporter.write_line(line)
