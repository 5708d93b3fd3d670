"""From events to phases: where the time between a request and its first token went.

Phases follow each other on the critical path, so their lengths add up to the time to the first
token. What overlaps with something longer does not show: a registration that arrives while
prefill still runs waits for nothing and has no length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from neuron_push.protocol import TraceEvent
from neuron_push.trace.collect import Track
from neuron_push.tracing import TraceContext

# In order, with what each means and on whose line it is drawn.
PHASES: Final[Mapping[str, tuple[str, str]]] = {
    "router": ("arrival at the router to both legs sent", "router"),
    "dispatch": ("on the way into the prefill engine's scheduler", "prefill"),
    "queue": ("waiting in the prefill engine's queue", "prefill"),
    "prefill": ("computing the prompt, up to the fence of its last chunk", "prefill"),
    "hand-over": ("pull: prefill's answer, by way of the router, until decode has it", "decode"),
    "registration wait": ("prompt done, decode engine has not registered yet", "decode"),
    "match": ("both here, last WRITE (pull: first READ) not posted yet", "prefill"),
    "post": ("planning and posting the last WRITE (pull: first READ)", "prefill"),
    "wire": ("last WRITE on its way (pull: all READs)", "prefill"),
    "notify": ("landed, until the decode engine knows it has everything", "decode"),
    "first step": ("all KV here, until the first byte of the answer", "decode"),
}


@dataclass
class Phase:
    """One stretch of a request's way, in seconds on the collector's clock."""

    name: str
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.stop - self.start


@dataclass
class Request:
    """One transfer: who served it and where its time went."""

    transfer: str
    request: str = ""
    mode: str = "push"
    engines: str = ""
    phases: list[Phase] = field(default_factory=list)
    outcome: str = "ok"
    nbytes: float = 0.0
    # Its own span and the one above it, if the router traced.
    span: TraceContext | None = None
    parent: TraceContext | None = None

    @property
    def start(self) -> float:
        """When it began."""
        return self.phases[0].start if self.phases else 0.0

    @property
    def seconds(self) -> float:
        """From its beginning to its first token."""
        return self.phases[-1].stop - self.start if self.phases else 0.0


def requests(tracks: Sequence[Track], only: str = "") -> list[Request]:
    """All transfers in the tracks, by time; `only` keeps those with this text in a name."""
    events: dict[str, list[TraceEvent]] = defaultdict(list)
    for track in tracks:
        for event in track.events:
            # Engines number the prompts of one request: "id#0", "id#1".
            events[event.transfer.partition("#")[0]].append(event)
    found = [_request(name, sorted(each, key=_at)) for name, each in events.items()]
    kept = [r for r in found if r.phases and (only in r.transfer or only in r.request)]
    return sorted(kept, key=lambda each: each.start)


def _at(event: TraceEvent) -> float:
    return event.at


def _request(transfer: str, events: Sequence[TraceEvent]) -> Request:
    first: dict[str, TraceEvent] = {}
    last: dict[str, TraceEvent] = {}
    for event in events:
        first.setdefault(event.name, event)
        last[event.name] = event
    found = Request(transfer)
    if "read posted" in first:
        found.mode = "pull"
    if "chosen" in first:
        found.mode, _, found.engines = first["chosen"].detail.partition(" ")
    named = first.get("arrived") or first.get("prefill arrived") or first.get("decode arrived")
    found.request = named.detail if named else ""
    failures = [
        e.name
        for e in events
        if "failed" in e.name or e.name in ("retried", "write broken", "read broken")
    ]
    found.outcome = failures[-1] if failures else "ok"
    if "trace context" in first:
        own, _, above = first["trace context"].detail.partition(" ")
        found.span, found.parent = TraceContext.parse(own), TraceContext.parse(above)
    found.nbytes = sum(event.value for event in events if event.name in ("notified", "read"))
    found.phases = _chain(_marks(first, last))
    return found


def _marks(
    first: Mapping[str, TraceEvent], last: Mapping[str, TraceEvent]
) -> list[tuple[str, float | None]]:
    """When each phase ends; the first entry is when the first one begins."""

    def at(name: str, where: Mapping[str, TraceEvent] = last) -> float | None:
        return where[name].at if name in where else None

    # A pull READs once the prompt is whole, so all of it is on the way to the first token.
    pulled = first.get("read posted")
    posted = pulled or last.get("posted")
    settled = at("settled last")
    ready = [moment for moment in (settled, at("registered")) if moment is not None]
    # A prompt that the decode engine's cache held is served without any WRITE.
    received = at("received") if posted or "received" in last else at("decode loaded")
    return [
        ("", at("arrived", first) or at("prefill arrived", first)),
        ("router", at("sent", first)),
        ("dispatch", at("prefill arrived", first)),
        ("queue", at("prefill scheduled", first)),
        # Without a look into the engine, its answer tells when prefill was over.
        ("prefill", settled if settled is not None else at("prefill answered")),
        ("hand-over", at("decode arrived", first) if pulled else None),
        ("registration wait", max(ready) if len(ready) == 2 else None),
        ("match", posted.at if posted else None),
        ("post", posted.at + posted.seconds if posted else None),
        ("wire", at("read") if pulled else at("landed")),
        ("notify", received),
        ("first step", at("first byte", first) or at("decode scheduled", first)),
    ]


def _chain(marks: Sequence[tuple[str, float | None]]) -> list[Phase]:
    """Phases from one mark to the next that is known; clocks that disagree make no holes."""
    phases: list[Phase] = []
    begin: float | None = None
    for name, moment in marks:
        if moment is None:
            continue
        if begin is None:
            begin = moment
        if name:
            stop = max(begin, moment)
            phases.append(Phase(name, begin, stop))
            begin = stop
    return phases


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which that share lies; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summary(found: Sequence[Request]) -> dict[str, dict[str, dict[str, float]]]:
    """Per mode and phase: mean, median and 90th percentile in seconds, and how many."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for mode in sorted({each.mode for each in found}):
        rows = result[mode] = {}
        of_mode = [each for each in found if each.mode == mode]
        for name in PHASES:
            times = [p.seconds for each in of_mode for p in each.phases if p.name == name]
            if times:
                rows[name] = _row(times)
        rows["total"] = _row([each.seconds for each in of_mode])
    return result


def _row(times: Sequence[float]) -> dict[str, float]:
    return {
        "count": float(len(times)),
        "mean": sum(times) / len(times),
        "p50": percentile(times, 0.5),
        "p90": percentile(times, 0.9),
    }
