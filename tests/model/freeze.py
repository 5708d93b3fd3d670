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
    "WorkerHalf": {"_last_news"},
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
    kind = type(thing)
    if kind in PLAIN:
        return thing
    copies = COPIES.get(kind) or COPIES.setdefault(kind, _copies_of(kind))
    if copies is _same:
        return thing
    known = memo.get(id(thing))
    return copies(thing, memo) if known is None else known


def _copies_of(kind):
    """What copies the instances of a class."""
    atom = issubclass(kind, ATOMS) or kind.__module__.startswith(PLANS)
    return _same if atom else _object


def _same(thing, memo):
    return thing


def _dict(thing, memo):
    made = memo[id(thing)] = {}
    for key, value in thing.items():
        made[clone(key, memo)] = clone(value, memo)
    return made


def _list(thing, memo):
    made = memo[id(thing)] = []
    made.extend([clone(value, memo) for value in thing])
    return made


def _tuple(thing, memo):
    return tuple([clone(value, memo) for value in thing])


def _set(thing, memo):
    made = memo[id(thing)] = {clone(value, memo) for value in thing}
    return made


def _deque(thing, memo):
    made = memo[id(thing)] = deque([clone(value, memo) for value in thing])
    return made


def _array(thing, memo):
    made = memo[id(thing)] = thing[:]
    return made


def _count(thing, memo):
    made = memo[id(thing)] = copy.copy(thing)
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


def _method(thing, memo):
    return types.MethodType(thing.__func__, clone(thing.__self__, memo))


def _cell(thing, memo):
    made = memo[id(thing)] = types.CellType()
    made.cell_contents = clone(thing.cell_contents, memo)
    return made


def _object(thing, memo):
    made = memo[id(thing)] = object.__new__(type(thing))
    for name in _slots(type(thing)):
        if hasattr(thing, name):
            object.__setattr__(made, name, clone(getattr(thing, name), memo))
    held = getattr(thing, "__dict__", None)
    if held:
        copied = made.__dict__
        for name, value in held.items():
            copied[name] = value if type(value) in PLAIN else clone(value, memo)
    return made


# By class, found as they are met.
COPIES = {
    dict: _dict, list: _list, tuple: _tuple, set: _set, deque: _deque, array: _array,
    COUNT: _count, types.FunctionType: _function, types.MethodType: _method,
    types.CellType: _cell,
}  # fmt: skip


class Key:
    """Makes one machine's key; `now` is its clock, `shared` ids of what never changes."""

    def __init__(self, now, most, shared):
        self._now, self._most, self._shared = now, most, shared
        self._seen = {}

    def of(self, thing):
        kind = type(thing)
        if kind in PLAIN:
            return thing
        words = WORDS.get(kind) or WORDS.setdefault(kind, _words_of(kind))
        return words(self, thing)

    def _atom(self, thing):
        return thing

    def _bytes(self, thing):
        return thing.tobytes()

    def _record(self, thing):
        return "shared" if id(thing) in self._shared else _encoder.encode(thing)

    def _plan(self, thing):
        """It follows from two geometries."""
        return "shared" if id(thing) in self._shared else type(thing).__name__

    def _tuple(self, thing):
        if id(thing) in self._shared:
            return "shared"
        return tuple([self.of(value) for value in thing])

    def _function(self, thing):
        cells = thing.__closure__ or ()
        return thing.__qualname__, tuple([self.of(cell.cell_contents) for cell in cells])

    def _method(self, thing):
        return thing.__func__.__qualname__, self.of(thing.__self__)

    def _dict(self, thing):
        return tuple([(self.of(key), self.of(value)) for key, value in thing.items()])

    def _list(self, thing):
        return tuple([self.of(value) for value in thing])

    def _set(self, thing):
        return frozenset([self.of(value) for value in thing])

    def _count(self, thing):
        return thing.__reduce__()[1]

    def _object(self, thing):
        name = type(thing).__name__
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
                held.append(value if type(value) in PLAIN else self.of(value))
        return tuple(held)

    def _time(self, value):
        relative = max(-self._most, min(self._most, value - self._now))
        return round(relative)


def _once(words):
    """Things that may be held in several places: told where first met, numbered from then on."""

    def numbered(self, thing):
        if id(thing) in self._shared:
            return "shared"
        number = self._seen.get(id(thing))
        if number is not None:
            return "again", number
        self._seen[id(thing)] = len(self._seen)
        return words(self, thing)

    return numbered


def _words_of(kind):
    """What makes the keys of the instances of a class."""
    if issubclass(kind, np.ndarray | array):
        return Key._bytes
    if issubclass(kind, msgspec.Struct):
        return Key._record
    if issubclass(kind, ATOMS):
        return Key._atom
    if kind.__module__.startswith(PLANS) and kind is not Blocks:
        return Key._plan
    return _once(Key._object)


# By class, found as they are met.
WORDS = {
    tuple: Key._tuple,
    dict: _once(Key._dict),
    list: _once(Key._list),
    deque: _once(Key._list),
    set: _once(Key._set),
    COUNT: _once(Key._count),
    types.FunctionType: _once(Key._function),
    types.MethodType: _once(Key._method),
}
