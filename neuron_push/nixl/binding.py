"""Finding NIXL, creating its agents, and turning what it raises into our errors.

The Python API has kept its shape from nixl 1.3.2 to 1.5.1 as far as it is used here; what a
release might lack is looked for before it is used.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Final

from neuron_push.errors import ConfigError, Disconnected, NeuronPushError, TransportError

__all__ = ["NO_PARAMETERS", "Edge", "Parameters", "binding", "create_agent"]

# Of each backend, as NIXL takes them at its creation.
Parameters = Mapping[str, Mapping[str, str]]
NO_PARAMETERS: Final[Parameters] = MappingProxyType({})

# The meta package first: where it is installed, it is the flavour that the user chose.
_PACKAGES: Final = ("nixl", "nixl_cu12", "nixl_cu13")
_BACKEND_HINT: Final = (
    "the plugin's libraries do not load; LIBFABRIC of nixl 1.5 needs libfabric 2.7 or newer and "
    "libcudart.so.12"
)


@functools.cache
def binding() -> Any:
    """NIXL's Python API module; raises ConfigError if there is none that loads."""
    reasons = []
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            reasons.append(str(error))
    raise ConfigError(
        "NIXL is not installed or does not load: pip install nixl-cu12 (or nixl-cu13, to match "
        f"the CUDA libraries of this machine); {'; '.join(reasons)}"
    )


class Edge:
    """Turns what NIXL raises into our errors, with the original as a cause without frames.

    Frames of NIXL's wrapper refer to the agent; kept in an exception that a session stores, they
    would keep it alive. A peer that turns out to be gone is added to `lost`.
    """

    __slots__ = ("_lost", "_peer", "_what")

    def __init__(self, what: str, peer: str = "", lost: set[str] | None = None) -> None:
        self._what = what
        self._peer = peer
        self._lost = lost

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del trace
        if not isinstance(error, Exception) or isinstance(error, NeuronPushError):
            return
        gone = type(error).__name__ == "nixlRemoteDisconnectError"
        if gone and self._lost is not None:
            self._lost.add(self._peer)
        text = " ".join(filter(None, (self._what, self._peer)))
        ours = Disconnected if gone else TransportError
        raise ours(f"{text}: {error or type(error).__name__}") from error.with_traceback(None)


def create_agent(
    name: str,
    backends: tuple[str, ...],
    num_threads: int,
    parameters: Parameters = NO_PARAMETERS,
) -> Any:
    """Create an agent with exactly these backends, each with its `parameters`.

    Raises ConfigError if one of them is not there: NIXL itself only warns.
    """
    api = binding()
    # Those with parameters are created by themselves, in order, since the list has none.
    config = _config(api, () if parameters else backends, num_threads)
    try:
        with Edge(f"cannot create a NIXL agent with {'/'.join(backends)}"):
            agent = api.nixl_agent(name, config)
            for backend in backends if parameters else ():
                agent.create_backend(backend, dict(parameters.get(backend, {})))
    except TransportError as error:
        if type(error.__cause__).__name__ != "nixlNotFoundError":
            raise
        raise ConfigError(f"{error} ({_BACKEND_HINT})") from error.__cause__
    missing = [backend for backend in backends if backend not in agent.backends]
    if missing or not backends:
        found = ", ".join(agent.get_plugin_list())
        raise ConfigError(
            f"NIXL has no backend {', '.join(missing) or 'to use'}; plugins found: {found}"
        )
    return agent


def _config(api: Any, backends: tuple[str, ...], num_threads: int) -> Any:
    settings: dict[str, Any] = {
        # NIXL's progress thread spins one core per agent; whoever owns the transport polls.
        "enable_prog_thread": False,
        "backends": list(backends),
        "num_threads": num_threads,
    }
    sync = getattr(api, "nixl_thread_sync_t", None)
    if sync is not None:
        # An uncontended lock costs nothing, and covers finalisers that run elsewhere after all.
        settings["sync_mode"] = sync.NIXL_THREAD_SYNC_STRICT
    known = inspect.signature(api.nixl_agent_config).parameters
    return api.nixl_agent_config(**{k: v for k, v in settings.items() if k in known})
