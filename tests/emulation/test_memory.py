"""The views reach what the device's attention would read at that place of its tensor."""

import numpy as np
import pytest
import torch

from neuron_push.emulation import memory
from neuron_push.emulation.devices import DEVICES
from neuron_push.emulation.oracle import Oracle, Slots
from tests.emulation import kit

BLOCK, SLOT, LAYER, HEAD = 3, 5, 1, 1


def filled(device, **options):
    made = kit.cache(device, **options)
    tokens = kit.shape(device, **options).block_tokens
    slots = Slots(np.array([65]), np.array([SLOT + 7 * tokens]), (np.array([BLOCK]),))
    Oracle(made, 0).fill(slots)
    return made, next(iter(list(made.tensors.values())[LAYER : LAYER + 1]))


def rows(device, tensor):
    """K and V of one slot as the real kernels find them."""
    if device == "trn2":
        return tensor[0, BLOCK, HEAD, SLOT], tensor[1, BLOCK, HEAD, SLOT]
    if device == "p5en":
        return tensor[BLOCK, HEAD, SLOT].chunk(2)
    page = tensor[BLOCK, HEAD].flatten()
    tokens = tensor.shape[2]
    key, value = page.chunk(2)
    return key.view(kit.WIDTH, tokens)[:, SLOT], value.view(tokens, kit.WIDTH)[SLOT]


@pytest.mark.parametrize("device", sorted(DEVICES))
def test_all_devices_keep_the_same_rows_in_their_own_places(device):
    _, reference = filled("p5en")
    _, tensor = filled(device, block=16)
    for mine, theirs in zip(rows(device, tensor), rows("p5en", reference), strict=True):
        assert mine.contiguous().view(torch.int32).tolist() == theirs.view(torch.int32).tolist()


@pytest.mark.parametrize("device", sorted(DEVICES))
def test_nothing_but_the_slot_is_written(device):
    made, tensor = filled(device)
    others = sum(int((t.view(torch.int32) != 0).sum()) for t in made.tensors.values())
    assert others <= kit.LAYERS * kit.HEADS * 2 * kit.WIDTH
    assert int((tensor.view(torch.int32) != 0).sum()) > 0


def test_trn2_layers_are_allocations_of_their_own_and_p5en_layers_are_not():
    bases = {t.untyped_storage().data_ptr() for t in kit.cache("trn2").tensors.values()}
    assert len(bases) == kit.LAYERS
    bases = {t.untyped_storage().data_ptr() for t in kit.cache("p5en").tensors.values()}
    assert len(bases) == 1


def test_shapes_are_those_of_the_real_runners():
    (first, *_) = kit.cache("trn2").tensors.values()
    assert first.shape == (2, 16, kit.HEADS, 32, kit.WIDTH)
    (first, *_) = kit.cache("p5en").tensors.values()
    assert first.shape == (16, kit.HEADS, 16, 2 * kit.WIDTH)
    (first, *_) = kit.cache("p5en", latent=True).tensors.values()
    assert first.shape == (16, 16, kit.WIDTH)


def test_groups_share_one_pool_of_blocks():
    full = kit.shape(layers=(0, 2))
    sliding = kit.shape(layers=(1, 3), window=32)
    made = memory.allocate(DEVICES["p5en"], (full, sliding), 16)
    names = list(made.tensors)
    assert made.tensors[names[0]].data_ptr() == made.tensors[names[2]].data_ptr()
