"""`ci/run_matrix`."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from ci.matrix import checks, hardware, report
from ci.matrix.cells import TIERS, Cell, cells, read, select
from ci.matrix.pool import Pool
from ci.matrix.states import Outcome, State, passed
from neuron_push.emulation import environments
from neuron_push.errors import NeuronPushError
from neuron_push.processes import ServerFailed

INTERRUPTED = "interrupted"
FILE = Path(__file__).resolve().parents[1] / "matrix.yaml"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="ci/run_matrix", description="Run the mixed-fleet matrix.")
    made.add_argument("--tier", choices=TIERS, default="pr")
    made.add_argument(
        "--only", action="append", default=[], metavar="TEXT",
        help="cells whose names hold this text, or whose devices are this: trn2>p5en",
    )  # fmt: skip
    made.add_argument(
        "--failed", action="store_true",
        help="cells that failed in the reports in --out; none if a byte or an answer was wrong",
    )  # fmt: skip
    made.add_argument("--list", action="store_true", help="name the cells and their engines' state")
    made.add_argument("--json", action="store_true", help="end with one JSON list on stdout")
    made.add_argument("--out", type=Path, default=Path("out/matrix"), help="where reports go")
    made.add_argument("--logs", type=Path, help="keep engine logs here")
    made.add_argument("--file", type=Path, default=FILE, help="another matrix.yaml")
    made.add_argument("--most-ranks", type=int, default=8, help="worker processes at once")
    made.add_argument(
        "--no-install", action="store_true",
        help="cells that need a vLLM version which is not installed are not run",
    )  # fmt: skip
    made.add_argument(
        "--prepare", action="store_true", help="only make the environments that the cells need"
    )
    made.add_argument(
        "--hardware-only", action="store_true", help="cells without their hardware are not run"
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """0 if no cell failed."""
    args = parser().parse_args(argv)
    try:
        chosen = select(cells(read(args.file), args.tier), args.only)
        if args.failed:
            again = report.failed(args.out)
            chosen = [cell for cell in chosen if cell.name in again]
        nodes = hardware.inventory()
    except (NeuronPushError, OSError) as error:
        print(f"run_matrix: {error}", file=sys.stderr)
        return 2
    if not chosen:
        print("run_matrix: no cell matches", file=sys.stderr)
        return 2
    if args.list:
        return _list(chosen, nodes, args.json)
    if args.prepare:
        return _prepare(chosen)
    outcomes = _run_all(args, chosen, nodes)
    report.write(outcomes, args.out, args.tier)
    _say(f"\n{report.totals(outcomes)}; reports in {args.out}", args.json)
    if args.json:
        print(json.dumps(report.as_json(outcomes)))
    bad = [o for o in outcomes if o.state is State.FAILED or o.reason == INTERRUPTED]
    return 1 if bad else 0


def _prepare(chosen: list[Cell]) -> int:
    """Installing is mostly waiting, so it may be done while something else runs."""
    try:
        for vllm in sorted({side.vllm for cell in chosen for side in (cell.prefill, cell.decode)}):
            print(f"vLLM {vllm}: {environments.python(vllm, print)}", flush=True)
    except NeuronPushError as error:
        print(f"run_matrix: {error}", file=sys.stderr)
        return 2
    return 0


def _list(chosen: list[Cell], nodes: list[hardware.Node], as_json: bool) -> int:
    rows = [
        {
            "cell": cell.name, "prefill": cell.prefill.device, "decode": cell.decode.device,
            "where": "hardware" if hardware.pair(cell, nodes) else "emulated",
            "labels": sorted({cell.prefill.device, cell.decode.device, "efa"}),
        }
        for cell in chosen
    ]  # fmt: skip
    if as_json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row['where']:9} {row['cell']}")
    return 0


def _run_all(
    args: argparse.Namespace, chosen: list[Cell], nodes: list[hardware.Node]
) -> list[Outcome]:
    # SIGTERM unwinds like an interrupt, so that engines are stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="neuron-push-matrix-") as scratch:
        logs = (args.logs or Path(scratch)).absolute()
        logs.mkdir(parents=True, exist_ok=True)

        def progress(text: str) -> None:
            if "starting" not in text:
                _say(f"    {text}", args.json)

        pool = Pool(logs, args.most_ranks, progress)
        outcomes = []
        emulated = [cell for cell in chosen if not _why_not(cell, nodes, args)]
        try:
            for cell in chosen:
                begun = time.monotonic()
                later = emulated[emulated.index(cell) + 1 :] if cell in emulated else []
                outcome = _run(cell, later[0] if later else None, pool, nodes, args)
                outcome.seconds = time.monotonic() - begun
                outcomes.append(outcome)
                _say(report.line(outcome), args.json)
        except KeyboardInterrupt:  # what there is, is reported
            rest = chosen[len(outcomes) :]
            outcomes += [Outcome(cell, State.NOT_RUN, INTERRUPTED) for cell in rest]
        finally:
            pool.close()
        return outcomes


def _why_not(cell: Cell, nodes: list[hardware.Node], args: argparse.Namespace) -> str:
    """Why the cell cannot be run emulated here; "" if it can."""
    missing = [s.vllm for s in (cell.prefill, cell.decode) if not environments.ready(s.vllm)]
    if args.hardware_only:
        return "no hardware for it is declared"
    if args.no_install and missing:
        return f"vLLM {missing[0]} is not installed"
    if cell.cores > len(os.sched_getaffinity(0)):
        return f"needs {cell.cores} cores, here are {len(os.sched_getaffinity(0))}"
    return "it runs on hardware" if hardware.pair(cell, nodes) else ""


def _run(
    cell: Cell, upcoming: Cell | None, pool: Pool, nodes: list[hardware.Node],
    args: argparse.Namespace,
) -> Outcome:  # fmt: skip
    real = hardware.pair(cell, nodes)
    if real is None and (why := _why_not(cell, nodes, args)):
        return Outcome(cell, State.NOT_RUN, why)
    try:
        if real is not None:
            verdict = checks.hardware(cell, *real)
        else:
            # A measurement has the machine to itself.
            prefill, decode = pool.get(cell, None if cell.timed else upcoming)
            verdict = checks.run(cell, checks.Emulated(prefill), checks.Emulated(decode))
    except (NeuronPushError, ServerFailed, OSError) as error:
        # A server's error ends with its log's tail; the log itself is kept with --logs.
        _say(str(error), args.json)
        return Outcome(cell, State.FAILED, str(error).splitlines()[0])
    return judge(cell, verdict, real is not None)


def judge(cell: Cell, verdict: checks.Verdict, on_hardware: bool) -> Outcome:
    """A refusal is good where the file says so, and nothing else is good there."""
    if verdict.refusal:
        meant = cell.refused and re.search(cell.refused, verdict.refusal)
        state = State.REFUSED if meant else State.FAILED
        return Outcome(cell, state, verdict.refusal, figures=verdict.figures)
    if cell.refused:
        why = f"the engines work together; matrix.yaml says they refuse: {cell.refused}"
        return Outcome(cell, State.FAILED, why, figures=verdict.figures)
    if verdict.problems:
        return Outcome(cell, State.FAILED, "; ".join(verdict.problems), figures=verdict.figures)
    return Outcome(cell, passed(on_hardware), figures=verdict.figures)


def _say(text: str, as_json: bool) -> None:
    print(text, file=sys.stderr if as_json else sys.stdout, flush=True)
