"""Entry point `vllm.platform_plugins`. vLLM calls it in each of its processes."""

from __future__ import annotations

import os

from neuron_push.emulation import VARIABLE

PLATFORM = "neuron_push.emulation.platform.EmulatedPlatform"


def platform() -> str | None:
    """The platform class to use, or None: then vLLM finds its own as if this were not here."""
    if not os.environ.get(VARIABLE):
        return None
    from neuron_push.emulation import nixl_name
    from neuron_push.emulation.options import wanted

    options = wanted()
    assert options is not None
    # The scheduler speaks differently to the V1 and V2 runners. vLLM would pick V1 where Triton
    # is missing, although nothing here runs a Triton kernel.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if options.runner == "gpu-v2" else "0"
    nixl_name.install()
    return PLATFORM
