"""One run: load over one column's engines, and what was seen of it from all sides."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from neuron_push.bench.sweep import proxy, results
from neuron_push.bench.sweep.cells import Cell, Run
from neuron_push.bench.sweep.load import Load
from neuron_push.emulation.report import PERIOD, timed
from neuron_push.errors import NeuronPushError
from neuron_push.processes import Server

# vLLM makes "cmpl-<X-Request-Id>-0" of a completion's id, and may add what keeps it unique.
INTERNAL: Final = re.compile(r"cmpl-(?P<request>.+?)-0(-[0-9a-f]{8})?")
COUNTERS: Final = ("modelled_seconds", "own_seconds", "late_seconds", "wrong_rows")
# What tells of posted copies, on the side that posts.
DESCRIPTORS: Final = ("vllm:nixl_num_descriptors_sum", "neuron_push_copies_total")


class RunFailed(NeuronPushError):
    """Requests of a run failed."""


@dataclass(frozen=True)
class Moment:
    """A step with the last prompt token of a request; seconds on the machine's monotonic clock."""

    launched: float
    ended: float


class Moments:
    """What an emulated engine says of its requests, from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> dict[str, Moment]:
        """By the X-Request-Id that the engine saw."""
        if not self._path.exists():
            return {}
        with self._path.open() as file:
            file.seek(self._offset)
            lines = [json.loads(line) for line in file if line.endswith("\n")]
        return {_request(name): Moment(launched, ended) for name, launched, ended in lines}


def _request(internal: str) -> str:
    named = INTERNAL.fullmatch(internal)
    return named["request"] if named else internal


@dataclass
class Sides:
    """The engines of a run, as far as this machine can look into them."""

    target: proxy.Target
    prefill: Path | None = None
    """File of its moments; None: it tells none."""
    decode: Path | None = None
    reports: Sequence[Path] = ()
    """Summaries of emulated ranks."""
    groups: Sequence[int] = ()
    """Process groups of the engines."""
    added: float = 0.0
    """See `results.Own`."""


@dataclass
class Tools:
    """What runs need besides engines."""

    load: Load
    proxy: Server
    model: str
    tokenizer: str
    folder: Path
    seconds: float
    setup: dict[str, Any] = field(default_factory=dict)
    fragmented: bool = False

    def ask(self, path: str, body: bytes = b"{}") -> bytes:
        """POST to the proxy."""
        request = urllib.request.Request(self.proxy.url + path, body)
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: bytes = answer.read()
        return found


def serve(tools: Tools, run: Run, prompts: int, file: Path) -> None:
    """`vllm bench serve` over the proxy, into a file."""
    cell = run.cell
    tools.load.run(
        [
            "--base-url", tools.proxy.url, "--backend", "openai", "--endpoint", "/v1/completions",
            "--model", tools.model, "--tokenizer", tools.tokenizer,
            "--dataset-name", "random", "--random-input-len", str(cell.input),
            "--random-output-len", str(cell.output), "--ignore-eos", "--temperature", "0",
            "--num-prompts", str(prompts), "--request-rate", str(cell.qps),
            "--seed", str(run.seed), "--num-warmups", "1", "--ready-check-timeout-sec", "0",
            "--request-id-prefix", f"{run.column}-{run.repeat}-", "--disable-tqdm",
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99",
            "--save-result", "--save-detailed", "--result-dir", str(file.parent),
            "--result-filename", file.name, "--metadata", f"mode={run.column}",
        ],
        within=120 + 4 * prompts / cell.qps,
    )  # fmt: skip


def measure(tools: Tools, run: Run, sides: Sides) -> results.Own:
    """One run into its file."""
    prompts = run.prompts(tools.seconds)
    scratch = tools.folder / f"{run.file}.part"
    scratch.unlink(missing_ok=True)
    tools.ask("/target", msgspec.json.encode(sides.target))
    looks = {name: Moments(path) for name, path in _files(sides).items()}
    before, copies = _summaries(sides.reports), descriptors(sides.target)
    serve(tools, run, prompts, scratch)
    records = msgspec.json.decode(tools.ask("/records"), type=list[proxy.Record])
    time.sleep(2 * PERIOD)
    raw = json.loads(scratch.read_text())
    if raw["completed"] != prompts:
        errors = {record.error for record in records if record.error} or {"no reason given"}
        raise RunFailed(f"{run.file}: {raw['completed']} of {prompts}: {'; '.join(errors)[:500]}")
    own = results.Own(
        column=run.column, repeat=run.repeat, seed=run.seed, fragmented=tools.fragmented,
        tpots=results.tpots(raw), unfit=unfit(before, _summaries(sides.reports)),
        descriptors=(descriptors(sides.target) - copies) / (prompts + 1), setup=tools.setup,
        added=sides.added, memory=peak(sides.groups),
    )  # fmt: skip
    handovers(own, records[1:], {name: look.read() for name, look in looks.items()})
    results.finish(raw, own, tools.folder / run.file)
    scratch.unlink()
    return own


def handovers(
    own: results.Own, records: Sequence[proxy.Record], seen: Mapping[str, Mapping[str, Moment]]
) -> None:
    """Fill in what lies between the engines; `records` without the warm-up's."""
    for record in records:
        if record.prefilled and record.first:
            own.handover_client.append(round(record.first - record.prefilled, 6))
        prefill = seen.get("prefill", {}).get(record.request)
        decode = seen.get("decode", {}).get(record.request)
        if prefill:
            own.to_last_forward.append(round(prefill.ended - record.arrived, 6))
        if decode and record.first:
            own.back.append(round(record.first - decode.ended, 6))
        if prefill and decode:
            own.handover.append(round(decode.launched - prefill.ended, 6))
            own.handover_token.append(round(decode.ended - prefill.ended, 6))


def unfit(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Why emulated engines distorted a run: the rule of `emulation.report` on its share alone."""
    shares = []
    for name, summary in after.items():
        start = before.get(name, {})
        shares.append(
            {**summary, **{key: summary[key] - start.get(key, 0) for key in COUNTERS}}
        )  # fmt: skip
    reasons = timed(shares)
    reasons += [
        f"{each['name']} saw {each['wrong_rows']} wrong rows"
        for each in shares
        if each["wrong_rows"]
    ]
    return reasons


def peak(groups: Sequence[int]) -> int:
    """Bytes: the most that each process of these groups has had resident, summed up."""
    total = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError):  # one that has just ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) not in groups:
                continue
            for line in (folder / "status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) << 10
    return total


def _files(sides: Sides) -> dict[str, Path]:
    both = {"prefill": sides.prefill, "decode": sides.decode}
    return {name: path for name, path in both.items() if path is not None}


def _summaries(paths: Sequence[Path]) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in paths}


def descriptors(target: proxy.Target) -> float:
    """Copies that both engines have posted so far, as their metrics say."""
    total = 0.0
    for engine in (target.prefill, target.decode):
        if engine is None:
            continue
        try:
            with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except (urllib.error.URLError, OSError):
            continue
        for line in text.splitlines():
            if line.startswith(DESCRIPTORS):
                total += float(line.rpartition(" ")[2])
    return total


def quick(tools: Tools, target: proxy.Target, cell: Cell, prompts: int) -> None:
    """Load whose figures nobody keeps."""
    tools.ask("/target", msgspec.json.encode(target))
    scratch = tools.folder / "warm-up.part"
    try:
        serve(tools, Run("warm-up", cell, 0), prompts, scratch)
    finally:
        scratch.unlink(missing_ok=True)
