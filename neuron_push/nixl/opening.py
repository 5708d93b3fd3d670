"""What opens a transport per generation: backends, parameters, and what NIXL says meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from neuron_push.errors import ConfigError
from neuron_push.geometry import Region
from neuron_push.nixl import logs
from neuron_push.nixl.agent import NixlTransport
from neuron_push.nixl.binding import NO_PARAMETERS, Parameters
from neuron_push.tamper import Tampering
from neuron_push.transport import AgentName, TransportFactory

__all__ = ["NixlFactory", "factory"]

logger = logging.getLogger(__name__)


def factory(
    backends: Sequence[str],
    num_threads: int = 0,
    fault: str = "",
    *,
    parameters: Parameters = NO_PARAMETERS,
    enter: Callable[[], None] | None = None,
) -> TransportFactory:
    """Build what opens a transport per generation; `fault` is the setting of that name.

    `enter` readies the thread that opens one (`Accelerator.enter_thread`).
    """
    plain = NixlFactory(tuple(backends), num_threads, parameters, enter)
    return Tampering(plain) if fault == "tamper" else plain


@dataclass(frozen=True)
class NixlFactory:
    """Opens agents with these backends; `num_threads` is the backend's own posting threads."""

    backends: tuple[str, ...] = ("UCX",)
    num_threads: int = 0
    parameters: Parameters = field(default_factory=dict)
    enter: Callable[[], None] | None = None

    def __call__(self, name: AgentName, regions: Sequence[Region]) -> NixlTransport:
        if self.enter is not None:
            self.enter()
        if all(region.memory == "DRAM" for region in regions):
            return self._open(name, regions)
        with logs.overheard() as said:
            transport = self._open(name, regions)
        if line := logs.fall_back(said):
            transport.close()
            raise ConfigError(
                f"NIXL takes the KV cache's device memory for host memory ({line}): libfabric's "
                "provider does not support it; check the EFA driver and `neuron-push doctor`"
            )
        logger.info("agent %s: %s", name, logs.rails(said))
        return transport

    def _open(self, name: AgentName, regions: Sequence[Region]) -> NixlTransport:
        return NixlTransport(name, regions, self.backends, self.num_threads, self.parameters)
