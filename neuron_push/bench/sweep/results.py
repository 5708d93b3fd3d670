"""Result files: what `vllm bench serve` writes, and under "neuron_push" what only a sweep knows.

A file has its final name only when it is complete; what a broken-off run left is overwritten.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from neuron_push.bench.sweep.cells import FRAGMENTED, Cell, Run
from neuron_push.errors import ConfigError

NAME: Final = re.compile(
    r"(?P<column>[a-z0-9-]+)_qps(?P<qps>[0-9.]+)_in(?P<input>\d+)_out(?P<output>\d+)"
    r"_iter(?P<repeat>\d+)\.json"
)
# Long lists that nothing here reads: times per request stay.
DROPPED: Final = ("generated_texts", "itls")


class Own(msgspec.Struct, kw_only=True):
    """What a sweep adds to a result. Lists have an entry per request that was answered."""

    column: str
    repeat: int
    seed: int
    fragmented: bool = False
    tpots: list[float] = []
    """Seconds per output token after the first."""
    to_last_forward: list[float] = []
    """Seconds from the request at the proxy to the end of P's last forward."""
    back: list[float] = []
    """Seconds from the end of D's first step to the first byte of its answer at the proxy."""
    handover: list[float] = []
    """Seconds from the end of P's last forward to the launch of D's first one."""
    handover_token: list[float] = []
    """Seconds from the end of P's last forward to the end of D's first one."""
    handover_client: list[float] = []
    """Seconds from P's answer to the first byte of D's, at the proxy."""
    added: float = 0.0
    """Of the floor of TTFT: seconds on top of prefill, for the copy of the last chunk over the
    modelled link and one decode step."""
    unfit: list[str] = []
    """Why durations of this run are not to be believed; none if they are."""
    descriptors: float = 0.0
    """Copies per request that the connector posted, as its metrics say; 0: not known."""
    memory: int = 0
    """Most bytes that the engines' processes have had resident, KV included; 0: not known."""
    setup: dict[str, Any] = {}


class Result(msgspec.Struct, kw_only=True):
    """What is read of a file; vLLM's names. Times are in seconds where vLLM's are."""

    completed: int
    failed: int = 0
    num_prompts: int
    ttfts: list[float]
    request_throughput: float = 0.0
    duration: float = 0.0
    neuron_push: Own
    cell: Cell = Cell(0, 0, 0)
    name: str = ""

    @property
    def good(self) -> bool:
        """Whether its figures count."""
        return not self.neuron_push.unfit


def finish(raw: dict[str, Any], own: Own, target: Path) -> None:
    """Write a complete result under its final name."""
    for name in DROPPED:
        raw.pop(name, None)
    for key in ("ttfts", "start_times"):
        raw[key] = [round(value, 6) for value in raw.get(key, [])]
    # Where it lies on this machine concerns nobody else.
    raw["tokenizer_id"] = Path(str(raw.get("tokenizer_id", ""))).name
    raw["neuron_push"] = msgspec.to_builtins(own)
    scratch = target.with_suffix(".tmp")
    scratch.write_text(json.dumps(raw))
    os.replace(scratch, target)


def tpots(raw: dict[str, Any]) -> list[float]:
    """Seconds per token after the first, of each request that was answered."""
    found = []
    for gaps, count in zip(raw["itls"], raw["output_lens"], strict=True):
        if count > 1 and gaps:
            found.append(round(sum(gaps) / (count - 1), 6))
    return found


def read(path: Path) -> Result:
    """One file; raises ConfigError saying what is wrong with it."""
    named = NAME.fullmatch(path.name)
    if named is None:
        raise ConfigError(f"{path.name} is not named <mode>_qps<q>_in<in>_out<out>_iter<i>.json")
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    own = result.neuron_push
    mode = f"{own.column}{FRAGMENTED if own.fragmented else ''}"
    if mode != named["column"]:
        raise ConfigError(f"{path} says that it is of {mode}")
    result.cell = Cell(int(named["input"]), float(named["qps"]), int(named["output"]))
    result.name = path.name
    return result


def finished(folder: Path, run: Run) -> bool:
    """Whether this run has been measured: a file that is whole, and of the same load."""
    try:
        result = read(folder / run.file)
    except ConfigError:
        return False
    return result.completed == result.num_prompts and result.neuron_push.seed == run.seed


def load(folder: Path) -> list[Result]:
    """All results in a folder, in the order of their names; raises ConfigError if none."""
    paths = sorted(path for path in folder.glob("*_iter*.json"))
    if not paths:
        raise ConfigError(f"no results in {folder}")
    return [read(path) for path in paths]


def cells(found: Iterable[Result]) -> list[Cell]:
    """The cells that occur, in order."""
    return sorted({result.cell for result in found})


def of(found: Sequence[Result], column: str, cell: Cell) -> list[Result]:
    """Results that count of one column in one cell, by repeat."""
    kept = [r for r in found if r.neuron_push.column == column and r.cell == cell and r.good]
    return sorted(kept, key=lambda result: result.neuron_push.repeat)
