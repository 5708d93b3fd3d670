"""docs/hardware.md names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hardware import __main__ as command
from tests.hardware import suite

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/hardware.md").read_text()


def test_every_hardware_check_is_explained():
    command.load()
    named = {each.name for each in suite.CHECKS if not re.match(r"t\d_", each.name)}
    assert {name for name in named if f"`{name}`" not in PAGE} == set()


def test_every_finding_of_the_doctor_is_explained():
    sources = "".join(path.read_text() for path in (ROOT / "neuron_push/doctor").glob("*.py"))
    named = set(re.findall(r'"((?:plugin|nixl|neuron|cuda|efa|memory|network)\.[a-z_]+)"', sources))
    assert len(named) > 15
    rows = {
        re.compile(re.escape(name).replace(r"\*", ".*"))
        for line in PAGE.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([a-zA-Z_.*]+)`", line.split("|")[1])
    }
    assert {name for name in named if not any(row.fullmatch(name) for row in rows)} == set()


@pytest.mark.parametrize(
    "words", ["Nothing on this page has been run on real hardware", "## What has not been run"]
)
def test_the_page_says_what_was_not_run(words):
    assert words in PAGE
