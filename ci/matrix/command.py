"""`ci/run_matrix`."""

from __future__ import annotations

import argparse
import json
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

FILE = Path(__file__).resolve().parents[1] / "matrix.yaml"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="ci/run_matrix", description="Run the mixed-fleet matrix.")
    made.add_argument("--tier", choices=TIERS, default="pr")
    made.add_argument(
        "--only", action="append", default=[], metavar="TEXT",
        help="cells whose names hold this text, or whose devices are this: trn2>p5en",
    )  # fmt: skip
    made.add_argument("--list", action="store_true", help="name the cells and their engines' state")
    made.add_argument("--json", action="store_true", help="end with one JSON list on stdout")
    made.add_argument("--out", type=Path, default=Path("out/matrix"), help="where reports go")
    made.add_argument("--logs", type=Path, help="keep engine logs here")
    made.add_argument("--file", type=Path, default=FILE, help="another matrix.yaml")
    made.add_argument("--most-ranks", type=int, default=6, help="worker processes at once")
    made.add_argument(
        "--no-install", action="store_true",
        help="cells that need a vLLM version which is not installed are not run",
    )  # fmt: skip
    made.add_argument(
        "--hardware-only", action="store_true", help="cells without their hardware are not run"
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """0 if no cell failed."""
    args = parser().parse_args(argv)
    try:
        chosen = select(cells(read(args.file), args.tier), args.only)
        nodes = hardware.inventory()
    except NeuronPushError as error:
        print(f"run_matrix: {error}", file=sys.stderr)
        return 2
    if not chosen:
        print("run_matrix: no cell matches", file=sys.stderr)
        return 2
    if args.list:
        return _list(chosen, nodes, args.json)
    outcomes = _run_all(args, chosen, nodes)
    report.write(outcomes, args.out, args.tier)
    _say(f"\n{report.totals(outcomes)}; reports in {args.out}", args.json)
    if args.json:
        print(json.dumps(report.as_json(outcomes)))
    return 1 if any(outcome.state is State.FAILED for outcome in outcomes) else 0


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
        try:
            for cell in chosen:
                begun = time.monotonic()
                outcome = _run(cell, pool, nodes, args)
                outcome.seconds = time.monotonic() - begun
                outcomes.append(outcome)
                _say(report.line(outcome), args.json)
        finally:
            pool.close()
        return outcomes


def _run(cell: Cell, pool: Pool, nodes: list[hardware.Node], args: argparse.Namespace) -> Outcome:
    if cell.connector == "neuron-push" and cell.mode == "pull":
        return Outcome(cell, State.NOT_RUN, "this version does not pull")
    real = hardware.pair(cell, nodes)
    missing = [s.vllm for s in (cell.prefill, cell.decode) if not environments.ready(s.vllm)]
    if real is None and args.hardware_only:
        return Outcome(cell, State.NOT_RUN, "no hardware for it is declared")
    if real is None and args.no_install and missing:
        return Outcome(cell, State.NOT_RUN, f"vLLM {missing[0]} is not installed")
    try:
        if real is not None:
            verdict = checks.hardware(cell, *real)
        else:
            prefill, decode = pool.get(cell)
            verdict = checks.run(cell, checks.Emulated(prefill), checks.Emulated(decode))
    except (NeuronPushError, ServerFailed, OSError) as error:
        # A server's error ends with its log's tail; the log itself is kept with --logs.
        return Outcome(cell, State.FAILED, str(error).splitlines()[0])
    return judge(cell, verdict, real is not None)


def judge(cell: Cell, verdict: checks.Verdict, on_hardware: bool) -> Outcome:
    """A refusal is as good as the list of pairs says; any problem is a failure."""
    if verdict.refusal:
        state = State.REFUSED if cell.may_refuse else State.FAILED
        return Outcome(cell, state, verdict.refusal, figures=verdict.figures)
    if verdict.problems:
        return Outcome(cell, State.FAILED, "; ".join(verdict.problems), figures=verdict.figures)
    return Outcome(cell, passed(on_hardware), figures=verdict.figures)


def _say(text: str, as_json: bool) -> None:
    print(text, file=sys.stderr if as_json else sys.stdout, flush=True)
