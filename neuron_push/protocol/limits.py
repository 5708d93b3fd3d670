"""The version of both channels, and what belongs to the messages themselves.

Each follows from how a message is written, so both sides and every router must have the same. What
an operator may set is in `neuron_push.limits`.
"""

from __future__ import annotations

from typing import Final

VERSION: Final = 2
MAGIC: Final = b"NP"

# Longest identifier, reason or address, in characters: the sender cuts what is longer, without
# knowing who will read it.
MAX_TEXT: Final = 512
# Numbers of staged pieces; one per MiB would reach this after an exabyte.
MAX_PIECE: Final = 1 << 40
# Bytes of a digest, and of a prompt's fingerprint: the longest that hashlib makes.
MAX_DIGEST: Final = 64
# Parts of a prompt's layers that travel apart; the sender cuts, and knows no setting of the reader.
MAX_PARTS: Final = 64
