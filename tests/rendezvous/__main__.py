"""`python -m tests.rendezvous`: play random worlds, or one again.

python -m tests.rendezvous --steps 1000000 --seed 5     worlds of all profiles, from a seed on
python -m tests.rendezvous --profile chaos --seed 7     one world, told
"""

from __future__ import annotations

import argparse
import time

from tests.rendezvous.profiles import PROFILES
from tests.rendezvous.scenario import run


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.rendezvous", description=__doc__)
    parser.add_argument("--profile", choices=PROFILES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1_000_000)
    given = parser.parse_args()
    if given.profile:
        world = run(given.seed, PROFILES[given.profile])
        print(f"{given.profile}, seed {given.seed}: {world.steps} steps, {dict(world.outcomes)}")
        return
    steps, seed, began = 0, given.seed, time.process_time()
    while steps < given.steps:
        for name in PROFILES:
            try:
                steps += run(seed, PROFILES[name]).steps
            except BaseException:
                print(f"replay: python -m tests.rendezvous --profile {name!r} --seed {seed}")
                raise
        seed += 1
    worlds = (seed - given.seed) * len(PROFILES)
    print(
        f"{steps:,} steps of {worlds} worlds, seeds {given.seed} to {seed - 1}, "
        f"{time.process_time() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
