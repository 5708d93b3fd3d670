"""What must hold (claims.yaml), judged by the files of results alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from neuron_push.bench.sweep import results, statistics
from neuron_push.bench.sweep.cells import Cell, parse
from neuron_push.bench.sweep.results import Result
from neuron_push.emulation import cost
from neuron_push.errors import ConfigError

SHIPPED: Final = Path(__file__).parent / "claims.yaml"
# Of a prefill engine's time that may be asked for before its queue only grows.
SUSTAINED: Final = 0.95
State = Literal["holds", "missed", "not measured"]
Place = tuple[str, ...]
Metric = Literal[
    "ttft", "tpot", "handover", "handover_token", "handover_client", "memory", ""
]  # fmt: skip


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the file; its head says what the fields mean."""

    id: str
    text: str
    metric: Metric = ""
    column: str = ""
    cells: tuple[str, ...] = ()
    """Empty: every cell that was measured."""
    regime: Literal["", "fragmented"] = ""
    sustained: bool = False
    """Only cells whose load the prefill engine can sustain."""
    file: str = ""
    value: Place = ()
    against: float | str | Place = 0.0
    at_most: float | None = None
    times_better: float | None = None
    not_worse: bool = False
    near: float | None = None


class Finding(msgspec.Struct, kw_only=True):
    """One comparison. An open interval ends at null."""

    where: str
    ratio: float
    low: float | None
    high: float | None
    rounds: int
    holds: bool


class Verdict(msgspec.Struct, kw_only=True):
    """What became of a claim."""

    id: str
    text: str
    rule: str
    state: State
    findings: list[Finding]
    missing: list[str]


def load(path: Path = SHIPPED) -> list[Claim]:
    """Read claims; raises ConfigError saying what is wrong with them."""
    try:
        claims = msgspec.yaml.decode(path.read_bytes(), type=list[Claim])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for claim in claims:
        rules = (claim.at_most, claim.times_better, claim.near, claim.not_worse or None)
        if sum(rule is not None for rule in rules) != 1:
            raise ConfigError(f"{path}: claim {claim.id} needs exactly one rule")
    return claims


def judge(
    claims: Sequence[Claim], found: Sequence[Result], files: Mapping[str, Any]
) -> list[Verdict]:
    """A verdict per claim. `files` holds what other benchmarks wrote, by file name."""
    return [_of_file(c, files) if c.file else _of_sweep(c, found) for c in claims]


def rule(claim: Claim) -> str:
    """The rule in words."""
    if claim.at_most is not None:
        return f"ratio at most {claim.at_most:g}"
    if claim.times_better is not None:
        return f"at least {claim.times_better:g} times better"
    if claim.near is not None:
        return f"ratio at most {claim.near:g}, or its interval reaches 1"
    return "the interval of the ratio is not above 1"


def holds(claim: Claim, ratio: statistics.Ratio) -> bool:
    """Whether a ratio, ours over theirs (smaller is better), satisfies the rule."""
    if claim.at_most is not None:
        return ratio.value <= claim.at_most
    if claim.times_better is not None:
        return ratio.value <= 1 / claim.times_better
    if claim.near is not None:
        return ratio.value <= claim.near or 0 < ratio.low <= 1
    return ratio.low <= 1


def values(result: Result, metric: str) -> list[float]:
    """Per request, in seconds; of memory, one number of bytes."""
    own = result.neuron_push
    if metric == "memory":
        return [float(own.memory)] if own.memory else []
    if metric == "ttft":
        return [ttft + own.added for ttft in result.ttfts]
    found: list[float] = own.tpots if metric == "tpot" else getattr(own, metric)
    return found


def compare(
    found: Sequence[Result], metric: str, column: str, against: str | float, cell: Cell
) -> statistics.Ratio | None:
    """Ratio of the rounds' medians; None unless both were measured in a common round."""
    ours = _medians(found, metric, column, cell)
    if isinstance(against, str):
        theirs = _medians(found, metric, against, cell)
    else:
        theirs = dict.fromkeys(ours, against / 1e3)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return None
    return statistics.ratio([ours[n] for n in common], [theirs[n] for n in common])


def _medians(found: Sequence[Result], metric: str, column: str, cell: Cell) -> dict[int, float]:
    return {
        result.neuron_push.repeat: statistics.median(values(result, metric))
        for result in results.of(found, column, cell)
        if values(result, metric)
    }


def _of_sweep(claim: Claim, found: Sequence[Result]) -> Verdict:
    regime = [r for r in found if r.neuron_push.fragmented == (claim.regime == "fragmented")]
    assert not isinstance(claim.against, tuple)
    findings, missing = [], []
    for cell in _cells(claim, regime):
        ratio = compare(regime, claim.metric, claim.column, claim.against, cell)
        if ratio is None:
            missing.append(cell.name)
        else:
            findings.append(_finding(cell.name, ratio, holds(claim, ratio)))
    return _verdict(claim, findings, missing if claim.cells or findings else ["every cell"])


def _cells(claim: Claim, found: Sequence[Result]) -> list[Cell]:
    measured = results.cells(found)
    if claim.cells:
        wanted = [(cell.input, cell.qps) for cell in parse(claim.cells, 0)]
        by_load = {(cell.input, cell.qps): cell for cell in measured}
        return [by_load.get(load, Cell(*load, 0)) for load in wanted]
    if claim.sustained:
        measured = [cell for cell in measured if sustained(cell, found)]
    return measured


def sustained(cell: Cell, found: Sequence[Result]) -> bool:
    """Whether prefill can keep up with a cell, by its cost model; True where none is known."""
    for result in found:
        prefill = result.neuron_push.setup.get("engines", {}).get("prefill")
        if prefill:
            seconds = cost.profile(prefill["profile"]).step(cell.input, 0)
            return cell.qps * seconds < SUSTAINED
    return True


def _of_file(claim: Claim, files: Mapping[str, Any]) -> Verdict:
    ours = _look(files.get(claim.file), claim.value)
    theirs = claim.against
    if isinstance(theirs, tuple):
        theirs = _look(files.get(claim.file), theirs)
    if not isinstance(ours, int | float) or not isinstance(theirs, int | float) or theirs <= 0:
        return _verdict(claim, [], [claim.file])
    single = statistics.Ratio(ours / theirs, 0.0, float("inf"), 1)
    return _verdict(claim, [_finding(" ".join(claim.value), single, holds(claim, single))], [])


def _look(document: Any, place: Place) -> Any:
    for step in place:
        if not isinstance(document, Mapping) or step not in document:
            return None
        document = document[step]
    return document


def _finding(where: str, ratio: statistics.Ratio, good: bool) -> Finding:
    closed = ratio.rounds > 1
    return Finding(
        where=where, ratio=round(ratio.value, 4), low=round(ratio.low, 4) if closed else None,
        high=round(ratio.high, 4) if closed else None, rounds=ratio.rounds, holds=good,
    )  # fmt: skip


def _verdict(claim: Claim, findings: list[Finding], missing: list[str]) -> Verdict:
    state: State = "holds"
    if any(not finding.holds for finding in findings):
        state = "missed"
    elif missing or not findings:
        state = "not measured"
    return Verdict(
        id=claim.id, text=claim.text, rule=rule(claim), state=state, findings=findings,
        missing=missing,
    )  # fmt: skip


def other_files(folder: Path, claims: Sequence[Claim]) -> dict[str, Any]:
    """What other benchmarks wrote beside a sweep's results."""
    found = {}
    for name in sorted({claim.file for claim in claims if claim.file}):
        path = folder / name
        if path.exists():
            try:
                found[name] = json.loads(path.read_text())
            except ValueError as error:
                raise ConfigError(f"{path}: {error}") from None
    return found
