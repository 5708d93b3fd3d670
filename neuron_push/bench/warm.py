"""Loads what children of the fork server need, NIXL's plugins above all: seconds, once.

Imported by the fork server. An agent is opened and closed, so that UCX is loaded; it leaves no
thread behind, which makes forking from here sound.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np

from neuron_push.bench.rank import ENVIRONMENT
from neuron_push.errors import NeuronPushError
from neuron_push.geometry import Region
from neuron_push.nixl import NixlTransport
from neuron_push.transport import AgentName


def _warm() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    memory = np.zeros(4096, np.uint8)
    region = Region(int(memory.ctypes.data), memory.nbytes, "DRAM", 0)
    with contextlib.suppress(NeuronPushError):
        NixlTransport(AgentName("warm"), [region]).close()


_warm()
