"""A fleet's events, made by hand: two pushes, one of which waits, and a pull seen from outside."""

from __future__ import annotations

from neuron_push.protocol import TraceEvent
from neuron_push.trace.collect import Clock, Track


def event(at, name, transfer, detail="", seconds=0.0, value=0.0):
    return TraceEvent(at, name, transfer, detail, seconds, value)


def push(name, begin, *, registered=0.004):
    """One push whose every phase is known, in milliseconds from `begin`."""

    def at(ms):
        return begin + ms / 1000

    router = [
        event(at(0), "arrived", name, f"req-{name}"),
        event(at(0.4), "chosen", name, "push P D"),
        event(at(1), "sent", name),
        event(at(40), "prefill answered", name),
        event(at(61), "first byte", name),
        event(at(90), "ended", name),
    ]
    prefill = [
        event(at(3), "prefill arrived", name, f"req-{name}"),
        event(at(5), "prefill scheduled", name),
        # Ranks know which prompt of the request they serve.
        event(at(30), "settled", name + "#0", value=512),
        event(at(registered * 1000), "registered", name + "#0", "D:0"),
        event(at(35), "settled last", name + "#0", value=1000),
        event(max(at(36), at(registered * 1000 + 1)), "posted", name + "#0", "D:0", 0.002, 488),
        event(max(at(48), at(registered * 1000 + 5)), "landed", name + "#0"),
    ]
    decode = [
        event(at(4), "decode arrived", name, f"req-{name}"),
        event(at(5), "wanted", name + "#0", value=999),
        event(at(50), "notified", name + "#0", "P:0", value=1 << 20),
        event(at(51), "received", name + "#0"),
        event(at(53), "decode scheduled", name),
    ]
    return router, prefill, decode


def pull(name, begin):
    return [
        event(begin, "arrived", name, f"req-{name}"),
        event(begin, "chosen", name, "pull P D"),
        event(begin + 0.001, "sent", name),
        event(begin + 0.05, "prefill answered", name),
        event(begin + 0.09, "first byte", name),
    ]


def whole_pull(name, begin):
    """A pull whose every phase is known: (router, prefill, decode)."""

    def at(ms):
        return begin + ms / 1000

    router = [
        event(at(0), "arrived", name, f"req-{name}"),
        event(at(0.4), "chosen", name, "pull P D"),
        event(at(1), "sent", name),
        event(at(40), "prefill answered", name),
        event(at(80), "first byte", name),
    ]
    prefill = [
        event(at(3), "prefill arrived", name, f"req-{name}"),
        event(at(5), "prefill scheduled", name),
        event(at(35), "settled last", name + "#0", value=1000),
        event(at(45), "registered", name + "#0", "D:0"),
    ]
    decode = [
        event(at(43), "decode arrived", name, f"req-{name}"),
        event(at(44), "wanted", name + "#0", value=999),
        event(at(47), "read posted", name + "#0", "P:0", 0.001, 500),
        event(at(50), "read posted", name + "#0", "P:0", 0.001, 499),
        event(at(60), "read", name + "#0", value=1 << 20),
        event(at(70), "read", name + "#0", value=1 << 20),
        event(at(72), "received", name + "#0"),
        event(at(75), "decode scheduled", name),
    ]
    return router, prefill, decode


def tracks():
    parts = [push("a", 100.0), push("b", 100.02, registered=0.040)]
    joined = [[e for part in parts for e in part[side]] for side in range(3)]
    joined[0] += pull("c", 100.2)
    clock = Clock(0.0, 0.0001)
    names = ("router", "P rank 0", "D rank 0")
    return [Track(name, clock, events) for name, events in zip(names, joined, strict=True)]
