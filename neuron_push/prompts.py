"""How a prompt is named so that the two legs of a request find each other.

The engine's main loop notes what a request says (`Prompt`); the transfer thread digests it.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

from neuron_push.protocol import Match

__all__ = ["Prompt", "base_id", "match_of"]

# vLLM numbers the samples of a request that asks for several, in front, and appends a dash and
# eight hex digits to each request id.
_SAMPLE: Final = re.compile(r"^\d+_")
_HEX: Final = frozenset("0123456789abcdef")


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """What a prompt's name is made of; tokens are a sample of it if there is a `transfer`.

    `counterpart` is the other engine's request id where the router passed it on, `also` names
    what the tokens do not show: images, an adapter.
    """

    request: str
    transfer: str
    counterpart: str
    length: int  # of the whole prompt
    tokens: Sequence[int]
    also: tuple[str, ...] = ()


def base_id(request: str) -> str:
    """A request id without its engine's random suffix and without the number of a sample."""
    base = _without_suffix(request)
    return _SAMPLE.sub("", base) if base[:1].isdecimal() else base


def _without_suffix(request: str) -> str:
    head, dash, tail = request.rpartition("-")
    return head if dash and len(tail) == 8 and _HEX.issuperset(tail) else request


def match_of(prompt: Prompt) -> Match:
    """How the two legs of a request find each other."""
    base, transfer = base_id(prompt.request), prompt.transfer
    if transfer:
        # A completion request with several prompts becomes several requests, numbered.
        head, _, index = base.rpartition("-")
        if index.isdecimal() and head.startswith("cmpl-"):
            transfer = f"{transfer}#{index}"
    elif _without_suffix(prompt.counterpart) != prompt.counterpart:
        base = base_id(prompt.counterpart)
    digest = hashlib.blake2b(array("q", prompt.tokens), digest_size=16)
    for each in prompt.also:
        digest.update(each.encode())
    return Match(transfer, base, digest.digest(), prompt.length)
