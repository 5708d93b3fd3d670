"""Tensors that look like torch's, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np


@dataclass
class FakeTensor:
    """A contiguous tensor of a KV cache, at the start of its allocation."""

    kind: str = "cpu"
    base: int = 0x10000
    size: int = 4096
    number: int = -1
    shape: tuple[int, ...] = (2, 4, 2, 16, 8)
    element: int = 2

    @property
    def device(self):
        return SimpleNamespace(type=self.kind)

    def get_device(self):
        return self.number

    def untyped_storage(self):
        return SimpleNamespace(data_ptr=lambda: self.base, nbytes=lambda: self.size)

    def stride(self):
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def data_ptr(self):
        return self.base

    def element_size(self):
        return self.element


class NeuronBytes:
    """A flat byte view of Neuron memory, or a range of it.

    Copies follow what LMCache pull request 4864 found on trn1 and trn2: to and from a host tensor
    of equal size, after `narrow`; strided views and copies between device tensors are refused.
    """

    def __init__(self, data, stride=1):
        self.data = data  # memoryview
        self.device = SimpleNamespace(type="neuron")
        self._stride = stride

    def data_ptr(self):
        return np.frombuffer(self.data, np.uint8).ctypes.data

    def numel(self):
        return len(self.data)

    def narrow(self, axis, start, length):
        assert axis == 0
        return NeuronBytes(self.data[start : start + length], self._stride)

    def strided(self, step):
        return NeuronBytes(self.data, step)

    def _check(self, other):
        if self._stride != 1:
            raise RuntimeError("neuron: copy_ of a strided view is not supported")
        if other.device.type != "cpu":
            raise RuntimeError("nrt_tensor_copy status=2")
        if other.numel() != self.numel():
            raise RuntimeError("neuron: sizes differ")

    def copy_(self, source):
        self._check(source)
        self.data[:] = source.data

    def read(self, target):
        self._check(target)
        target.data[:] = self.data


class HostBytes(NeuronBytes):
    """A flat byte tensor on the host."""

    def __init__(self, data):
        super().__init__(data)
        self.device = SimpleNamespace(type="cpu")

    def narrow(self, axis, start, length):
        assert axis == 0
        return HostBytes(self.data[start : start + length])

    def copy_(self, source):
        if source.device.type == "cpu":
            self.data[:] = source.data
        else:
            source.read(self)
