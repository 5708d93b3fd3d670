"""matrix.yaml -> cells.

A side is written `device[/tpN][/ppN][/bN][@version]`: trn2, p5en/tp2, p5en/pp2, trn2/b48@0.29.0.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from neuron_push.emulation.devices import DEVICES
from neuron_push.errors import ConfigError

TIERS = ("pr", "merge", "nightly")
_SIDE = re.compile(
    r"(?P<device>\w+)(/tp(?P<tp>\d+))?(/pp(?P<pp>\d+))?(/b(?P<block>\d+))?"
    r"(@(?P<vllm>\d+\.\d+\.\d+))?"
)

Load = Literal["shapes", "burst", "prefix", "aborts"]
Connector = Literal["neuron-push", "vllm-push", "vllm-pull"]


@dataclass(frozen=True)
class Side:
    """One engine of a cell, prefill or decode."""

    device: str
    tp: int
    block: int
    vllm: str
    pp: int = 1

    @classmethod
    def parse(cls, text: str, default: str) -> Side:
        found = _SIDE.fullmatch(text)
        if found is None or found["device"] not in DEVICES:
            raise ConfigError(f"{text!r} is not device[/tpN][/ppN][/bN][@version]")
        block = int(found["block"] or DEVICES[found["device"]].block_tokens)
        tp, pp = (int(found[name] or 1) for name in ("tp", "pp"))
        return cls(found["device"], tp, block, found["vllm"] or default, pp)

    def __str__(self) -> str:
        stages = f"/pp{self.pp}" if self.pp > 1 else ""
        return f"{self.device}/tp{self.tp}{stages}/b{self.block}@{self.vllm}"

    @property
    def ranks(self) -> int:
        """Worker processes."""
        return self.tp * self.pp


class CellSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cells in matrix.yaml: every combination of the lists."""

    prefill: list[str]
    decode: list[str]
    tiers: list[Literal["pr", "merge", "nightly"]]
    model: tuple[str, ...] = ("tiny-gqa",)
    connector: tuple[Connector, ...] = ("neuron-push",)
    mode: tuple[Literal["push", "pull"], ...] = ("push",)
    prefix_caching: tuple[bool, ...] = (True,)
    runner: tuple[Literal["gpu-v2", "gpu-v1", "cpu"], ...] = ("gpu-v2",)
    streaming: tuple[Literal["chunk", "layer", "off"], ...] = ("chunk",)
    load: tuple[Load, ...] = ("shapes", "burst")
    kv_tokens: int = 24_000
    """Tokens that each engine's KV blocks hold; few make the scheduler preempt."""
    timed: str = ""
    """A cost profile: durations count, and a cell whose emulation distorts them fails."""
    cores: int = 0
    """Cores that it takes, such as for a measurement; on fewer the cell is not run."""
    refused: str = ""
    """What the engines must say if they cannot work together, a regular expression. Then that
    refusal is the only good end of the cell; "" says that the pair works."""
    same_side: bool = False
    """Only combinations whose two sides are alike."""


class MatrixSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    default_vllm: str
    cells: list[CellSpec]


@dataclass(frozen=True)
class Cell:
    """One combination that either works or does not."""

    prefill: Side
    decode: Side
    model: str
    connector: str
    mode: str
    prefix_caching: bool
    runner: str
    load: tuple[str, ...]
    kv_tokens: int
    timed: str = ""
    cores: int = 0
    refused: str = ""
    streaming: str = "chunk"

    @property
    def short_of_kv(self) -> bool:
        """Whether requests are preempted on purpose."""
        return self.kv_tokens < 10_000

    @property
    def devices(self) -> str:
        """Such as "trn2>p5en"."""
        return f"{self.prefill.device}>{self.decode.device}"

    @property
    def name(self) -> str:
        words = [self.model, self.connector, self.mode, *self.load]
        words += [] if self.prefix_caching else ["no-prefix-cache"]
        words += [] if self.runner == "gpu-v2" else [self.runner]
        words += [] if self.streaming == "chunk" else [self.streaming]
        words += [f"kv{self.kv_tokens}"] if self.short_of_kv else []
        words += [f"timed:{self.timed}"] if self.timed else []
        return f"{self.prefill} > {self.decode} {' '.join(words)}"


def read(path: Path) -> MatrixSpec:
    """Raises ConfigError saying what is wrong with the file."""
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=MatrixSpec)
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None


def cells(matrix: MatrixSpec, tier: str) -> list[Cell]:
    """Cells of a tier and of the tiers it includes, each once, in the file's order."""
    included = TIERS[: TIERS.index(tier) + 1]
    found: dict[str, Cell] = {}
    for spec in matrix.cells:
        if set(spec.tiers) & set(included):
            for cell in _expand(matrix, spec):
                found.setdefault(cell.name, cell)
    return list(found.values())


def _expand(matrix: MatrixSpec, spec: CellSpec) -> Iterator[Cell]:
    for prefill, decode, model, connector, mode, caching, runner, streaming in itertools.product(
        spec.prefill, spec.decode, spec.model, spec.connector, spec.mode, spec.prefix_caching,
        spec.runner, spec.streaming,
    ):  # fmt: skip
        sides = [Side.parse(text, matrix.default_vllm) for text in (prefill, decode)]
        if spec.same_side and sides[0] != sides[1]:
            continue
        yield Cell(
            sides[0], sides[1], model, connector, mode, caching, runner, spec.load,
            spec.kv_tokens, spec.timed, spec.cores, spec.refused, streaming,
        )  # fmt: skip


def select(found: list[Cell], only: list[str]) -> list[Cell]:
    """Cells whose names hold one of the `only` texts, or whose devices are "p>d"."""
    return [
        cell
        for cell in found
        if not only or any(text == cell.devices or text in cell.name for text in only)
    ]
