"""Copies of a running machine, and keys under which two equal machines are one.

Both walk every attribute that they find, so what a machine will have tomorrow is copied and
compared too. Times count relative to the machine's clock, saturated: a deadline is due or it is
not, however long the run that led there. What only measures (`MEASURES`) is left out of keys.
"""

from __future__ import annotations

import copy
import itertools
import types
from array import array
from collections import deque
from enum import Enum

import msgspec
import numpy as np

from neuron_push.plan import Blocks
from neuron_push.rendezvous.registrations import DOUBTFUL

# Attributes that hold a time of the machine's clock, by class.
TIMES = {
    "Attempt": {"deadline", "send_at"},
    "Link": {"heard", "spoke", "asked"},
    "Links": {"_ticked"},
    "Write": {"posted"},
    "Read": {"posted"},
    "Want": {"asked"},
    "Sending": {"expires", "repeat_at"},
    "Source": {"finished"},
    "Rotation": {"deadline", "told"},
    "Generations": {"_last"},
}
# Attributes that are measured and never decided by, by class.
MEASURES = {
    "Attempt": {"began"},
    "Sending": {"began", "started"},
    "Route": {"began"},
    "Process": {"now", "effects"},
    "Pin": {"since", "ended"},
    "Prefills": {"_steps"},  # a name, for models whose layers travel apart
    "WorkerHalf": {"_last_news", "_meta"},
    "Core": {"_handlers", "_messages"},  # code
}
# Attributes that count up for ever, by class, and the number from which on they make no difference.
COUNTERS = {"Attempt": {"sent": DOUBTFUL + 1}}
NOTHING: set[str] = set()
ATOMS = (
    int, float, str, bytes, bool, type(None), type, Enum, np.ndarray, msgspec.Struct,
    types.BuiltinFunctionType, types.ModuleType, frozenset, property,
)  # fmt: skip
PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
COUNT = type(itertools.count())
# Never changed once made.
PLANS = "neuron_push.plan"
_encoder = msgspec.msgpack.Encoder()


def attributes(thing):
    """Names of everything that an object holds, from its dict and the slots of its classes."""
    names = _slots(type(thing))
    held = getattr(thing, "__dict__", None)
    return names if held is None else [*names, *held]


_known: dict[type, list[str]] = {}


def _slots(kind):
    names = _known.get(kind)
    if names is None:
        held = [_as_tuple(base.__dict__.get("__slots__", ())) for base in kind.__mro__]
        found = dict.fromkeys(slot for slots in held for slot in slots)
        names = _known[kind] = [n for n in found if n not in ("__dict__", "__weakref__")]
    return names


def _as_tuple(slots):
    return (slots,) if isinstance(slots, str) else tuple(slots)


def clone(thing, memo):
    """A copy that shares only what nobody changes; `memo` starts with {id: object} of that."""
    if type(thing) in PLAIN or isinstance(thing, ATOMS) or type(thing).__module__.startswith(PLANS):
        return thing
    known = memo.get(id(thing))
    if known is not None:
        return known
    kind = type(thing)
    if kind is array:
        made = memo[id(thing)] = thing[:]
    elif kind is dict:
        made = memo[id(thing)] = {}
        for key, value in thing.items():
            made[clone(key, memo)] = clone(value, memo)
    elif kind is list:
        made = memo[id(thing)] = []
        made.extend([clone(value, memo) for value in thing])
    elif kind is tuple:
        made = tuple([clone(value, memo) for value in thing])
    elif kind is set:
        made = memo[id(thing)] = {clone(value, memo) for value in thing}
    elif kind is deque:
        made = memo[id(thing)] = deque([clone(value, memo) for value in thing])
    elif kind is COUNT:
        made = memo[id(thing)] = copy.copy(thing)
    elif kind is types.FunctionType:
        made = _function(thing, memo)
    elif kind is types.MethodType:
        made = types.MethodType(thing.__func__, clone(thing.__self__, memo))
    elif kind is types.CellType:
        made = memo[id(thing)] = types.CellType()
        made.cell_contents = clone(thing.cell_contents, memo)
    else:
        made = memo[id(thing)] = object.__new__(kind)
        for name in attributes(thing):
            if hasattr(thing, name):
                object.__setattr__(made, name, clone(getattr(thing, name), memo))
    return made


def _function(thing, memo):
    if not thing.__closure__:
        return thing
    closure = tuple([clone(cell, memo) for cell in thing.__closure__])
    made = types.FunctionType(
        thing.__code__, thing.__globals__, thing.__name__, thing.__defaults__, closure
    )
    made.__kwdefaults__ = thing.__kwdefaults__
    return made


class Key:
    """Makes one machine's key; `now` is its clock, `shared` ids of what never changes."""

    def __init__(self, now, most, shared):
        self._now, self._most, self._shared = now, most, shared
        self._seen = {}

    def of(self, thing):
        if type(thing) in PLAIN:
            return thing
        if isinstance(thing, np.ndarray | array):
            return thing.tobytes()
        if isinstance(thing, msgspec.Struct):
            return "shared" if id(thing) in self._shared else _encoder.encode(thing)
        if isinstance(thing, ATOMS):
            return thing
        if id(thing) in self._shared:
            return "shared"
        kind = type(thing)
        if kind is tuple:
            return tuple([self.of(value) for value in thing])
        if kind.__module__.startswith(PLANS) and kind is not Blocks:
            return kind.__name__  # follows from two geometries
        number = self._seen.get(id(thing))
        if number is not None:
            return "again", number
        self._seen[id(thing)] = len(self._seen)
        if kind is dict:
            return tuple([(self.of(key), self.of(value)) for key, value in thing.items()])
        if kind is list or kind is deque:
            return tuple([self.of(value) for value in thing])
        if kind is set:
            return frozenset([self.of(value) for value in thing])
        if kind is COUNT:
            return thing.__reduce__()[1]
        if kind is types.FunctionType:
            cells = thing.__closure__ or ()
            return thing.__qualname__, tuple([self.of(cell.cell_contents) for cell in cells])
        if kind is types.MethodType:
            return thing.__func__.__qualname__, self.of(thing.__self__)
        return self._object(thing, kind.__name__)

    def _object(self, thing, name):
        times, measures = TIMES.get(name, NOTHING), MEASURES.get(name, NOTHING)
        counters = COUNTERS.get(name, {})
        held = [name]
        for attribute in attributes(thing):
            if attribute in measures or not hasattr(thing, attribute):
                continue
            value = getattr(thing, attribute)
            if attribute in times and value is not None:
                held.append(self._time(value))
            elif attribute in counters:
                held.append(min(value, counters[attribute]))
            else:
                held.append(self.of(value))
        return tuple(held)

    def _time(self, value):
        relative = max(-self._most, min(self._most, value - self._now))
        return round(relative)
