"""One self-contained HTML page: a bar per phase, together and request by request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final

from neuron_push.trace.collect import Track
from neuron_push.trace.phases import PHASES, Request, summary

# Requests in the page, and rows drawn at once.
MOST_KEPT: Final = 5000
MOST_DRAWN: Final = 300
NOTE: Final = (
    "phases follow each other on the critical path and add up to the time to the first token"
)


def page(tracks: Sequence[Track], found: Sequence[Request]) -> str:
    """The page's text."""
    template = files("neuron_push.trace").joinpath("page.html").read_text(encoding="utf-8")
    raw = json.dumps(_data(tracks, found), separators=(",", ":"))
    # The text of a script element ends at the first "</", whatever it stands in.
    return template.replace("__DATA__", raw.replace("<", "\\u003c"))


def _data(tracks: Sequence[Track], found: Sequence[Request]) -> dict[str, Any]:
    kept = found[-MOST_KEPT:]
    origin = kept[0].start if kept else 0.0
    note = NOTE
    if len(kept) < len(found):
        note += f"; the newest of {len(found)} are shown"
    return {
        "note": note,
        "most": MOST_DRAWN,
        "phases": [{"name": name, "text": text} for name, (text, _) in PHASES.items()],
        "summary": summary(found),
        "requests": [_row(each, origin) for each in kept],
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
        ],
    }


def _row(each: Request, origin: float) -> dict[str, Any]:
    return {
        "transfer": each.transfer,
        "request": each.request,
        "mode": each.mode,
        "engines": each.engines,
        "outcome": each.outcome,
        "start": each.start - origin,
        "seconds": each.seconds,
        "phases": [
            {"name": p.name, "start": p.start - origin, "seconds": p.seconds} for p in each.phases
        ],
    }
