"""`neuron-push bench sweep`: runs all cells, into files that say which of them are done."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.parse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from neuron_push import processes
from neuron_push.bench.sweep import cells, columns, engines, proxy, results, setup, statistics
from neuron_push.bench.sweep.cells import Cell, Run
from neuron_push.bench.sweep.churn import churn
from neuron_push.bench.sweep.load import Load, LoadFailed
from neuron_push.bench.sweep.measure import RunFailed, Sides, Tools, measure, quick
from neuron_push.bench.sweep.progress import Progress, duration
from neuron_push.emulation import cost, fleet, models
from neuron_push.errors import ConfigError
from neuron_push.ports import HOST, free_ports
from neuron_push.processes import Server

HERE: Final = Path(__file__).parent
SHIPPED: Final = HERE / "fleet.yaml"
SPARSE: Final = HERE / "fragmented.yaml"
CELLS: Final = ("1kx1", "1kx8", "4kx1", "4kx8", "16kx1")
# Of one token; other models are taken to have as much as the largest of these.
KV_BYTES: Final = {"qwen3-32b-rank": 32 << 10, "small-kv": 4 << 10}
# A run that the machine disturbed is made once more.
ATTEMPTS: Final = 2
Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = (
        "TTFT and TPOT of this connector and vLLM's own, over input lengths and request rates:"
        " interleaved rounds of `vllm bench serve`. A second call with the same folder goes on"
        " where the first one ended."
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/sweep"), help="folder of result files (out/sweep)")
    add("--cells", nargs="+", default=list(CELLS), help=f"INPUTxQPS ({' '.join(CELLS)})")
    add("--columns", nargs="+", default=list(columns.DEFAULT),
        help=f"of {' '.join(columns.COLUMNS)}")  # fmt: skip
    add("--output-len", type=int, default=64, help="tokens of each answer (64)")
    add("--repeats", type=int, default=5, help="interleaved rounds (5)")
    add("--seconds", type=float, default=20.0, help="of load per run (20)")
    add("--fleet", type=Path, help="fleet file of one prefill and one decode engine (shipped one)")
    add("--fragmented", action="store_true",
        help="scatter the free blocks of all engines first; a fleet of its own")  # fmt: skip
    add("--one-pair", action="store_true",
        help="keep one pair of engines at a time, as happens if memory is short")  # fmt: skip
    add("--prefill-url", help="a running engine: URL[#side=PORT&name=ENGINE_ID&host=H&tp=N]")
    add("--decode-url", help="the other one")
    add("--model", default="", help="of running engines: their model's name")
    add("--tokenizer", default="", help="of running engines; default: the model")


def main(args: argparse.Namespace) -> int:
    """Entry for the command line; exit status 1 if a run stayed unfit."""
    wanted = cells.parse(args.cells, args.output_len)
    chosen = columns.chosen(args.columns)
    if min(args.repeats, args.output_len) < 1 or args.seconds <= 0:
        raise ConfigError("--repeats, --output-len and --seconds must be positive")
    args.out.mkdir(parents=True, exist_ok=True)
    with processes.signals_as_interrupts():
        if args.prefill_url or args.decode_url:
            return _running(args, wanted, chosen)
        return _emulated(args, wanted, chosen)


# ---------------------------------------------------------------------- emulated engines


def _emulated(
    args: argparse.Namespace, wanted: Sequence[Cell], chosen: dict[str, columns.Column]
) -> int:
    path = args.fleet or (SPARSE if args.fragmented else SHIPPED)
    template = engines.Template.of(fleet.load(path))
    longest = max(cell.input + cell.output for cell in wanted)
    _fits(template, longest)
    kinds = list(dict.fromkeys(column.kind for column in chosen.values()))
    needed = engines.memory_needed(kinds, template, KV_BYTES.get(template.model, 32 << 10))
    free = engines.memory_free()
    together = not args.one_pair and needed < free
    if not together and len(kinds) > 1:
        print(f"one pair of engines at a time: all need {needed >> 30} GiB, {free >> 30} are free")
    runs, skipped = _left(args, cells.rounds(
        list(chosen), wanted, args.repeats, together=together, fragmented=args.fragmented
    ))  # fmt: skip
    print(f"{len(runs)} runs of {args.seconds:g} s, {skipped} done before; results in {args.out}")
    if not runs:
        return 0
    logs = args.out / "logs"
    described = setup.describe(template, setup.command_line(), chosen)
    with ExitStack() as stack:
        model = models.find(template.model, logs.absolute() / "models")
        tools = _tools(stack, args, fleet.SERVED, str(model), described)
        up = stack.enter_context(
            engines.pairs(template, logs.absolute(), print, together=together)
        )  # fmt: skip
        warm = partial(_warm, tools, wanted, args.fragmented)

        def sides(run: Run) -> Sides:
            column = chosen[run.column]
            pair = up.awake(column.kind, warm)
            added = _added(template, run.cell) if column.dispatch == "prefill" else 0.0
            return replace(_sides(pair, column), added=added)

        return _all(args, tools, runs, sides)


def _fits(template: engines.Template, longest: int) -> None:
    for spec in (template.prefill, template.decode):
        tokens = spec.blocks * (spec.block_size or 16)
        if longest > min(spec.max_model_len, tokens):
            raise ConfigError(
                f"{longest} tokens of prompt and answer do not fit the {spec.role} engine of the"
                f" fleet file: max_model_len {spec.max_model_len}, blocks for {tokens} tokens"
            )


def _added(template: engines.Template, cell: Cell) -> float:
    """Seconds from the end of prefill to a token, at best: the last chunk's copy, and a step."""
    prefill = cost.profile(template.prefill.profile)
    most = template.prefill.max_batched
    last = cell.input % most or min(cell.input, most)
    copy = prefill.transfer(last * KV_BYTES.get(template.model, 0))
    return copy + cost.profile(template.decode.profile).step(0, 1)


def _sides(pair: engines.Pair, column: columns.Column) -> Sides:
    def moments(engine: fleet.EmulatedEngine | None) -> Path | None:
        return engine.reports / f"{engine.spec.name}-0.moments.jsonl" if engine else None

    reports = [
        engine.reports / f"{engine.spec.name}-{rank}.json"
        for engine in pair.engines
        for rank in range(engine.spec.tp)
        if column.dispatch != "prefill" or engine is pair.prefill
    ]
    return Sides(
        pair.target(column.dispatch), moments(pair.prefill), moments(pair.decode), reports,
        [engine.pid for engine in pair.engines],
    )  # fmt: skip


def _warm(tools: Tools, wanted: Sequence[Cell], fragmented: bool, pair: engines.Pair) -> None:
    """Connections, and memory touched for the first time, are not what is measured."""
    if fragmented:
        print(f"scattering the blocks of {pair.kind}")
        churn(pair.engines)
    dispatch = {"vllm-pull": "pull", "decode-bench": "decode"}.get(
        columns.KINDS[pair.kind].connector, "push"
    )
    largest = max(wanted, key=lambda cell: cell.input)
    prompt = Cell(largest.input, 1000.0, 8)
    blocks = max(engine.spec.blocks * engine.block_size for engine in pair.engines)
    print(f"warming up {pair.kind}")
    quick(tools, pair.target(dispatch), prompt, 1)
    quick(tools, pair.target(dispatch), prompt, -(-blocks // largest.input) + 1)


# ---------------------------------------------------------------------- running engines


def _running(
    args: argparse.Namespace, wanted: Sequence[Cell], chosen: dict[str, columns.Column]
) -> int:
    if len({column.kind for column in chosen.values()}) != 1:
        raise ConfigError("running engines have one connector: name its columns with --columns")
    if not args.model:
        raise ConfigError("--model says what the running engines serve")
    legs = {"prefill": _engine(args.prefill_url), "decode": _engine(args.decode_url)}
    targets = {
        name: proxy.Target(dispatch=column.dispatch, **legs) for name, column in chosen.items()
    }
    for name, column in chosen.items():
        for role, engine in legs.items():
            if engine is None and column.dispatch in ("push", "pull", role):
                raise ConfigError(f"column {name} needs --{role}-url")
    runs, skipped = _left(args, cells.rounds(list(chosen), wanted, args.repeats, together=True))
    print(f"{len(runs)} runs of {args.seconds:g} s, {skipped} done before; results in {args.out}")
    described = setup.describe(None, setup.command_line(), chosen)
    with ExitStack() as stack:
        tools = _tools(stack, args, args.model, args.tokenizer or args.model, described)
        return _all(args, tools, runs, lambda run: Sides(targets[run.column]))


def _engine(text: str | None) -> proxy.Engine | None:
    """An engine as the command line names it."""
    if not text:
        return None
    url, _, fragment = text.partition("#")
    fields: dict[str, Any] = dict(urllib.parse.parse_qsl(fragment))
    if "side" in fields:
        fields["side_port"] = fields.pop("side")
    host = urllib.parse.urlsplit(url).hostname or HOST
    try:
        return msgspec.convert(
            {"url": url.rstrip("/"), "host": host, **fields}, proxy.Engine, strict=False
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{text}: {error}") from None


# ---------------------------------------------------------------------- both


def _left(args: argparse.Namespace, runs: Any) -> tuple[list[Run], int]:
    """Runs that are not done yet, and how many are."""
    every = list(runs)
    left = [run for run in every if not results.finished(args.out, run)]
    return left, len(every) - len(left)


def _tools(
    stack: ExitStack, args: argparse.Namespace, model: str, tokenizer: str, described: Any
) -> Tools:
    (port,) = free_ports(1)
    logs = args.out / "logs"
    words = [sys.executable, "-m", proxy.__name__, "--port", str(port)]
    server = stack.enter_context(Server("proxy", words, port, logs / "proxy.log"))
    print("loading vllm bench serve")
    load = stack.enter_context(Load(logs / "load.log"))
    server.wait_ready(60)
    return Tools(load, server, model, tokenizer, args.out, args.seconds, described, args.fragmented)


def _all(
    args: argparse.Namespace, tools: Tools, runs: Sequence[Run], sides: Callable[[Run], Sides]
) -> int:
    progress = Progress(len(runs), args.seconds)
    bad = 0
    for run in runs:
        print(progress.line(f"{run.column} {run.cell.name} round {run.repeat}"), flush=True)
        bad += not _one(tools, run, sides(run))
        progress.step()
    print(f"done after {duration(progress.clock() - progress.began)}; {bad} runs unfit or failed")
    (args.out / "setup.json").write_text(json.dumps(tools.setup, indent=1))
    return 1 if bad else 0


def _one(tools: Tools, run: Run, sides: Sides) -> bool:
    """Whether a run succeeded; what failed has no file, and the next call tries it again."""
    for attempt in range(ATTEMPTS):
        again = ", once more" if attempt + 1 < ATTEMPTS else ""
        try:
            own = measure(tools, run, sides)
        except RunFailed as error:
            print(f"  failed{again}: {error}", flush=True)
            continue
        except LoadFailed as error:
            print(f"  failed{again}: {error}", flush=True)
            tools.load.restart()
            continue
        print(f"  {_summary(tools.folder / run.file)}", flush=True)
        if not own.unfit:
            return True
        print(f"  unfit{again}: {'; '.join(own.unfit)}", flush=True)
    return False


def _summary(path: Path) -> str:
    result = results.read(path)
    own = result.neuron_push
    parts = [f"TTFT p50 {statistics.median(result.ttfts) * 1e3:.1f} ms"]
    if own.tpots:
        parts.append(f"TPOT p50 {statistics.median(own.tpots) * 1e3:.2f} ms")
    if own.handover:
        parts.append(f"handover p50 {statistics.median(own.handover) * 1e3:.1f} ms")
    return ", ".join([*parts, f"{result.completed} requests"])
