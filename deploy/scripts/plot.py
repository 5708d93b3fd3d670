#!/usr/bin/env python3
"""Draws TTFT and TPOT against request rate from a sweep's result files, one line per mode.

plot.py RESULTS [--out charts.png]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

NAME = re.compile(r"(?P<mode>\w+?)_qps(?P<rate>[\d.]+)_in(?P<input>\d+)_out(?P<output>\d+)_iter\d+")
FIGURES = {"median_ttft_ms": "TTFT, median of requests (ms)", "median_tpot_ms": "TPOT (ms)"}

Runs = dict[tuple[str, int, float], list[dict[str, float]]]


def read(folder: Path) -> tuple[Runs, list[str]]:
    """Runs by (mode, input length, rate); and files that were left out, with the reason."""
    runs: Runs = defaultdict(list)
    left_out = []
    for path in sorted(folder.glob("*.json")):
        match = NAME.fullmatch(path.stem)
        if not match:
            left_out.append(f"{path.name}: not named like a sweep's result")
            continue
        result = json.loads(path.read_text())
        if result.get("failed", 0) or not result.get("completed", 0):
            left_out.append(f"{path.name}: {result.get('failed', 0)} requests failed")
            continue
        key = (match["mode"], int(match["input"]), float(match["rate"]))
        runs[key].append({name: float(result[name]) for name in FIGURES})
    return runs, left_out


def draw(runs: Runs, out: Path) -> None:
    """One row per figure, one column per input length; bars span the repeats."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    inputs = sorted({key[1] for key in runs})
    modes = sorted({key[0] for key in runs})
    size = (4.2 * len(inputs), 6.4)
    figure, axes = pyplot.subplots(len(FIGURES), len(inputs), squeeze=False, figsize=size)
    for row, (name, label) in enumerate(FIGURES.items()):
        for column, length in enumerate(inputs):
            axis = axes[row][column]
            for mode in modes:
                rates = sorted(r for m, i, r in runs if m == mode and i == length)
                values = [[run[name] for run in runs[mode, length, rate]] for rate in rates]
                middle = [statistics.median(each) for each in values]
                low = [m - min(each) for m, each in zip(middle, values, strict=True)]
                high = [max(each) - m for m, each in zip(middle, values, strict=True)]
                axis.errorbar(rates, middle, yerr=[low, high], marker="o", capsize=3, label=mode)
            axis.set_title(f"{length} tokens in")
            axis.set_xlabel("requests/s")
            axis.set_ylabel(label)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(out, dpi=130)


def main() -> int:
    """Read, draw, and say what was left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=Path("charts.png"))
    args = parser.parse_args()
    runs, left_out = read(args.results)
    for line in left_out:
        sys.stderr.write(f"left out: {line}\n")
    if not runs:
        sys.stderr.write(f"no results in {args.results}\n")
        return 1
    draw(runs, args.out)
    sys.stdout.write(f"{sum(map(len, runs.values()))} runs: {args.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
