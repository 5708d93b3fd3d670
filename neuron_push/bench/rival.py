"""The engine half of `bench faults`: one script, this connector and vLLM's NixlPushConnector.

Two engines in processes of their own (seat.py); a prompt of two chunks is half computed when the
fault comes. What is waited for ends the case; a connector that is not done after `wait` seconds
is reported with that, and its engines are killed. Every case begins with engines of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from neuron_push.bench.pair import OURS, PUSH, ahead
from neuron_push.bench.seat import CHUNK_BLOCKS, Recipe, Seat
from neuron_push.bench.shells import BLOCK, model_folder
from neuron_push.errors import NeuronPushError
from neuron_push.ports import free_ports

__all__ = ["CASES", "CONNECTORS", "run", "table"]

CONNECTORS: Final = (OURS, PUSH)
TOKENS: Final = 2 * CHUNK_BLOCKS * BLOCK
# How long engines may take to serve the first request, seconds.
WARM_UP: Final = 90.0
Figures = dict[str, float | None]  # seconds; None: not within the wait

_numbers = itertools.count(1)


@dataclass
class Duel:
    """One pair of engines of one connector, for one case."""

    stack: ExitStack
    connector: str
    policy: str
    wait: float
    prefill: Seat = field(init=False)
    decode: Seat = field(init=False)

    def __post_init__(self) -> None:
        self.prefill = self._seat("kv_producer", "P")
        self.decode = self._seat("kv_consumer", "D")
        for seat in (self.prefill, self.decode):
            seat.ready()
        time.sleep(1.0)  # ranks announce themselves
        if self.push(WARM_UP) is None:
            raise NeuronPushError(f"{self.connector}: no request succeeded before the fault")
        self.rest = self.prefill.call("free"), self.decode.call("free")

    def again(self, seat: Seat) -> Seat:
        """The engine started anew on its port."""
        seat.kill()
        another = seat.again(f"{seat.recipe.engine}+")
        self.stack.callback(another.kill)
        another.ready()
        time.sleep(1.0)
        return another

    def begin(self) -> tuple[str, list[int], dict[str, Any]]:
        """A name, a prompt and prefill's parameters for the next request."""
        number = next(_numbers)
        prompt = [(number + 7 * i) % 4000 for i in range(TOKENS)]
        transfer = f"t{number}"
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        return f"cmpl-{number}-0-aaaaaaaa", prompt, params

    def half(self) -> str:
        """A request of which half is computed, and prefill stands; its name."""
        name, prompt, params = self.begin()
        self.prefill.call("stand_after", 1)
        self.prefill.call("add", name, prompt, params)
        self._decode(name, prompt, params["transfer_id"])
        self.until(lambda: self.prefill.call("stands"))
        time.sleep(0.3)  # what was computed is on its way, if the connector streams
        return name

    def push(self, wait: float = 0.0) -> float | None:
        """A whole request: seconds until decode has ended it with prefill's KV; None if not."""
        name, prompt, params = self.begin()
        began = time.monotonic()
        self.prefill.call("stand_after", None)
        self.prefill.call("add", name, prompt, params)
        self._decode(name, prompt, params["transfer_id"])
        ended = self.until(lambda: self.decode.call("ended", name), wait)
        computed = self.decode.call("computed", name)
        if ended is None or computed is None:
            return None
        self.until(lambda: self.prefill.call("ended", name), wait)
        return float(ended - began)

    def until(self, condition: Callable[[], Any], wait: float = 0.0) -> Any:
        """What a condition answers once it is true, or None after the wait."""
        deadline = time.monotonic() + (wait or self.wait)
        while not (found := condition()):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return found

    def since(self, began: float, condition: Callable[[], Any]) -> float | None:
        """Seconds from `began` until a condition holds (or to the time that it names)."""
        found = self.until(condition)
        if found is None:
            return None
        return (found if isinstance(found, float) else time.monotonic()) - began

    def blocks_back(self, seat: Seat, began: float) -> float | None:
        """Seconds until an engine holds no more than before."""
        rest = self.rest[seat is self.decode]
        return self.since(began, lambda: seat.call("free") >= rest)

    def _decode(self, name: str, prompt: list[int], transfer: str) -> None:
        place = self.prefill.call("identity"), self.prefill.recipe.port
        self.decode.call("add", name, prompt, ahead(self.connector, *place, name, transfer))

    def _seat(self, role: str, letter: str) -> Seat:
        (port,) = free_ports(1)
        recipe = Recipe(self.connector, role, f"{letter}{port}", port, self.policy, model_folder())
        seat = Seat(recipe)
        self.stack.callback(seat.kill)
        return seat


def prefill_killed_fail(duel: Duel) -> Figures:
    """P dies half way, D is to fail the request; then P comes back on its port."""
    name = duel.half()
    killed = time.monotonic()
    duel.prefill.kill()
    told = duel.since(killed, lambda: duel.decode.call("ended", name))
    back = duel.blocks_back(duel.decode, killed)
    duel.prefill = duel.again(duel.prefill)
    return {
        "P killed, fail: D's request ends": told,
        "P killed, fail: D's blocks back": back,
        "P restarted on its port: next request": duel.push(),
    }


def prefill_killed_recompute(duel: Duel) -> Figures:
    """P dies half way, D is to compute the prompt itself."""
    name = duel.half()
    killed = time.monotonic()
    duel.prefill.kill()
    computes = duel.since(killed, lambda: duel.decode.call("computed", name))
    return {"P killed, recompute: D computes": computes}


def prefill_aborts(duel: Duel) -> Figures:
    """P's request is aborted half way."""
    name = duel.half()
    aborted = time.monotonic()
    duel.prefill.call("abort", name)
    duel.prefill.call("stand_after", None)
    told = duel.since(aborted, lambda: duel.decode.call("ended", name))
    return {
        "P aborts: D's request ends": told,
        "P aborts: D's blocks back": duel.blocks_back(duel.decode, aborted),
    }


def decode_killed(duel: Duel) -> Figures:
    """D dies half way, P goes on; then D comes back on its port."""
    duel.half()
    killed = time.monotonic()
    duel.decode.kill()
    duel.prefill.call("stand_after", None)
    back = duel.blocks_back(duel.prefill, killed)
    duel.decode = duel.again(duel.decode)
    return {"D killed: P's blocks back": back, "D restarted on its port: next request": duel.push()}


def decode_aborts(duel: Duel) -> Figures:
    """D's request is aborted half way, P goes on."""
    name = duel.half()
    aborted = time.monotonic()
    duel.decode.call("abort", name)
    duel.prefill.call("stand_after", None)
    back = duel.blocks_back(duel.decode, aborted)
    return {
        "D aborts: D's blocks back": back,
        "D aborts: P's blocks back": duel.blocks_back(duel.prefill, aborted),
    }


CASES: Final[Sequence[tuple[Callable[[Duel], Figures], str]]] = (
    (prefill_killed_fail, "fail"),
    (prefill_killed_recompute, "recompute"),
    (prefill_aborts, "fail"),
    (decode_killed, "fail"),
    (decode_aborts, "fail"),
)


def table(found: dict[str, dict[str, float | None]], wait: float) -> Iterator[str]:
    """The same for people."""
    if found:
        yield f"{'milliseconds, engines':<42}" + "".join(f"{name:>22}" for name in CONNECTORS)
    for figure, values in found.items():
        cells = (_cell(values, name, wait) for name in CONNECTORS)
        yield f"{figure:<42}" + "".join(f"{cell:>22}" for cell in cells)


def _cell(values: dict[str, float | None], name: str, wait: float) -> str:
    if name not in values:
        return "-"
    value = values[name]
    return f"> {wait:g} s" if value is None else f"{value:.0f}"


def run(wait: float, say: Callable[[str], None]) -> dict[str, dict[str, float | None]]:
    """Every case with each connector: {figure: {connector: milliseconds, None beyond `wait`}}.

    A connector that could not even begin a case is missing there, and `say` hears why.
    """
    found: dict[str, dict[str, float | None]] = {}
    for case, policy in CASES:
        for connector in CONNECTORS:
            title = f"{case.__name__.replace('_', ' ')}: {connector}"
            say(title)
            try:
                with ExitStack() as stack:
                    figures = case(Duel(stack, connector, policy, wait))
            except NeuronPushError as error:
                say(f"{title}: {error}")
                continue
            for name, seconds in figures.items():
                value = None if seconds is None else round(seconds * 1000, 1)
                found.setdefault(name, {})[connector] = value
    return found
