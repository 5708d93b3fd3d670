"""The same phases as OpenTelemetry spans, one trace per request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from neuron_push.errors import ConfigError
from neuron_push.trace.phases import PHASES, Request


def export(found: Sequence[Request], exporter: Any) -> int:
    """Hand spans to an OpenTelemetry exporter; how many there were."""
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "neuron-push"}))
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=1 << 17))
    tracer = provider.get_tracer("neuron_push.trace")
    # Events are on the collector's monotonic clock; spans carry Unix time.
    shift = time.time() - time.monotonic()
    count = 0
    for each in found:
        attributes: dict[str, str | float] = {
            "neuron_push.transfer_id": each.transfer,
            "neuron_push.request_id": each.request,
            "neuron_push.mode": each.mode,
            "neuron_push.outcome": each.outcome,
            "neuron_push.bytes": each.nbytes,
        }
        start = _ns(each.start + shift)
        root = tracer.start_span("first token", start_time=start, attributes=attributes)
        context = trace.set_span_in_context(root)
        for phase in each.phases:
            span = tracer.start_span(
                phase.name,
                context,
                start_time=_ns(phase.start + shift),
                attributes={"neuron_push.side": PHASES[phase.name][1]},
            )
            span.end(_ns(phase.stop + shift))
            count += 1
        root.end(_ns(each.start + each.seconds + shift))
        count += 1
    provider.shutdown()
    return count


def otlp(endpoint: str) -> Any:
    """An exporter that speaks OTLP over HTTP; raises ConfigError if that is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError:
        raise ConfigError("--otlp needs OpenTelemetry: pip install 'neuron-push[otel]'") from None
    return OTLPSpanExporter(endpoint=endpoint)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
