"""A scene: one rank here, its peers in processes of their own, and a healthy peer that goes on.

The rank under test runs in the test's process; what is stopped and killed runs in children.
A `Stream` is the healthy peer: one transfer held half way and small ones without end, each
compared byte for byte.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from neuron_push.bench.child import Child
from neuron_push.bench.rank import Rank, Shape
from neuron_push.config import Config

# 2 MiB per block; 32 MiB are more than sockets hold, so a stopped sender leaves a WRITE half done.
LARGE = Shape(blocks=24, width=8192)
SMALL = Shape(blocks=24, width=16)
# Blocks of the transfer that is hit; of the one held half way; of the stream's; of new ones.
HIT, HELD, FLOW, FRESH = list(range(1, 17)), [17, 18], [19], [20, 21]
# What a busy machine may add to any bound.
SLACK = 6.0


# How a process stands after each fault.
FALLEN = {"stop": "T", "kill": "Z"}


class Scene:
    """Ranks and streams of one test; leaving it ends them all."""

    def __init__(self, stack: ExitStack, config: Config, shape: Shape = SMALL) -> None:
        self._stack = stack
        self.config = config
        self.shape = shape
        self.streams: list[Stream] = []

    def child(self, engine: str, role: str) -> Child:
        child = Child(engine, role, self.config, self.shape)
        self._stack.callback(child.kill)
        return child

    def again(self, child: Child) -> Child:
        """The same engine, started anew on its port."""
        child.kill()
        another = child.again()
        self._stack.callback(another.kill)
        return another

    def rank(self, engine: str, role: str) -> Rank:
        rank = Rank(engine, role, self.config, self.shape)
        self._stack.callback(rank.close)
        return rank

    def stream(self, source, sink) -> Stream:
        """A healthy pair beside the one that is hit."""
        self.streams.append(Stream(source, sink))
        return self.streams[-1]

    def until(self, condition, within=30.0, what=""):
        """Wait for a condition while the streams flow."""
        deadline = time.monotonic() + within
        while not condition():
            if time.monotonic() > deadline:
                said = what() if callable(what) else what
                raise AssertionError(f"not within {within} s: {said}")
            for stream in self.streams:
                stream.step()
            time.sleep(0.002)
        return time.monotonic()

    def hears(self, end, kind, number, within=30.0):
        """Wait for a report of a rank here or in a child; when it came."""
        return self.until(
            lambda: end.call("has", kind, number),
            within,
            lambda: f"{kind} {number} of {end.call('state')}",
        )

    def flow(self, seconds):
        """Let the streams flow for a while."""
        deadline = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= deadline, seconds + SLACK)

    def finish(self):
        """What the healthy peers had under way arrives as well."""
        for stream in self.streams:
            stream.finish(self)


class Stream:
    """Transfers between two healthy ranks."""

    def __init__(self, source, sink) -> None:
        self.source, self.sink = source, sink
        self.done = 0
        self._name = f"{source.address.port}"
        self._held = source.call("offer", f"held {self._name}", HELD, 9000, 1)
        self._holding = sink.call("want", f"held {self._name}", HELD, source.address)
        self._next()

    def _next(self):
        self._stamp = 9001 + self.done
        name = f"flow {self._name} {self.done}"
        self.source.call("offer", name, FLOW, self._stamp)
        self._wanted = self.sink.call("want", name, FLOW, self.source.address)

    def step(self):
        for number in (self._wanted, self._holding):
            failed = self.sink.call("has", "ReceiveFailed", number)
            assert not failed, self.sink.call("reason", number)
        if self.sink.call("has", "Received", self._wanted):
            assert self.sink.call("exact", FLOW, self._stamp)
            self.done += 1
            self._next()

    def finish(self, scene):
        before = self.done
        scene.until(lambda: self.done > before, what="the healthy peer's next transfer")
        self.source.call("finish", self._held, 1)
        scene.hears(self.sink, "Received", self._holding)
        assert self.sink.call("exact", HELD, 9000)


def half_landed(p, d, fault):
    """D, in a child, falls with part of a WRITE landed: P waits for that after its first post."""
    d.call("arm", "half landed", fault, "P", HIT)
    p.arm("posted", lambda: d.wait_until(FALLEN[fault]), "D")


def transfer(scene, source, sink, name, blocks=FRESH, stamp=77, engine=""):
    """A whole transfer between two ranks, compared."""
    offered = source.call("offer", name, blocks, stamp)
    wanted = sink.call("want", name, blocks, source.address, engine)
    ended = lambda: any(sink.call("has", k, wanted) for k in ("Received", "ReceiveFailed"))  # noqa: E731
    scene.until(
        ended, what=lambda: f"transfer {name}: {source.call('state')}; {sink.call('state')}"
    )
    assert sink.call("has", "Received", wanted), sink.call("reason", wanted)
    assert sink.call("exact", blocks, stamp)
    scene.hears(sink, "Unpinned", wanted)
    scene.hears(source, "Unpinned", offered)


def nothing_left(scene, end):
    """Every session is over and every fence done."""

    def quiet():
        state = end.call("state")
        busy = state["attempts"] or state["sendings"] or state["sources"] or state["fencing"]
        assert state["failure"] == "None", state
        return not busy

    scene.until(quiet, what=f"{end.call('state')}")
