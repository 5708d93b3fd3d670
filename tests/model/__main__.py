"""`python -m tests.model`: explore, or hunt a mutant."""

from __future__ import annotations

import argparse
import logging
import time

import pytest

from tests.model.mutants import MUTANTS, hunt
from tests.model.scenarios import MOST, NIGHT, SCENARIOS
from tests.model.space import Space
from tests.model.walk import play


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("bounds", nargs="*", help=f"of {', '.join([*SCENARIOS, *NIGHT])}")
    parser.add_argument("--night", action="store_true", help="the larger bounds")
    parser.add_argument("--walk", type=int, metavar="SEED", help="one long random run")
    parser.add_argument("--steps", type=int, default=3000, help="of --walk")
    parser.add_argument("--mutant", choices=[mutant.__name__ for mutant in MUTANTS])
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if given.walk is not None:
        walk = play(given.walk, given.steps)
        print(f"seed {given.walk}: {walk.steps} steps, {walk.received} requests received")
        return
    if given.mutant:
        with pytest.MonkeyPatch.context() as patch:
            print(hunt(next(m for m in MUTANTS if m.__name__ == given.mutant), patch))
        return
    known = {**SCENARIOS, **NIGHT}
    for name in given.bounds or (NIGHT if given.night else SCENARIOS):
        space, began = Space(known[name]), time.process_time()
        states = space.explore(MOST, whole=False)
        print(
            f"{name:24} {states:9,} states {space.steps:10,} steps {len(space.locals):7,} process "
            f"states {time.process_time() - began:7.1f} s"
            f"{'' if space.whole else ', and there are more'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
