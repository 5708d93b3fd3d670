"""Many worlds, counted and printed."""

from __future__ import annotations

import itertools
import time
import traceback
from collections import Counter

from tests.stack.profiles import PROFILES
from tests.stack.world import World

# Of so many worlds, one is played twice, and both must have gone alike.
AGAIN = 31


def replay(name: str, seed: int) -> str:
    return f"python -m tests.stack --profile {name!r} --seed {seed}"


def once(name: str, seed: int, trace: bool = False) -> World:
    """One world, told."""
    world = World(seed, PROFILES[name])
    try:
        world.run()
    except Exception:  # noqa: BLE001  told, with the way to see it again
        traceback.print_exc()
        raise SystemExit(f"replay: {replay(name, seed)}") from None
    finally:
        if trace:
            for when, text in world.clock.trace:
                print(f"{when:9.4f}  {text}")
    print(f"{name}, seed {seed}: {world.clock.counted:,} steps {dict(world.clock.steps)}")
    print(f"{dict(world.outcomes)} {dict(world.notes)}")
    return world


def campaign(first: int, steps: int, seconds: float) -> None:
    """Worlds of all profiles from a seed on; a failure names itself.

    A step is a turn in which something happened: a message or bytes arrived, a process did
    something about it, a step of an engine began or ended with something in it, a person came.
    Turns in which nothing was found to do are counted apart, as idle.
    """
    began, worlds = time.process_time(), 0
    total: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for seed, name in ((seed, name) for seed in itertools.count(first) for name in PROFILES):
        try:
            world = World(seed, PROFILES[name]).run()
            if worlds % AGAIN == 0:
                again = World(seed, PROFILES[name]).run()
                assert world.story() == again.story(), "a world did not replay from its seed"
        except BaseException:
            print(f"replay: {replay(name, seed)}", flush=True)
            raise
        total.update(world.clock.steps)
        outcomes.update(world.outcomes)
        worlds += 1
        counted, spent = total.total() - total["idle"], time.process_time() - began
        if counted >= steps or spent >= seconds:
            break
    shown = ", ".join(f"{kind} {count:,}" for kind, count in total.most_common())
    print(f"{counted:,} steps of {worlds} worlds, seeds {first} to {seed}, {spent:.0f} s")
    print(f"turns: {shown}\nrequests: {dict(outcomes)}")
