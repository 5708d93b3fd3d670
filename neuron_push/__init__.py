"""Pushes the KV cache of a prompt from a prefill engine into a decode engine.

Importing this package costs nothing: vLLM imports every plugin in every process it starts,
so what needs a device, NIXL or torch lives in submodules and is imported where it is used.
"""

__version__ = "0.1.0"
