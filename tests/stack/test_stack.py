"""The whole stack keeps its promises in every seeded world, and notices planted defects.

Each run is a process of its own: a world owns time and chance, and the order of sets of names.
A failure prints the command that plays its world again.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

# Of processor time, for the default run.
SECONDS = 8
NIGHTLY_STEPS = 1_000_000


def stack(*arguments: object) -> str:
    """What `python -m tests.stack` prints; it must succeed."""
    command = [sys.executable, "-m", "tests.stack", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    print(ran.stdout)
    return ran.stdout


def steps_in(text: str) -> int:
    return int(re.search(r"^([\d,]+) steps", text, re.MULTILINE)[1].replace(",", ""))


# Of the planted defects, those that are noticed in a second.
SOON = ("free_when_the_link_is_lost", "cancelled_before_the_drain")


@pytest.mark.slow
def test_promises_hold_and_planted_defects_are_noticed(say):
    told = stack("--seconds", SECONDS, "--mutants", ",".join(SOON))
    say("tests/stack: " + next(line for line in told.splitlines() if " steps of " in line))
    assert steps_in(told) > 10_000
    assert "'length': " in told, "nobody was answered"
    assert told.count(": noticed in ") == len(SOON)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_promises_hold_for_a_million_steps():
    assert steps_in(stack("--steps", NIGHTLY_STEPS, "--seed", 1000)) >= NIGHTLY_STEPS


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_planted_defect_is_noticed():
    assert "NOT NOTICED" not in stack("--steps", 1, "--mutants", "all")


@pytest.mark.nightly
def test_a_seed_decides_everything():
    assert len({stack("--profile", "chaos, many", "--seed", 3) for _ in range(2)}) == 1
