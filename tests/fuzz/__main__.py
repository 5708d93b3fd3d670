"""`python -m tests.fuzz`: fuzz for a while, or replay one input."""

from __future__ import annotations

import argparse
import time

from tests.fuzz.loop import fuzz, keep
from tests.fuzz.targets import TARGETS, begin


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write what is new to the corpus")
    parser.add_argument("--input", help="hex: run the target on this alone")
    given = parser.parse_args()
    for name in given.targets or TARGETS:
        target, codec = TARGETS[name]
        if given.input is not None:
            target(bytes.fromhex(given.input))
            print(f"{name}: stands it")
            continue
        end = time.monotonic() + given.seconds
        rounds, corpus, seen = fuzz(
            name, target, codec, begin(name), given.seed, lambda _, end=end: time.monotonic() < end
        )
        print(f"{name}: seed {given.seed}, {rounds} rounds, {seen} edges, {len(corpus)} inputs")
        if given.keep:
            keep(name, corpus)


if __name__ == "__main__":
    main()
