"""What a KV slot must hold, and how the next token follows from what it does hold.

    word(token, position, layer, K|V, head, w) = key(token, position) ^ base(layer, K|V, head, w)

w counts the 8-byte words of a head's row. Heads and layers are the model's own numbers, so the
pattern does not know about ranks, blocks or layouts.

The state (Mamba) that a request's first n tokens leave behind has the words

    word(layer, rank, w) = state_key(digest of those tokens) ^ base(layer, 0, rank, w)

A request's digest is the sum over positions of a hash of the slot's bytes. The hash is linear:
hash(seen) = hash(expected) + hash(seen - expected). The first part follows from (token, position)
alone, so only wrong bytes cost anything, and ranks add up their second parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))

# Next tokens are drawn from printable ASCII, which byte-level vocabularies keep at their start
# in one order or another, and which holds no special token.
FIRST_TOKEN: Final = 33
TOKENS: Final = 93


def mix(values: Words) -> Words:
    """splitmix64, element by element: a bijection whose output bits all depend on the input."""
    # Arrays wrap around without a warning; scalars would warn.
    x = values + _GOLDEN
    x = (x ^ (x >> _SHIFTS[0])) * _FIRST
    x = (x ^ (x >> _SHIFTS[1])) * _SECOND
    return np.asarray(x ^ (x >> _SHIFTS[2]), np.uint64)


def keys(tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], seed: int) -> Words:
    """One word per (token, position)."""
    place = mix(positions.astype(np.uint64) + np.uint64(seed) * np.uint64(1 << 40))
    return mix(tokens.astype(np.uint64) ^ place)


def bases(layers: Sequence[int], kinds: int, heads: Sequence[int], words: int) -> Words:
    """Array (layers, kinds, heads, words); `kinds` is 2 for K and V, 1 for a latent."""
    axes = np.ix_(
        np.array(layers, np.uint64), np.arange(kinds, dtype=np.uint64),
        np.array(heads, np.uint64), np.arange(words, dtype=np.uint64),
    )  # fmt: skip
    layer, kind, head, word = axes
    shift = np.uint64
    return mix(
        (layer << shift(44)) | (kind << shift(40)) | (head << shift(20)) | word | shift(1 << 63)
    )


def digests(key: Words) -> Words:
    """Hash of a slot that holds what it must."""
    return mix(key ^ np.uint64(0x5DEECE66D))


def state_key(digest: int) -> npt.NDArray[np.int64]:
    """What decides the content of a state: one word, in an array."""
    value = np.array([digest & (2**64 - 1)], np.uint64)
    return mix(value ^ np.uint64(0x2545F4914F6CDD1D)).view(np.int64)


def next_token(digest: int, position: int, allowed: npt.NDArray[np.int64] | None = None) -> int:
    """The token after `position`: printable, unless none of the `allowed` ones is."""
    value = (digest + position * int(_FIRST)) & (2**64 - 1)
    drawn = int(mix(np.array([value], np.uint64))[0])
    if allowed is None:
        return FIRST_TOKEN + drawn % TOKENS
    printable = allowed[(allowed >= FIRST_TOKEN) & (allowed < FIRST_TOKEN + TOKENS)]
    choice = printable if len(printable) else allowed
    return int(choice[drawn % len(choice)])


def continuation(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """What an engine whose every KV byte is right answers."""
    tokens = list(prompt)
    array = np.array(tokens, np.int64)
    key = keys(array, np.arange(len(tokens)), seed)
    digest = int(digests(key).sum(dtype=np.uint64))
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(digest, len(tokens)))
        last = keys(np.array(tokens[-1:]), np.array([len(tokens) - 1]), seed)
        digest += int(digests(last)[0])
    return tokens[len(prompt) :]
