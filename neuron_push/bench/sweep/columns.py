"""What a sweep compares: who sends the legs how, to which engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from neuron_push.errors import ConfigError

Dispatch = Literal["push", "pull", "prefill", "decode"]
Connector = Literal["neuron-push", "vllm-push", "vllm-pull", "decode-bench"]


@dataclass(frozen=True)
class Kind:
    """A pair of engines: columns that need the same one share it."""

    connector: Connector
    settings: Mapping[str, Any] = field(default_factory=dict)
    prefill: bool = True
    """False: decode alone."""
    runner: str = ""
    """Hook order of the engines; "": the fleet file's."""


@dataclass(frozen=True)
class Column:
    """One line of a chart."""

    label: str
    dispatch: Dispatch
    """push: both legs at once; pull: prefill first; prefill, decode: that engine alone."""
    kind: str
    floor: bool = False


KINDS: Final[Mapping[str, Kind]] = {
    "ours": Kind("neuron-push"),
    # The runner that tells of layers.
    "ours-layer": Kind("neuron-push", {"streaming": "layer"}, runner="gpu-v1"),
    "ours-off": Kind("neuron-push", {"streaming": "off"}),
    "nixl-push": Kind("vllm-push"),
    "nixl-pull": Kind("vllm-pull"),
    "decode-bench": Kind("decode-bench", prefill=False),
}
COLUMNS: Final[Mapping[str, Column]] = {
    "push": Column("neuron-push, push by chunk", "push", "ours"),
    "push-layer": Column("neuron-push, push by layer", "push", "ours-layer"),
    "push-off": Column("neuron-push, push at the end", "push", "ours-off"),
    "pull": Column("neuron-push, pull", "pull", "ours"),
    "nixl-push": Column("NixlPushConnector", "push", "nixl-push"),
    "nixl-pull": Column("NixlConnector", "pull", "nixl-pull"),
    "floor-ttft": Column("floor: prefill alone", "prefill", "ours", floor=True),
    "floor-tpot": Column("floor: decode alone", "decode", "decode-bench", floor=True),
}
DEFAULT: Final = ("push", "pull", "nixl-push", "nixl-pull", "floor-ttft", "floor-tpot")


def chosen(names: list[str]) -> dict[str, Column]:
    """Columns by name; ConfigError names the known ones."""
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise ConfigError(f"no column {unknown[0]!r}; known: {', '.join(COLUMNS)}")
    return {name: COLUMNS[name] for name in names}
