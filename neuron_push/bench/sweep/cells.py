"""Input lengths x request rates, and the order in which they are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from neuron_push.errors import ConfigError

# Added to a mode's name where blocks were scattered first.
FRAGMENTED: Final = "-fragmented"


@dataclass(frozen=True, order=True)
class Cell:
    """One load: prompts of so many tokens at so many requests per second."""

    input: int
    qps: float
    output: int

    @property
    def name(self) -> str:
        """As in the published file names."""
        return f"qps{self.qps:g}_in{self.input}_out{self.output}"


@dataclass(frozen=True)
class Run:
    """One file of results. All columns of a repeat see the same prompts and arrivals."""

    column: str
    cell: Cell
    repeat: int
    fragmented: bool = False

    @property
    def file(self) -> str:
        """<mode>_qps<q>_in<in>_out<out>_iter<i>.json"""
        mode = f"{self.column}{FRAGMENTED if self.fragmented else ''}"
        return f"{mode}_{self.cell.name}_iter{self.repeat}.json"

    @property
    def seed(self) -> int:
        """Of prompts and arrivals."""
        return self.repeat * 1000 + self.cell.input % 997 + round(self.cell.qps * 10)

    def prompts(self, seconds: float) -> int:
        """How many requests keep the rate for that long; never fewer than 4."""
        return max(4, round(self.cell.qps * seconds))


def parse(texts: Sequence[str], output: int) -> list[Cell]:
    """Cells written as INPUTxQPS, such as 4096x8 or 4kx8."""
    cells = []
    for text in texts:
        length, _, rate = text.lower().partition("x")
        try:
            tokens = int(length[:-1]) * 1024 if length.endswith("k") else int(length)
            cells.append(Cell(tokens, float(rate), output))
        except ValueError:
            raise ConfigError(f"cell {text!r} is not INPUTxQPS, such as 4kx8") from None
        if tokens < 1 or cells[-1].qps <= 0:
            raise ConfigError(f"cell {text!r}: tokens and rate must be positive")
    return cells


def rounds(
    columns: Sequence[str],
    cells: Sequence[Cell],
    repeats: int,
    *,
    together: bool,
    fragmented: bool = False,
) -> Iterator[Run]:
    """All runs in order, interleaved.

    With all engines up (`together`), the columns of a cell follow each other, and each round
    begins with another one, so that none is always first after a pause. Else each column has
    its engines for all cells of a round, as starting them takes a minute.
    """
    for repeat in range(1, repeats + 1):
        turn = (repeat - 1) % len(columns)
        order = [*columns[turn:], *columns[:turn]]
        if together:
            pairs = [(column, cell) for cell in cells for column in order]
        else:
            pairs = [(column, cell) for column in order for cell in cells]
        yield from (Run(column, cell, repeat, fragmented) for column, cell in pairs)
