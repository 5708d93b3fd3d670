"""`Transport` over byte arrays in one process, for tests.

A `MemoryFabric` is the network and everybody's memory. Left alone it behaves: notifications
arrive at once, a WRITE lands when its sender polls it. A test takes over by setting
`auto_land` or `auto_deliver` to False and calling `land`, `deliver`, `drop`, `duplicate`,
`reorder`, `disconnect`, `kill`.

It keeps the unpleasant habits of real NIXL (tests/test_transport_contract.py runs over both):
bytes of a posted WRITE move until one of the two agents is closed, whatever else happened to the
connection, and a dead process's bytes may still arrive.
"""

from neuron_push.memory.fabric import Letter, MemoryFabric, MemoryTransport, PostedWrite

__all__ = ["Letter", "MemoryFabric", "MemoryTransport", "PostedWrite"]
