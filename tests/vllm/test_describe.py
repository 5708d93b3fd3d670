"""Geometry read from tensors, compared with bytes that vLLM's own kernel wrote."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from neuron_push.accelerator import CpuAccelerator
from neuron_push.errors import ConfigError, NeuronPushError
from neuron_push.vllm.describe import describe, held_heads, layer_index
from tests.vllm.kit import LAYERS, cache_config, state_spec

HEADS, WIDTH, BLOCKS = 2, 32, 4


@pytest.mark.parametrize(
    ("total", "ranks", "held"),
    [
        (8, 1, [tuple(range(8))]),
        (8, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (2, 4, [(0,), (0,), (1,), (1,)]),
        (1, 2, [(0,), (0,)]),
    ],
)
def test_heads_of_a_rank(total, ranks, held):
    assert [held_heads(total, rank, ranks) for rank in range(ranks)] == held


def test_the_layer_number_is_in_the_name():
    assert layer_index("model.layers.13.self_attn.attn") == 13
    with pytest.raises(ConfigError, match="carries no layer number"):
        layer_index("lm_head")


def layers_of(backend, **facts):
    layer = SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), **facts
    )
    context = dict.fromkeys(LAYERS, layer)
    compiled = SimpleNamespace(static_forward_context=context)
    return SimpleNamespace(compilation_config=compiled, additional_config=None)


def caches_of(block, dtype=torch.float32, shape=None):
    """Views of one storage, as vLLM's CPU runner makes them."""
    shape = shape or (BLOCKS, HEADS, block, 2 * WIDTH)
    store = torch.zeros((len(LAYERS), *shape), dtype=dtype)
    return dict(zip(LAYERS, store, strict=True))


def described(config, caches, block, heads=(0, 1)):
    kv = cache_config(BLOCKS, block=block)
    return describe(config, kv, caches, CpuAccelerator(), heads)


def read(plane, caches, block, head, token):
    """The channels of one token, through the plane's strides over the storage's bytes."""
    store = torch.empty(0, dtype=torch.uint8).set_(caches[LAYERS[0]].untyped_storage())
    base = plane.offset + block * plane.page + head * plane.head + token * plane.token
    element = caches[LAYERS[0]].element_size()
    starts = [base + channel * plane.channel for channel in range(plane.width)]
    pieces = torch.stack([store[at : at + element] for at in starts])
    return pieces.flatten().view(caches[LAYERS[0]].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block", "isa"), [(32, "vec"), (64, "vec"), (16, "vec16")])
def test_planes_read_back_what_vllms_kernel_writes(block, isa, dtype):
    import vllm._custom_ops as ops

    caches = caches_of(block, dtype)
    tokens = 2 * block + 3
    table = [2, 3, 1]
    slots = torch.tensor([table[t // block] * block + t % block for t in range(tokens)])
    written = {}
    for layer in LAYERS:
        key, value = (torch.randn(tokens, HEADS, WIDTH).to(dtype) for _ in range(2))
        pages = caches[layer].view(BLOCKS, HEADS, 2 * block, WIDTH)
        try:
            ops.cpu_attn_reshape_and_cache(key, value, *pages.chunk(2, dim=2), slots, isa)
        except (AttributeError, RuntimeError) as error:
            pytest.skip(f"this build of vLLM has no such kernel: {error}")
        written[layer] = {"k": key, "v": value}
    geometry = described(layers_of("CPU_ATTN", isa=isa), caches, block)
    assert len(geometry.regions) == 1
    assert geometry.regions[0].length == caches[LAYERS[0]].untyped_storage().nbytes()
    (group,) = geometry.groups
    assert len(group.planes) == 4
    for plane in group.planes:
        expected = written[LAYERS[plane.layer]][plane.kind]
        for token in (0, 1, block - 1, block, tokens - 1):
            for head in range(HEADS):
                found = read(plane, caches, table[token // block], head, token % block)
                assert torch.equal(found, expected[token, head])


def test_packed_pages_are_opaque_and_say_of_which_kind():
    caches = caches_of(32)
    kinds = set()
    for isa in ("amx", "neon"):
        geometry = described(layers_of("CPU_ATTN", isa=isa), caches, 32)
        interiors = {plane.interior for plane in geometry.groups[0].planes}
        assert all(interiors)
        kinds |= interiors
    assert len(kinds) >= 2


def test_the_heads_of_the_rank_are_listed():
    geometry = described(layers_of("CPU_ATTN", isa="vec"), caches_of(32), 32, heads=(4, 5))
    assert geometry.groups[0].heads == (4, 5)
    assert geometry.groups[0].block_tokens == 32


def test_interleaved_backends():
    geometry = described(layers_of("FLASH_ATTN"), caches_of(16), 16)
    key, value = geometry.groups[0].planes[:2]
    assert value.offset - key.offset == WIDTH * 4
    assert key.token == 2 * WIDTH * 4


def test_blocks_of_several_pages():
    geometry = described(layers_of("FLASH_ATTN"), caches_of(16, shape=(2 * BLOCKS, 2, 16, 64)), 32)
    assert (geometry.groups[0].block_tokens, geometry.groups[0].page_tokens) == (32, 16)


def test_pages_that_do_not_divide_a_block_are_refused():
    with pytest.raises(ConfigError, match="blocks of 16 tokens over pages of 32"):
        described(layers_of("FLASH_ATTN"), caches_of(32), 16)


@pytest.mark.parametrize("backend", ["FLASHINFER", "XFORMERS", "A_NEW_ONE"])
def test_backends_that_are_not_known_are_refused_by_name(backend):
    with pytest.raises(ConfigError, match=backend):
        described(layers_of(backend), caches_of(16), 16)


def test_caches_of_a_kind_that_does_not_travel_are_refused():
    kv = cache_config(BLOCKS, block=32)
    kv.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(block_size=32)
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        describe(layers_of("CPU_ATTN", isa="vec"), kv, caches_of(32), CpuAccelerator(), (0, 1))


def with_state(spec, seat=0):
    """Attention and a state group over one allocation, as vLLM lays a hybrid model out."""
    pages = torch.zeros(3, BLOCKS, spec.page_size_bytes, dtype=torch.int8)
    caches = {
        name: pages[n].view(torch.float32).view(BLOCKS, 2, 16, 64) for n, name in enumerate(LAYERS)
    }
    caches["model.layers.2.mixer"] = pages[2].view(BLOCKS, 1, 1, -1)[
        ..., : spec.state_content_size_bytes
    ]
    kv = cache_config(BLOCKS, block=16, state=spec)
    return describe(layers_of("FLASH_ATTN"), kv, caches, CpuAccelerator(), (0, 1), seat), pages


def test_a_state_is_one_opaque_page_per_block_and_rank():
    spec = state_spec()
    geometry, pages = with_state(spec, seat=3)
    group = geometry.groups[1]
    (plane,) = group.planes
    assert (group.kind, group.heads, group.block_tokens, group.num_blocks) == (
        "state", (3,), 4096, BLOCKS,
    )  # fmt: skip
    assert (plane.layer, plane.page, plane.page_bytes) == (
        2, spec.page_size_bytes, 4 * (3 * 64 + 4 * 8 * 16),
    )  # fmt: skip
    assert plane.interior == "mamba2:3x64.float32+4x8x16.float32:1x1x2816x1"
    assert geometry.regions[0].base + plane.offset == pages[2].data_ptr()
    assert geometry.element_bytes == 4


def test_a_state_that_every_rank_holds_is_the_same_on_all():
    spec = replace(state_spec(), tp_replicated=True)
    assert with_state(spec, seat=3)[0].groups[1].heads == (0,)


def test_states_of_several_places_in_a_prompt_are_refused():
    with pytest.raises(ConfigError, match=r"mamba_cache_mode is 'align'.*--no-enable-prefix"):
        with_state(state_spec("align"))


def test_caches_with_elements_of_several_sizes_are_refused():
    caches = caches_of(16)
    caches[LAYERS[1]] = torch.zeros(BLOCKS, HEADS, 16, 2 * WIDTH, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="elements of 2 and 4 bytes"):
        described(layers_of("FLASH_ATTN"), caches, 16)


@pytest.mark.parametrize("name", ["tp0_layer3_k", "tp11_layer0_v", "tp0_layer3_kv"])
def test_caches_of_nxd_inference_are_refused_by_their_names(name):
    with pytest.raises(ConfigError, match="one process holds the caches of all ranks"):
        described(layers_of("CUSTOM"), {name: torch.zeros(1)}, 16)


def test_a_cache_of_unknown_rank_is_refused():
    with pytest.raises(NeuronPushError, match=r"axes|dimensions"):
        described(layers_of("CPU_ATTN", isa=""), caches_of(32, shape=(8, 8)), 32)
