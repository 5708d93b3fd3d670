"""What came of the cells: a table to read, JUnit and JSON for machines, a grid as HTML."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from ci.matrix.states import Outcome, State
from neuron_push.errors import ConfigError

COLOURS: Final = {
    State.PASSED_HARDWARE: "#1a7f37", State.PASSED_EMULATED: "#6fbf73", State.NOT_RUN: "#c9c9c9",
    State.FAILED: "#d1242f", State.REFUSED: "#e3b341",
}  # fmt: skip


def line(outcome: Outcome) -> str:
    """One cell's row of the table."""
    seen = outcome.figures
    work = ""
    if "answered" in seen:
        work = (
            f"{seen['answered']}/{seen['requests']} answered, WRITEs before the next launch "
            f"{seen['writes_early']}, after {seen['writes_late']}, "
            f"{seen['bytes_checked'] >> 20} MiB checked"
        )
    what = outcome.reason or work
    return f"{outcome.state:16} {outcome.seconds:6.1f} s  {outcome.cell.name}  {what}"


def totals(outcomes: Sequence[Outcome]) -> str:
    """How many cells ended how."""
    counts = Counter(outcome.state for outcome in outcomes)
    return ", ".join(f"{counts[state]} {state}" for state in State if counts[state])


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For machines."""
    return [
        {
            "cell": outcome.cell.name, "state": str(outcome.state), "reason": outcome.reason,
            "seconds": round(outcome.seconds, 2), "prefill": str(outcome.cell.prefill),
            "decode": str(outcome.cell.decode), "model": outcome.cell.model,
            "connector": outcome.cell.connector, "mode": outcome.cell.mode,
            **outcome.figures,
        }
        for outcome in outcomes
    ]  # fmt: skip


def failed(folder: Path) -> list[str]:
    """Names of the cells that failed in the reports in `folder`.

    Raises ConfigError if one saw a wrong byte or answer, which is never put down to a busy machine.
    """
    rows = json.loads((folder / "matrix.json").read_text())
    lost = [row for row in rows if row["state"] == State.FAILED]
    wrong = [row["cell"] for row in lost if row.get("wrong_rows") or row.get("wrong_answers")]
    if wrong:
        raise ConfigError(f"something was wrong in {wrong[0]}: another try would hide it")
    return [row["cell"] for row in lost]


def write(outcomes: Sequence[Outcome], folder: Path, tier: str) -> None:
    """matrix.json, junit.xml and matrix.html."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "matrix.json").write_text(json.dumps(as_json(outcomes), indent=1) + "\n")
    (folder / "junit.xml").write_bytes(ElementTree.tostring(junit(outcomes, tier)))
    (folder / "matrix.html").write_text(page(outcomes, tier))


def junit(outcomes: Sequence[Outcome], tier: str) -> ElementTree.Element:
    """Refusals and cells that were not run are skipped, with their reason."""
    counts = Counter(outcome.state for outcome in outcomes)
    suite = ElementTree.Element(
        "testsuite", name=f"matrix {tier}", tests=str(len(outcomes)),
        failures=str(counts[State.FAILED]), errors="0",
        skipped=str(counts[State.NOT_RUN] + counts[State.REFUSED]),
        time=f"{sum(outcome.seconds for outcome in outcomes):.3f}",
    )  # fmt: skip
    for outcome in outcomes:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"matrix.{outcome.state}", name=outcome.cell.name,
            time=f"{outcome.seconds:.3f}",
        )  # fmt: skip
        if outcome.state is State.FAILED:
            ElementTree.SubElement(case, "failure", message=outcome.reason)
        elif outcome.state in (State.NOT_RUN, State.REFUSED):
            why = f"{outcome.state}: {outcome.reason}"
            ElementTree.SubElement(case, "skipped", message=why)
    return suite


def page(outcomes: Sequence[Outcome], tier: str) -> str:
    """A grid, prefill sides down and decode sides across; one square per cell."""
    down = list(dict.fromkeys(str(outcome.cell.prefill) for outcome in outcomes))
    across = list(dict.fromkeys(str(outcome.cell.decode) for outcome in outcomes))
    rows = ["<tr><th>prefill \\ decode</th>" + "".join(f"<th>{d}</th>" for d in across) + "</tr>"]
    for prefill in down:
        squares = []
        for decode in across:
            here = [
                _square(outcome)
                for outcome in outcomes
                if (str(outcome.cell.prefill), str(outcome.cell.decode)) == (prefill, decode)
            ]
            squares.append(f"<td>{''.join(here)}</td>")
        rows.append(f"<tr><th>{prefill}</th>{''.join(squares)}</tr>")
    legend = "".join(
        f"<span style='background:{colour}'>{state}</span>" for state, colour in COLOURS.items()
    )
    style = (
        "body{font:14px sans-serif}table{border-collapse:collapse}td,th{border:1px solid #ddd;"
        "padding:4px;font-weight:normal}span{display:inline-block;margin:2px;padding:2px 6px}"
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>matrix {tier}</title><style>{style}</style>"
        f"<h1>Matrix, tier {tier}: {totals(outcomes)}</h1><p>{legend}</p>"
        f"<table>{''.join(rows)}</table>\n"
    )


def _square(outcome: Outcome) -> str:
    cell = outcome.cell
    title = html.escape(f"{cell.name}\n{outcome.state} {outcome.reason}", quote=True)
    label = html.escape(f"{cell.model} {cell.connector} {cell.mode} {' '.join(cell.load)}")
    return f"<span title='{title}' style='background:{COLOURS[outcome.state]}'>{label}</span>"
