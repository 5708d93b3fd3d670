"""The loop: choose an input, change it, run it under a line tracer, keep what reaches new lines."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import msgspec

CORPUS = Path(__file__).with_name("corpus")
MOST = 1 << 16  # bytes of one input
NUMBERS = (0, 1, -1, 127, 255, 2**15, 2**31, 2**32, 2**40, 2**63 - 1, -(2**63), 2**64 - 1)
VALUES = (None, True, 0, -1, 2**63, 0.5, "", "x" * 600, b"", b"\0" * 70, [], {}, [[]], "\ud7ff")


def read(name: str) -> list[bytes]:
    """The inputs kept for a target."""
    path = CORPUS / f"{name}.txt"
    return [bytes.fromhex(line) for line in path.read_text().split()] if path.exists() else []


def keep(name: str, inputs) -> None:
    """Write a target's inputs, shortest first."""
    lines = sorted({data.hex() for data in inputs}, key=lambda line: (len(line), line))
    (CORPUS / f"{name}.txt").write_text("\n".join(lines) + "\n")


class Tracer:
    """Pairs of lines that follow each other in the package's own code."""

    def __init__(self, part="neuron_push"):
        self._part = f"/{part}/"
        self.seen: set = set()
        self.fresh = False

    def run(self, target, data):
        """Run a target; whether it went where none went before."""
        self.fresh = False
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            target(data)
        finally:
            sys.settrace(before)
        return self.fresh

    def _call(self, frame, event, argument):
        code = frame.f_code
        if self._part not in code.co_filename:
            return None
        last = 0

        def line(frame, event, argument):
            nonlocal last
            edge = (code, last, frame.f_lineno)
            last = frame.f_lineno
            if edge not in self.seen:
                self.seen.add(edge)
                self.fresh = True
            return line

        return line


def change(rng: random.Random, data: bytes, others, codec) -> bytes:
    """Another input, close to this one."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        how = rng.randrange(7)
        if how >= 4 and codec is not None:
            data = _restructure(rng, data, others, codec)
        elif how == 0 and data:
            spot = rng.randrange(len(data))
            data = data[:spot] + bytes([data[spot] ^ 1 << rng.randrange(8)]) + data[spot + 1 :]
        elif how == 1:
            spot = rng.randrange(len(data) + 1)
            data = data[:spot] + rng.randbytes(rng.choice([1, 1, 2, 8])) + data[spot:]
        elif how == 2:
            low, high = sorted(rng.randrange(len(data) + 1) for _ in range(2))
            data = data[:low] + data[high:]
        else:
            other = rng.choice(others)
            data = data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]
    return data[:MOST]


def _restructure(rng, data, others, codec):
    """Change one value inside, or put one of another input in its place."""
    head, decoder, encoder = codec
    try:
        value = decoder.decode(data[head:])
        if rng.random() < 0.3:
            donor = decoder.decode(rng.choice(others)[head:])
            value = _put(rng, value, _pick(rng, donor))
        else:
            value = _put(rng, value, rng.choice(VALUES + NUMBERS))
        return data[:head] + encoder.encode(value)
    except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError, TypeError):
        return data


def _pick(rng, value):
    while isinstance(value, list | dict) and value and rng.random() < 0.7:
        value = rng.choice(list(value.values()) if isinstance(value, dict) else value)
    return value


def _put(rng, value, new):
    if isinstance(value, list) and value and rng.random() < 0.9:
        spot = rng.randrange(len(value))
        return [*value[:spot], _put(rng, value[spot], new), *value[spot + 1 :]]
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        return {**value, name: _put(rng, value[name], new)}
    return new


MSGPACK = (3, msgspec.msgpack.Decoder(), msgspec.msgpack.Encoder())
JSON = (0, msgspec.json.Decoder(), msgspec.json.Encoder())


class Failed(AssertionError):
    """An input that a target does not stand."""


def fuzz(name, target, codec, begin, seed, go_on):
    """Fuzz from `begin` while `go_on(rounds)`; returns (rounds, inputs kept, edges seen).

    Raises Failed with the input.
    """
    rng, tracer, rounds = random.Random(seed), Tracer(), 0
    corpus = []

    def attempt(data):
        try:
            return tracer.run(target, data)
        except Exception as error:
            raise Failed(
                f"{name}: {type(error).__name__}: {error}\n"
                f"replay: python -m tests.fuzz {name} --input {data.hex()}"
            ) from error

    for data in dict.fromkeys(begin):
        attempt(data)
        corpus.append(data)
    while go_on(rounds):
        rounds += 1
        data = change(rng, rng.choice(corpus), corpus, codec)
        if attempt(data):
            corpus.append(data)
    return rounds, corpus, len(tracer.seen)
