"""Every setting, in one place.

Read from vLLM's `kv_connector_extra_config` (or a router's flags) by `Config.parse`, which
refuses unknown names and values out of range, saying what would be right.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from neuron_push.errors import ConfigError
from neuron_push.limits import LIMITS, Limits

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65_535)]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine. Durations are seconds, sizes are bytes."""

    side_channel_host: str = "127.0.0.1"
    """Address that peers and routers use to reach this engine; also where it listens.
    Default: VLLM_NIXL_SIDE_CHANNEL_HOST, else the loopback address."""

    side_channel_port: Port = 5600
    """TCP port of the engine's listener. Default: VLLM_NIXL_SIDE_CHANNEL_PORT, else 5600; the
    data-parallel rank is added. Worker ranks take free ports and announce them. None of
    net.ipv4.ip_local_port_range: outgoing connections take those, also during a restart."""

    side_channel_keys: str = ""
    """Key file of the side channel; peers without one of its keys are turned away, and everything
    said there is encrypted. Made by `neuron-push key`, mode 0400; a second line is accepted too.
    Default: NEURON_PUSH_SIDE_CHANNEL_KEYS, else none."""

    accelerator: str = "auto"
    """Name of an installed accelerator ("cpu", "cuda", "neuron"), or "auto"."""

    backends: tuple[str, ...] = ()
    """NIXL backends to instantiate. Empty: what the accelerator prefers."""

    num_threads: Annotated[int, Meta(ge=0, le=64)] = 0
    """Posting threads inside the NIXL backend. 0: the transfer thread posts itself."""

    mode: Literal["auto", "push", "pull"] = "auto"
    """Who moves the bytes. "push": the prefill engine WRITEs. "pull": the decode engine READs what
    the prefill engine has finished. "auto": each request says, by carrying the block ids of a
    finished prefill or not. A request that contradicts a fixed mode is refused."""

    streaming: Literal["chunk", "layer", "off"] = "chunk"
    """"chunk": tokens travel as soon as their prefill chunk is settled. "layer": the first layers
    of a chunk travel while its last are computed, where the runner tells of layers (CUDA graphs are
    then piecewise) and pages need no reordering; else as "chunk". "off": one go at the end of
    prefill."""

    lease: Seconds = 30.0
    """How long a finished prompt is held for a decode engine that has not registered."""

    patience: Seconds = 120.0
    """How long a decode request waits for its KV before it fails, if the router set no
    budget. It ends earlier when the prefill engine fails or falls silent."""

    alive_interval: Seconds = 0.5
    """How often a sign of life is asked of a peer with transfers under way."""

    silence: Seconds = 3.0
    """Silence after which a peer is taken for dead. A false death is harmless: its transfers
    fail, and the next request greets it again."""

    resend: Seconds = 0.04
    """First wait before an unanswered registration or cancellation is repeated; it doubles
    up to `resend_most`."""

    resend_most: Seconds = 1.0
    """Longest wait between repeats."""

    greeting_timeout: Seconds = 5.0
    """How long a peer's side channel may take to answer."""

    drain_timeout: Seconds = 30.0
    """How long a peer that shows signs of life may take to confirm a cancellation, or a WRITE
    towards it to end, before it is fenced like a dead one."""

    move_timeout: Seconds = 5.0
    """How long a healthy peer may take to follow to a new agent generation before it counts
    as lost."""

    rotation_interval: Seconds = 1.0
    """Least time between two generation rotations; lost peers are collected meanwhile."""

    stall: Seconds = 10.0
    """How long one call of NIXL may keep the transfer thread. After that, what waits for KV on this
    rank fails with that reason, unless vLLM would compute again into the blocks. Blocks stay held
    until the call returns."""

    stall_most: Seconds = 120.0
    """After so long in one call the engine stops with an error, so that every request ends and it
    can be started anew. LIBFABRIC may block for 60 s, and in some cases without end."""

    slice_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 30)] = 64 << 20
    """Largest WRITE posted at once, so that cancellations and signs of life are served
    between slices."""

    batch_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 128
    """Fewer settled tokens than this wait for the next chunk, so that copies stay large; the end of
    the prompt never waits. 0: every chunk travels by itself."""

    writes_in_flight: Annotated[int, Meta(ge=1, le=64)] = 2
    """Slices in flight per transfer."""

    min_run: Annotated[int, Meta(ge=1)] = 16_384
    """Copies shorter than this many bytes go through a staging slab if a side can reorder; without
    one, copies down to 2,048 bytes are still made directly. Scattered blocks whose copies would be
    shorter than half of it go from slab to slab if both sides can. Both engines use the same."""

    staging_slab_bytes: Annotated[int, Meta(ge=1 << 12, le=1 << 32)] = 16 << 20
    """Size of one staging slab, used by pairs of unlike layouts and for scattered blocks. A slab
    must hold the tokens between two block boundaries that both sides share."""

    staging_slabs: Annotated[int, Meta(ge=0, le=1024)] = 4
    """Slabs set aside on every rank that can reorder; all staged transfers of a rank share them.
    0: never reorder here; 1: never from slab to slab."""

    host_staging: bool = False
    """Move KV pages through registered host memory, for a Trainium instance that cannot register
    its own (no EFA). Slow: one more copy on this side, made by the transfer thread. Also set by
    NEURON_PUSH_HOST_STAGING=1. Uses `staging_slabs` and `staging_slab_bytes`."""

    idle_poll: Seconds = 0.02
    """Polling period of the transfer thread when nothing is expected; twice as long once nothing
    has happened for ten periods, and five times as long after forty rounds while no prompt is on
    offer."""

    waiting_poll: Seconds = 0.004
    """Polling period while transfers wait for the other engine."""

    announced_poll: Seconds = 0.001
    """Polling period when a peer has said that data is about to arrive."""

    switch_interval: Annotated[float, Meta(ge=0, le=1)] = 0.0005
    """Python's thread switch interval to set in worker processes, so that a busy main loop
    delays the transfer thread by less than the default 5 ms. 0 leaves it alone."""

    step_wait: Annotated[float, Meta(ge=0, le=0.1)] = 0.0015
    """How long a step that scheduled no tokens may wait for a completion."""

    step_wait_idle: Annotated[float, Meta(ge=0, le=0.1)] = 0.005
    """The same after a second in which nothing happened."""

    kv_digest: bool = False
    """Compare a digest of every WRITE, and of every prompt pulled, before decoding over it; a
    transfer that differs fails, as by `kv_load_failure_policy`. Set it on both engines. Needs KV in
    host memory, and time on both transfer threads: about 0.7 ms per MiB. What would be pulled and
    then brought into order by decode is pushed."""

    limits: Limits = LIMITS
    """What a peer may make this engine hold or look at, by name: `"limits": {"links": 64}`."""

    trace_events: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Trace events that the scheduler half and every worker rank keep for `neuron-push trace`,
    each. 0 turns tracing off."""

    fault: str = ""
    """Deliberate fault for tests: "" none, "tamper" flips one byte of every WRITE."""

    @classmethod
    def parse(
        cls, settings: Mapping[str, Any], environment: Mapping[str, str] = os.environ
    ) -> Config:
        """Build from user settings and environment; raises ConfigError naming the setting."""
        _refuse_unknown(settings, cls, "")
        limits = settings.get("limits")
        if isinstance(limits, Mapping):
            _refuse_unknown(limits, Limits, "limits.")
        merged = {**_from_environment(environment), **settings}
        try:
            return msgspec.convert(merged, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"bad setting in kv_connector_extra_config: {error}") from None


def _refuse_unknown(given: Mapping[str, Any], record: type[msgspec.Struct], within: str) -> None:
    known = {field.name for field in msgspec.structs.fields(record)}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {within + near[0]!r}?" if near else ""
            raise ConfigError(
                f"unknown setting {within + name!r} in kv_connector_extra_config{hint}"
            )


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    names = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "side_channel_host",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "side_channel_port",
        "NEURON_PUSH_SIDE_CHANNEL_KEYS": "side_channel_keys",
        "NEURON_PUSH_HOST_STAGING": "host_staging",
    }
    return {setting: environment[name] for name, setting in names.items() if name in environment}
