"""`python -m tests.stack`: play worlds of the whole stack, or one again.

python -m tests.stack --steps 1000000 --seed 5          worlds of all profiles, from a seed on
python -m tests.stack --seconds 25                      as many as this processor time allows
python -m tests.stack --profile chaos --seed 7 --trace  one world, told
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

if (
    os.environ.get("PYTHONHASHSEED") != "0"
):  # sets of names have an order: a seed decides everything
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.stack", *sys.argv[1:]])

from tests.stack.campaign import campaign, once
from tests.stack.mutants import hunt_all
from tests.stack.profiles import PROFILES


@contextmanager
def collecting_less() -> Iterator[None]:
    """What is loaded by now stays, and worlds are many small objects: a third of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    yield
    gc.unfreeze()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stack", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--profile", choices=PROFILES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of processor time")
    parser.add_argument("--mutants", help="then plant these defects, or all")
    parser.add_argument("--trace", action="store_true", help="tell what happened")
    given = parser.parse_args()
    with collecting_less():
        if given.profile:
            once(given.profile, given.seed, given.trace)
        else:
            campaign(given.seed, given.steps, given.seconds)
        if given.mutants:
            hunt_all(given.mutants)


if __name__ == "__main__":
    main()
