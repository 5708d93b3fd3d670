"""The same phases as OpenTelemetry spans, one trace per request.

Where the router traced, they belong to the client's trace: the span of a request has the id that
the router sent to the engines in `traceparent`, so that their own spans hang below it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from neuron_push.errors import ConfigError
from neuron_push.trace.phases import PHASES, Request

if TYPE_CHECKING:
    from neuron_push.tracing import TraceContext


def export(found: Sequence[Request], exporter: Any) -> int:
    """Hand spans to an OpenTelemetry exporter; how many there were."""
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ids = _ids()
    resource = Resource.create({"service.name": "neuron-push"})
    provider = TracerProvider(resource=resource, id_generator=ids)
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
        ids.next = each.span
        root = tracer.start_span(
            "first token", _context(each.parent), start_time=start, attributes=attributes
        )
        ids.next = None
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


def _ids() -> Any:
    """Draws ids as the SDK does, but for a span whose ids are known."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        next: TraceContext | None = None

        def generate_span_id(self) -> int:
            return int(self.next.span, 16) if self.next else super().generate_span_id()

        def generate_trace_id(self) -> int:
            return int(self.next.trace, 16) if self.next else super().generate_trace_id()

    return Ids()


def _context(parent: TraceContext | None) -> Any:
    """The context of a span that another process has recorded; None for none."""
    if parent is None:
        return None
    from opentelemetry import trace
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    flags = TraceFlags(TraceFlags.SAMPLED)  # whoever exports wants to see it
    above = SpanContext(int(parent.trace, 16), int(parent.span, 16), True, flags)
    return trace.set_span_in_context(NonRecordingSpan(above))


def otlp(endpoint: str) -> Any:
    """An exporter that speaks OTLP over HTTP; raises ConfigError if that is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError:
        raise ConfigError("--otlp needs OpenTelemetry: pip install 'neuron-push[otel]'") from None
    return OTLPSpanExporter(endpoint=endpoint)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
