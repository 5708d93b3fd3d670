"""Events and phases in the format of Chrome's tracing, which Perfetto opens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from neuron_push.trace.collect import Track
from neuron_push.trace.phases import PHASES, Request

LINES: Final = ("router", "prefill", "decode")


def trace(tracks: Sequence[Track], found: Sequence[Request]) -> dict[str, Any]:
    """The whole file. Times are microseconds since the first event."""
    starts = [event.at for track in tracks for event in track.events]
    origin = min([*starts, *(each.start for each in found)], default=0.0)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "clocks": [
                {
                    "source": track.source,
                    "offset_seconds": track.clock.offset,
                    "error_seconds": track.clock.error,
                    "events": len(track.events),
                    "lost": track.lost,
                    "tracing": track.tracing,
                }
                for track in tracks
            ]
        },
        "traceEvents": [*_slices(found, origin), *_instants(tracks, origin)],
    }


def _slices(found: Sequence[Request], origin: float) -> Iterator[dict[str, Any]]:
    """Phases on the line of whoever is at work; overlapping requests on lines of their own."""
    for number, line in enumerate(LINES, 1):
        yield _name("process_name", number, 0, f"{line}: phases")
    free: list[float] = []
    for flow, each in enumerate(found, 1):
        lane = next((i for i, until in enumerate(free) if until <= each.start), len(free))
        free[lane : lane + 1] = [each.start + each.seconds]
        previous = 0
        for phase in each.phases:
            process = LINES.index(PHASES[phase.name][1]) + 1
            shared = {"pid": process, "tid": lane + 1, "ts": _us(phase.start, origin)}
            yield {
                **shared, "ph": "X", "name": phase.name, "cat": each.mode,
                "dur": round(phase.seconds * 1e6, 3),
                "args": {"transfer": each.transfer, "request": each.request},
            }  # fmt: skip
            if previous and previous != process:
                # An arrow from one process to the next.
                end = {"name": "hand-over", "cat": each.mode, "id": f"{flow}.{phase.name}"}
                yield {**shared, **end, "pid": previous, "ph": "s"}
                yield {**shared, **end, "ph": "f", "bp": "e"}
            previous = process


def _instants(tracks: Sequence[Track], origin: float) -> Iterator[dict[str, Any]]:
    """Every event as it was recorded, per process."""
    for number, track in enumerate(tracks, len(LINES) + 1):
        yield _name("process_name", number, 0, f"{track.source}: events")
        for event in track.events:
            yield {
                "ph": "X" if event.seconds else "i", "s": "t", "pid": number, "tid": 1,
                "name": event.name, "cat": "event", "ts": _us(event.at, origin),
                "dur": round(event.seconds * 1e6, 3),
                "args": {
                    "transfer": event.transfer, "detail": event.detail, "value": event.value,
                },
            }  # fmt: skip


def _us(moment: float, origin: float) -> float:
    return round((moment - origin) * 1e6, 3)


def _name(kind: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": text}}
