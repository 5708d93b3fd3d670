"""Coverage-guided fuzzing of everything that reads what a stranger sent.

A target takes bytes and raises for nothing but its own refusal. Inputs that reach a new line are
kept and changed again; `corpus/` has those found so far and every input that ever failed, one in
hex per line.

    python -m tests.fuzz [TARGET ...] [--seconds N] [--seed N] [--keep]

(atheris instruments C and needs its own build of Python code; our decoders' C is msgspec's, and a
line tracer over our own modules is all that is wanted.)
"""
