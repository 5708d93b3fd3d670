"""Lines said when a session ends, and the order of tests that several processes share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from typing import Any

import pytest

LINES = pytest.StashKey[list[str]]()
FIRE = pytest.StashKey[list[float]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests (`-n`), none is left alone with a long one.

    They take two at a time, so long ones come first, and each before a short one.
    """
    if hasattr(config, "workerinput"):
        long = [item for item in items if item.get_closest_marker("slow")]
        short = [item for item in items if not item.get_closest_marker("slow")]
        items[:] = [item for item in chain(*zip_longest(long, short)) if item is not None]


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Keep a line for the end of the session."""
    return pytestconfig.stash.setdefault(LINES, []).append


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """How long the promise was under fire on real engines."""
    began = time.monotonic()
    yield
    if item.get_closest_marker("fire"):
        spent = item.config.stash.setdefault(FIRE, [])
        spent.append(time.monotonic() - began)


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
    if spent := config.stash.get(FIRE, []):
        terminalreporter.write_line(
            f"under fire: {len(spent)} tests of real engines took {sum(spent):.0f} s"
        )
    for line in config.stash.get(LINES, []):
        terminalreporter.write_line(line)
