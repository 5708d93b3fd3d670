"""Moving pages through registered host memory, where device memory cannot be registered.

Some Trainium instances (trn2.3xlarge, or any without EFA) have no way to register their memory.
There, with `host_staging` on, NIXL is told of host memory only:

    prefill    a WRITE's source ranges are copied to a slot of host memory, and sent from there
    decode     every prompt is written into slabs of host memory (`Slabs.sole`), and copied from
               there to its pages

It costs a pass over PCIe on each side, and the copies hold up the transfer thread.

Copies are `narrow` to the exact range and `copy_` with a host tensor of equal size. Neuron refuses
every other form: strided device views, and copies between device tensors (LMCache pull request
4864). Bytes are brought into another order on the host, so a staged side can always reorder.
"""

from neuron_push.bounce.copies import HostCopies
from neuron_push.bounce.device import HostStaged
from neuron_push.bounce.mover import StagedMover
from neuron_push.bounce.transport import Slots, StagedTransport

__all__ = ["HostCopies", "HostStaged", "Slots", "StagedMover", "StagedTransport"]
