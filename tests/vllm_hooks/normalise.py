"""From the recorder's raw lines to a trace without ids, paths or timing in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from tests.vllm_hooks.traces import SCHEDULER, Call, Step, Trace

# vLLM appends a random part to the id that the caller chose.
_REQUEST_ID = re.compile(r"^(r\d+)-[0-9a-f]+$")

RawLine = dict[str, Any]


def _without_random_part(value: Any) -> Any:
    if isinstance(value, str):
        return _REQUEST_ID.sub(r"\1", value)
    if isinstance(value, list):
        return [_without_random_part(item) for item in value]
    if isinstance(value, dict):
        return {_without_random_part(key): _without_random_part(v) for key, v in value.items()}
    return value


def _call(line: RawLine) -> Call:
    detail = {key: value for key, value in line["detail"].items() if value not in ([], {})}
    return Call(line["side"], line["hook"], _without_random_part(detail))


def _is_call(line: RawLine) -> bool:
    return "hook" in line


def _one_process(lines: Iterable[RawLine]) -> list[Step]:
    """Cuts at the driver's marks; order is that of the file."""
    steps: list[list[Call]] = [[]]
    for line in lines:
        if "engine_step" in line:
            steps.append([])
        elif _is_call(line):
            steps[-1].append(_call(line))
    return [tuple(step) for step in steps]


def _many_processes(lines: list[RawLine]) -> list[Step]:
    """Puts each worker's calls behind the ``build_connector_meta`` of the metadata they saw."""
    by_number: dict[int, list[Call]] = {}
    shutdowns: list[Call] = []
    for line in sorted(filter(_is_call, lines), key=lambda line: str(line["side"])):
        if line["hook"] == "shutdown":
            shutdowns.append(_call(line))
        elif line["side"] != SCHEDULER:
            by_number.setdefault(line["step"], []).append(_call(line))
    scheduler = (line for line in lines if line.get("side") in (None, SCHEDULER))
    steps = [tuple(by_number.pop(0, []))]
    for step in _one_process(line for line in scheduler if line.get("hook") != "shutdown"):
        calls: list[Call] = []
        for call in step:
            calls.append(call)
            if call.hook == "build_connector_meta" and by_number:
                calls += by_number.pop(min(by_number))
        steps.append(tuple(calls))
    workers_at_start, scheduler_at_start, *rest = steps
    # The engine shuts its workers down first.
    shutdowns.sort(key=lambda call: call.is_scheduler)
    return [workers_at_start + scheduler_at_start, *rest[:-1], rest[-1] + tuple(shutdowns)]


def normalise(raw: str, vllm: str, runner: str, case: str) -> Trace:
    """``raw`` is the text of a recording."""
    lines = [json.loads(line) for line in raw.splitlines()]
    workers = {line["side"] for line in lines if _is_call(line)} - {SCHEDULER}
    startup, *steps = _many_processes(lines) if len(workers) > 1 else _one_process(lines)
    while steps and not steps[-1]:
        steps.pop()
    return Trace(
        vllm=vllm,
        runner=runner,
        case=case,
        provenance="recorded",
        startup=startup,
        steps=tuple(steps),
        sources=(),
    )
