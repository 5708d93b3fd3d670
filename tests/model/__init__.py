"""Exhaustive checks of the real state machines in small bounds.

Why no TLA+: a specification beside the code is a second thing to keep true. Here the code that
ships (core, scheduler halves, pins, worker half) is what is explored, and adding an attribute or
a message to it needs no change here. What is specified is the world: two engines, a router that
sends legs, a network that keeps what it was given, WRITEs that land when they like (states.py).

    python -m tests.model                  the bounds of CI, with counts
    python -m tests.model --night          larger ones
    python -m tests.model --mutant NAME    the shortest way to what a planted defect breaks
"""
