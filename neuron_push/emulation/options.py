"""What is emulated: one environment variable, so that every process of an engine agrees.

`NEURON_PUSH_EMULATE` is a device name, or JSON with the fields of `Options`:

    NEURON_PUSH_EMULATE=p5en
    NEURON_PUSH_EMULATE='{"device": "trn2", "profile": "qwen3-32b-tp8-trn2", "verify": "sampled"}'
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from neuron_push.emulation import VARIABLE
from neuron_push.errors import ConfigError

DeviceName = Literal["trn2", "p5en", "cpu"]
Runner = Literal["gpu-v2", "gpu-v1", "cpu"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One emulated engine."""

    device: DeviceName = "p5en"
    """Whose KV layout and block size."""

    runner: Runner = "gpu-v2"
    """Whose order of connector hooks. "cpu" writes bytes before the hooks; the others launch,
    call the hooks, and write later."""

    verify: Literal["full", "sampled", "none"] = "full"
    """"full": every byte once when KV becomes schedulable, then new and sampled slots each
    step. "sampled": of eight positions one is written, and a few of those are read at each of
    these moments. "none": nothing is read, for KV that follows no pattern. Engines that exchange
    KV share it."""

    profile: str = "instant"
    """Name of a cost profile (neuron_push.emulation.cost)."""

    link: bool = False
    """Whether this engine's WRITEs take the time of the profile's link (neuron-push only)."""

    report: str = ""
    """Folder for reports; empty: the log only."""

    kv_bytes: Annotated[int, Meta(ge=1 << 20)] = 256 << 20
    """KV memory per rank, unless --num-gpu-blocks-override says otherwise."""

    huge_pages: bool = False
    """KV in pages of 2 MiB, if the kernel gives them. UCX copies between processes page by page:
    twice as fast then."""

    progress_delay: Annotated[int, Meta(ge=0)] = 0
    """Microseconds between two rounds of NIXL's progress thread, which vLLM's connectors start.
    0: NIXL's own choice, to spin on a core of its own."""

    seed: int = 0
    """Of the pattern and of sampled positions. Engines that exchange KV share it."""

    fault: Literal["", "early-fence", "late-block", "drop-layer", "swap-blocks", "flip-byte"] = ""
    """A deliberate fault of the emulated device, for tests of the oracle."""


def parse(text: str) -> Options:
    """Options from the variable's text; raises ConfigError saying what is wrong."""
    text = text.strip()
    if not text.startswith("{"):
        text = msgspec.json.encode({"device": text}).decode()
    try:
        return msgspec.json.decode(text, type=Options)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{VARIABLE}: {error}") from None


def wanted(environment: Mapping[str, str] = os.environ) -> Options | None:
    """The options, or None when nothing is to be emulated."""
    text = environment.get(VARIABLE, "")
    return parse(text) if text else None


def encode(options: Options) -> str:
    """The variable's text for these options."""
    return msgspec.json.encode(options).decode()
