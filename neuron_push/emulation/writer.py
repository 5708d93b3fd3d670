"""The thread that stands for the device: it works off launched steps in order.

A launch returns at once. The step's bytes appear near the end of its modelled time, then its
tokens are drawn from what the cache holds, then its fence is done.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from neuron_push.emulation import pattern
from neuron_push.emulation.cost import Clock, Latencies, RealClock
from neuron_push.emulation.oracle import Oracle, Slots
from neuron_push.emulation.report import PERIOD, Reporter
from neuron_push.emulation.requests import Piece
from neuron_push.waiting import take

# Sums differences over tensor-parallel ranks; the identity for one rank.
Combine = Callable[[np.ndarray], np.ndarray]
# Called around the work on a step: "before", "written" and "drawn"; for faults.
Meddle = Callable[[str, "Step"], None]


@dataclass(eq=False)
class Step:
    """One launched batch."""

    pieces: Sequence[Piece]
    launched: float
    written: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    drawable: threading.Event = field(default_factory=threading.Event)
    allowed: Mapping[str, np.ndarray] = field(default_factory=dict)
    """By request, tokens that a grammar allows; known when `drawable` is set."""
    sampled: list[list[int]] = field(default_factory=list)
    error: BaseException | None = None
    layer: int | None = None
    """Of the layer hook that is being called, if one is."""
    filled: int = 0
    """Layers whose bytes are in memory."""

    def allow(self, tokens: Mapping[str, np.ndarray]) -> None:
        """Let tokens be drawn, for some requests out of these only."""
        self.allowed = tokens
        self.drawable.set()


class StepFence:
    """Done when a step's bytes are in memory, or those of its layers up to the one at hand."""

    def __init__(self, step: Step | None) -> None:
        self._step = step
        self._layer = step.layer if step is not None else None

    def done(self) -> bool:
        step = self._step
        early = step is not None and self._layer is not None and step.filled > self._layer
        return step is None or early or step.written.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self.done() or (self._step is not None and self._step.written.wait(timeout_s))


class Writer:
    """One rank's emulated device."""

    def __init__(
        self,
        oracle: Oracle,
        costs: Latencies,
        reporter: Reporter,
        *,
        checking: Checking | None = None,
        combine: Combine | None = None,
        clock: Clock | None = None,
        meddle: Meddle | None = None,
        early_fence: bool = False,
        layers: int = 0,
    ) -> None:
        """`layers`: how many there are, if their bytes appear one after the other."""
        self._oracle = oracle
        self._costs = costs
        self._reporter = reporter
        self._checking = checking or CHECKING["full"]
        self._combine = combine or (lambda values: values)
        self._clock = clock or RealClock()
        self._meddle = meddle or (lambda moment, step: None)
        self._early_fence = early_fence
        self._layers = layers
        self._queue: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._last: Step | None = None
        self._free_at = 0.0  # when the device has ended its last step
        self._pace = 0.0  # seconds of work per token, smoothed
        self.open_window = False  # a step has ended and none was launched since
        self._thread = threading.Thread(target=self._run, name="emulated-device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def launch(self, pieces: Sequence[Piece], *, drawable: bool = True) -> Step:
        """Hand a batch to the device; returns at once. Not `drawable`: `Step.allow` comes later."""
        self.open_window = False
        step = Step(pieces, self._clock.now())
        if drawable:
            step.drawable.set()
        self._last = step
        self._queue.put(step)
        return step

    def fence(self) -> StepFence:
        """Marks the end of what was launched so far."""
        return StepFence(None if self._early_fence else self._last)

    def wrote(self) -> None:
        """A WRITE has been posted (any thread)."""
        if self.open_window:
            self._reporter.summary.writes_early += 1
        else:
            self._reporter.summary.writes_late += 1

    def close(self) -> None:
        """Finish what was launched and stop."""
        self._queue.put(None)
        self._thread.join(10)
        self._reporter.close()

    def _run(self) -> None:
        while True:
            try:
                step = take(self._queue, PERIOD)
            except queue.Empty:
                self._reporter.idle()
                continue
            if step is None:
                return
            try:
                self.execute(step)
            except BaseException as error:
                step.error = error
                step.written.set()
                step.done.set()
                raise

    def execute(self, step: Step) -> None:
        """Work off one step, in its modelled time."""
        clock, summary = self._clock, self._reporter.summary
        tokens = sum(piece.count for piece in step.pieces)
        decodes = sum(piece.decodes for piece in step.pieces)
        single = sum(piece.count == 1 for piece in step.pieces)
        modelled = self._costs.step(tokens - single, single)
        end = max(step.launched, self._free_at) + modelled
        new = [_new_slots(piece) for piece in step.pieces]
        if not self._layers:
            clock.sleep_until(end - self._pace * tokens)
        begun, worked = clock.now(), time.thread_time()
        self._meddle("before", step)
        self._fill(step, _join([self._kept(slots) for slots in new]), end - modelled, end)
        self._meddle("written", step)
        if not step.drawable.is_set():  # the bytes are there on time, whenever the grammar comes
            clock.sleep_until(end)
            step.written.set()
            step.drawable.wait()
        self._draw(step, new)
        self._meddle("drawn", step)
        own = time.thread_time() - worked
        self._pace += 0.2 * ((clock.now() - begun) / max(1, tokens) - self._pace)
        clock.sleep_until(end)
        self._free_at = clock.now()
        step.written.set()
        self.open_window = True
        step.done.set()
        summary.steps += 1
        summary.prefill_tokens += tokens - decodes
        summary.decode_tokens += decodes
        summary.modelled_seconds += modelled
        summary.own_seconds += own
        summary.late_seconds += max(0.0, self._free_at - end)
        self._reporter.step_done()
        for piece in step.pieces:
            if piece.completes_prompt:
                self._reporter.prompt_done(piece.state.request, step.launched, self._free_at)

    def _fill(self, step: Step, slots: Slots, begin: float, end: float) -> None:
        """The step's bytes, at once or layer after layer over its time."""
        if not self._layers:
            self._oracle.fill(slots)
        # In at most 16 goes: each costs as much as what it writes.
        for start in range(0, self._layers, size := -(-self._layers // 16) or 1):
            stop = min(start + size, self._layers)
            share = stop / self._layers
            self._clock.sleep_until(begin + share * (end - begin) - self._pace * len(slots))
            self._oracle.fill_layers(slots, start, stop)
            step.filled = stop

    # ------------------------------------------------------------------ reading

    def _draw(self, step: Step, new: Sequence[Slots]) -> None:
        """Read what the step attends to, and draw each request's next token from it."""
        wrong = np.zeros(len(step.pieces), np.int64)
        for index, piece in enumerate(step.pieces):
            wrong[index] = self._read_context(piece)
        hashes = np.split(self._hashes(_join(new)), np.cumsum([len(slots) for slots in new])[:-1])
        wrong += self._read_new(step.pieces, new)
        wrong += self._read_states(step.pieces)
        wrong = self._combine(wrong)
        for piece, mine, difference in zip(step.pieces, hashes, wrong.tolist(), strict=True):
            state, stop = piece.state, piece.start + piece.count
            state.digest = (state.digest + _sum(mine) + difference) & (2**64 - 1)
            for group, (_, block) in piece.states.items():
                self._oracle.fill_state(group, block, pattern.state_key(state.digest))
            if stop < len(state.tokens):
                step.sampled.append([])  # a chunk of a prompt
                continue
            token = pattern.next_token(state.digest, stop, step.allowed.get(state.request))
            state.tokens.append(token)
            step.sampled.append([token])

    def _read_context(self, piece: Piece) -> int:
        """KV that became schedulable with this step: every byte of it, once."""
        if piece.context is None:
            return 0
        first, blocks = piece.context
        state = piece.state
        if first == 0:
            state.digest = 0
        positions = np.arange(first, piece.start)
        slots = _slots(piece, positions, blocks)
        self._reporter.summary.context_tokens += len(slots)
        state.digest += _sum(self._hashes(slots))
        read = self._sample(slots)
        return self._read([piece] * len(read), read, "context").sum().item()

    def _read_new(self, pieces: Sequence[Piece], new: Sequence[Slots]) -> np.ndarray:
        """Slots just written, and a few earlier ones, of all requests at once."""
        owners: list[int] = []
        parts = []
        for index, (piece, mine) in enumerate(zip(pieces, new, strict=True)):
            for slots in (self._sample(mine), self._sample(_slots(piece, *piece.again))):
                owners += [index] * len(slots)
                parts.append(slots)
        slots = _join(parts)
        found = self._read([pieces[owner] for owner in owners], slots, "step")
        wrong = np.zeros(len(pieces), np.int64)
        np.add.at(wrong, np.array(owners, np.int64), found)
        return wrong

    def _read_states(self, pieces: Sequence[Piece]) -> np.ndarray:
        """State pages as they are before the step: each is what all earlier tokens have made."""
        wrong = np.zeros(len(pieces), np.int64)
        for index, piece in enumerate(pieces):
            key = pattern.state_key(piece.state.digest)
            for group, (block, _) in piece.states.items() if piece.start else ():
                reading = self._oracle.read_state(group, block, piece.start - 1, key)
                moment = "step" if piece.context is None else "context"
                self._reporter.reading([piece.state.request], reading, moment)
                wrong[index] += reading.difference[0]
        return wrong

    def _read(self, owners: Sequence[Piece], slots: Slots, moment: str) -> np.ndarray:
        reading = self._oracle.read(slots)
        names = [piece.state.request for piece in owners] if reading.wrong_rows else []
        self._reporter.reading(names, reading, moment)
        return reading.difference

    def _hashes(self, slots: Slots) -> pattern.Words:
        return pattern.digests(self._oracle.keys(slots))

    def _kept(self, slots: Slots) -> Slots:
        """Those that the pattern is written to."""
        if self._checking.every == 1:
            return slots
        return _pick(slots, np.flatnonzero(slots.positions % self._checking.every == 0))

    def _sample(self, slots: Slots) -> Slots:
        """Those that are read."""
        kept, most = self._kept(slots), self._checking.samples
        if most is None or len(kept) <= most:
            return kept
        return _pick(kept, np.unique(np.linspace(0, len(kept) - 1, most).astype(np.int64)))


@dataclass(frozen=True)
class Checking:
    """How much of the pattern is written and read."""

    samples: int | None
    """Slots read at each moment; None: all."""
    every: int
    """Of so many positions, one holds the pattern."""


# By `verify`. Writing all of 32 KiB a token takes a sixth of a p5en's modelled prefill.
CHECKING: Final = {"full": Checking(None, 1), "sampled": Checking(8, 8), "none": Checking(0, 8)}


def _new_slots(piece: Piece) -> Slots:
    return _slots(piece, np.arange(piece.start, piece.start + piece.count), piece.blocks)


def _slots(piece: Piece, positions: np.ndarray, blocks: tuple[np.ndarray, ...]) -> Slots:
    known, count = piece.state.tokens, len(positions)
    if count and positions[-1] - positions[0] == count - 1:  # ascending, without a gap
        tokens = np.array(known[positions[0] : positions[-1] + 1], np.int64)
    else:
        tokens = np.array([known[position] for position in positions.tolist()], np.int64)
    return Slots(tokens, positions, blocks)


def _pick(slots: Slots, chosen: np.ndarray) -> Slots:
    if len(chosen) == len(slots):
        return slots
    return Slots(
        slots.tokens[chosen], slots.positions[chosen], tuple(rows[chosen] for rows in slots.blocks)
    )


def _join(parts: Sequence[Slots]) -> Slots:
    groups = len(parts[0].blocks)
    return Slots(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.positions for part in parts]),
        tuple(np.concatenate([part.blocks[g] for part in parts]) for g in range(groups)),
    )


def _sum(values: pattern.Words) -> int:
    return int(values.sum(dtype=np.uint64))
