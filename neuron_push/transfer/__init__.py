"""The transfer thread: owns the transport, the side channel of its rank and all sessions."""

from neuron_push.transfer.tally import Snapshot, Tally
from neuron_push.transfer.thread import TransferThread

__all__ = ["Snapshot", "Tally", "TransferThread"]
