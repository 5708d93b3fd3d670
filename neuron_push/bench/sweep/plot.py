"""`neuron-push bench plot`: charts of TTFT and TPOT, as PNG and SVG."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from neuron_push.bench.sweep import claims, results, statistics
from neuron_push.bench.sweep.cells import Cell
from neuron_push.bench.sweep.columns import COLUMNS
from neuron_push.bench.sweep.results import Result

# Name of the file, metric, its floor, what the axis says.
CHARTS: Final = (
    ("ttft", "ttft", "floor-ttft", "time to first token, ms"),
    ("tpot", "tpot", "floor-tpot", "time per output token, ms"),
)
COLORS: Final = {
    "push": "#0b6e4f", "push-layer": "#5bc0be", "push-off": "#a3a847", "pull": "#1f6feb",
    "nixl-push": "#d1495b", "nixl-pull": "#edae49",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = (
        "Draw TTFT and TPOT over request rates, a panel per input length: the median of all"
        " requests, bars from the 10th to the 90th percentile, the floor dashed."
    )
    parser.add_argument("results", type=Path, help="folder of result files")
    parser.add_argument("--out", type=Path, help="folder of charts (that of the results)")


def main(args: argparse.Namespace) -> int:
    """Entry for the command line."""
    found = results.load(args.results)
    out: Path = args.out or args.results
    out.mkdir(parents=True, exist_ok=True)
    for path in draw(found, out):
        print(path)
    return 0


def draw(found: Sequence[Result], out: Path) -> list[Path]:
    """Write all charts; regimes have charts of their own."""
    written = []
    for regime in (False, True):
        part = [r for r in found if r.neuron_push.fragmented == regime and r.good]
        if not part:
            continue
        for name, metric, floor, label in CHARTS:
            figure = _figure(part, metric, floor, label)
            for kind in ("png", "svg"):
                path = out / f"{name}{'-fragmented' if regime else ''}.{kind}"
                # Without a date, and with fixed ids, the same data make the same file.
                metadata = {"Date": None} if kind == "svg" else {}
                figure.savefig(path, dpi=150, metadata=metadata)
                written.append(path)
    return written


def _figure(found: Sequence[Result], metric: str, floor: str, label: str) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "neuron-push"
    cells = results.cells(found)
    lengths = sorted({cell.input for cell in cells})
    names = [name for name in COLUMNS if _drawn(name, found, floor)]
    figure = Figure(figsize=(3.2 + 2.6 * len(lengths), 4.2), layout="constrained")
    axes: Any = figure.subplots(1, len(lengths), squeeze=False)[0]
    for panel, length in zip(axes, lengths, strict=True):
        here = [cell for cell in cells if cell.input == length]
        for index, name in enumerate(names):
            shift = 0.5 * (index / max(1, len(names) - 1) - 0.5)
            _line(panel, found, metric, name, here, shift)
        panel.set_xticks(range(len(here)), [_tick(found, metric, cell) for cell in here])
        panel.set_xlim(-0.6, len(here) - 0.4)
        panel.set_ylim(bottom=0)
        panel.set_title(f"{length} tokens in")
        panel.set_xlabel("requests per second")
        panel.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel(label)
    handles, texts = axes[-1].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _drawn(name: str, found: Sequence[Result], floor: str) -> bool:
    """Measured, and not another metric's floor."""
    there = any(result.neuron_push.column == name for result in found)
    return there and (not COLUMNS[name].floor or name == floor)


def _line(
    panel: Any, found: Sequence[Result], metric: str, name: str, cells: Sequence[Cell],
    shift: float,
) -> None:  # fmt: skip
    places, middles, below, above = [], [], [], []
    for place, cell in enumerate(cells):
        pooled = pool(found, metric, name, cell)
        if not pooled:
            continue
        middle = statistics.median(pooled) * 1e3
        places.append(place + shift)
        middles.append(middle)
        below.append(middle - statistics.percentile(pooled, 0.1) * 1e3)
        above.append(statistics.percentile(pooled, 0.9) * 1e3 - middle)
    column = COLUMNS[name]
    style = {"color": "black", "linestyle": "--"} if column.floor else {"color": COLORS[name]}
    panel.errorbar(
        places, middles, yerr=[below, above], marker="o", markersize=4, capsize=2, linewidth=1.2,
        label=column.label, **style,
    )  # fmt: skip


def pool(found: Sequence[Result], metric: str, name: str, cell: Cell) -> list[float]:
    """Requests of all rounds, seconds each."""
    return [v for result in results.of(found, name, cell) for v in claims.values(result, metric)]


def _tick(found: Sequence[Result], metric: str, cell: Cell) -> str:
    """The rate, over how many requests each point is of."""
    counts = {len(pool(found, metric, name, cell)) for name in COLUMNS} - {0}
    most, least = max(counts, default=0), min(counts, default=0)
    return f"{cell.qps:g}\nn={most}" if most == least else f"{cell.qps:g}\nn={least}-{most}"
