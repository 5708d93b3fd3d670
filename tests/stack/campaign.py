"""Many worlds, counted and printed."""

from __future__ import annotations

import time
import traceback
from collections import Counter

from tests.stack.profiles import PROFILES
from tests.stack.world import World


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
    """Worlds of all profiles from a seed on; a failure names itself."""
    began, seed, worlds = time.process_time(), first, 0
    total: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    while True:
        for name, profile in PROFILES.items():
            try:
                world = World(seed, profile).run()
            except BaseException:
                print(f"replay: {replay(name, seed)}", flush=True)
                raise
            total.update(world.clock.steps)
            outcomes.update(world.outcomes)
            worlds += 1
            counted, spent = total.total() - total["idle"], time.process_time() - began
            if counted >= steps or spent >= seconds:
                shown = ", ".join(f"{kind} {count:,}" for kind, count in total.most_common())
                print(
                    f"{counted:,} steps of {worlds} worlds, seeds {first} to {seed}, {spent:.0f} s"
                )
                print(f"turns: {shown}\nrequests: {dict(outcomes)}")
                return
        seed += 1
