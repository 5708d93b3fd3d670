"""Lines said when a session ends: how much was simulated, and from which seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

LINES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Keep a line for the end of the session."""
    return pytestconfig.stash.setdefault(LINES, []).append


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes (`-n`) hands its lines to the one that writes."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["lines"] = session.config.stash.get(LINES, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what another process hands over."""
    lines = getattr(node, "workeroutput", {}).get("lines", [])
    node.config.stash.setdefault(LINES, []).extend(lines)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say the lines."""
    for line in config.stash.get(LINES, []):
        terminalreporter.write_line(line)
