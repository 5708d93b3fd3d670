"""Hook traces: the order in which a vLLM version and runner call a connector.

A trace is a list of steps. A step opens with what the scheduler asks while it schedules and
ends with what it tells the connector about the step's output. Calls of one process keep their
order; calls of worker processes stand, rank by rank, after the ``build_connector_meta`` that
caused them, since the order *between* processes is not defined.

A recorded trace comes from an engine that ran. A derived trace is read from the source and
names the lines it rests on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

TRACES = Path(__file__).parent / "traces"

Provenance: TypeAlias = Literal["recorded", "derived"]

SCHEDULER = "scheduler"


@dataclass(frozen=True)
class Call:
    """One call of a hook by vLLM."""

    side: str
    """``scheduler``, or ``worker`` and the rank in the engine: ``worker0``."""
    hook: str
    detail: dict[str, Any]
    """A summary of arguments and answer; requests are named r0, r1 in order of arrival. Empty
    lists are left out. Workers' calls say whether metadata is bound when they are called, and
    those of the V2 runner ``within`` which of its methods they are made."""

    @property
    def is_scheduler(self) -> bool:
        return self.side == SCHEDULER

    def __str__(self) -> str:
        detail = " ".join(f"{key}={json.dumps(self.detail[key])}" for key in sorted(self.detail))
        return f"{self.side} {self.hook} {detail}".rstrip()


Step: TypeAlias = tuple[Call, ...]


@dataclass(frozen=True)
class Source:
    """A line of vLLM that a derived trace rests on."""

    file: str
    """Path inside the installed ``vllm`` package."""
    line: int
    text: str
    """What that line contains; the check compares it without surrounding blanks."""


@dataclass(frozen=True)
class Trace:
    """One case of one version and runner."""

    vllm: str
    runner: str
    case: str
    provenance: Provenance
    startup: Step
    """Calls before the first step, in the order of the start of an engine; empty if derived."""
    steps: tuple[Step, ...]
    sources: tuple[Source, ...]
    """Empty if recorded."""

    @property
    def name(self) -> str:
        return f"vllm-{self.vllm}/{self.runner}-{self.case}"

    def lines(self) -> list[str]:
        """One text line per call and per step, for comparison."""
        lines = ["startup"] + [f"  {call}" for call in self.startup]
        for number, step in enumerate(self.steps):
            lines.append(f"step {number}")
            lines += [f"  {call}" for call in step]
        return lines


def parse_call(data: list[Any]) -> Call:
    """Reads ``[side, hook]`` or ``[side, hook, detail]``."""
    side, hook, *rest = data
    return Call(side, hook, rest[0] if rest else {})


def parse_trace(data: dict[str, Any]) -> Trace:
    return Trace(
        vllm=data["vllm"],
        runner=data["runner"],
        case=data["case"],
        provenance=data["provenance"],
        startup=tuple(parse_call(call) for call in data["startup"]),
        steps=tuple(tuple(parse_call(call) for call in step) for step in data["steps"]),
        sources=tuple(Source(**source) for source in data["sources"]),
    )


def load_traces(
    vllm: str | None = None, runner: str | None = None, case: str | None = None
) -> list[Trace]:
    """All committed traces, sorted by name; the arguments narrow them down."""
    found = (parse_trace(json.loads(path.read_text())) for path in sorted(TRACES.rglob("*.json")))
    return [
        trace
        for trace in found
        if vllm in (None, trace.vllm)
        and runner in (None, trace.runner)
        and case in (None, trace.case)
    ]


def _call_text(call: Call) -> str:
    parts: list[Any] = [call.side, call.hook]
    return json.dumps([*parts, call.detail] if call.detail else parts)


def _nested(items: list[str], indent: str) -> str:
    if not items:
        return "[]"
    inner = ",\n".join(f"{indent}  {item}" for item in items)
    return f"[\n{inner}\n{indent}]"


def _text(trace: Trace) -> Iterator[str]:
    yield f'"vllm": {json.dumps(trace.vllm)}'
    yield f'"runner": {json.dumps(trace.runner)}'
    yield f'"case": {json.dumps(trace.case)}'
    yield f'"provenance": {json.dumps(trace.provenance)}'
    yield '"sources": ' + _nested([json.dumps(vars(source)) for source in trace.sources], "  ")
    yield '"startup": ' + _nested([_call_text(call) for call in trace.startup], "  ")
    steps = [_nested([_call_text(call) for call in step], "    ") for step in trace.steps]
    yield '"steps": ' + _nested(steps, "  ")


def save_trace(trace: Trace) -> Path:
    """Writes one call per line, so that a change of order reads well in a diff."""
    path = TRACES / f"{trace.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n  " + ",\n  ".join(_text(trace)) + "\n}\n")
    return path
