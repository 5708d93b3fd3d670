"""What clients may ask of sampling: log-probabilities, and tokens that a grammar allows.

An emulated device has one distribution: the token that it draws (of a prompt: the token that is
there) has probability 1/2, and all others share the rest evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Table = tuple[Ints, npt.NDArray[np.float32], Ints]
"""Token ids and log-probabilities, (rows, 1 + top), and the rank of each row's first token."""

FAVOURITE: Final = math.log(0.5)


def wanted(parameters: Any, vocabulary: int) -> tuple[int | None, int | None]:
    """Tops that a request asks for, of generated and of prompt tokens; None: none."""
    asked = (
        getattr(parameters, "num_logprobs", getattr(parameters, "logprobs", None)),
        getattr(parameters, "prompt_logprobs", None),
    )
    return tuple(vocabulary if top == -1 else top for top in asked)  # type: ignore[return-value]


def table(tokens: Sequence[int], top: int, vocabulary: int) -> Table:
    """One row per token: the token itself, then the `top` likeliest, of which it is the first."""
    first = np.array(tokens, np.int64)[:, None]
    # All tokens but the favourite, in their order.
    rest = np.arange(max(0, top - 1))[None, :]
    rest = rest + (rest >= first)
    ids = np.concatenate([first, np.repeat(first, min(1, top), axis=1), rest], axis=1)
    chances = np.full(ids.shape, FAVOURITE - math.log(vocabulary - 1), np.float32)
    chances[:, : 1 + min(1, top)] = FAVOURITE
    return ids, chances, np.ones(len(first), np.int64)


def allowed(grammar: Any, vocabulary: int) -> dict[str, Ints]:
    """Tokens that each request's grammar allows next, from vLLM's bit masks (32 per word)."""
    if grammar is None:
        return {}
    names, masks = grammar.structured_output_request_ids, grammar.grammar_bitmask
    return {
        name: np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocabulary])
        for name, mask in zip(names, masks, strict=False)
    }
