"""The report's HTML: one file, nothing to load."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from neuron_push.bench.sweep import claims, plot, results, statistics
from neuron_push.bench.sweep.cells import Cell
from neuron_push.bench.sweep.columns import COLUMNS

if TYPE_CHECKING:
    from neuron_push.bench.sweep.claims import Verdict
    from neuron_push.bench.sweep.report import Study
    from neuron_push.bench.sweep.results import Result

DATA: Final = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
METRICS: Final = (("ttft", "TTFT"), ("tpot", "TPOT"), ("handover", "handover"))
STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .6rem 0 1.6rem }
td, th { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: left }
td.n { text-align: right; font-variant-numeric: tabular-nums }
.holds { color: #0b6e4f } .missed { color: #b3261e; font-weight: 600 } .not { color: #777 }
svg { max-width: 100%; height: auto } pre { overflow-x: auto; background: #f6f6f6; padding: .6rem }
"""


def render(study: Study, charts: Sequence[str]) -> str:
    """The page. `charts` are SVG texts."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{_TITLE}</title>",
        f"<style>{STYLE}</style><h1>{_TITLE}</h1>",
        *_verdicts(study.verdicts),
        "<h2>Charts</h2><p>Medians of all requests; bars reach from the 10th to the 90th"
        " percentile; n is the number of requests of each point.</p>",
        "<!-- chart -->", *charts, "<!-- end of chart -->",
        *_regimes(study.results),
        *_others(study.files),
        *_setup(study.results),
        *_raw(study),
        _data(study),
    ]  # fmt: skip
    return "\n".join(parts) + "\n</html>\n"


_TITLE: Final = "neuron-push beside vLLM's NIXL connectors"


def data(text: str) -> dict[str, Any]:
    """What a page holds as data; ValueError if it holds none."""
    found = DATA.search(text)
    if found is None:
        raise ValueError("it holds no data")
    document: dict[str, Any] = json.loads(found[1].replace("<\\/", "</"))
    return document


def _data(study: Study) -> str:
    document = {
        "verdicts": msgspec.to_builtins(study.verdicts),
        "digests": study.digests,
        "raw": study.raw,
    }
    text = json.dumps(document, sort_keys=True).replace("</", "<\\/")
    return f'<script type="application/json" id="data">{text}</script>'


def _verdicts(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield "<h2>Claims</h2><table><tr><th>verdict<th>claim<th>rule<th>measured</tr>"
    for verdict in verdicts:
        measured = [
            f"{finding.where}: {_ratio(finding)}{'' if finding.holds else ' - misses'}"
            for finding in verdict.findings
        ]
        measured += [f"{where}: not measured" for where in verdict.missing]
        style = verdict.state.split()[0]
        yield (
            f"<tr><td class={style}>{verdict.state}<td>{_text(verdict.text)}"
            f"<td>{_text(verdict.rule)}<td>{'<br>'.join(map(_text, measured))}</tr>"
        )
    yield "</table>"


def _ratio(ratio: Any) -> str:
    value = getattr(ratio, "ratio", None) or ratio.value
    if ratio.rounds < 2:
        return f"{value:.3f}"
    return f"{value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _regimes(found: Sequence[Result]) -> Iterator[str]:
    for fragmented in (False, True):
        part = [r for r in found if r.neuron_push.fragmented == fragmented]
        if part:
            yield f"<h2>{'Fragmented blocks' if fragmented else 'Figures'}</h2>"
            yield from _figures(part)
            yield from _stages(part)
            yield from _ratios(part)


def _figures(found: Sequence[Result]) -> Iterator[str]:
    """Medians per cell and column."""
    yield (
        "<table><tr><th>cell<th>column<th>TTFT p50 ms<th>p90<th>TPOT p50 ms<th>p90"
        "<th>handover p50 ms<th>copies per request<th>requests<th>rounds<th>unfit</tr>"
    )
    for cell in results.cells(found):
        for name, column in COLUMNS.items():
            rows = [r for r in found if r.cell == cell and r.neuron_push.column == name]
            if not rows:
                continue
            good = results.of(found, name, cell)
            numbers = [
                *_two(plot.pool(found, "ttft", name, cell)),
                *_two(plot.pool(found, "tpot", name, cell)),
                _two(plot.pool(found, "handover", name, cell))[0],
            ]
            copies = max((r.neuron_push.descriptors for r in good), default=0)
            numbers += [f"{copies:.0f}" if copies else "", str(sum(r.completed for r in good)),
                        str(len(good)), str(len(rows) - len(good))]  # fmt: skip
            cells = "".join(f"<td class=n>{number}" for number in numbers)
            yield f"<tr><td>{cell.name}<td>{_text(column.label)}{cells}</tr>"
    yield "</table>"


def _stages(found: Sequence[Result]) -> Iterator[str]:
    """Where TTFT goes: medians of its stages, in milliseconds."""
    rows = [r for r in found if r.neuron_push.to_last_forward]
    if not rows:
        return
    yield (
        "<p>Where TTFT goes, medians in ms: until P's last forward has ended, from there to the"
        " launch of D's first step, that step, and back to the proxy.</p><table><tr><th>cell"
        "<th>column<th>to the end of P's last forward<th>handover<th>first step<th>back</tr>"
    )
    for cell in results.cells(rows):
        for name, column in COLUMNS.items():
            own = [r.neuron_push for r in results.of(rows, name, cell)]
            stages = (
                [value for each in own for value in each.to_last_forward],
                [value for each in own for value in each.handover],
                [b - a for each in own
                 for a, b in zip(each.handover, each.handover_token, strict=True)],
                [value for each in own for value in each.back],
            )  # fmt: skip
            if any(stages):
                cells = "".join(f"<td class=n>{_two(values)[0]}" for values in stages)
                yield f"<tr><td>{cell.name}<td>{_text(column.label)}{cells}</tr>"
    yield "</table>"


def _two(values: Sequence[float]) -> tuple[str, str]:
    """Median and 90th percentile in milliseconds."""
    if not values:
        return "", ""
    middle, high = statistics.median(values), statistics.percentile(values, 0.9)
    return f"{middle * 1e3:.2f}", f"{high * 1e3:.2f}"


def _ratios(found: Sequence[Result]) -> Iterator[str]:
    """Ours over everything else, with paired intervals."""
    yield (
        "<p>Ratios of the rounds' medians, paired by round (below 1 is better than the other),"
        " with 95% intervals.</p><table><tr><th>cell<th>ratio"
        + "".join(f"<th>{name}" for _, name in METRICS)
        + "</tr>"
    )
    names = [n for n in COLUMNS if any(r.neuron_push.column == n for r in found)]
    ours = [name for name in names if not COLUMNS[name].floor and not name.startswith("nixl")]
    for cell in results.cells(found):
        for mine in ours:
            for other in names:
                if other not in ours:
                    yield _ratio_row(found, cell, mine, other)
    yield "</table>"


def _ratio_row(found: Sequence[Result], cell: Cell, mine: str, other: str) -> str:
    cells = []
    for metric, _ in METRICS:
        if COLUMNS[other].floor and not other.endswith(metric):
            cells.append("<td>")
            continue
        ratio = claims.compare(found, metric, mine, other, cell)
        cells.append(f"<td class=n>{_ratio(ratio) if ratio else ''}")
    return f"<tr><td>{cell.name}<td>{mine} / {other}{''.join(cells)}</tr>"


def _others(files: dict[str, Any]) -> Iterator[str]:
    for name, document in files.items():
        yield f"<h2>{_text(name)}</h2><pre>{_text(json.dumps(document, indent=1))}</pre>"


def _setup(found: Sequence[Result]) -> Iterator[str]:
    """Each setup that occurs, once."""
    texts = {json.dumps(r.neuron_push.setup, indent=1, sort_keys=True) for r in found}
    yield "<h2>Setup</h2>"
    for text in sorted(texts):
        yield f"<pre>{_text(text)}</pre>"


def _raw(study: Study) -> Iterator[str]:
    yield (
        "<h2>Raw files</h2><p>All of them are inside this page, as data, and beside it under"
        " these names.</p><table><tr><th>file<th>SHA-256</tr>"
    )
    for name, digest in study.digests.items():
        yield f'<tr><td><a href="{_text(name)}">{_text(name)}</a><td><code>{digest}</code></tr>'
    yield "</table>"


def _text(text: str) -> str:
    return html.escape(text)
