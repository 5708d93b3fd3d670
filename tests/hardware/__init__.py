"""Checks that need a device. One command on a machine runs all that it can, and says so in JSON:

    python -m tests.hardware --json report.json

The same checks run under pytest: `pytest -m cuda tests/hardware` (or neuron, efa). Those marked
cuda need PyTorch, numpy and msgspec, from a bare checkout; NIXL and vLLM may be absent.
test_logic.py runs what can be run of all of them on host memory, so that a device does not meet
them untried.

suite     registry, runner, report
gpu       one CUDA GPU
neuron    Trainium: T1 to T6 of the notes on Neuron
fabric    EFA: WRITEs between two processes
pair      those two processes
memory    a buffer on a device or on the host
"""
