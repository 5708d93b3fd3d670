"""The whole stack keeps its promises in every seeded world (test_mutants.py: and would notice).

Each run is a process of its own: a world owns time and chance, and the order of sets of names.
A failure prints the command that plays its world again.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

# The million of every run, in two processes; each of them begins at a seed.
MILLION = 1_000_000
PARTS = (0, 10_000)
NIGHTLY_STEPS = 5_000_000


def stack(*arguments: object) -> str:
    """What `python -m tests.stack` prints; it must succeed."""
    command = [sys.executable, "-m", "tests.stack", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    print(ran.stdout)
    return ran.stdout


def steps_in(text: str) -> int:
    return int(re.search(r"^([\d,]+) steps", text, re.MULTILINE)[1].replace(",", ""))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", PARTS)
def test_promises_hold_for_its_part_of_a_million_steps(first, say):
    told = stack("--steps", MILLION // len(PARTS), "--seed", first)
    say("tests/stack: " + next(line for line in told.splitlines() if " steps of " in line))
    assert steps_in(told) * len(PARTS) >= MILLION
    assert "'length': " in told, "nobody was answered"


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_promises_hold_all_night():
    assert steps_in(stack("--steps", NIGHTLY_STEPS, "--seed", 10**6)) >= NIGHTLY_STEPS
