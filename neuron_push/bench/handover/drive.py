"""Single requests through the proxy, and what devices and traces say of them."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from neuron_push.bench.sweep import proxy, statistics
from neuron_push.bench.sweep.engines import Pair, Template
from neuron_push.bench.sweep.measure import Moment, Moments, descriptors
from neuron_push.emulation.fleet import SERVED, EmulatedEngine
from neuron_push.errors import NeuronPushError
from neuron_push.ports import HOST
from neuron_push.processes import Server
from neuron_push.protocol import Address
from neuron_push.trace.collect import Track, collect, processes_of

PATIENCE: Final = 120.0
# Between two requests: blocks come back, and nothing is in flight.
PAUSE: Final = 0.15
TRACED: Final = {"trace_events": 1 << 16}


@dataclass
class Seen:
    """One request, seen by both devices."""

    request: str
    prefill: Moment
    decode: Moment

    @property
    def handover(self) -> float:
        """Seconds from the end of P's last forward to the launch of D's first."""
        return self.decode.launched - self.prefill.ended

    @property
    def first_token(self) -> float:
        """Seconds from the end of P's last forward to the end of D's first."""
        return self.decode.ended - self.prefill.ended


def traced(template: Template) -> Template:
    """The same engines with tracing on."""
    specs = [
        msgspec.structs.replace(spec, settings={**spec.settings, **TRACED})
        for spec in (template.prefill, template.decode)
    ]
    return Template(specs[0], specs[1], template.model)


class Driver:
    """Sends requests to one pair over the proxy."""

    def __init__(self, server: Server, pair: Pair, dispatch: Any) -> None:
        self._url = server.url
        self._pair = pair
        self._dice = random.Random(5)
        self._aim(dispatch)

    def _aim(self, dispatch: Any) -> None:
        self._target = self._pair.target(dispatch)
        post(f"{self._url}/target", msgspec.json.encode(self._target))

    def copies(self) -> float:
        """How many the pair has posted so far, for all its requests."""
        return descriptors(self._target)

    def one(self, tokens: int, output: int = 2) -> None:
        """One request, to its end; raises NeuronPushError when it fails."""
        prompt = [self._dice.randrange(33, 126) for _ in range(tokens)]
        body = {
            "model": SERVED, "prompt": prompt, "max_tokens": output, "ignore_eos": True,
            "temperature": 0,
        }  # fmt: skip
        post(f"{self._url}/v1/completions", json.dumps(body).encode())

    def several(self, tokens: int, count: int) -> list[Seen]:
        """One after the other."""
        looks = self.looks()
        post(f"{self._url}/records")
        for _ in range(count):
            self.one(tokens)
            time.sleep(PAUSE)
        return self.seen(looks)

    def looks(self) -> tuple[Moments, Moments]:
        """Both devices, from now on."""
        prefill, decode = self._pair.prefill, self._pair.decode
        assert prefill is not None
        return Moments(moments(prefill)), Moments(moments(decode))

    def seen(self, looks: tuple[Moments, Moments]) -> list[Seen]:
        """What both devices have seen since, of the requests that came through the proxy."""
        answer = post(f"{self._url}/records")
        records = msgspec.json.decode(answer, type=list[proxy.Record])
        prefill, decode = (look.read() for look in looks)
        return [
            Seen(name, prefill[name], decode[name])
            for name in (record.request for record in records)
            if name in prefill and name in decode
        ]

    def tracks(self) -> list[Track]:
        """Trace events of both engines on this machine's clock."""
        askers = [
            asker
            for engine in self._pair.engines
            for asker in processes_of(Address(HOST, engine.side_port))
        ]
        found, complaints = collect(askers)
        if complaints:
            raise NeuronPushError("; ".join(complaints))
        return found


def moments(engine: EmulatedEngine) -> Path:
    """Where an engine of one rank tells of its requests."""
    return engine.reports / f"{engine.spec.name}-0.moments.jsonl"


def post(url: str, body: bytes = b"{}") -> bytes:
    """POST, or NeuronPushError with what the answer says."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise NeuronPushError(f"{url}: {error.code} {error.read()[:300]!r}") from None
    except OSError as error:
        raise NeuronPushError(f"{url}: {error}") from None


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    """Median, percentiles and how many, for a report."""
    return {
        "p50_ms": round(statistics.median(values) * 1e3, 3),
        "p90_ms": round(statistics.percentile(values, 0.9) * 1e3, 3),
        "p99_ms": round(statistics.percentile(values, 0.99) * 1e3, 3),
        "n": len(values),
    }
