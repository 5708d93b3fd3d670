"""What the scheduler has told about each request, as a model runner keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neuron_push.emulation.fill import Ints

# Positions of the earlier context that each step reads again.
RECHECKED = 2


@dataclass(eq=False)
class State:
    """One request. The writer thread appends to `tokens` and owns `digest`."""

    request: str
    tokens: list[int]
    tables: list[list[int]]
    prompt: int
    sampling: Any = None
    """vLLM's SamplingParams, as far as `sampling` understands them."""
    next: int = 0
    """Tokens launched so far (main loop)."""
    digest: int = 0
    """Over the tokens read so far (writer)."""


@dataclass(frozen=True)
class Piece:
    """One request's share of a step, with its blocks as they were at launch."""

    state: State
    start: int
    count: int
    blocks: tuple[Ints, ...]
    """Per group, the block of each position from `start` on."""
    states: dict[int, tuple[int, int]]
    """By number of each state group: the block of the state before the step (0 at the start of a
    prompt), and that of the state after it."""
    context: tuple[int, tuple[Ints, ...]] | None
    """KV that is there without having been computed by this request: first position, and
    blocks per group of the positions up to `start`."""
    again: tuple[Ints, tuple[Ints, ...]]
    """Earlier positions to read again, and their blocks per group."""

    @property
    def decodes(self) -> bool:
        return self.start >= self.state.prompt

    @property
    def completes_prompt(self) -> bool:
        return self.start < self.state.prompt <= self.start + self.count


@dataclass
class Requests:
    """All requests of a worker."""

    sizes: tuple[int, ...]
    """Tokens per block, per group."""
    windows: tuple[int, ...]
    """Per group, tokens that attention looks back over; 0: all."""
    seed: int = 0
    state_groups: tuple[int, ...] = ()
    """Numbers of the groups that keep a state per request (or per block) and no tokens."""
    states: dict[str, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def update(self, output: Any) -> list[Piece]:
        """Take in a SchedulerOutput; what it schedules, in its order."""
        for request in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self.states.pop(request, None)
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            tables = [list(table) for table in new.block_ids]
            self.states[new.req_id] = State(
                new.req_id, tokens, tables, new.prompt_len, getattr(new, "sampling_params", None)
            )  # fmt: skip
            computed[new.req_id] = new.num_computed_tokens
        self._update_cached(output.scheduled_cached_reqs, computed)
        return [
            self._piece(self.states[request], computed[request], count)
            for request, count in output.num_scheduled_tokens.items()
        ]

    def _update_cached(self, cached: Any, computed: dict[str, int]) -> None:
        for index, request in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            computed[request] = cached.num_computed_tokens[index]
            old = self.states.get(request)
            if request in cached.resumed_req_ids:
                # A fresh state: what is in flight still writes to the old one.
                tokens = list(cached.all_token_ids[request])
                prompt = old.prompt if old else len(tokens)
                tables = [list(table) for table in blocks]
                sampling = old.sampling if old else None
                self.states[request] = State(request, tokens, tables, prompt, sampling)
            elif blocks is not None:
                assert old is not None
                for table, more in zip(old.tables, blocks, strict=True):
                    table.extend(more)

    def _piece(self, state: State, start: int, count: int) -> Piece:
        context = None
        if start != state.next:
            first = state.next if start > state.next else 0
            context = first, self._blocks(state, np.arange(first, start), start)
        state.next = start + count
        again = np.unique(self._random.integers(0, start, RECHECKED)) if start else np.arange(0)
        new = np.arange(start, start + count)
        return Piece(
            state, start, count, self._blocks(state, new, None),
            {group: self._kept(state, group, start, count) for group in self.state_groups},
            context, (again, self._blocks(state, again, start)),
        )  # fmt: skip

    def _kept(self, state: State, group: int, start: int, count: int) -> tuple[int, int]:
        """A state lies in the block of the last token that it holds."""
        table, size = state.tables[group], self.sizes[group]
        return table[(start - 1) // size] if start else 0, table[(start + count - 1) // size]

    def _blocks(self, state: State, positions: Ints, reader: int | None) -> tuple[Ints, ...]:
        """Block per position and group; 0 where the token at `reader` does not look."""
        rows = []
        groups = zip(state.tables, self.sizes, self.windows, strict=True)
        for number, (table, size, window) in enumerate(groups):
            if number in self.state_groups:
                rows.append(np.zeros(len(positions), np.int64))
                continue
            found = np.array(table, np.int64)[positions // size]
            if window and reader is not None:
                found = np.where(positions > reader - window, found, 0)
            rows.append(found)
        return tuple(rows)
