"""Recorded and derived orders of vLLM's connector hooks; see ``traces``."""

from tests.vllm_hooks.traces import Call, Source, Step, Trace, load_traces

__all__ = ["Call", "Source", "Step", "Trace", "load_traces"]
