"""Writes many slots in one compiled call, which releases the GIL.

Torch and NumPy would need a temporary as large as what is written and pass over it twice, or a
call per run of neighbouring slots.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


@numba.njit(nogil=True, cache=True)
def _fill(memory: Any, slots: Any, keys: Any, starts: Any, base: Any) -> None:
    """memory[slots[t] + starts[r] + w] = base[r, w] ^ keys[t], for all t, r and w."""
    width = base.shape[1]
    for number in range(starts.shape[0]):
        row = base[number]
        for index in range(slots.shape[0]):
            key = keys[index]
            first = slots[index] + starts[number]
            # A slice: what is indexed by a range alone needs no check for negative numbers.
            target = memory[first : first + width]
            for word in range(width):
                target[word] = row[word] ^ key


class Rows:
    """The rows of every slot of a tensor with axes (block, token, ..., word), 8-byte words."""

    def __init__(self, tensor: torch.Tensor, base: torch.Tensor) -> None:
        """`base` has the axes of one slot. The words of a row lie side by side."""
        strides = tensor.stride()
        assert tensor.dtype == torch.int64 and strides[-1] == 1
        first = tensor.storage_offset()
        words = first + 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)
        )  # fmt: skip
        self._memory = torch.as_strided(tensor, (words,), (1,), 0).numpy()
        self._block, self._token = strides[:2]
        self._first = first
        shape = tensor.shape[2:-1]
        grid = np.indices(shape).reshape(len(shape), -1)
        self._starts = np.array(strides[2:-1], np.int64) @ grid
        self._base = base.reshape(-1, base.shape[-1]).numpy()

    def fill(self, blocks: Ints, tokens: Ints, keys: Ints) -> None:
        """Write the slots (blocks[t], tokens[t]); `keys` has a word for each."""
        slots = blocks * self._block + tokens * self._token + self._first
        _fill(self._memory, slots, keys, self._starts, self._base)
